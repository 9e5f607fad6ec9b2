"""What a request's decoding gives back, step by step and as a whole."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Step:
    """What one step added to the response; the prefill, which adds the first token, is step 0.

    `draft_kept[i]` says whether `tokens[i]` was drafted and accepted, or is the target's own.
    `accepted` counts kept tokens only: those after a stop token are not. The step took
    `draft_seconds` (telling the drafter what was committed, and proposing) + `verify_seconds`
    (the target's pass, choosing the tokens, and rewinding).
    """

    number: int
    tokens: list[int]
    draft_kept: list[bool]
    drafted: int
    accepted: int
    draft_seconds: float
    verify_seconds: float
    finish_reason: Literal["stop", "length"] | None = None
    """Why the response ends here, None if it goes on."""


@dataclass(frozen=True, kw_only=True)
class DecodeResult:
    """A response and the figures of its steps (lists by step, the prefill aside).

    `token_ids` include the stop token. The seconds are the loop's own: a caller that takes its
    time between two steps is not counted. Acceptance length, bonus counted, is
    1 + sum(accepted) / len(accepted); tokens/s is (len(token_ids) - 1) / decode_seconds.
    """

    token_ids: list[int]
    draft_kept: list[bool]
    finish_reason: Literal["stop", "length", "interrupted"]
    drafted: list[int]
    accepted: list[int]
    draft_seconds: list[float]
    verify_seconds: list[float]
    first_token_seconds: float
    """From the start to the first token: the target's prefill, and not the drafter's."""
    decode_seconds: float
    """From the first token to the last; the drafter's own prefill is in it."""


def collect(steps: Iterable[Step]) -> DecodeResult:
    """The result of a response's steps, "interrupted" if the last of them is missing."""
    steps = list(steps)
    later = steps[1:]
    reason = steps[-1].finish_reason if steps else None
    return DecodeResult(
        token_ids=[token for step in steps for token in step.tokens],
        draft_kept=[kept for step in steps for kept in step.draft_kept],
        finish_reason=reason or "interrupted",
        drafted=[step.drafted for step in later],
        accepted=[step.accepted for step in later],
        draft_seconds=[step.draft_seconds for step in later],
        verify_seconds=[step.verify_seconds for step in later],
        first_token_seconds=steps[0].verify_seconds if steps else 0.0,
        decode_seconds=sum(step.draft_seconds + step.verify_seconds for step in later),
    )
