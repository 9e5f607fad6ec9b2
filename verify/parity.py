"""parity/parity.safetensors: what a draft computes, kept with it, so that any installation can
compare.

A few texts with the target's features, and what the draft made of them stage by stage. A replay
starts each stage from what is stored, so the first stage that differs is the one that is wrong:
the features, the context, the block (positions first), the Markov row, the head.

Tensors of text i, S tokens, A anchors, K drafting slots, m taps, H widths, in float32:
`i.tokens` [S], `i.prompt_length` [1], `i.features` [S, m * Ht], `i.anchors` [A], `i.context`
[S, H], `i.hidden` [A, K, H], `i.previous` [A, K], `i.top` [A, K, 32] target ids, `i.base`,
`i.markov` [A, K, 32] their two parts of the logits, `i.log_norm` [A, K], `i.drafted` [A, K]
greedy; with a target `i.accepted` [steps] of greedy decoding with the draft.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.convert import PARITY_FILE
from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.target import TransformersTarget

_TOP = 32
_ANCHORS = 6
_GREEDY = Sampling(temperature=0.0)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first stage of one text that differs, by how much of its largest magnitude."""

    stage: str
    size: float
    meaning: str
    text: int = 0


@torch.inference_mode()
def record_parity(
    draft: DSparkDraft,
    texts: Sequence[tuple[Tensor, int, Tensor]],
    accepted: Sequence[Sequence[int]] | None = None,
) -> dict[str, Tensor]:
    """The file's tensors for `texts` (tokens [S], prompt length, features [S, m * Ht])."""
    stored: dict[str, Tensor] = {}
    for number, (tokens, start, features) in enumerate(texts):
        size = draft.config.block_size
        last = max(start, len(tokens) - size - 1)
        anchors = torch.unique(torch.linspace(start, last, _ANCHORS).long())
        made = _stages(draft, tokens, features, anchors)
        stored |= {f"{number}.{name}": tensor for name, tensor in made.items()}
        stored |= {
            f"{number}.tokens": tokens,
            f"{number}.prompt_length": torch.tensor([start]),
            f"{number}.features": features.float(),
            f"{number}.anchors": anchors,
        }
        if accepted is not None:
            stored[f"{number}.accepted"] = torch.tensor(list(accepted[number]))
    return {name: tensor.cpu().contiguous().clone() for name, tensor in stored.items()}


@torch.inference_mode()
def texts_of(
    target: TransformersTarget,
    draft: DSparkDraft,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 32,
) -> tuple[list[tuple[Tensor, int, Tensor]], list[list[int]]]:
    """The target's greedy texts with their features, and how many drafted tokens each step of
    greedy decoding with the draft accepts; `target` taps what the draft needs."""
    texts, accepted = [], []
    settings = DecodeSettings(
        sampling=_GREEDY, max_new_tokens=new_tokens, num_tokens=draft.config.num_drafts
    )
    for prompt in prompts:
        result = decode(target, DSparkDrafter(draft, _GREEDY, None), prompt, settings)
        tokens = torch.tensor([*prompt, *result.token_ids])
        features = target.begin(len(tokens)).forward(tokens.to(target.device), 1).features
        assert features is not None
        texts.append((tokens, len(prompt), features.cpu()))
        accepted.append(list(result.accepted))
    return texts, accepted


def write_parity(stored: Mapping[str, Tensor], folder: Path) -> Path:
    """Write the record into the folder of the draft, atomically."""
    path = folder / PARITY_FILE
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as temporary:
        save_file(dict(stored), temporary, metadata={"format": "pt"})
    return path


def read_parity(folder: Path) -> dict[str, Tensor]:
    """UserError where there is no such file, or it is broken, holds no text, or lacks a tensor or
    its shape: the message names it."""
    path = folder / PARITY_FILE
    if not path.is_file():
        raise UserError(
            "--parity",
            str(folder),
            f"has no {PARITY_FILE}",
            "Write one with `sparksmith convert --parity` or `train`.",
        )
    try:
        stored = load_file(path)
    except (SafetensorError, OSError) as error:
        raise _unfit(path, f"cannot be read ({error})") from None
    texts = sorted({name.partition(".")[0] for name in stored})
    if not texts:
        raise _unfit(path, "holds no text")
    if set(texts) != {str(number) for number in range(len(texts))}:
        raise _unfit(path, f"holds tensors of the texts {', '.join(texts[:5])}, not 0, 1, ...")
    for text in texts:
        _check_text(path, text, stored)
    return stored


