"""Traces to one report: a dictionary that is report.json, and that every writer only formats.

Nothing here knows which engine made a trace; a field that it could not give is null.
"""

from collections.abc import Sequence
from typing import Any

from sparksmith.draft.errors import UserError
from sparksmith.eval.acceptance import acceptance, by_position, entropy_curve
from sparksmith.eval.bands import (
    EDGES,
    LABELS,
    NO_BASELINE,
    UNDETERMINED,
    mean_entropy,
    prompt_band,
)
from sparksmith.eval.bootstrap import CONFIDENCE, NUM_RESAMPLES, SEED
from sparksmith.eval.definitions import DEFINITIONS
from sparksmith.eval.degeneracy import degeneracy, degenerate_prompts
from sparksmith.eval.findings import headline, missing, title, warnings
from sparksmith.eval.pairing import ARMS, PromptTraces, by_prompt
from sparksmith.eval.published import published_k3
from sparksmith.eval.speed import responses, speed, time_split
from sparksmith.eval.trace import Trace

REPORT_VERSION = 1

Group = dict[str, Any]


def summarise(
    traces: Sequence[Trace],
    settings: dict[str, Any],
    losslessness: dict[str, Any] | None,
    live: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The whole report as one JSON-able dictionary.

    `settings` is everything needed to run the evaluation again, copied as it is. `losslessness`
    is the caller's check, {"prompts", "tokens", "equal", "ties", "differences", ...}, None if it
    was not made. `live` has a live run's "warnings", "notes" and "surface". Every figure with an
    interval is {"value", "low", "high"}, null where it could not be measured.
    Raises UserError for no traces, or for counts that contradict the tokens.
    """
    if not traces:
        raise UserError("traces", 0, "gives nothing to report", "Evaluate at least one prompt.")
    for trace in traces:
        _check_entropies(trace)
    prompts = by_prompt(traces)
    workloads = {
        name: summarise_group([p for p in prompts if p.workload == name])
        for name in dict.fromkeys(p.workload for p in prompts)
    }
    bands = _bands(prompts)
    return {
        "report_version": REPORT_VERSION,
        "title": title(workloads),
        "headline": [headline(name, group) for name, group in workloads.items()],
        "warnings": [
            *(live or {}).get("warnings", ()),
            *warnings(workloads, traces, losslessness),
        ],
        "notes": list((live or {}).get("notes", ())),
        "surface": list((live or {}).get("surface", ())),
        "missing": missing(traces, bands),
        "overall": summarise_group(prompts),
        "workloads": workloads,
        "entropy_bands": {"edges_bits": [*EDGES, None], "bands": bands},
        "token_entropy": {
            "overall": entropy_curve(prompts),
            "workloads": {
                name: entropy_curve([p for p in prompts if p.workload == name])
                for name in workloads
            },
        },
        "prompts": [_prompt_row(p) for p in prompts],
        "losslessness": losslessness,
        "settings": settings,
        "conditions": {arm: conditions([t for t in traces if t.arm == arm]) for arm in ARMS},
        "bootstrap": {"resamples": NUM_RESAMPLES, "confidence": CONFIDENCE, "seed": SEED},
        "definitions": DEFINITIONS,
        "published": published_k3(),
    }


def _check_entropies(trace: Trace) -> None:
    for name in ("entropy_lower", "entropy_upper"):
        bound = getattr(trace, name)
        if bound is not None and len(bound) != len(trace.token_ids):
            raise UserError(
                f"trace {trace.workload}/{trace.prompt_id}",
                f"{len(bound)} values of {name}, {len(trace.token_ids)} tokens",
                "does not have one entropy a token",
                "Record an entropy for every token, the first and the stop token included.",
            )


def summarise_group(prompts: Sequence[PromptTraces]) -> Group:
    """Every figure of a set of prompts."""
    return {
        "prompts": len(prompts),
        "acceptance": acceptance(prompts),
        "positions": by_position(prompts),
        "speed": speed(prompts),
        "time_split": time_split(prompts),
        "responses": {arm: responses(prompts, arm) for arm in ARMS},
        "degeneracy": degeneracy(prompts),
    }


def _bands(prompts: Sequence[PromptTraces]) -> dict[str, Group]:
    """Groups of prompts by the band of their autoregressive response; empty bands left out."""
    members: dict[str, list[PromptTraces]] = {}
    for prompt in prompts:
        members.setdefault(prompt_band(list(prompt.autoregressive)), []).append(prompt)
    return {
        label: summarise_group(members[label])
        for label in (*LABELS, UNDETERMINED, NO_BASELINE)
        if label in members
    }


def _prompt_row(prompt: PromptTraces) -> dict[str, Any]:
    """One prompt for the scatter plot: values without intervals, null where unknown."""
    accepted = acceptance([prompt])
    entropy = mean_entropy(list(prompt.autoregressive)) if prompt.autoregressive else None
    return {
        "prompt_id": prompt.prompt_id,
        "workload": prompt.workload,
        "band": prompt_band(list(prompt.autoregressive)),
        "entropy_lower": entropy[0] if entropy else None,
        "entropy_upper": entropy[1] if entropy else None,
        "acceptance_length": accepted["acceptance_length"]["value"] if accepted else None,
        "steps": accepted["steps"] if accepted else None,
        "accepted": accepted["accepted"] if accepted else None,
        "ratio": speed([prompt])["ratio"]["value"],
        "tokens": {arm: sum(len(t.token_ids) for t in prompt.arm(arm)) for arm in ARMS},
        "degenerate": bool(degenerate_prompts([prompt], "speculative")),
    }


def conditions(traces: Sequence[Trace]) -> dict[str, Any]:
    """Engine, sampling and settings of an arm; a list of the values where traces disagree."""
    values: dict[str, list[Any]] = {}
    for trace in traces:
        for key, value in {"engine": trace.engine, **trace.settings, **trace.sampling}.items():
            seen = values.setdefault(key, [])
            if value not in seen:
                seen.append(value)
    return {
        key: seen[0] if len(seen) == 1 else _shortened(key, seen) for key, seen in values.items()
    }


def _shortened(key: str, seen: list[Any]) -> Any:
    """Seeds differ by prompt: their range is enough here, each trace has its own."""
    if key == "seed" and all(isinstance(value, int) for value in seen):
        return f"{min(seen)} to {max(seen)}, one a response"
    return seen
