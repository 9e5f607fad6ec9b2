"""`sparksmith train`: responses in, a draft out."""

import hashlib
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparksmith.cli.target import (
    Device,
    Dtype,
    OpenTarget,
    TargetChoice,
    TargetName,
    Threads,
    TrustRemoteCode,
    open_target,
    resolve,
)
from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.distill.generation import Response
    from sparksmith.distill.new_draft import DraftShape
    from sparksmith.distill.training import Trainer, TrainSettings
    from sparksmith.draft.model import DSparkDraft
    from sparksmith.draft.sampling import Sampling

EXAMPLE = "sparksmith train --responses runs/responses --minutes 10 --out runs/draft"
DRAFT, TRAINING, LOSS = "Draft", "Training", "Loss (each weight is printed as it is used)"


def train(
    responses: Annotated[Path, typer.Option(help="Folder that `generate` wrote.")],
    out: Annotated[Path, typer.Option(help="Folder for best/, last/ and run.json.")],
    target: TargetName = "embedded",
    minutes: Annotated[
        float | None, typer.Option(help="Wall-time budget.", rich_help_panel=TRAINING)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Step budget.", rich_help_panel=TRAINING)
    ] = None,
    batch_size: Annotated[
        int, typer.Option(help="Responses a step.", rich_help_panel=TRAINING)
    ] = 2,
    anchors: Annotated[
        int, typer.Option(help="Most blocks of a response.", rich_help_panel=TRAINING)
    ] = 64,
    optimizer: Annotated[
        str, typer.Option(help="adamw or muon.", rich_help_panel=TRAINING)
    ] = "adamw",
    lr: Annotated[
        float, typer.Option(help="AdamW's learning rate.", rich_help_panel=TRAINING)
    ] = 4e-3,
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
        int, typer.Option(help="Responses kept for validation.", rich_help_panel=TRAINING)
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
        int, typer.Option(help="Most frequent words kept; 0 keeps all.", rich_help_panel=DRAFT)
    ] = 8192,
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
            help="Random weights instead of the target's last layers.",
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
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Distil a draft from the target's responses.

    The responses say at which temperature they were sampled; the draft is trained for that one.
    Stop it whenever you like: the same command goes on where it was.
    """
    from sparksmith.cli.responses import read_generated
    from sparksmith.distill.loss import LossWeights
    from sparksmith.distill.new_draft import DraftShape
    from sparksmith.distill.optimizers import OptimizerSettings
    from sparksmith.distill.schedule import Budget
    from sparksmith.distill.training import TrainSettings

    generated = read_generated(responses)
    settings = TrainSettings(
        budget=Budget(steps=steps, minutes=minutes),
        temperature=generated.sampling.temperature,
        batch_size=batch_size,
        anchors=anchors,
        warmup=warmup,
        seed=seed,
        loss=LossWeights(ce=ce_weight, tv=tv_weight, confidence=confidence_weight, gamma=gamma),
        optimizer=OptimizerSettings(
            name=optimizer,  # type: ignore[arg-type]
            lr=lr,
            weight_decay=weight_decay,
            grad_clip=grad_clip,
        ),
    )
    shape = DraftShape(
        num_layers=layers,
        block_size=block_size,
        markov_rank=markov_rank,
        markov_head_type=markov_head,  # type: ignore[arg-type]
        draft_vocab_size=draft_vocab,
        is_causal=causal,
        mask_token_id=mask_token_id,
    )
    choice = TargetChoice(
        name=target,
        dtype=dtype,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
    )
    opened = open_target(choice, taps=taps_of(choice, parse_taps(taps)))
    run_training(
        opened,
        TrainingInputs(
            responses=generated.responses,
            sampling=generated.sampling,
            record=generated.record,
            held_out=held_out,
            cache_bytes=int(cache_gib * (1 << 30)),
            from_target=not from_scratch,
        ),
        (shape, settings),
        out,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """What a draft learns from; `record` identifies it in run.json."""

    responses: "list[Response]"
    sampling: "Sampling"
    record: dict[str, Any]
    held_out: int
    cache_bytes: int
    from_target: bool = True


def parse_taps(text: str | None) -> tuple[int, ...] | None:
    """Layer numbers from "3,9,15"; None means the default for the target's depth."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError("--taps", text, "is not a list of layers", "Write 3,9,15.") from None