def check_fits(config: DSparkConfig, stored: Mapping[str, Tensor]) -> None:
    """UserError where a record is of a draft of other sizes."""
    width = config.target_hidden_size * len(config.target_layer_ids)
    drafting = config.block_size if config.sample_from_anchor else config.block_size - 1
    sizes = {"features": (1, width), "context": (1, config.hidden_size)}
    sizes |= {"hidden": (2, config.hidden_size), "previous": (1, drafting)}
    for name, tensor in stored.items():
        own = name.partition(".")[2]
        if own in sizes:
            axis, size = sizes[own]
            if tensor.shape[axis] != size:
                raise UserError(
                    "--parity",
                    name,
                    f"has the shape {list(tensor.shape)}, and this draft's has {size} in place of "
                    f"{tensor.shape[axis]}",
                    "Use the record of this draft.",
                )
        if own in ("tokens", "previous", "top", "drafted") and not _are_ids(config, tensor):
            raise UserError(
                "--parity",
                name,
                f"holds numbers that are no words of a vocabulary of {config.vocab_size}",
                "Use the record of this draft.",
            )


def _are_ids(config: DSparkConfig, tensor: Tensor) -> bool:
    return bool(((tensor >= 0) & (tensor < config.vocab_size)).all())


# Shapes by the letters of the module's docstring; those of whole numbers.
_SHAPES = {
    "tokens": "S",
    "prompt_length": "1",
    "features": "SF",
    "anchors": "A",
    "context": "SH",
    "hidden": "AKH",
    "previous": "AK",
    "top": "AKT",
    "base": "AKT",
    "markov": "AKT",
    "log_norm": "AK",
    "drafted": "AK",
}
_WHOLE = ("tokens", "prompt_length", "anchors", "previous", "top", "drafted", "accepted")


def _check_text(path: Path, text: str, stored: Mapping[str, Tensor]) -> None:
    sizes = {"1": 1}
    for own, letters in _SHAPES.items():
        name = f"{text}.{own}"
        if name not in stored:
            raise _unfit(path, f"lacks the tensor {name}")
        shape = stored[name].shape
        if len(shape) == len(letters):
            for letter, size in zip(letters, shape, strict=True):
                sizes.setdefault(letter, size)
        wanted = [sizes.get(letter, letter) for letter in letters]
        if list(shape) != wanted or not stored[name].numel():
            raise _unfit(path, f"holds {name} of shape {list(shape)}, and {wanted} is meant")
    for own in _WHOLE:
        found = stored.get(f"{text}.{own}")
        if found is not None and (found.is_floating_point() or found.dim() < 1):
            raise _unfit(path, f"holds {text}.{own}, which are no whole numbers")
    length, start = sizes["S"], int(stored[f"{text}.prompt_length"])
    anchors = stored[f"{text}.anchors"]
    if not 1 <= start <= length:
        raise _unfit(path, f"says in {text}.prompt_length {start} of {length} tokens")
    if not ((anchors >= 0) & (anchors < length)).all():
        raise _unfit(path, f"holds {text}.anchors beyond its {length} tokens")


def _unfit(path: Path, problem: str) -> UserError:
    return UserError(
        "--parity", str(path), problem, "Write it again with `sparksmith convert --parity`."
    )


@torch.inference_mode()
def replay_parity(
    draft: DSparkDraft,
    stored: Mapping[str, Tensor],
    target: TransformersTarget | None = None,
    *,
    tolerance: float = 1e-4,
) -> list[Difference]:
    """The first difference of every text, none if all agree; with a target (tapping what the
    draft needs) its features and the accepted counts of greedy decoding too."""
    check_fits(draft.config, stored)
    found = []
    for number in range(sum(name.endswith(".tokens") for name in stored)):
        own = {
            name.partition(".")[2]: tensor
            for name, tensor in stored.items()
            if name.startswith(f"{number}.")
        }
        difference = _first_difference(draft, own, target, tolerance)
        if difference is not None:
            found.append(replace(difference, text=number))
    return found


def _first_difference(
    draft: DSparkDraft,
    own: Mapping[str, Tensor],
    target: TransformersTarget | None,
    tolerance: float,
) -> Difference | None:
    device = draft.fc.weight.device
    tokens, features = own["tokens"].to(device), own["features"].to(device)
    if target is not None:
        made = target.begin(len(tokens)).forward(tokens.to(target.device), 1).features
        assert made is not None
        if (size := _distance(made, features)) > tolerance:
            return _said("features", size, "the target, its layers tapped, or the tapped stream")
    if (size := _distance(draft.fuse(features), own["context"])) > tolerance:
        return _said("context", size, "the projection of the features or its norm")
    made_stages = _stages(draft, tokens, features, own["anchors"].to(device), own)
    if (size := _distance(made_stages["hidden"], own["hidden"])) > tolerance:
        return _said("block", size, _why_the_block(draft, own, tolerance))
    for stage, meaning in (
        ("markov", "a row of the Markov tables, or the vocabulary's map"),
        ("base", "the head, or its rows"),
        ("log_norm", "the head, in words outside the likeliest"),
    ):
        if (size := _distance(made_stages[stage], own[stage])) > tolerance:
            return _said(stage, size, meaning)
    if not torch.equal(made_stages["drafted"].cpu(), own["drafted"]):
        return _said("drafted", 1.0, "how drafted words are chosen, or the order of the slots")
    if target is not None and "accepted" in own:
        start = int(own["prompt_length"])
        settings = DecodeSettings(
            sampling=_GREEDY,
            max_new_tokens=len(tokens) - start,
            num_tokens=draft.config.num_drafts,
        )
        prompt = tokens[:start].tolist()
        result = decode(target, DSparkDrafter(draft, _GREEDY, None), prompt, settings)
        if list(result.accepted) != own["accepted"].tolist():
            return _said("accepted", 1.0, "the decode loop: what is verified, or kept")
    return None


