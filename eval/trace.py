"""One request, measured: the only thing the reports know about where a figure came from.

File format: JSON lines, one trace a line, written by the in-process loop and, with nulls where
an engine cannot tell, by a deployment.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing

TRACE_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class Trace:
    """One request of one arm. Times are in seconds, entropies in bits.

    The first token of a response comes from the prefill; every later one from a step. In the
    speculative arm step s drafts `drafted[s]` tokens, of which `accepted[s]` are kept, and emits
    `accepted[s] + 1` tokens (fewer where a stop token or the cap ended the response; `accepted`
    counts kept tokens only; `token_ids` includes the stop token). In the autoregressive arm
    `drafted` and `accepted` are all zero.
    Fields that an engine cannot give are None, never estimated.
    """

    prompt_id: str
    workload: str
    arm: Literal["speculative", "autoregressive"]
    engine: str
    prompt_tokens: int
    token_ids: list[int]
    text: str
    finish_reason: Literal["stop", "length"]
    drafted: list[int] | None
    accepted: list[int] | None
    draft_seconds: list[float] | None
    verify_seconds: list[float] | None
    first_token_seconds: float | None
    decode_seconds: float | None
    """Wall time from the first token to the last, so tokens/s = (len(token_ids) - 1) / it."""
    entropy_lower: list[float] | None = None
    """Entropy of the target at temperature 1 where each token was chosen; a lower bound where an
    engine shows only its top words, equal to `entropy_upper` in-process."""
    entropy_upper: list[float] | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    """temperature, top_k, top_p, seed, max_tokens."""
    settings: dict[str, Any] = field(default_factory=dict)
    """target, draft, num_tokens (K), accept_rule, dtype, threads, versions: whatever must be
    equal before two traces may be compared."""
    version: int = TRACE_VERSION


def write_traces(path: Path, traces: Iterable[Trace]) -> None:
    """Write traces as JSON lines, atomically."""
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for trace in traces:
            file.write(json.dumps(asdict(trace), ensure_ascii=False) + "\n")


def read_traces(path: Path) -> Iterator[Trace]:
    """Read JSON lines of traces.

    Raises UserError naming the line for broken JSON, an unknown or missing field, or a version
    this release does not read.
    """
    known = {f.name for f in fields(Trace)}
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            where = f"{path}:{number}"
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise UserError(
                    where, line[:80], f"is not JSON ({error.msg})", "Remove or repair the line."
                ) from None
            if not isinstance(row, dict) or row.get("version") != TRACE_VERSION:
                raise UserError(
                    where,
                    row.get("version") if isinstance(row, dict) else line[:80],
                    f"is not trace version {TRACE_VERSION}",
                    "Evaluate again with this release of sparksmith.",
                )
            if unknown := set(row) - known:
                raise UserError(where, sorted(unknown), "are unknown fields", "Evaluate again.")
            try:
                yield Trace(**row)
            except TypeError as error:
                raise UserError(
                    where, line[:80], f"lacks a field ({error})", "Evaluate again."
                ) from None
