"""Bootstrap intervals against a case whose interval is known."""

import numpy as np
import pytest

from sparksmith.eval.bootstrap import PromptResamples, divide


def test_interval_of_a_mean_is_the_normal_one() -> None:
    generator = np.random.default_rng(3)
    values = generator.normal(2.0, 0.5, 400)
    found = PromptResamples(400).ratio(values, np.ones(400))
    half = 1.96 * values.std() / np.sqrt(400)
    assert found["value"] == pytest.approx(values.mean())
    assert found["low"] == pytest.approx(values.mean() - half, abs=0.1 * half)
    assert found["high"] == pytest.approx(values.mean() + half, abs=0.1 * half)


def test_about_95_of_100_intervals_hold_the_truth() -> None:
    generator = np.random.default_rng(4)
    held = 0
    for _ in range(300):
        steps = generator.integers(20, 60, 60).astype(float)
        accepted = generator.binomial(steps.astype(int), generator.beta(6, 4, 60))
        found = PromptResamples(60, 400).ratio(accepted.astype(float), steps, plus=1.0)
        assert found["low"] is not None
        assert found["high"] is not None
        held += found["low"] <= 1.6 <= found["high"]
    assert 0.90 <= held / 300 <= 0.98


def test_whole_prompts_are_resampled() -> None:
    # 1000 steps in two prompts that disagree: steps would give +-0.03, prompts give [0, 1].
    found = PromptResamples(2).ratio(np.array([0.0, 500.0]), np.array([500.0, 500.0]))
    assert found == {"value": 0.5, "low": 0.0, "high": 1.0}


def test_equal_prompts_have_no_spread_and_one_prompt_has_no_interval() -> None:
    same = PromptResamples(30).ratio(np.full(30, 3.0), np.full(30, 2.0))
    assert same == {"value": 1.5, "low": 1.5, "high": 1.5}
    one = PromptResamples(1).ratio(np.array([3.0]), np.array([2.0]))
    assert one == {"value": 1.5, "low": None, "high": None}


def test_the_same_counts_give_the_same_interval() -> None:
    values = np.arange(20.0)
    first, second = (PromptResamples(20).ratio(values, np.ones(20)) for _ in range(2))
    assert first == second


def test_an_undefined_ratio_is_null() -> None:
    nothing = PromptResamples(5).ratio(np.zeros(5), np.zeros(5))
    assert nothing == {"value": None, "low": None, "high": None}
    # One prompt of five carries all the counts: it is missing from a third of the resamples.
    rare = PromptResamples(5).ratio(np.array([1.0, 0, 0, 0, 0]), np.array([2.0, 0, 0, 0, 0]))
    assert rare == {"value": 0.5, "low": None, "high": None}
    assert np.isnan(divide(np.array([1.0]), np.array([0.0]))).all()
