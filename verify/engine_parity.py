"""A record of parity against a running engine: whether it accepts what was recorded, and if not,
which fault accepts just that.

An engine tells its tokens and how many drafted tokens each step accepted. Where these differ from
the record, the draft is run with one fault after the other (positions moved, no Markov head,
features of neighbouring layers, ...): one that leads to the engine's counts is what is wrong there.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MethodType

import torch
from torch import Tensor

from sparksmith.draft.backbone import Attention
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.rotary import Rotary
from sparksmith.verify.endpoint import Endpoint, RequestError
from sparksmith.verify.parity import Difference
from sparksmith.verify.target import TransformersTarget


@dataclass(frozen=True, kw_only=True)
class Served:
    """An engine's greedy response to a recorded prompt; `accepted` None: it does not say."""

    tokens: list[int]
    accepted: list[int] | None


@dataclass(frozen=True, kw_only=True)
class _Text:
    tokens: Tensor
    start: int
    features: Tensor
    accepted: list[int]

    @property
    def response(self) -> list[int]:
        response: list[int] = self.tokens[self.start :].tolist()
        return response


def serve_parity(endpoint: Endpoint, stored: Mapping[str, Tensor]) -> list[Served]:
    """The engine's responses to the recorded prompts. RequestError where it refuses one."""
    made = []
    for text in _texts(stored):
        options = {"max_tokens": len(text.response), "temperature": 0.0}
        answer = endpoint.complete(text.tokens[: text.start].tolist(), options)
        if answer.token_ids is None:
            raise RequestError("tells no token ids; vLLM does", 1)
        accepted = None if answer.steps is None else answer.steps.accepted
        made.append(Served(tokens=answer.token_ids, accepted=accepted))
    return made


def compare_engine(
    stored: Mapping[str, Tensor],
    served: Sequence[Served],
    draft: DSparkDraft | None = None,
    target: TransformersTarget | None = None,
) -> list[Difference]:
    """The first difference of every text; with a bound draft, and better a target, its cause."""
    texts = list(_texts(stored))
    found = []
    for number, (text, answer) in enumerate(zip(texts, served, strict=True)):
        difference = _difference(text, answer)
        if difference is not None:
            found.append(replace(difference, text=number))
    known = all(answer.accepted is not None for answer in served)
    if draft is not None and found and known and all(one.stage == "accepted" for one in found):
        cause = _cause(draft, texts, served, target)
        found = [replace(one, meaning=cause) for one in found]
    return found


def _texts(stored: Mapping[str, Tensor]) -> Iterator[_Text]:
    for number in range(sum(name.endswith(".tokens") for name in stored)):
        kept = stored.get(f"{number}.accepted")
        yield _Text(
            tokens=stored[f"{number}.tokens"],
            start=int(stored[f"{number}.prompt_length"]),
            features=stored[f"{number}.features"],
            accepted=[] if kept is None else kept.tolist(),
        )


def _difference(text: _Text, answer: Served) -> Difference | None:
    for place, (wanted, there) in enumerate(zip(text.response, answer.tokens, strict=False)):
        if wanted != there:
            return Difference(
                stage=f"text, at token {place}",
                size=1.0,
                meaning="the target there: its weights, its precision, or its sampling",
            )
    if answer.accepted is None:
        return Difference(
            stage="accepted",
            size=1.0,
            meaning="the server's options: it tells accepted tokens with "
            "`--per-request-spec-decode-metrics detailed`, and a draft",
        )
    step = _first_step(text.accepted, answer.accepted)
    if step is None:
        return None
    counts = f"{answer.accepted[step]} of the drafted tokens where {text.accepted[step]} are right"
    return Difference(
        stage="accepted",
        size=1.0,
        meaning=f"how the draft is served: step {step + 1} accepts {counts}",
    )


def _first_step(wanted: Sequence[int], there: Sequence[int]) -> int | None:
    """Where they part; the last step is left out, for it drafts beyond the end or not at all."""
    for step in range(min(len(wanted), len(there)) - 1):
        if wanted[step] != there[step]:
            return step
    return None


def _cause(
    draft: DSparkDraft,
    texts: Sequence[_Text],
    served: Sequence[Served],
    target: TransformersTarget | None,
) -> str:
    fitting = []
    for name, counts in _faulty_counts(draft, texts, target):
        if all(
            answer.accepted is not None and _first_step(made, answer.accepted) is None
            for made, answer in zip(counts, served, strict=True)
        ):
            fitting.append(name)
    if not fitting:
        return "how the draft is served: no fault known here leads to these counts"
    return " or ".join(fitting) + ": with it, the counts are just these"


