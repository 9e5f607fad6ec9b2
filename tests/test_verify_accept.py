"""The accept rules worked by hand, and at the edges; test_verify_lossless.py proves the theorem."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sparksmith.verify.accept import ACCEPT_RULES, Verdict, accept_block

BOTH = pytest.mark.parametrize("accept", ACCEPT_RULES.values(), ids=ACCEPT_RULES.keys())
Accept = Callable[[Tensor, Tensor, Tensor, Tensor], Verdict]


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_drafted_word_worked_by_hand(accept: Accept, dtype: torch.dtype) -> None:
    # Word 0 is kept below 0.25 / 0.5; the residual is [0, 0.25, 0.25, 0], cut at a half.
    target = torch.tensor([[0.25, 0.375, 0.375, 0.0], [0.0, 0.0, 0.5, 0.5]], dtype=dtype)
    draft = torch.tensor([[0.5, 0.125, 0.125, 0.25]], dtype=dtype)
    tokens = torch.tensor([0])
    for uniforms, accepted, next_token in [
        ((0.499, 0.0), 1, 2),
        ((0.499, 0.5), 1, 3),
        ((0.5, 0.0), 0, 1),
        ((0.5, 0.499), 0, 1),
        ((0.5, 0.5), 0, 2),
        ((0.999, 0.999), 0, 2),
    ]:
        verdict = accept(target, draft, tokens, torch.tensor(uniforms, dtype=dtype))
        assert verdict == Verdict(accepted=accepted, next_token=next_token)


def test_block_worked_by_hand() -> None:
    # w_1 = 1/2. Residual of the next row: max([1/4, 1/4] - [1/8, 7/8], 0) = [1/8, 0], so
    # h_1 = (1/8) / (1/8 + 1/2) = 1/5. Then x_2 = 0: w_2 = min(1, 1/2 * (1/2) / (1/8)) = 1 = h_2.
    target = torch.tensor([[0.25, 0.75], [0.5, 0.5], [1.0, 0.0]])
    draft = torch.tensor([[0.5, 0.5], [0.125, 0.875]])
    verdict = accept_block(target, draft, torch.tensor([0, 0]), torch.tensor([0.9, 0.9, 0.9]))
    assert verdict == Verdict(accepted=2, next_token=0)  # standard stops at once: 0.9 > 1/2
    # x_2 = 1: w_2 = 1/2 * (1/2) / (7/8) = 2/7.
    tokens = torch.tensor([0, 1])
    for first, second, accepted, next_token in [
        (0.9, 0.285, 2, 0),
        (0.199, 0.286, 1, 0),
        (0.201, 0.286, 0, 1),
    ]:
        uniforms = torch.tensor([first, second, 0.9])
        verdict = accept_block(target, draft, tokens, uniforms)
        assert verdict == Verdict(accepted=accepted, next_token=next_token)


@BOTH
@pytest.mark.parametrize("one_hot_draft", [False, True])
def test_greedy_keeps_the_prefix_that_matches_the_argmax(
    accept: Accept, one_hot_draft: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        best = torch.randint(4, (6,), generator=generator)
        tokens = torch.randint(2, (5,), generator=generator)
        tokens = torch.where(tokens == 0, best[:-1], (best[:-1] + 1) % 4)
        target = torch.nn.functional.one_hot(best, 4).float()
        draft = torch.rand(5, 4, generator=generator) + 0.01
        draft = draft / draft.sum(-1, keepdim=True)
        if one_hot_draft:
            draft = torch.nn.functional.one_hot(tokens, 4).float()
        uniforms = torch.rand(6, generator=generator)
        matches = int((tokens == best[:-1]).long().cumprod(0).sum())
        verdict = accept(target, draft, tokens, uniforms)
        assert verdict == Verdict(accepted=matches, next_token=int(best[matches]))


@BOTH
def test_certain_and_impossible_words_at_the_ends_of_the_uniforms(accept: Accept) -> None:
    largest = math.nextafter(1.0, 0.0)
    certain = torch.tensor([[0.3, 0.7, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    tokens = torch.tensor([0])
    equal = accept(
        certain, certain[:1], tokens, torch.tensor([largest, largest], dtype=torch.float64)
    )
    assert equal == Verdict(accepted=1, next_token=1)
    never = torch.tensor([[0.0, 1.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    zeros = torch.zeros(2, dtype=torch.float64)
    assert accept(never, certain[:1], tokens, zeros) == Verdict(accepted=0, next_token=1)


@BOTH
def test_a_drafted_word_of_draft_probability_zero(accept: Accept) -> None:
    """It cannot be drawn; the verdict stays what the limit gives, without a division by zero."""
    draft = torch.tensor([[0.0, 0.5, 0.5]])
    uniforms = torch.tensor([0.5, 0.5])
    target = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]])
    assert accept(target, draft, torch.tensor([0]), uniforms).accepted == 1
    target = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]])
    verdict = accept(target, draft, torch.tensor([0]), uniforms)
    assert verdict == Verdict(accepted=0, next_token=1)


def test_block_keeps_a_prefix_of_weight_one_though_its_residual_is_empty() -> None:
    """h = 0 / 0 counts as 1. Only a word that cannot be drawn, as 2 here, brings it to a test."""
    same = torch.tensor([[0.5, 0.5, 0.0]]).repeat(3, 1)
    verdict = accept_block(same, same[:2], torch.tensor([1, 2]), torch.tensor([0.9, 0.9, 0.25]))
    assert verdict == Verdict(accepted=1, next_token=0)


@BOTH
def test_residual_that_vanishes_by_rounding_falls_back_to_the_target(accept: Accept) -> None:
    draft = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    target = draft.clone().repeat(2, 1)
    target[0, 0] = math.nextafter(0.5, 0.0)  # a target a hair short of one
    uniforms = torch.tensor([math.nextafter(1.0, 0.0), 0.25], dtype=torch.float64)
    verdict = accept(target, draft, torch.tensor([0]), uniforms)
    assert verdict == Verdict(accepted=0, next_token=0)


@BOTH
@pytest.mark.parametrize("uniform", [0.0, 0.5, math.nextafter(1.0, 0.0), 1.0])
def test_next_token_never_has_probability_zero(accept: Accept, uniform: float) -> None:
    """Also where a float32 cumulative sum would pass or miss 1, and for a uniform rounded to 1."""
    vocabulary = 50_000
    probs = torch.rand(1, vocabulary, generator=torch.Generator().manual_seed(0))
    probs[:, ::2] = 0.0
    probs[:, -1000:] = 0.0
    for row in (probs / probs.sum(), probs / probs.sum() * 0.9999):
        uniforms = torch.tensor([uniform], dtype=torch.float64)
        none = torch.empty(0, dtype=torch.int64)
        verdict = accept(row, torch.empty(0, vocabulary), none, uniforms)
        assert verdict.accepted == 0
        assert row[0, verdict.next_token] > 0.0


@BOTH
def test_next_token_of_a_rejection_lies_in_the_residual(accept: Accept) -> None:
    generator = torch.Generator().manual_seed(1)
    rejections = 0
    for _ in range(200):
        logits = 2.0 * torch.randn(3, 100, generator=generator)
        target = logits.softmax(-1)
        draft = (logits[:2] + torch.randn(2, 100, generator=generator)).softmax(-1)
        tokens = torch.multinomial(draft, 1, generator=generator)[:, 0]
        verdict = accept(target, draft, tokens, torch.rand(3, generator=generator))
        if verdict.accepted < 2:
            rejections += 1
            row = verdict.accepted
            assert target[row, verdict.next_token] > draft[row, verdict.next_token]
    assert rejections > 20


@BOTH
def test_a_target_without_any_mass_is_reported(accept: Accept) -> None:
    none = torch.empty(0, dtype=torch.int64)
    for row in (torch.full((1, 3), torch.nan), torch.zeros(1, 3)):
        with pytest.raises(ValueError, match="target_probs row 0 has no positive probability"):
            accept(row, torch.empty(0, 3), none, torch.tensor([0.5]))
