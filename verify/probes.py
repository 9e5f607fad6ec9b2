"""Checks that run the draft beside its target: what no file can tell.

The target writes a few greedy texts. At anchors along them the draft's blocks are compared with
what the target went on to say: shifted by a slot, fed from neighbouring layers, or from features
of another place, a sound draft is worse.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.findings import Finding
from sparksmith.verify.target import TransformersTarget, streams_of

NUM_ANCHORS = 64
_MIN_SPREAD = 1e-3
_RESOLUTION = 1e-7
"""Of float32: smaller differences are rounding."""
_LISTENS = 1e-2
"""A block that other features change by less of its size is hardly trained, and tells little."""
_CHANCE = 2.0
"""An acceptance below this many times that of features from elsewhere is chance."""

STORIES = {
    "parity": "A draft recorded in one installation and replayed in another, stage by stage: the "
    "first stage that differs is the one that is wrong, for each starts from what was recorded.",
    "probe-slots": "The masked slots of a block differ only in their positions. A draft without "
    "positions gives the same hidden state in all of them: it drafts one word, over and over.",
    "probe-order": "Without positions in its keys a draft sees the context as a bag of words: the "
    "same block whatever came first.",
    "probe-offset": "A draft read in the wrong form (fill-in, or from the anchor), or a loop that "
    "takes row k + 1 for row k, predicts the right words a place too early or too late.",
    "probe-taps": "Libraries count layers from different ends: tap i may be the input or the "
    "output of layer i. A layer too low or too high costs acceptance, and nothing says so.",
    "probe-stream": "With Attention Residuals a layer's output is the running prefix sum or the "
    "mixture that the next layer reads: same shape, other numbers. A draft fed the one it was not "
    "trained on loses most of its acceptance, silently.",
    "probe-chance": "The sum of everything that no other check sees: a draft that does no better "
    "on its own features than on those of other text is not using them.",
}


@dataclass(frozen=True, kw_only=True)
class ProbeResult:
    """What the probes measured, for `--json`: how far a block's masked slots differ, with their
    positions and with all the same, and what the features change of a block, all of its size; mean
    log-probability of the target's word at the first drafted slot, by tap shift, and the share of
    right words by offset."""

    positions: int
    slot_spread: float
    slot_spread_without_positions: float
    context_change: float
    right_by_offset: dict[int, float]
    log_probability_by_shift: dict[int, float]
    log_probability_by_stream: dict[str, float]
    accepted: float
    accepted_elsewhere: float
    findings: tuple[Finding, ...]


@torch.inference_mode()
def probe(
    target: TransformersTarget,
    draft: DSparkDraft,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int = 48,
) -> ProbeResult:
    """Run all probes with a bound draft; `target` taps nothing, or what it likes."""
    taps = draft.config.target_layer_ids
    layers = sorted({tap + shift for tap in taps for shift in (-1, 0, 1)})
    layers = [layer for layer in layers if 0 <= layer < target.num_layers - 1]
    wide = TransformersTarget(target.model, layers, target.stream)
    settings = DecodeSettings(
        sampling=Sampling(temperature=0.0), max_new_tokens=new_tokens, stop_token_ids=frozenset()
    )
    texts = []
    for prompt in prompts:
        said = decode(wide, None, prompt, settings).token_ids
        tokens = torch.tensor([*prompt, *said], device=target.device)
        features = wide.begin(len(tokens)).forward(tokens, 1).features
        assert features is not None
        below = target.model.get_input_embeddings()(tokens)
        texts.append((tokens, len(prompt), _ByLayer(below, features, layers)))
    others = {
        stream: TransformersTarget(target.model, taps, stream)
        for stream in streams_of(target.model)
        if stream != target.stream
    }
    streams: dict[str, list[Tensor]] = {}
    size = draft.config.block_size
    per_text = -(-NUM_ANCHORS // max(1, len(texts)))
    shifts: dict[int, list[Tensor]] = {}
    right: dict[int, list[Tensor]] = {-1: [], 0: [], 1: []}
    overlaps, elsewhere, spreads, still, changes = [], [], [], [], []
    for number, (tokens, start, by_layer) in enumerate(texts):
        last = len(tokens) - size - 2
        anchors = torch.linspace(start, max(start, last), per_text, device=tokens.device).long()
        anchors = torch.unique(anchors)
        for shift in (-1, 0, 1):
            features = by_layer.at([tap + shift for tap in taps])
            if features is None:
                continue
            blocks = _Blocks.of(draft, features, tokens, anchors)
            shifts.setdefault(shift, []).append(blocks.log_probabilities(tokens, anchors)[:, 0])
            if shift == 0:
                for offset in right:
                    right[offset].append(blocks.right(tokens, anchors, offset))
                overlaps.append(blocks.log_probabilities(tokens, anchors)[:, 0].exp())
                spreads.append(blocks.spread)
                with _Still(draft):
                    still.append(_Blocks.of(draft, features, tokens, anchors).spread)
                deaf = _Blocks.of(draft, torch.zeros_like(features), tokens, anchors)
                changes.append(_change(blocks.hidden, deaf.hidden))
        for stream, recorded in others.items():
            found = recorded.begin(len(tokens)).forward(tokens, 1).features
            assert found is not None
            blocks = _Blocks.of(draft, found, tokens, anchors)
            streams.setdefault(stream, []).append(blocks.log_probabilities(tokens, anchors)[:, 0])
        other = texts[(number + 1) % len(texts)][2].at(list(taps))
        own = by_layer.at(list(taps))
        if other is not None and own is not None and len(texts) > 1:
            moved = other[torch.arange(len(own), device=own.device) % len(other)]
            blocks = _Blocks.of(draft, moved, tokens, anchors)
            elsewhere.append(blocks.log_probabilities(tokens, anchors)[:, 0].exp())
    result = ProbeResult(
        positions=sum(len(part) for part in overlaps),
        slot_spread=max(spreads),
        slot_spread_without_positions=max(still),
        context_change=max(changes),
        right_by_offset={offset: _mean(parts) for offset, parts in right.items()},
        log_probability_by_shift={shift: _mean(parts) for shift, parts in shifts.items()},
        log_probability_by_stream={
            target.stream: _mean(shifts[0]),
            **{stream: _mean(parts) for stream, parts in streams.items()},
        },
        accepted=_mean(overlaps),
        accepted_elsewhere=_mean(elsewhere) if elsewhere else float("nan"),
        findings=(),
    )
    return replace(result, findings=tuple(_findings(draft, result)))


@torch.inference_mode()
def probe_alone(draft: DSparkDraft) -> list[Finding]:
    """What can be tried without the target: with random features and embedding, do the masked
    slots differ, and does the context's order matter? Replaces what the draft is bound to."""
    config = draft.config
    generator = torch.Generator().manual_seed(0)
    weight = draft.fc.weight
    embed = torch.randn(config.vocab_size, config.hidden_size, generator=generator).to(weight)
    draft.bind(embed, embed[: config.draft_vocab_size])
    width = config.target_hidden_size * len(config.target_layer_ids)
    features = torch.randn(1, 12, width, generator=generator).to(weight)
    tokens = torch.arange(12, device=weight.device)[None] % config.vocab_size
    anchors = torch.tensor([[11]], device=weight.device)
    turned, other = features.clone(), torch.randn(features.shape, generator=generator).to(weight)
    turned[:, :11] = features[:, :11].flip(1)  # what the block sees

    def block(seen: Tensor) -> Tensor:
        return draft.forward_blocks(seen.clone(), tokens, anchors)[0, 0]

    def measured() -> tuple[float, float]:
        straight = block(features)
        return _spread(straight[None]), _change(straight, block(turned))

    spread, moved = measured()
    with _Still(draft):
        still_spread, still_moved = measured()
    listens = _change(block(features), block(other)) >= _LISTENS
    found = []
    if _is_noise(spread, still_spread):
        found.append(_all_alike(spread, listens))
    if _is_noise(moved, still_moved):
        found.append(
            Finding(
                check="probe-order",
                level="error" if listens else "warning",
                value=f"the context backwards changes the block by {moved:.1e} of its size",
                consequence="the draft does not know which word came when"
                if listens
                else _TOO_SMALL,
                remedy="Train a draft whose keys know their positions.",
            )
        )
    return found