def _faulty_counts(
    draft: DSparkDraft, texts: Sequence[_Text], target: TransformersTarget | None
) -> Iterator[tuple[str, list[list[int]]]]:
    """Every fault with the accepted counts it leads to, text by text."""
    for name, faulty in _faulty_drafts(draft):
        yield name, [_accepted(faulty, text, text.features) for text in texts]
    if draft.config.sample_from_anchor:
        yield (
            "the block read as 1 + K slots (sample_from_anchor false)",
            [_accepted(draft, text, text.features, first=1) for text in texts],
        )
    taps = draft.config.target_layer_ids
    width = draft.config.target_hidden_size
    if len(taps) > 1:
        turned = [
            torch.unflatten(text.features, -1, (-1, width)).flip(-2).flatten(-2) for text in texts
        ]
        yield (
            "the taps in descending order",
            [_accepted(draft, *pair) for pair in zip(texts, turned, strict=True)],
        )
    if target is None:
        return
    for offset in (-1, 1):
        moved = tuple(tap + offset for tap in taps)
        if moved[0] < 0 or moved[-1] >= target.num_layers - 1:
            continue
        other = TransformersTarget(target.model, moved, target.stream)
        made = []
        for text in texts:
            passed = other.begin(len(text.tokens)).forward(text.tokens.to(target.device), 1)
            assert passed.features is not None
            made.append(_accepted(draft, text, passed.features))
        yield f"features of the layers {offset:+d} from the taps", made


def _faulty_drafts(draft: DSparkDraft) -> Iterator[tuple[str, DSparkDraft]]:
    for offset in (-1, 1):
        yield f"positions of the block {offset:+d} from theirs", _moved(draft, offset)
    if draft.markov_head is not None:
        without = _copy(draft)
        assert without.markov_head is not None
        torch.nn.init.zeros_(without.markov_head.markov_w2.weight)
        yield "no Markov head", without
    config = draft.config
    other = DSparkDraft(replace(config, is_causal=not config.is_causal), draft.target_ids)
    other.to(draft.fc.weight).load_state_dict(draft.state_dict())
    other.bind(draft.bound.embed, draft.bound.head)
    kind = "bidirectional" if config.is_causal else "causal"
    yield f"a {kind} block", other
    if config.mla is None and len(draft.layers) > 1:
        yield (
            "the first layer's key norm for the context in every layer, as vLLM's build for CPUs "
            "has it",
            _one_key_norm(draft),
        )
    raw = _copy(draft)
    torch.nn.init.ones_(raw.hidden_norm.weight)
    yield "no weights in the norm of the context", raw


def _copy(draft: DSparkDraft) -> DSparkDraft:
    made = copy.deepcopy(draft)
    made.bind(draft.bound.embed, draft.bound.head)
    return made


def _moved(draft: DSparkDraft, offset: int) -> DSparkDraft:
    made = _copy(draft)
    original = made.rotary

    def rotary(positions: Tensor) -> Rotary:
        # The slots' positions come by sequence; the context's are one row.
        return original(positions + offset * (positions.ndim == 2))

    made.rotary = rotary  # type: ignore[method-assign]
    return made


def _one_key_norm(draft: DSparkDraft) -> DSparkDraft:
    made = _copy(draft)
    first = made.layers[0].self_attn
    assert isinstance(first, Attention)

    def keys_values(self: Attention, x: Tensor, positions: Rotary) -> tuple[Tensor, Tensor]:
        if positions[0].ndim > 2:
            return Attention.keys_values(self, x, positions)
        own, self.k_norm = self.k_norm, first.k_norm
        try:
            return Attention.keys_values(self, x, positions)
        finally:
            self.k_norm = own

    for layer in list(made.layers)[1:]:
        attention = layer.self_attn
        assert isinstance(attention, Attention)
        attention.keys_values = MethodType(keys_values, attention)  # type: ignore[method-assign]
    return made


@torch.inference_mode()
def _accepted(
    draft: DSparkDraft, text: _Text, features: Tensor, first: int | None = None
) -> list[int]:
    """Accepted counts of greedy decoding along a greedy text: every place's draft is compared with
    what follows it, and the steps go from place to place.

    `first` is the slot that drafts the first token, by default the draft's own.
    """
    config = draft.config
    if first is None:
        first = 0 if config.sample_from_anchor else 1
    device = draft.fc.weight.device
    tokens = text.tokens.to(device)
    anchors = torch.arange(text.start, len(tokens) - 1, device=device)
    hidden = draft.forward_blocks(features.to(draft.fc.weight)[None], tokens[None], anchors[None])
    hidden = hidden[0, :, first:]
    base = draft.base_logits(hidden)
    counts = []
    for row, anchor in enumerate(anchors.tolist()):
        previous, state, count = tokens[anchor], None, 0
        for slot in range(hidden.shape[1]):
            logits = base[row, slot]
            if draft.markov_head is not None:
                bias, state = draft.markov_step(previous, hidden[row, slot], state)
                logits = logits + bias
            previous = draft.target_ids[logits.argmax(-1)]
            place = anchor + slot + 1
            if place >= len(tokens) or int(previous) != int(tokens[place]):
                break
            count += 1
        counts.append(count)
    steps, place = [], 0
    while place < len(counts):
        steps.append(counts[place])
        place += counts[place] + 1
    return steps
