"""Does the text loop? A draft predicts a loop perfectly, so loops make acceptance look good."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from sparksmith.eval.acceptance import acceptance, measured
from sparksmith.eval.pairing import ARMS, PromptTraces
from sparksmith.eval.trace import Trace

MIN_REPEATS = 3
MIN_LOOP_TOKENS = 32
MIN_LOOP_SHARE = 0.25
MIN_DISTINCT_4 = 0.5
MIN_TOKENS_FOR_DISTINCT = 64
MAX_PERIOD = 256


@dataclass(frozen=True)
class Loop:
    """The longest stretch of tokens that repeats with one period; 0 tokens if there is none."""

    tokens: int
    period: int


def distinct_n(tokens: Sequence[int], n: int) -> float | None:
    """Different n-grams / n-grams of one response; None when it is shorter than n."""
    total = len(tokens) - n + 1
    if total < 1:
        return None
    return len({tuple(tokens[i : i + n]) for i in range(total)}) / total


def longest_loop(tokens: Sequence[int]) -> Loop:
    """The longest stretch made of the same `period` tokens at least three times over.

    Periods up to a third of the response, 256 at most; the shortest period wins a tie.
    """
    ids = np.asarray(tokens)
    best = Loop(0, 0)
    for period in range(1, min(len(ids) // MIN_REPEATS, MAX_PERIOD) + 1):
        breaks = np.flatnonzero(ids[period:] != ids[:-period])
        edges = np.concatenate([[-1], breaks, [len(ids) - period]])
        stretch = int(np.diff(edges).max()) - 1 + period
        if stretch >= MIN_REPEATS * period and stretch > best.tokens:
            best = Loop(stretch, period)
    return best


@dataclass(frozen=True)
class _Repetition:
    loop: Loop
    distinct: tuple[float | None, ...]


# A report looks at each response once a grouping: by workload, by band, overall.
@lru_cache(maxsize=8192)
def _repetition(tokens: tuple[int, ...]) -> _Repetition:
    return _Repetition(longest_loop(tokens), tuple(distinct_n(tokens, n) for n in range(1, 5)))


def is_degenerate(trace: Trace) -> bool:
    """True for a response with a loop of at least 32 tokens and a quarter of its length, or, from
    64 tokens on, with fewer than half of its 4-grams different."""
    repetition = _repetition(tuple(trace.token_ids))
    num_tokens = len(trace.token_ids)
    if repetition.loop.tokens >= max(MIN_LOOP_TOKENS, MIN_LOOP_SHARE * num_tokens):
        return True
    distinct = repetition.distinct[3]
    return (
        distinct is not None and num_tokens >= MIN_TOKENS_FOR_DISTINCT and distinct < MIN_DISTINCT_4
    )


def degenerate_prompts(prompts: Sequence[PromptTraces], arm: str) -> list[PromptTraces]:
    """Prompts with a degenerate response in `arm`."""
    return [p for p in prompts if any(is_degenerate(t) for t in p.arm(arm))]


def degeneracy(prompts: Sequence[PromptTraces]) -> dict[str, Any]:
    """Repetition in each arm, and the acceptance length without the prompts that loop.

    distinct_n are means over responses (they fall with length: compare arms, not reports).
    """
    flagged = degenerate_prompts(prompts, "speculative")
    kept = measured([p for p in prompts if p not in flagged])
    without = acceptance(kept) if flagged else None
    return {
        **{arm: _arm(prompts, arm) for arm in ARMS},
        "acceptance_length_without_flagged": without["acceptance_length"] if without else None,
    }


def _arm(prompts: Sequence[PromptTraces], arm: str) -> dict[str, Any] | None:
    present = [p for p in prompts if p.arm(arm)]
    if not present:
        return None
    seen = [_repetition(tuple(t.token_ids)) for p in present for t in p.arm(arm)]
    flagged = degenerate_prompts(present, arm)
    distinct: dict[str, float | None] = {}
    for n in range(1, 5):
        values = [v for repetition in seen if (v := repetition.distinct[n - 1]) is not None]
        distinct[str(n)] = float(np.mean(values)) if values else None
    worst = max((repetition.loop for repetition in seen), key=lambda loop: loop.tokens)
    return {
        "prompts": len(present),
        "flagged_prompts": len(flagged),
        "flagged_share": len(flagged) / len(present),
        "flagged": [p.prompt_id for p in flagged],
        "distinct": distinct,
        "longest_loop_tokens": worst.tokens,
        "longest_loop_period": worst.period,
    }
