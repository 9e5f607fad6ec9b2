"""Expected acceptance from rollouts, against exact enumeration of the decode step."""

import itertools

import pytest
import torch
from torch import Tensor

from sparksmith.verify.accept import accept_standard
from sparksmith.verify.expected import expected_accepts

V, K = 3, 3
WORDS = list(itertools.product(range(V), repeat=K))


def tables(seed: int, *, greedy: bool = False, excluded: bool = False) -> dict[int, Tensor]:
    """Conditional distributions by prefix length k: [V, .., V (k times), V] in float64."""
    generator = torch.Generator().manual_seed(seed)
    result = {}
    for k in range(K + 1):
        logits = 1.5 * torch.randn((V,) * (k + 1), generator=generator, dtype=torch.float64)
        if excluded:
            logits = logits.masked_fill(logits == logits.amin(-1, keepdim=True), -torch.inf)
        if greedy:
            logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True), -torch.inf)
        result[k] = logits.softmax(-1)
    return result


def along(table: dict[int, Tensor], words: tuple[int, ...]) -> Tensor:
    """What `table` gives each word of the sequence; [K]."""
    return torch.stack([table[k][words[:k]][words[k]] for k in range(K)])


def true_joint(target: dict[int, Tensor], draft: dict[int, Tensor]) -> Tensor:
    """P(at least k accepted), k = 1..K, by drafting every sequence and running the rule.

    Token k's uniform matters only if all before it are kept, so the accepted count is found at
    both sides of every threshold min(1, p/q), which also shows that the rule has them there.
    """
    joint = torch.zeros(K, dtype=torch.float64)
    for words in WORDS:
        probability = along(draft, words).prod()
        if probability == 0.0:
            continue
        keeps = (along(target, words) / along(draft, words)).clamp(max=1.0)
        target_rows = torch.stack([target[k][words[:k]] for k in range(K + 1)])
        draft_rows = torch.stack([draft[k][words[:k]] for k in range(K)])
        for k in range(K):
            for side in (-1e-13, 1e-13):
                uniforms = torch.zeros(K + 1, dtype=torch.float64)
                uniforms[k] = keeps[k] + side
                if not 0.0 <= uniforms[k] < 1.0 or (keeps[:k] == 0.0).any():
                    continue
                verdict = accept_standard(target_rows, draft_rows, torch.tensor(words), uniforms)
                assert (verdict.accepted > k) == (side < 0)
        joint += probability * keeps.cumprod(0)
    return joint


def rollouts(target: dict[int, Tensor], draft: dict[int, Tensor]) -> tuple[Tensor, ...]:
    """Every sequence the target can roll out: its probability [N], then the [N, K] arguments."""
    words = [w for w in WORDS if along(target, w).prod() > 0.0]
    target_token_probs = torch.stack([along(target, w) for w in words])
    draft_token_probs = torch.stack([along(draft, w) for w in words])
    overlaps = torch.tensor(
        [
            [float(torch.minimum(target[k][w[:k]], draft[k][w[:k]]).sum()) for k in range(K)]
            for w in words
        ],
        dtype=torch.float64,
    )
    return target_token_probs.prod(-1), target_token_probs, draft_token_probs, overlaps


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("target_kind", "draft_kind"),
    [({}, {}), ({"excluded": True}, {}), ({"excluded": True}, {"excluded": True}),
     ({}, {"greedy": True}), ({"greedy": True}, {}), ({"greedy": True}, {"greedy": True})],
)  # fmt: skip
def test_mean_over_rollouts_is_the_probability_of_acceptance(
    seed: int, target_kind: dict[str, bool], draft_kind: dict[str, bool]
) -> None:
    target, draft = tables(seed, **target_kind), tables(seed + 100, **draft_kind)
    probability, *arguments = rollouts(target, draft)
    joint = probability @ expected_accepts(*arguments)
    assert torch.allclose(joint, true_joint(target, draft), rtol=0.0, atol=1e-12)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_product_of_overlaps_along_the_rollout_is_biased(seed: int) -> None:
    target, draft = tables(seed), tables(seed + 100)
    probability, _, _, overlaps = rollouts(target, draft)
    biased = probability @ overlaps.cumprod(-1)
    error = (biased - true_joint(target, draft)).abs()
    assert error[0] < 1e-12  # the first position has no prefix to be walked wrongly
    assert error[1:].max() > 0.01


def test_worked_by_hand() -> None:
    # Prefix weights 1, min(1, .2/.4) = .5, .5 * min(1, .9/.3) = .5, times the overlaps.
    joint = expected_accepts(
        torch.tensor([[0.4, 0.3, 0.5]]),
        torch.tensor([[0.2, 0.9, 0.1]]),
        torch.tensor([[0.8, 0.6, 0.4]]),
    )
    assert joint.tolist() == [pytest.approx([0.8, 0.3, 0.2])]


def test_greedy_counts_the_prefix_that_matches_exactly() -> None:
    match = torch.tensor([[1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]])
    joint = expected_accepts(torch.ones(3, 4), match, match)
    assert joint.sum(-1).tolist() == [2.0, 0.0, 4.0]


def test_a_token_the_target_excludes_ends_the_block() -> None:
    joint = expected_accepts(
        torch.tensor([[0.5, 0.0, 0.5]]), torch.full((1, 3), 0.5), torch.full((1, 3), 0.5)
    )
    assert joint.tolist() == [[0.5, 0.5, 0.0]]
