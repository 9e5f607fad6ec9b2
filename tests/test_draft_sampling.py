"""The distribution sampled from is transformers', and samples follow it."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling, probabilities, sample


def by_transformers(logits: Tensor, sampling: Sampling) -> Tensor:
    ids = torch.zeros(len(logits), 1, dtype=torch.long)
    logits = TemperatureLogitsWarper(sampling.temperature)(ids, logits)
    if sampling.top_k:
        logits = TopKLogitsWarper(sampling.top_k)(ids, logits)
    if sampling.top_p < 1.0:
        logits = TopPLogitsWarper(sampling.top_p)(ids, logits)
    return logits.softmax(-1)


SETTINGS = [
    Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    for temperature, top_k, top_p in itertools.product(
        (0.3, 0.7, 1.0, 1.5), (0, 1, 5), (0.5, 0.95, 1.0)
    )
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_equals_transformers(sampling: Sampling) -> None:
    logits = 4 * torch.randn(16, 200, generator=torch.Generator().manual_seed(1))
    expected = by_transformers(logits, sampling)
    result = probabilities(logits, sampling)
    assert torch.equal(result > 0, expected > 0)
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("top_k", [1, 3, 10])
def test_words_that_tie_with_the_last_of_top_k_stay(top_k: int) -> None:
    logits = torch.randint(0, 4, (8, 50), generator=torch.Generator().manual_seed(2)).float()
    sampling = Sampling(temperature=1.0, top_k=top_k, top_p=1.0)
    result = probabilities(logits, sampling)
    assert int((result[0] > 0).sum()) > top_k
    torch.testing.assert_close(result, by_transformers(logits, sampling))


def test_ties_at_the_edge_of_the_nucleus_keep_its_size_and_values() -> None:
    # Which of the tied words stays is each sort's own choice; how many, and their mass, is not.
    logits = torch.randint(0, 4, (8, 50), generator=torch.Generator().manual_seed(3)).float()
    sampling = Sampling(temperature=1.0, top_p=0.6)
    result = probabilities(logits, sampling).sort().values
    torch.testing.assert_close(result, by_transformers(logits, sampling).sort().values)


@pytest.mark.parametrize("scale", [0.0, 0.1, 1.0])
def test_a_nucleus_wider_than_the_words_first_looked_at(scale: float) -> None:
    noise = torch.randn(4, 3000, generator=torch.Generator().manual_seed(4))
    # Distinct values, so that the edge is the same for both sorts.
    logits = scale * noise + torch.linspace(0, 1e-2, 3000)
    sampling = Sampling(temperature=1.0, top_p=0.95)
    result = probabilities(logits, sampling)
    assert int((result > 0).sum(-1).min()) > 512
    expected = by_transformers(logits, sampling)
    # The cumulative sums run in opposite directions: a word at the very edge may differ.
    assert int(((result > 0) != (expected > 0)).sum(-1).max()) <= 1
    torch.testing.assert_close(result, expected, rtol=1e-3, atol=2e-5)


def test_one_narrow_and_one_wide_row_together() -> None:
    logits = torch.linspace(0, 1e-2, 2 * 2000).view(2, 2000)
    logits[0, 7] = 50.0
    result = probabilities(logits, Sampling(temperature=1.0, top_p=0.9))
    assert result[0].nonzero().flatten().tolist() == [7]
    assert int((result[1] > 0).sum()) > 1700


def test_hand_worked_nucleus() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()
    result = probabilities(logits, Sampling(temperature=1.0, top_p=0.7))
    torch.testing.assert_close(result, torch.tensor([[2 / 3, 1 / 3, 0.0, 0.0]]))


def test_greedy_is_one_hot_at_the_first_largest() -> None:
    result = probabilities(
        torch.tensor([[1.0, 3.0, 3.0], [2.0, 0.0, 1.0]]), Sampling(temperature=0)
    )
    assert result.tolist() == [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]


def test_half_precision_logits_become_float32_and_float64_stays() -> None:
    sampling = Sampling()
    assert probabilities(torch.zeros(1, 8, dtype=torch.bfloat16), sampling).dtype == torch.float32
    assert probabilities(torch.zeros(1, 8, dtype=torch.float64), sampling).dtype == torch.float64


def test_samples_follow_the_distribution() -> None:
    probs = torch.tensor([0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    draws = 40_000
    generator = torch.Generator().manual_seed(5)
    tokens = sample(probs.expand(draws, -1), generator)
    counts = tokens.bincount(minlength=6).double()
    assert counts[1] == counts[5] == 0
    expected = draws * probs.double()
    kept = expected > 0
    chi_square = ((counts - expected)[kept] ** 2 / expected[kept]).sum()
    # The 0.999 quantile of chi-square with 3 degrees of freedom.
    assert float(chi_square) < 16.27


def test_sample_repeats_with_the_seed_and_finds_the_only_word() -> None:
    probs = torch.rand(64, 1000, generator=torch.Generator().manual_seed(6))
    first = sample(probs, torch.Generator().manual_seed(7))
    assert torch.equal(first, sample(probs, torch.Generator().manual_seed(7)))
    only = torch.zeros(3, 9).index_fill(1, torch.tensor([8]), 1.0)
    assert sample(only, None).tolist() == [8, 8, 8]


def test_a_uniform_of_zero_does_not_draw_an_impossible_word(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def zeros(size: tuple[int, int], **settings: object) -> Tensor:
        return torch.zeros(size, dtype=torch.float64)

    monkeypatch.setattr(torch, "rand", zeros)
    assert sample(torch.tensor([[0.0, 0.0, 0.4, 0.6]]), None).tolist() == [2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("top_k", -1),
        ("top_p", 0.0),
        ("top_p", 1.1),
    ],
)
def test_unfit_settings_name_the_field(field: str, value: float) -> None:
    with pytest.raises(UserError) as caught:
        Sampling(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