def taps_of(choice: TargetChoice, taps: tuple[int, ...] | None) -> tuple[int, ...]:
    """The given taps, or the default ones; reads only the target's configuration."""
    if taps is not None:
        return taps
    from sparksmith.distill.new_draft import DraftShape, default_taps
    from sparksmith.verify.loading import num_layers

    depth = num_layers(resolve(choice.name), choice.trust_remote_code)
    return default_taps(depth, min(DraftShape().num_taps, max(1, depth - 2)))


def run_training(
    opened: OpenTarget,
    inputs: TrainingInputs,
    plan: "tuple[DraftShape, TrainSettings]",
    out: Path,
) -> dict[str, Any]:
    """Everything after the options: all checks come before the first step."""
    from sparksmith.cli.training import train_with_progress
    from sparksmith.distill.features import OnlineFeatures, require_plain_head
    from sparksmith.distill.training import Trainer
    from sparksmith.verify.run_record import RunRecord

    shape, settings = plan
    require_plain_head(opened.target)
    training, held_out = split(inputs.responses, inputs.held_out)
    draft = _make_draft(opened, shape, inputs, settings.seed)
    record = RunRecord.open(
        out,
        "train",
        settings={
            **settings.comparable(),
            "shape": asdict(shape),
            "taps": list(opened.target.taps),
            "from_target": inputs.from_target,
            "held_out": len(held_out),
        },
        inputs={"target": opened.record, "responses": inputs.record},
        conditions={"budget": asdict(settings.budget)},
    )
    with record:
        source = OnlineFeatures(
            opened.target, training, inputs.sampling, cache_bytes=inputs.cache_bytes
        )
        held = OnlineFeatures(opened.target, held_out, inputs.sampling, cache_bytes=1 << 30)
        trainer = Trainer(draft, settings, out, (source, held.take(range(len(held)))))
        resumed = trainer.resume()
        _describe(draft, trainer, len(training), resumed)
        results = train_with_progress(trainer)
        record.finish("complete", **results)
    print(
        f"expected acceptance length {results['expected_acceptance_length']:.3f} (bonus counted) "
        f"on {len(held_out)} held-out responses; draft in {out / 'best'}"
    )
    return results


def split(responses: "list[Response]", held_out: int) -> "tuple[list[Response], list[Response]]":
    """Training and held-out responses; which ones depends on their ids alone."""
    ordered = sorted(
        responses, key=lambda response: hashlib.sha256(response.request_id.encode()).digest()
    )
    count = min(held_out, len(ordered) // 10 or min(1, len(ordered) - 1))
    return ordered[count:], ordered[:count]


def _make_draft(
    opened: OpenTarget, shape: "DraftShape", inputs: TrainingInputs, seed: int
) -> "DSparkDraft":
    import torch

    from sparksmith.distill.initial import start_from_target
    from sparksmith.distill.new_draft import new_draft, reserved_token, word_counts

    torch.manual_seed(seed)
    target = opened.target
    mask = shape.mask_token_id
    if mask is None:
        mask = reserved_token(opened.tokenizer, target.vocab_size, inputs.responses)
    training, _ = split(inputs.responses, inputs.held_out)
    draft = new_draft(target, shape, mask, word_counts(training, target.vocab_size))
    if inputs.from_target:
        start_from_target(draft, target)
    return draft


def _describe(draft: "DSparkDraft", trainer: "Trainer", num_training: int, resumed: bool) -> None:
    from sparksmith.distill.validation import draft_vocabulary_coverage

    settings, config = trainer.settings, draft.config
    loss, optimizer = settings.loss, settings.optimizer
    size = sum(parameter.numel() for parameter in draft.parameters())
    say(
        f"draft: {config.num_hidden_layers} layers, block {config.block_size}, taps "
        f"{','.join(map(str, config.target_layer_ids))}, {size / 1e6:.1f} M parameters, "
        f"vocabulary {config.draft_vocab_size} of {config.vocab_size} "
        f"({draft_vocabulary_coverage(draft, trainer.held_out):.1%} of held-out tokens)"
    )
    say(
        f"loss: {loss.ce:g} CE + {loss.tv:g} TV + {loss.confidence:g} confidence, slot weights "
        f"{' '.join(f'{w:.2f}' for w in loss.slot_weights(config.block_size).tolist())}, "
        f"temperature {settings.temperature:g}"
    )
    say(
        f"{optimizer.name}, lr {optimizer.lr:g}, {num_training} training responses, "
        f"{len(trainer.held_out)} held out"
        + (f"; going on at step {trainer.progress.step}" if resumed else "")
    )


def say(text: str) -> None:
    print(text, file=sys.stderr)