def _said(stage: str, size: float, meaning: str) -> Difference:
    return Difference(stage=stage, size=size, meaning=meaning)


def _why_the_block(draft: DSparkDraft, own: Mapping[str, Tensor], tolerance: float) -> str:
    """Whether the stored block is this draft's at other positions: then those are what is wrong."""
    device = draft.fc.weight.device
    inputs = (own[name].to(device) for name in ("tokens", "features", "anchors"))
    tokens, features, anchors = inputs
    for shift in (-1, 1):
        moved = {**own, "shift": torch.tensor(shift)}
        made = _stages(draft, tokens, features, anchors, moved)
        if _distance(made["hidden"], own["hidden"]) <= tolerance:
            return f"positions: those recorded are {shift:+d} from the ones here"
    return "positions, rotary settings, or the layers' weights"


def _stages(
    draft: DSparkDraft,
    tokens: Tensor,
    features: Tensor,
    anchors: Tensor,
    own: Mapping[str, Tensor] | None = None,
) -> dict[str, Tensor]:
    """All stages; with `own`, a file's record, later ones start from what it stored."""
    features = features.to(draft.fc.weight)
    first = 0 if draft.config.sample_from_anchor else 1
    shift = int(own["shift"]) if own is not None and "shift" in own else 0
    with _shifted(draft, shift):
        hidden = draft.forward_blocks(features[None], tokens[None], anchors[None])[0, :, first:]
    before = hidden if own is None else own["hidden"].to(hidden)
    offsets = torch.arange(hidden.shape[1], device=tokens.device)
    previous = tokens[(anchors[:, None] + offsets).clamp(max=len(tokens) - 1)]
    base = draft.base_logits(before)
    bias = torch.zeros_like(base)
    if draft.markov_head is not None:
        bias = draft.markov_bias(previous, before)
    logits = (base + bias).float()
    if own is None:
        top = logits.topk(min(_TOP, logits.shape[-1])).indices
        ids = draft.target_ids[top]
    else:
        ids = own["top"].to(tokens.device)
        known = torch.full((draft.config.vocab_size,), 0, device=tokens.device)
        known[draft.target_ids] = torch.arange(len(draft.target_ids), device=tokens.device)
        top = known[ids]
    return {
        "context": draft.fuse(features).float(),
        "hidden": hidden.float(),
        "previous": previous,
        "top": ids,
        "base": base.gather(-1, top).float(),
        "markov": bias.gather(-1, top).float(),
        "log_norm": logits.logsumexp(-1),
        "drafted": _greedy(draft, before, tokens[anchors]),
    }


class _shifted:  # noqa: N801 - used as a function
    """Positions moved by a constant while the block is computed."""

    def __init__(self, draft: DSparkDraft, shift: int) -> None:
        self._draft, self._shift = draft, shift

    def __enter__(self) -> None:
        if self._shift:
            original = type(self._draft).rotary.__get__(self._draft)
            size = self._draft.config.block_size

            def moved(positions: Tensor) -> tuple[Tensor, Tensor]:
                # The slots' positions come by sequence; the context's are one row.
                is_slots = positions.ndim == 2 and positions.shape[1] % size == 0
                found: tuple[Tensor, Tensor] = original(positions + self._shift * is_slots)
                return found

            self._draft.rotary = moved  # type: ignore[method-assign]

    def __exit__(self, *_error: object) -> None:
        vars(self._draft).pop("rotary", None)


def _greedy(draft: DSparkDraft, hidden: Tensor, anchors: Tensor) -> Tensor:
    """The likeliest words slot by slot, [A, K] target ids."""
    drafted = torch.zeros(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    for row, anchor in enumerate(anchors):
        previous, state = anchor, None
        for slot, states in enumerate(hidden[row]):
            logits = draft.base_logits(states)
            if draft.markov_head is not None:
                bias, state = draft.markov_step(previous, states, state)
                logits = logits + bias
            previous = draft.target_ids[logits.argmax(-1)]
            drafted[row, slot] = previous
    return drafted


def _distance(one: Tensor, other: Tensor) -> float:
    """The largest difference, relative to the largest magnitude."""
    one, other = one.float().cpu(), other.float().cpu()
    if one.shape != other.shape:
        return float("inf")
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-12))