_TOO_SMALL = "nothing moves a block of weights so small: untrained, it accepts next to nothing"


def _is_noise(size: float, still: float) -> bool:
    """Whether a difference is no more than a draft without positions has, `still`, by rounding or
    by its mask."""
    return size < _MIN_SPREAD and size <= 10 * max(still, _RESOLUTION)


def _spread(hidden: Tensor) -> float:
    """How far the masked slots of blocks [A, K, H] are from each other, of their size; 1 where
    there are not two of them."""
    if hidden.shape[1] < 3:
        return 1.0
    masked = hidden[:, 1:]
    return float((masked - masked[:, :1]).abs().max() / masked.abs().max().clamp(min=1e-30))


def _change(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-30))


class _Still:
    """All positions the same while a block is computed."""

    def __init__(self, draft: DSparkDraft) -> None:
        self._draft = draft

    def __enter__(self) -> None:
        original = type(self._draft).rotary.__get__(self._draft)

        def still(positions: Tensor) -> tuple[Tensor, Tensor]:
            found: tuple[Tensor, Tensor] = original(torch.zeros_like(positions))
            return found

        self._draft.rotary = still  # type: ignore[method-assign]

    def __exit__(self, *_error: object) -> None:
        vars(self._draft).pop("rotary", None)


def _all_alike(spread: float, listens: bool) -> Finding:
    return Finding(
        check="probe-slots",
        level="error" if listens else "warning",
        value=f"masked slots differ by {spread:.1e} of their size",
        consequence="the block drafts one word again and again" if listens else _TOO_SMALL,
        remedy="Train a draft whose slots know their positions.",
    )


