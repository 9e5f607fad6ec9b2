"""`sparksmith train`: responses in, a draft out."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparksmith.cli.target import (
    Device,
    Dtype,
    OpenEnds,
    OpenTarget,
    Stream,
    TargetChoice,
    TargetName,
    Threads,
    TrustRemoteCode,
    open_ends,
    open_target,
    resolve,
)
from sparksmith.cli.training import TrainingInputs as TrainingInputs
from sparksmith.cli.training import run_training as run_training
from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.distill.feature_store import FeatureStore
    from sparksmith.distill.generation import Response
    from sparksmith.distill.optimizers import OptimizerSettings
    from sparksmith.draft.sampling import Sampling

EXAMPLE = "sparksmith train --responses runs/responses --minutes 10 --out runs/draft"
DRAFT, TRAINING, LOSS = "Draft", "Training", "Loss (each weight is printed as it is used)"


def train(
    out: Annotated[Path, typer.Option(help="Folder for best/, last/ and run.json.")],
    responses: Annotated[
        Path | None, typer.Option(help="Folder that `generate` wrote.", show_default=False)
    ] = None,
    features: Annotated[
        Path | None,
        typer.Option(
            help="Folder that `capture` wrote, instead of --responses: the target's layers are "
            "not loaded.",
            show_default=False,
        ),
    ] = None,
    target: TargetName = "embedded",
    minutes: Annotated[
        float | None, typer.Option(help="Wall-time budget.", rich_help_panel=TRAINING)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Step budget.", rich_help_panel=TRAINING)
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(
            help="At which the draft will serve (default: that of the responses).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        typer.Option(
            help="The target's nucleus then (default: likewise).", rich_help_panel=TRAINING
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Responses a step.", rich_help_panel=TRAINING)
    ] = 2,
    anchors: Annotated[
        int, typer.Option(help="Most blocks of a response.", rich_help_panel=TRAINING)
    ] = 128,
    optimizer: Annotated[
        str, typer.Option(help="adamw or muon.", rich_help_panel=TRAINING)
    ] = "adamw",
    lr: Annotated[
        float,
        typer.Option(
            help="AdamW's learning rate: of all weights, or of those that Muon leaves.",
            rich_help_panel=TRAINING,
        ),
    ] = 5e-4,
    markov_lr_scale: Annotated[
        float, typer.Option(help="Times lr: the Markov tables.", rich_help_panel=TRAINING)
    ] = 40.0,
    context_lr_scale: Annotated[
        float, typer.Option(help="Times lr: the context projection.", rich_help_panel=TRAINING)
    ] = 0.002,
    muon_lr: Annotated[
        float | None,
        typer.Option(
            help="With muon, the learning rate of the backbone's matrices (default: 0.02).",
            rich_help_panel=TRAINING,
        ),
    ] = None,
    weight_decay: Annotated[
        float, typer.Option(help="For all weights.", rich_help_panel=TRAINING)
    ] = 0.0,
    warmup: Annotated[
        float, typer.Option(help="Share of the budget.", rich_help_panel=TRAINING)
    ] = 0.04,
    grad_clip: Annotated[
        float, typer.Option(help="Largest gradient norm.", rich_help_panel=TRAINING)
    ] = 1.0,
    held_out: Annotated[
        int,
        typer.Option(
            help="Responses kept for validation, a tenth at most.", rich_help_panel=TRAINING
        ),
    ] = 64,
    cache_gib: Annotated[
        float,
        typer.Option(help="Memory for features; the rest is recomputed.", rich_help_panel=TRAINING),
    ] = 4.0,
    seed: Annotated[int, typer.Option(help="Of order and anchors.", rich_help_panel=TRAINING)] = 0,
    layers: Annotated[int, typer.Option(help="Draft layers.", rich_help_panel=DRAFT)] = 2,
    block_size: Annotated[
        int, typer.Option(help="Tokens drafted at once.", rich_help_panel=DRAFT)
    ] = 5,
    taps: Annotated[
        str | None,
        typer.Option(help="Target layers, such as 3,9,15,21,27.", rich_help_panel=DRAFT),
    ] = None,
    markov_rank: Annotated[
        int, typer.Option(help="0 leaves the Markov head out.", rich_help_panel=DRAFT)
    ] = 128,
    markov_head: Annotated[
        str, typer.Option(help="vanilla, gated or rnn.", rich_help_panel=DRAFT)
    ] = "vanilla",
    draft_vocab: Annotated[
        int | None,
        typer.Option(
            help="Most frequent words kept; 0 keeps all (default: 8192; 0 with --mla).",
            rich_help_panel=DRAFT,
        ),
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(
            help="A public K3 draft's sizes, taps and block in the place of these options: k3-mla, "
            "k3-gqa, k3-gqa-96; for `k3-mini` k3-mla-mini and k3-gqa-mini.",
            rich_help_panel=DRAFT,
        ),
    ] = None,
    mla: Annotated[
        bool,
        typer.Option(
            "--mla", help="Latent attention, the K3DSparkModel layout.", rich_help_panel=DRAFT
        ),
    ] = False,
    head_dim: Annotated[
        int | None,
        typer.Option(help="Of a head (default: twice the target's).", rich_help_panel=DRAFT),
    ] = None,
    kv_heads: Annotated[
        int | None,
        typer.Option(help="Key/value heads (default: all heads).", rich_help_panel=DRAFT),
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Causal attention in a block.", rich_help_panel=DRAFT)
    ] = False,
    mask_token_id: Annotated[
        int | None, typer.Option(help="Default: an unused special token.", rich_help_panel=DRAFT)
    ] = None,
    from_scratch: Annotated[
        bool,
        typer.Option(
            "--from-scratch",
            help="Random weights instead of the start by regression.",
            rich_help_panel=DRAFT,
        ),
    ] = False,
    ce_weight: Annotated[float, typer.Option(help="Cross-entropy.", rich_help_panel=LOSS)] = 0.1,
    tv_weight: Annotated[
        float, typer.Option(help="Total variation (raw L1).", rich_help_panel=LOSS)
    ] = 0.9,
    confidence_weight: Annotated[
        float, typer.Option(help="Confidence head.", rich_help_panel=LOSS)
    ] = 1.0,
    gamma: Annotated[
        float, typer.Option(help="Slot k counts exp(-k / gamma).", rich_help_panel=LOSS)
    ] = 4.0,
    stream: Stream = None,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Distil a draft from the target's responses.

    The responses say at which temperature they were sampled; the draft is trained for that one.

    Stop it whenever you like: the same command goes on where it was.
    """
    from sparksmith.distill.loss import LossWeights
    from sparksmith.distill.new_draft import DraftShape
    from sparksmith.distill.schedule import Budget
    from sparksmith.distill.training import TrainSettings
    from sparksmith.verify.run_record import check_folder

    check_folder(out, "train")
    if held_out < 0:
        raise UserError("--held-out", held_out, "is negative", "Use 0 to validate on nothing.")
    choice = TargetChoice(
        name=target,
        dtype=dtype,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
        stream=stream,
    )
    read = _read_responses if features is None else _read_features
    given = read(_one_of(responses, features), choice, _preset_taps(preset, parse_taps(taps)))
    sampling = given.serving_sampling(temperature, top_p, validates=held_out > 0)
    settings = TrainSettings(
        budget=Budget(steps=steps, minutes=minutes),
        temperature=sampling.temperature,
        greedy_rollouts=given.made.greedy,
        batch_size=batch_size,
        anchors=anchors,
        warmup=warmup,
        seed=seed,
        loss=LossWeights(ce=ce_weight, tv=tv_weight, confidence=confidence_weight, gamma=gamma),
        optimizer=replace(
            optimizer_settings(optimizer, (lr, muon_lr), weight_decay, grad_clip),
            markov_lr_scale=markov_lr_scale,
            context_lr_scale=context_lr_scale,
        ),
    )
    shape = DraftShape(
        num_layers=layers,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_head_type=markov_head,  # type: ignore[arg-type]
        draft_vocab_size=(0 if mla else DraftShape.draft_vocab_size)
        if draft_vocab is None
        else draft_vocab,
        mla=mla,
        head_dim=head_dim,
        num_kv_heads=kv_heads,
        is_causal=causal,
        mask_token_id=mask_token_id,
        preset=preset,
    )
    opened = given.open()
    run_training(
        opened,
        TrainingInputs(
            responses=given.responses,
            sampling=sampling,
            record=given.record,
            held_out=held_out,
            cache_bytes=int(cache_gib * (1 << 30)),
            from_regression=not from_scratch,
            store=given.store,
        ),
        (shape, settings),
        out,
    )


