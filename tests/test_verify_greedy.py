"""On real models: greedy speculative text is the plain greedy text, token for token."""

from collections.abc import Callable
from functools import cache, partial
from itertools import cycle
from typing import Any

import pytest
import torch
from draft_models import MLA, tiny_draft
from tiny_models import HIDDEN, VOCABULARY, full_pass, tiny_model, words
from torch import Tensor

from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.ngram import NgramDrafter
from sparksmith.draft.proposal import Proposal
from sparksmith.draft.sampling import Sampling
from sparksmith.verify import caches
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.target import TransformersTarget

TAPS = (0, 2)
PROMPT = words(5)
LENGTH = 200


@cache
def target_of(kind: str) -> TransformersTarget:
    # The first k3_mini falls into a loop of five words.
    model = tiny_model(kind, seed=1 if kind == "k3_mini" else 0)
    if kind in ("kimi_linear", "k3_mini"):
        # The plain PyTorch form of KDA pads every pass to chunks of 64 tokens; in chunks of 8 the
        # result is the same, twice as fast.
        model.forward = partial(model.forward, chunk_size=8)
    return TransformersTarget(model, TAPS)


@cache
def greedy_text(kind: str) -> list[int]:
    """transformers' own greedy text, prompt included."""
    output = target_of(kind).model.generate(
        torch.tensor([PROMPT]),
        attention_mask=torch.ones(1, len(PROMPT), dtype=torch.long),
        do_sample=False,
        max_new_tokens=LENGTH,
    )
    text = output[0].tolist()
    # A text that repeats one word would be the same with a broken cache.
    assert len(set(text[-50:])) > 8
    return text


class ScriptedDrafter:
    """Knows the text, and says it with a wrong word at four places of ten."""

    taps: tuple[int, ...] = ()

    def __init__(self, text: list[int], lengths: tuple[int, ...] = ()) -> None:
        self.text = text
        self.lengths = cycle(lengths) if lengths else None
        self.length = 0
        self.generator = torch.Generator().manual_seed(1)

    def update(self, tokens: Tensor, features: Tensor | None) -> None:
        assert tokens.tolist() == self.text[self.length : self.length + len(tokens)]
        self.length += len(tokens)

    def propose(self, anchor: int, num_tokens: int) -> Proposal:
        assert anchor == self.text[self.length]
        if self.lengths is not None:
            num_tokens = min(num_tokens, next(self.lengths))
        right = torch.tensor(self.text[self.length + 1 : self.length + 1 + num_tokens])
        wrong = torch.rand(num_tokens, generator=self.generator) < 0.4
        tokens = torch.where(wrong, (right + 1) % VOCABULARY, right).long()
        # Not quite sure of itself.
        probs = torch.full((num_tokens, VOCABULARY), 0.1 / VOCABULARY)
        probs[torch.arange(num_tokens), tokens] += 0.9
        return Proposal(tokens=tokens, probs=probs)


def scripted(kind: str) -> ScriptedDrafter:
    return ScriptedDrafter(greedy_text(kind))


def varying(kind: str) -> ScriptedDrafter:
    return ScriptedDrafter(greedy_text(kind), lengths=(7, 0, 1, 4, 0, 2, 7, 3))


def ngram(kind: str) -> NgramDrafter:
    return NgramDrafter(VOCABULARY, max_ngram=2, min_ngram=1)


def random_mla(kind: str) -> DSparkDrafter:
    return random_dspark(kind, **MLA)


def random_dspark(kind: str, **changes: Any) -> DSparkDrafter:
    draft = tiny_draft(
        bind=False,
        hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        target_hidden_size=HIDDEN,
        target_layer_ids=TAPS,
        block_size=7,
        **changes,
    )
    target = target_of(kind)
    draft.bind(target.embed_weight.detach(), target.head_weight.detach())
    generator = torch.Generator().manual_seed(0)
    return DSparkDrafter(draft, Sampling(temperature=5.0, top_p=1.0), generator)


