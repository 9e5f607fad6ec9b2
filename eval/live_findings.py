"""What a live run shows beside its figures: notes that support them, and faults that do not average
away."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from sparksmith.eval.live import Account
from sparksmith.eval.trace import Trace

FEW_REQUESTS = 12
"""With fewer, a decline is not told from chance."""
SILENT_STEPS = 30
"""Steps in a row without an accepted token, at the end of a run that accepted some before."""


def live_notes(account: Account) -> list[str]:
    """Where the counts come from, and whether the two sources agree."""
    notes = []
    counters = account.counters
    if account.drafts and counters is not None:
        same = (account.drafts, account.drafted, account.accepted) == (
            counters.drafts,
            counters.draft_tokens,
            counters.accepted,
        )
        if same:
            notes.append(
                "The per-request metrics and the difference of the /metrics counters agree: "
                f"{account.drafts:,} steps, {account.drafted:,} drafted and {account.accepted:,} "
                "accepted tokens."
            )
    elif account.drafts:
        notes.append("Counts are the server's per-request metrics; it has no /metrics to compare.")
    if account.repeated:
        notes.append(
            f"{account.repeated} requests were sent again after a failure; their times are those "
            "of the answer that came, and they are not held against the counters."
        )
    if account.unordered:
        notes.append(
            f"Counts of {account.unordered} requests come from the /metrics counters alone: how "
            "many steps accepted how much is exact, their order is not known. Start the server "
            "with --per-request-spec-decode-metrics detailed."
        )
    return notes


def live_warnings(traces: Sequence[Trace], account: Account) -> list[str]:
    """Faults of the server, or of the measurement."""
    found = []
    counters = account.counters
    if account.drafts and counters is not None:
        own = (account.drafts, account.drafted, account.accepted)
        there = (counters.drafts, counters.draft_tokens, counters.accepted)
        if own != there:
            found.append(
                f"The per-request metrics say {own[0]:,} steps, {own[1]:,} drafted and {own[2]:,} "
                f"accepted, the /metrics counters {there[0]:,}, {there[1]:,} and {there[2]:,}: "
                "another user was on the server, so its speed was not one user's."
            )
    speculative = [t for t in traces if t.arm == "speculative" and t.accepted]
    found += _decline(speculative) + _silence(speculative)
    if account.cached_prompt_tokens:
        found.append(
            f"{account.cached_prompt_tokens:,} prompt tokens came from the prefix cache: the draft "
            "may not know of them, and the time to the first token is not a prefill's."
        )
    if account.failed:
        found.append(
            f"{len(account.failed)} requests failed and are not in the figures; first: "
            f"{account.failed[0]}"
        )
    if account.without_entropy:
        found.append(
            f"{account.without_entropy} responses have no entropies: the server tells no "
            "log-probabilities of a prompt, or no token ids."
        )
    cut = sum(t.finish_reason == "length" for t in traces)
    if traces and cut > len(traces) / 2:
        found.append(f"{cut} of {len(traces)} responses were cut by the cap of tokens.")
    return found


def _decline(traces: Sequence[Trace]) -> list[str]:
    """A fall of acceptance with the number of requests served, prompts' own level aside."""
    lengths: dict[str, list[tuple[int, float]]] = {}
    for number, trace in enumerate(traces):
        assert trace.accepted is not None
        value = sum(trace.accepted) / len(trace.accepted)
        lengths.setdefault(f"{trace.workload}/{trace.prompt_id}", []).append((number, value))
    repeated = [pairs for pairs in lengths.values() if len(pairs) > 1]
    if sum(map(len, repeated)) < FEW_REQUESTS:
        return []
    # Of each prompt the change from its own mean, against when it was asked.
    when, change = [], []
    for pairs in repeated:
        mean = float(np.mean([value for _, value in pairs]))
        for number, value in pairs:
            when.append(number)
            change.append(value - mean)
    slope, _ = np.polyfit(when, change, 1)
    drop = -slope * (max(when) - min(when))
    level = 1 + float(np.mean([v for pairs in repeated for _, v in pairs]))
    correlation = float(np.corrcoef(when, change)[0, 1]) if np.std(change) else 0.0
    if drop > 0.1 * level and correlation < -0.5:
        return [
            f"Acceptance falls steadily over the run, by {drop:.2f} tokens a step from its first "
            "to its last repeat: the server's state decays. Restart it and look at its draft cache."
        ]
    return []


def _silence(traces: Sequence[Trace]) -> list[str]:
    """No accepted token for many steps up to the end, where there were some before."""
    steps = [count for trace in traces for count in trace.accepted or ()]
    silent = 0
    while silent < len(steps) and not steps[-1 - silent]:
        silent += 1
    if silent >= SILENT_STEPS and silent < len(steps) and sum(steps) / len(steps) > 0.05:
        return [
            f"After {len(steps) - silent:,} steps nothing was accepted any more, for {silent:,} "
            "steps: the server's draft has stopped working."
        ]
    return []


def surface_rows(rows: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The surface of speeds as cells: users, one user's tokens/s, all tokens/s, failed."""
    return [
        (
            str(row["users"]),
            "-"
            if row["tokens_per_second_user"] is None
            else f"{row['tokens_per_second_user']:.1f}",
            f"{row['tokens_per_second_total']:.1f}",
            str(row["failed"]),
        )
        for row in rows
    ]
