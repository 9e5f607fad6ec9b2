"""Confidence intervals by bootstrap over prompts.

Prompts are resampled, never steps: steps of one response resemble each other, and repeating a
run on the same prompts would show no spread at all.
"""

from collections.abc import Callable
from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

NUM_RESAMPLES = 4000
CONFIDENCE = 0.95
SEED = 20240229

Array = NDArray[np.float64]


class Estimate(TypedDict):
    """A value and its 95% interval; None where there is nothing to estimate it from."""

    value: float | None
    low: float | None
    high: float | None


NOTHING = Estimate(value=None, low=None, high=None)


class PromptResamples:
    """Draws of P prompts from P prompts, kept as how often each prompt was drawn [R, P].

    Every statistic of the same prompts uses the same draws, so that a ratio of two of them keeps
    their correlation. The seed is fixed: the same traces give the same report.
    """

    def __init__(self, num_prompts: int, num_resamples: int = NUM_RESAMPLES) -> None:
        self.num_prompts = num_prompts
        generator = np.random.default_rng(SEED)
        self._draws: Array = (
            generator.multinomial(
                num_prompts, np.full(num_prompts, 1.0 / num_prompts), size=num_resamples
            ).astype(np.float64)
            if num_prompts > 1
            else np.ones((1, num_prompts))
        )

    def estimate(self, counts: Array, statistic: Callable[[Array], Array]) -> list[Estimate]:
        """Estimate statistics of pooled counters.

        `counts` [P, C] holds each prompt's counters; `statistic` maps pooled counters [N, C] to
        N rows of S values [N, S], NaN where a value is undefined. The value is the statistic of
        the sums; the interval is the 2.5th to the 97.5th percentile over resamples, None for a
        single prompt or where over a tenth of the resamples leave it undefined.
        """
        pooled = statistic(counts.sum(axis=0, keepdims=True))[0]
        samples = statistic(self._draws @ counts) if self.num_prompts > 1 else None
        return [
            _estimate(float(value), samples[:, s] if samples is not None else None)
            for s, value in enumerate(pooled)
        ]

    def ratio(self, numerator: Array, denominator: Array, plus: float = 0.0) -> Estimate:
        """`plus` + pooled `numerator` [P] / pooled `denominator` [P]."""
        counts = np.stack([numerator, denominator], axis=1)
        return self.estimate(counts, lambda sums: plus + divide(sums[:, :1], sums[:, 1:]))[0]


def divide(numerator: Array, denominator: Array) -> Array:
    """Elementwise quotient, NaN where the denominator is 0."""
    result = np.full(np.broadcast_shapes(numerator.shape, denominator.shape), np.nan)
    np.divide(numerator, denominator, out=result, where=denominator != 0)
    return result


def _estimate(value: float, samples: Array | None) -> Estimate:
    if not np.isfinite(value):
        return NOTHING
    if samples is None:
        return Estimate(value=value, low=None, high=None)
    finite = samples[np.isfinite(samples)]
    if len(finite) < 0.9 * len(samples):
        return Estimate(value=value, low=None, high=None)
    tail = 50 * (1 - CONFIDENCE)
    low, high = np.percentile(finite, [tail, 100 - tail])
    return Estimate(value=value, low=float(low), high=float(high))
