"""Entropy bands: fixed edges in bits, the same in every report, for tokens and for prompts.

An engine that shows only its top words bounds the entropy from both sides. A value is put in a
band only when both bounds fall in it; otherwise it is undetermined, and counted as such.
"""

from bisect import bisect_right
from math import inf

from sparksmith.eval.trace import Trace

EDGES = (0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0)
"""Lower edges in bits; a band holds its lower edge and not its upper one, the last is open."""

UNDETERMINED = "undetermined"
NO_BASELINE = "no baseline"


def _label(index: int) -> str:
    low = f"{EDGES[index]:g}"
    return f"{low}-{EDGES[index + 1]:g}" if index + 1 < len(EDGES) else f"{low}+"


LABELS = tuple(_label(index) for index in range(len(EDGES)))


def upper_edge(index: int) -> float:
    """Upper edge of a band in bits, infinity for the last."""
    return EDGES[index + 1] if index + 1 < len(EDGES) else inf


def band_index(lower: float, upper: float) -> int | None:
    """Index of the band that holds both bounds, None if they fall in different bands."""
    # Rounding can leave the entropy of a certain token at -1e-17.
    low = bisect_right(EDGES, max(lower, 0.0)) - 1
    high = bisect_right(EDGES, max(upper, 0.0)) - 1
    return low if low == high else None


def mean_entropy(traces: list[Trace]) -> tuple[float, float] | None:
    """Mean lower and upper bound over all tokens of `traces`, None where a trace has no entropy."""
    lower = [trace.entropy_lower for trace in traces]
    upper = [trace.entropy_upper for trace in traces]
    num_tokens = sum(len(trace.token_ids) for trace in traces)
    if num_tokens == 0 or any(bound is None for bound in lower + upper):
        return None
    return (
        sum(sum(bound) for bound in lower if bound is not None) / num_tokens,
        sum(sum(bound) for bound in upper if bound is not None) / num_tokens,
    )


def prompt_band(baseline: list[Trace]) -> str:
    """The band of a prompt: the mean entropy of its autoregressive responses.

    The baseline's text does not depend on the draft, so the draft cannot move a prompt.
    """
    if not baseline:
        return NO_BASELINE
    bounds = mean_entropy(baseline)
    index = None if bounds is None else band_index(*bounds)
    return UNDETERMINED if index is None else LABELS[index]
