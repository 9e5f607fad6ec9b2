"""The draft that a command was given: a folder, `ngram` for prompt lookup, or `none` for neither.

Whether it fits the target is read from two config.json files, before any weights are loaded.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Protocol

import typer

from sparksmith.cli.target import TargetChoice, resolve
from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.cli.evaluating import Drafting
    from sparksmith.draft.config import DSparkConfig
    from sparksmith.draft.model import DSparkDraft
    from sparksmith.verify.target import TransformersTarget

NGRAM, NOTHING = "ngram", "none"
NGRAM_TOKENS = 4
"""Tokens that prompt lookup drafts a step where no number is asked for."""
DRAFT_TEMPERATURE = 0.8
"""Of the target's: what it adds to the overlap of target and draft is small, and costs nothing."""
MIN_SURVIVAL = 0.05
"""Best on two CPU cores, where one more token in a verification costs a twentieth of a step. A GPU
verifies a few tokens more in the same time."""

DRAFT_PANEL = "Draft"
NumTokens = Annotated[
    int | None,
    typer.Option(
        "--num-tokens",
        "-k",
        help="Tokens drafted a step, at most (default: the draft's block; 4 for `ngram`).",
        rich_help_panel=DRAFT_PANEL,
    ),
]
MinSurvival = Annotated[
    float | None,
    typer.Option(
        help="End a draft before a token whose chance to be accepted with all before it is lower, "
        "by the confidence head; 0 drafts whole blocks "
        f"(default: {MIN_SURVIVAL} on a CPU, 0 on a GPU).",
        rich_help_panel=DRAFT_PANEL,
    ),
]
DraftTemperature = Annotated[
    float,
    typer.Option(
        help="The draft's own temperature, as a multiple of the target's.",
        rich_help_panel=DRAFT_PANEL,
    ),
]
DraftTopP = Annotated[
    float, typer.Option(help="The draft's own nucleus; 1 is off.", rich_help_panel=DRAFT_PANEL)
]


class Sizes(Protocol):
    """What a draft must fit; a loaded target has it, and a target's configuration tells it."""

    @property
    def num_layers(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...


def read_draft_config(draft: str) -> "DSparkConfig | None":
    """The configuration of the draft in a folder; None for `ngram` and `none`."""
    if draft in (NGRAM, NOTHING):
        return None
    from sparksmith.draft.checkpoint import read_config

    return read_config(Path(draft))


def stream_of(draft: str) -> str | None:
    """The stream that the draft in a folder was trained on, where its manifest says one that only
    some targets have; None leaves it to the target."""
    if draft in (NGRAM, NOTHING):
        return None
    from sparksmith.draft.manifest import stated_stream

    return stated_stream(Path(draft))


def load(draft: str) -> "DSparkDraft | None":
    """The draft in a folder, unbound, in float32; None for `ngram` and `none`."""
    if draft in (NGRAM, NOTHING):
        return None
    import torch

    from sparksmith.draft.checkpoint import load_draft

    return load_draft(Path(draft), dtype=torch.float32)


def num_tokens_of(chosen: int | None, config: "DSparkConfig | None") -> int:
    """The K that was chosen, by default the draft's block; UserError for one it cannot draft."""
    if chosen is None:
        return NGRAM_TOKENS if config is None else config.num_drafts
    if chosen < 1:
        raise UserError(
            "--num-tokens",
            chosen,
            "drafts nothing",
            "Use 1 or more; `sparksmith decode --draft none` decodes without a draft.",
        )
    if config is not None and chosen > config.num_drafts:
        raise UserError(
            "--num-tokens",
            chosen,
            f"is more than the draft's block of {config.num_drafts}",
            f"Use 1 to {config.num_drafts}, or train a draft with a larger --block-size.",
        )
    return chosen


def min_survival_of(
    chosen: float | None, config: "DSparkConfig | None", device: str = "cpu"
) -> float:
    """The least survival that was chosen; by default `MIN_SURVIVAL` where it pays (a CPU) and the
    draft can tell it."""
    from sparksmith.draft.drafter import check_min_survival

    has_head = config is not None and config.enable_confidence_head
    if chosen is None:
        return MIN_SURVIVAL if has_head and device == "cpu" else 0.0
    check_min_survival(chosen, has_head=has_head)
    return chosen


def drafting_of(
    options: tuple[float, float, float | None], config: "DSparkConfig | None", device: str
) -> "Drafting":
    """The options above (temperature, top-p, least survival) for a draft of `config` beside a
    target on `device`; UserError for one that is out of its range."""
    from sparksmith.cli.evaluating import Drafting

    temperature, top_p, min_survival = options
    if not 0.0 < temperature <= 10.0:
        raise UserError(
            "--draft-temperature", temperature, "is not in (0, 10]", "Use 1 for the target's own."
        )
    if not 0.0 < top_p <= 1.0:
        raise UserError("--draft-top-p", top_p, "is not in (0, 1]", "Use 1 to switch it off.")
    return Drafting(
        temperature=temperature,
        top_p=top_p,
        min_survival=min_survival_of(min_survival, config, device),
    )


def check_choice(config: "DSparkConfig | None", choice: TargetChoice, draft: str) -> None:
    """`check_fit` against the configuration of a target that is not loaded yet."""
    from sparksmith.verify.loading import target_sizes

    if config is not None:
        check_fit(config, target_sizes(resolve(choice.name), choice.trust_remote_code), draft)


def check_fit(config: "DSparkConfig", target: Sizes, draft: str) -> None:
    """UserError, naming what does not fit, for a draft that was made for another target."""
    remedy = "Use the target that this draft was trained for."
    if config.target_layer_ids[-1] >= target.num_layers - 1:
        raise UserError(
            "target_layer_ids",
            list(config.target_layer_ids),
            f"of draft {draft} do not exist in a target of {target.num_layers} layers",
            remedy,
        )
    for name, own, theirs in (
        ("target_hidden_size", config.target_hidden_size, target.hidden_size),
        ("hidden_size", config.hidden_size, target.hidden_size),
        ("vocab_size", config.vocab_size, target.vocab_size),
    ):
        if own != theirs:
            raise UserError(name, own, f"of draft {draft} is not the target's {theirs}", remedy)


def bind_draft(draft: "DSparkDraft", target: "TransformersTarget", name: str) -> None:
    """Move the draft to the target's device and bind it; UserError as `check_fit`."""
    check_fit(draft.config, target, name)
    draft.to(target.device)
    draft.bind(target.embed_weight, target.head_weight)