CASES = [
    (scripted, 1, "block"),
    (scripted, 4, "standard"),
    (scripted, 7, "block"),
    (varying, 7, "block"),
    (ngram, 4, "block"),
    (random_dspark, 1, "standard"),
    (random_dspark, 7, "block"),
    (random_mla, 7, "block"),
]


def speculative(kind: str, make_drafter: Callable, num_tokens: int, rule: str):
    settings = DecodeSettings(
        sampling=Sampling(temperature=0.0),
        max_new_tokens=LENGTH,
        num_tokens=num_tokens,
        accept_rule=rule,
        stop_token_ids=frozenset(),
    )
    return decode(target_of(kind), make_drafter(kind), PROMPT, settings)


@pytest.mark.parametrize("kind", ["qwen3", "kimi_linear", "k3_mini"])
@pytest.mark.parametrize(("make_drafter", "num_tokens", "rule"), CASES)
def test_speculative_text_is_the_greedy_text(kind, make_drafter, num_tokens, rule):
    result = speculative(kind, make_drafter, num_tokens, rule)
    assert [*PROMPT, *result.token_ids] == greedy_text(kind)
    assert 0 < sum(result.accepted) < 0.8 * sum(result.drafted)
    if make_drafter in (scripted, varying):
        assert sum(result.accepted) > 0.15 * sum(result.drafted)


@pytest.mark.parametrize("kind", ["llama", "mistral", "lfm2"])
def test_other_caches(kind):
    result = speculative(kind, varying, 7, "block")
    assert [*PROMPT, *result.token_ids] == greedy_text(kind)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "lfm2", "kimi_linear"])
def test_baseline_text_is_the_greedy_text(kind):
    settings = DecodeSettings(sampling=Sampling(temperature=0.0), max_new_tokens=LENGTH)
    result = decode(target_of(kind), None, PROMPT, settings)
    assert [*PROMPT, *result.token_ids] == greedy_text(kind)


def test_a_prompt_of_one_token():
    settings = DecodeSettings(sampling=Sampling(temperature=0.0), max_new_tokens=20)
    plain = decode(target_of("kimi_linear"), None, [3], settings)
    drafted = decode(target_of("kimi_linear"), random_dspark("kimi_linear"), [3], settings)
    assert drafted.token_ids == plain.token_ids


def forget_states(cache: caches.RewindingCache, length: int) -> None:
    """A restore that crops attention and leaves the recurrent states as they are."""
    for layer in cache._attention:
        layer.forget_after(length)


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (caches.RewindingCache, "restore", forget_states),
        # Copies that share their tensors are overwritten by the next pass.
        (caches, "_copy_state", dict),
        (caches.PreallocatedLayer, "forget_after", lambda layer, length: None),
    ],
)
def test_a_broken_rewind_changes_the_text(monkeypatch, owner, name, broken):
    expected = greedy_text("kimi_linear")[len(PROMPT) :]
    monkeypatch.setattr(owner, name, broken)
    settings = DecodeSettings(sampling=Sampling(temperature=0.0), max_new_tokens=60, num_tokens=4)
    drafter = NgramDrafter(VOCABULARY, max_ngram=2, min_ngram=1)
    text = decode(target_of("kimi_linear"), drafter, PROMPT, settings).token_ids
    assert text != expected[:60]


class Listener(ScriptedDrafter):
    """Keeps the features it is told of."""

    taps = TAPS

    def __init__(self, text: list[int]) -> None:
        super().__init__(text)
        self.features: list[Tensor] = []

    def update(self, tokens: Tensor, features: Tensor | None) -> None:
        super().update(tokens, features)
        assert features is not None
        assert len(features) == len(tokens)
        self.features.append(features)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "kimi_linear"])
def test_drafter_gets_the_features_of_the_text_as_it_stands(kind):
    listener = Listener(greedy_text(kind))
    speculative(kind, lambda _: listener, 4, "block")
    features = torch.cat(listener.features)
    _, expected = full_pass(target_of(kind).model, greedy_text(kind), TAPS)
    assert len(features) > LENGTH - 6
    difference = (features - expected[: len(features)]).abs().max()
    assert difference <= 1e-5 * expected.abs().max()