class _ByLayer:
    """Layer outputs of one text, the embeddings standing for layer -1."""

    def __init__(self, below: Tensor, features: Tensor, layers: Sequence[int]) -> None:
        width = below.shape[-1]
        self._parts = {-1: below}
        for index, layer in enumerate(layers):
            self._parts[layer] = features[:, index * width : (index + 1) * width]

    def at(self, layers: Sequence[int]) -> Tensor | None:
        """[S, m * H], or None where a layer was not captured."""
        if any(layer not in self._parts for layer in layers):
            return None
        return torch.cat([self._parts[layer] for layer in layers], dim=-1)


@dataclass(frozen=True, kw_only=True)
class _Blocks:
    """The drafting slots of blocks at A anchors: logits [A, K, Vd] under teacher forcing."""

    draft: DSparkDraft
    logits: Tensor
    spread: float
    hidden: Tensor
    """Of all slots, [A, K or K + 1, H]."""

    @classmethod
    def of(cls, draft: DSparkDraft, features: Tensor, tokens: Tensor, anchors: Tensor) -> "_Blocks":
        hidden = draft.forward_blocks(features[None], tokens[None], anchors[None])[0]
        whole, spread = hidden, _spread(hidden)
        if not draft.config.sample_from_anchor:
            hidden = hidden[:, 1:]
        offsets = torch.arange(hidden.shape[1], device=tokens.device)
        previous = tokens[anchors[:, None] + offsets]
        return cls(
            draft=draft, logits=draft.logits(previous, hidden).float(), spread=spread, hidden=whole
        )

    def log_probabilities(self, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Of the target's words at each slot, [A, K]; of those that the draft cannot say, -30."""
        wanted = self._wanted(tokens, anchors, 0)
        found = self.logits.log_softmax(-1).gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
        return found.masked_fill(wanted < 0, -30.0)

    def right(self, tokens: Tensor, anchors: Tensor, offset: int) -> Tensor:
        """Whether each slot's likeliest word is the target's `offset` places on, [A * K].

        Places where neighbouring words are alike say nothing of the offset and are left out.
        """
        wanted = self._wanted(tokens, anchors, offset)
        others = [self._wanted(tokens, anchors, o) for o in (-1, 0, 1) if o != offset]
        tells = torch.stack([wanted != other for other in others]).all(0)
        return (self.logits.argmax(-1) == wanted)[tells].float()

    def _wanted(self, tokens: Tensor, anchors: Tensor, offset: int) -> Tensor:
        config = self.draft.config
        places = anchors[:, None] + 1 + offset
        places = places + torch.arange(self.logits.shape[1], device=tokens.device)
        known = torch.full((config.vocab_size,), -1, device=tokens.device)
        known[self.draft.target_ids] = torch.arange(config.draft_vocab_size, device=tokens.device)
        return known[tokens[places]]


def _mean(parts: Sequence[Tensor]) -> float:
    whole = torch.cat([part.flatten() for part in parts])
    return float(whole.mean()) if len(whole) else 0.0


def _findings(draft: DSparkDraft, result: ProbeResult) -> list[Finding]:
    found = []
    if _is_noise(result.slot_spread, result.slot_spread_without_positions):
        found.append(_all_alike(result.slot_spread, result.context_change >= _LISTENS))
    right = result.right_by_offset
    best = max(right, key=lambda offset: right[offset])
    if best != 0 and right[best] > 1.5 * right[0] + 0.02:
        form = "false" if draft.config.sample_from_anchor else "true"
        found.append(
            Finding(
                check="probe-offset",
                level="error",
                value=f"drafts agree with the text at offset {best:+d} ({right[best]:.0%}) rather "
                f"than at 0 ({right[0]:.0%})",
                consequence="next to nothing is accepted",
                remedy=f"Try sample_from_anchor {form}.",
            )
        )
    shifts = result.log_probability_by_shift
    tap = max(shifts, key=lambda shift: shifts[shift])
    uniform = 1.0 / draft.config.draft_vocab_size
    # Below a guess at random, differences between layers say nothing.
    if tap != 0 and shifts[tap] > max(shifts[0] + 0.05, math.log(uniform)):
        found.append(
            Finding(
                check="probe-taps",
                level="error",
                value=f"layers {tap:+d} from the taps predict better "
                f"({shifts[tap]:.2f} against {shifts[0]:.2f} nats)",
                consequence="acceptance is lower than it could be, and nothing says so",
                remedy=f"Try target_layer_ids {[t + tap for t in draft.config.target_layer_ids]}.",
            )
        )
    streams = result.log_probability_by_stream
    served, likeliest = next(iter(streams)), max(streams, key=lambda stream: streams[stream])
    if likeliest != served and streams[likeliest] > max(streams[served] + 0.05, math.log(uniform)):
        found.append(
            Finding(
                check="probe-stream",
                level="error",
                value=f"{likeliest} predicts better than {served} "
                f"({streams[likeliest]:.2f} against {streams[served]:.2f} nats)",
                consequence="the draft is fed the stream that it was not trained on",
                remedy=f"Write stream {likeliest} in sparksmith.json, and serve it.",
            )
        )
    if not result.accepted > _CHANCE * max(result.accepted_elsewhere, uniform):
        found.append(
            Finding(
                check="probe-chance",
                level="warning",
                value=f"the target's word has probability {result.accepted:.3f}, and "
                f"{result.accepted_elsewhere:.3f} with the features of another text",
                consequence="the draft hardly uses what it is told: a slow-down",
                remedy="Check that this is the target it was trained for, and the tapped stream.",
            )
        )
    return found
