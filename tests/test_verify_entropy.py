"""Entropy in bits: known values, and a plain float64 reference."""

import math

import pytest
import torch

from sparksmith.verify.entropy import entropy_bits, entropy_bounds


def test_known_distributions() -> None:
    inf = math.inf
    rows = [
        ([5.0, 5.0, 5.0, 5.0], 2.0),  # uniform: log2 V
        ([0.0, 0.0, -inf, -inf], 1.0),
        ([-inf, 3.0, -inf, -inf], 0.0),
        ([1000.0, 0.0, 0.0, 0.0], 0.0),
        ([math.log(4.0), math.log(2.0), 0.0, 0.0], 1.75),  # 1/2, 1/4, 1/8, 1/8
        ([-1e30, -1e30, -1e30, -1e30], 2.0),
    ]
    entropies = entropy_bits(torch.tensor([logits for logits, _ in rows]))
    assert entropies.dtype == torch.float32
    assert entropies.tolist() == pytest.approx([bits for _, bits in rows], abs=1e-6)


def test_uniform_over_a_large_vocabulary() -> None:
    assert entropy_bits(torch.zeros(1, 163_840)).item() == pytest.approx(math.log2(163_840))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0, 20.0])
def test_equals_a_float64_reference(dtype: torch.dtype, spread: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = (spread * torch.randn(5, 2000, generator=generator)).to(dtype)
    expected = []
    for row in logits.double().tolist():
        largest = max(row)
        masses = [math.exp(x - largest) for x in row]
        total = math.fsum(masses)
        expected.append(-math.fsum(m / total * math.log2(m / total) for m in masses if m > 0.0))
    assert entropy_bits(logits).tolist() == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_do_not_change_the_result(chunk: int) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(entropy_bits(logits, chunk), entropy_bits(logits), rtol=0, atol=1e-6)


def test_no_rows() -> None:
    assert entropy_bits(torch.empty(0, 10)).shape == (0,)


@pytest.mark.parametrize("known", [1, 3, 20])
@pytest.mark.parametrize("spread", [0.3, 1.0, 3.0])
def test_bounds_from_the_likeliest_words_hold_the_entropy(known: int, spread: float) -> None:
    generator = torch.Generator().manual_seed(known)
    logits = spread * torch.randn(40, 50, generator=generator, dtype=torch.float64)
    for row in logits:
        logprobs = row.log_softmax(-1).sort(descending=True).values[:known].tolist()
        low, high = entropy_bounds(logprobs, 50)
        exact = float(entropy_bits(row[None])[0])
        assert low - 1e-5 <= exact <= high + 1e-5


def test_bounds_meet_where_all_is_known() -> None:
    assert entropy_bounds([math.log(0.5), math.log(0.5)], 9) == pytest.approx((1.0, 1.0))
    # Half is known to be on one word; the rest is on one other, or even on eight.
    assert entropy_bounds([math.log(0.5)], 9) == pytest.approx((1.0, 0.5 + 0.5 * 4.0))
    assert entropy_bounds([], 8) == (0.0, 3.0)
