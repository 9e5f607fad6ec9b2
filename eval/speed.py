"""Single-user speed of both arms, paired by prompt.

Above temperature 0 the two arms write different texts, so what is compared is decode seconds per
token, the first token (the prefill's) aside; both arms' lengths are reported beside it.
"""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from sparksmith.eval.bootstrap import NOTHING, Array, PromptResamples, divide
from sparksmith.eval.pairing import ARMS, PromptTraces, traces_of
from sparksmith.eval.trace import Trace


def speed(prompts: Sequence[PromptTraces]) -> dict[str, Any]:
    """Tokens/s of each arm and their ratio.

    tokens_per_second = sum of (tokens - 1) / sum of decode seconds, over the prompts that both
    arms answered (over all its prompts where the other arm is missing); ratio = speculative /
    autoregressive, resampled by prompt with the pair kept together.
    """
    timed = {arm: [p for p in prompts if _timed(p.arm(arm))] for arm in ARMS}
    paired = [p for p in timed["speculative"] if _timed(p.autoregressive)]
    result: dict[str, Any] = {
        "paired_prompts": len(paired),
        "unpaired_prompts": sum(len(timed[arm]) - len(paired) for arm in ARMS),
        "ratio": NOTHING,
    }
    for arm in ARMS:
        used = paired or timed[arm]
        result[arm] = _arm_speed(used, arm) if used else None
    if paired:
        counts = np.concatenate([_counts(paired, arm) for arm in ARMS], axis=1)
        result["ratio"] = PromptResamples(len(paired)).estimate(counts, _speed_ratio)[0]
    return result


def _timed(traces: Sequence[Trace]) -> bool:
    return bool(traces) and all(t.decode_seconds is not None for t in traces)


def _counts(prompts: Sequence[PromptTraces], arm: str) -> Array:
    """[P, 2]: tokens after the first, and decode seconds, of each prompt."""
    return np.array(
        [
            [
                sum(max(0, len(t.token_ids) - 1) for t in p.arm(arm)),
                sum(t.decode_seconds or 0.0 for t in p.arm(arm)),
            ]
            for p in prompts
        ]
    )


def _speed_ratio(sums: Array) -> Array:
    """[N, 4] (tokens, seconds of both arms) to [N, 1] ratio of tokens/s."""
    return divide(divide(sums[:, :1], sums[:, 1:2]), divide(sums[:, 2:3], sums[:, 3:]))


def _arm_speed(prompts: Sequence[PromptTraces], arm: str) -> dict[str, Any]:
    counts = _counts(prompts, arm)
    tokens, seconds = counts.sum(axis=0)
    return {
        "tokens_per_second": PromptResamples(len(prompts)).ratio(counts[:, 0], counts[:, 1]),
        "prompts": len(prompts),
        "tokens_after_first": int(tokens),
        "decode_seconds": float(seconds),
    }


def time_split(prompts: Sequence[PromptTraces]) -> dict[str, Any] | None:
    """Where a speculative step's time goes, and what a plain step takes; milliseconds and shares.

    other = decode seconds - draft - verify (sampling, bookkeeping, callbacks). None where an
    engine does not time its parts.
    """
    traces = [
        t
        for t in traces_of(prompts, "speculative")
        if t.draft_seconds and t.verify_seconds and t.decode_seconds
    ]
    steps = sum(len(t.verify_seconds or ()) for t in traces)
    if not steps:
        return None
    total = sum(t.decode_seconds or 0.0 for t in traces)
    draft = sum(sum(t.draft_seconds or ()) for t in traces)
    verify = sum(sum(t.verify_seconds or ()) for t in traces)
    # Timers of the parts and of the whole differ by their own cost, so the rest can be -1e-6.
    parts = {"draft": draft, "verify": verify, "other": max(0.0, total - draft - verify)}
    plain = [p for p in prompts if _timed(p.autoregressive)]
    plain_tokens, plain_seconds = _counts(plain, "autoregressive").sum(axis=0) if plain else (0, 0)
    return {
        "steps": steps,
        "tokens_per_step": sum(len(t.token_ids) - 1 for t in traces) / steps,
        "share": {part: seconds / total for part, seconds in parts.items()},
        "milliseconds_per_step": {
            part: 1e3 * seconds / steps for part, seconds in {**parts, "total": total}.items()
        },
        "plain_milliseconds_per_token": (
            float(1e3 * plain_seconds / plain_tokens) if plain_tokens else None
        ),
    }


def responses(prompts: Sequence[PromptTraces], arm: str) -> dict[str, Any] | None:
    """Counts, lengths, time to first token and finish reasons of one arm; None if it is empty."""
    traces = traces_of(prompts, arm)
    if not traces:
        return None
    lengths = np.array([len(t.token_ids) for t in traces])
    first = [t.first_token_seconds for t in traces if t.first_token_seconds is not None]
    return {
        "prompts": sum(bool(p.arm(arm)) for p in prompts),
        "responses": len(traces),
        "tokens": int(lengths.sum()),
        "mean_tokens": float(lengths.mean()),
        "median_tokens": float(np.median(lengths)),
        "prompt_tokens": sum(t.prompt_tokens for t in traces),
        "first_token_seconds": {
            "median": float(np.median(first)) if first else None,
            "p90": float(np.percentile(first, 90)) if first else None,
            "responses": len(first),
        },
        "finish_reasons": dict(sorted(Counter(t.finish_reason for t in traces).items())),
    }