@dataclass(frozen=True, kw_only=True)
class _Given:
    """What a draft is to learn from. `made` is the sampling of the responses; `open` loads as much
    of the target as that takes."""

    responses: "list[Response]"
    made: "Sampling"
    record: dict[str, Any]
    open: "Callable[[], OpenTarget | OpenEnds]"
    store: "FeatureStore | None" = None

    def serving_sampling(
        self, temperature: float | None, top_p: float | None, *, validates: bool
    ) -> "Sampling":
        """As the function of this name; stored features are of one sampling alone."""
        if self.store is None:
            return serving_sampling(self.made, temperature, top_p, validates=validates)
        stored = self.store.contents.sampling
        for option, value, own in (
            ("--temperature", temperature, stored.temperature),
            ("--top-p", top_p, stored.top_p),
        ):
            if value is not None and value != own:
                raise UserError(
                    option,
                    value,
                    f"is not that of the features, {own:g}",
                    f"Leave it out, or capture with {option} {value:g}.",
                )
        return serving_sampling(self.made, stored.temperature, stored.top_p, validates=validates)


def _one_of(responses: Path | None, features: Path | None) -> Path:
    if responses is not None and features is not None:
        raise UserError(
            "--features",
            str(features),
            "holds its responses, and --responses is given too",
            "Give one of the two.",
        )
    folder = features or responses
    if folder is None:
        raise UserError(
            "--responses",
            None,
            "is not given",
            "Give what `generate` wrote, or --features with what `capture` wrote.",
        )
    return folder


def _read_responses(folder: Path, choice: TargetChoice, taps: tuple[int, ...] | None) -> _Given:
    from sparksmith.cli.responses import check_answered_by, read_generated

    generated = read_generated(folder)

    def load() -> OpenTarget:
        opened = open_target(choice, taps=taps_of(choice, taps))
        check_answered_by(generated, opened)
        return opened

    return _Given(
        responses=generated.responses,
        made=generated.sampling,
        record=generated.record,
        open=load,
    )


def _read_features(folder: Path, choice: TargetChoice, taps: tuple[int, ...] | None) -> _Given:
    """Of the target that the features are of, unless another than the default is given."""
    from sparksmith.cli.features import open_features
    from sparksmith.cli.responses import check_target_of
    from sparksmith.verify.embedded import TARGET_NAME

    store = open_features(folder)
    contents = store.contents
    for option, value, own in (
        ("--taps", taps, contents.taps),
        ("--stream", choice.stream, contents.stream),
    ):
        if value is not None and value != own:
            raise UserError(option, value, f"is not that of the features, {own}", "Leave it out.")
    name = choice.name
    if name == TARGET_NAME:
        name = str(contents.target.get("name", name))

    def load() -> OpenEnds:
        opened = open_ends(replace(choice, name=name, stream=contents.stream), taps=contents.taps)
        check_target_of(contents.target, opened, "these features", "capture")
        return opened

    return _Given(
        responses=store.responses(),
        made=contents.responses_sampling,
        record={"features": len(store), "sha256": store.sha256},
        open=load,
        store=store,
    )


def parse_taps(text: str | None) -> tuple[int, ...] | None:
    """Layer numbers from "3,9,15"; None means the default for the target's depth."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError("--taps", text, "is not a list of layers", "Write 3,9,15.") from None


def _preset_taps(name: str | None, taps: tuple[int, ...] | None) -> tuple[int, ...] | None:
    """The preset's taps; UserError for an unknown preset, and for other taps beside it."""
    if name is None:
        return taps
    from sparksmith.draft.presets import preset as of_name

    own = of_name(name).target_layer_ids
    if taps not in (None, own):
        raise UserError("--taps", taps, f"are not those of the preset, {own}", "Leave them out.")
    return own


def taps_of(choice: TargetChoice, taps: tuple[int, ...] | None) -> tuple[int, ...]:
    """The given taps, checked, or the default ones; reads only the target's configuration."""
    from sparksmith.distill.new_draft import DraftShape, default_taps
    from sparksmith.verify.loading import target_sizes
    from sparksmith.verify.target import check_taps

    depth = target_sizes(resolve(choice.name), choice.trust_remote_code).num_layers
    if taps is not None:
        check_taps(taps, depth)
        return taps
    return default_taps(depth, min(DraftShape().num_taps, max(1, depth - 2)))


def serving_sampling(
    made: "Sampling", temperature: float | None, top_p: float | None, *, validates: bool
) -> "Sampling":
    """The sampling that the draft is trained for: that of the responses (`made`), unless given.

    Raises UserError for greedy sampling, which leaves nothing to learn from. Validation judges a
    draft by what sampled responses were drawn from, so when it `validates` theirs cannot be
    changed; greedy responses are judged by exact match, at any temperature of training.
    """
    from sparksmith.draft.sampling import Sampling

    wanted = Sampling(
        temperature=made.temperature if temperature is None else temperature,
        top_k=made.top_k,
        top_p=made.top_p if top_p is None else top_p,
    )
    if wanted.greedy:
        raise UserError(
            "--temperature",
            wanted.temperature,
            "gives a one-hot target, which total variation cannot learn from",
            "Add `--temperature 0.2`, which also serves greedy decoding."
            if made.greedy
            else "Leave it out, or generate greedy responses and train with `--temperature 0.2`.",
        )
    if made.greedy or wanted == made or not validates:
        return wanted
    option, value, own = ("--top-p", wanted.top_p, made.top_p)
    if wanted.temperature != made.temperature:
        option, value, own = ("--temperature", wanted.temperature, made.temperature)
    raise UserError(
        option,
        value,
        f"is not what the responses were sampled with ({own:g}), which validation needs",
        "Leave it out, generate responses with it, or train with `--held-out 0`.",
    )


def optimizer_settings(
    name: str, rates: tuple[float, float | None], weight_decay: float, grad_clip: float
) -> "OptimizerSettings":
    """The optimizer as its options say; `rates` are AdamW's and Muon's, which only muon takes."""
    from sparksmith.distill.optimizers import OptimizerSettings

    lr, muon_lr = rates
    if muon_lr is not None and name != "muon":
        raise UserError(
            "--muon-lr",
            muon_lr,
            f"has no use with {name}",
            "Leave it out, or add --optimizer muon.",
        )
    return OptimizerSettings(
        name=name,  # type: ignore[arg-type]
        lr=lr,
        muon_lr=OptimizerSettings.muon_lr if muon_lr is None else muon_lr,
        weight_decay=weight_decay,
        grad_clip=grad_clip,
    )
