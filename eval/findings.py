"""What a report says in words: the headline, the warnings, and what could not be measured."""

from collections.abc import Sequence
from typing import Any

from sparksmith.eval.bands import NO_BASELINE, UNDETERMINED
from sparksmith.eval.pairing import ARMS
from sparksmith.eval.trace import Trace

FEW_PROMPTS = 20
FLAGGED_SHARE = 0.1
LENGTH_DIFFERENCE = 0.2

# The packaged workload whose file name is shorter than what it is.
IN_WORDS = {"creative": "creative writing"}
# What each field of a trace is needed for; None there makes these figures null, never estimated.
NEEDED_FOR = {
    "drafted": "acceptance length, positions and entropy curve",
    "draft_seconds": "the step-time split",
    "verify_seconds": "the step-time split",
    "first_token_seconds": "time to first token",
    "decode_seconds": "tokens/s and the ratio",
    "entropy_lower": "entropy bands and the entropy curve",
}
# Settings in which the arms differ by nature.
DRAFT_SETTINGS = {
    "draft", "num_tokens", "min_survival", "draft_temperature", "draft_top_p", "accept_rule",
    "drafter", "vocabulary", "steps",
}  # fmt: skip


def words(workload: str) -> str:
    """A workload's name as prose: creative -> creative writing, low_entropy -> low entropy."""
    return IN_WORDS.get(workload, workload.replace("_", " ").replace("-", " "))


def interval(estimate: dict[str, Any], digits: int = 2, unit: str = "") -> str:
    """An estimate as "1.82x [1.70, 1.95]", a dash where there is none."""
    if estimate["value"] is None:
        return "-"
    text = f"{estimate['value']:.{digits}f}{unit}"
    if estimate["low"] is None:
        return text
    return f"{text} [{estimate['low']:.{digits}f}, {estimate['high']:.{digits}f}]"


def headline(workload: str, group: dict[str, Any]) -> str:
    """One sentence: what was measured on a workload, in plain words."""
    accepted, speed = group["acceptance"], group["speed"]
    parts = []
    if accepted is not None:
        parts.append(f"{interval(accepted['acceptance_length'])} tokens a step")
    ratio = speed["ratio"]
    if ratio["value"] is not None:
        fast, plain = (speed[arm]["tokens_per_second"]["value"] for arm in ARMS)
        parts.append(
            f"{interval(ratio, unit='x')} the speed of plain decoding "
            f"({fast:.1f} against {plain:.1f} tokens/s)"
        )
    return f"On {words(workload)}: {', '.join(parts) or 'nothing could be measured'}."


def title(workloads: dict[str, dict[str, Any]]) -> str:
    """The report's first line: the most and the least predictable workload, side by side."""
    measured = {
        name: group["acceptance"]["acceptance_length"]["value"]
        for name, group in workloads.items()
        if group["acceptance"] is not None and group["acceptance"]["steps"]
    }
    if not measured:
        return "No acceptance could be measured."
    best = max(measured, key=lambda name: measured[name])
    worst = min(measured, key=lambda name: measured[name])
    sentence = f"On {words(best)}, {measured[best]:.2f} tokens a step"
    ratio = workloads[best]["speed"]["ratio"]["value"]
    if ratio is not None:
        sentence += f" and {ratio:.2f}x the speed of plain decoding"
    if worst != best:
        sentence += f"; on {words(worst)}, {measured[worst]:.2f} tokens"
        ratio = workloads[worst]["speed"]["ratio"]["value"]
        sentence += f" and {ratio:.2f}x" if ratio is not None else ""
    return sentence + "."


def about(summary: dict[str, Any]) -> str:
    """One sentence on what ran: target, draft, drafted tokens, sampling and dtype, if recorded."""
    made_with = summary["conditions"]["speculative"] or summary["conditions"]["autoregressive"]
    parts = [
        f"{name} {made_with[key]}".strip()
        for key, name in (
            ("target", "target"), ("draft", "draft"), ("num_tokens", "drafted tokens"),
            ("min_survival", "least survival"),
            ("temperature", "temperature"), ("top_p", "top-p"), ("dtype", ""), ("engine", "on"),
        )
        if key in made_with and isinstance(made_with[key], str | int | float)
    ]  # fmt: skip
    text = ", ".join(parts) or "settings were not recorded"
    return f"{text[0].upper()}{text[1:]}."


def lossless_sentence(check: dict[str, Any] | None) -> str:
    """What the caller's check of greedy decoding found."""
    if check is None:
        return "Losslessness was not checked in this run."
    text = (
        f"At temperature 0, {check.get('equal', 0)} of {check.get('prompts', 0)} checked prompts "
        f"gave exactly the text of plain decoding ({check.get('tokens', 0):,} tokens)"
    )
    if check.get("ties"):
        text += f"; {check['ties']} parted at a tie between the two top words"
    if check.get("differences"):
        text += f"; {check['differences']} differ, which is a failure"
    return text + "."


def warnings(
    workloads: dict[str, dict[str, Any]],
    traces: Sequence[Trace],
    losslessness: dict[str, Any] | None,
) -> list[str]:
    """What a reader must know before quoting a figure; most serious first."""
    found = _lossless_warnings(losslessness) + _arm_warnings(traces)
    # One line for what several workloads have in common: a list that is read to its end.
    concerned: dict[str, list[str]] = {}
    for name, group in workloads.items():
        for text in _group_warnings(group):
            concerned.setdefault(text, []).append(words(name))
    for text, names in concerned.items():
        found.append(f"{_listed(names)}: {text}")
    found += _dtype_warnings(traces)
    return found


def _listed(names: Sequence[str]) -> str:
    """["code", "chat", "maths"] as "Code, chat and maths"."""
    *first, last = names
    text = f"{', '.join(first)} and {last}" if first else last
    return text[0].upper() + text[1:]


def _lossless_warnings(check: dict[str, Any] | None) -> list[str]:
    if check is None:
        return ["Losslessness was not checked in this run."]
    if check.get("differences", 0):
        return [
            f"LOSSLESSNESS FAILED: {check['differences']} of {check.get('prompts', '?')} checked "
            "prompts differ from plain greedy decoding. Do not use these figures."
        ]
    return []


def _arm_warnings(traces: Sequence[Trace]) -> list[str]:
    found = []
    present = {trace.arm for trace in traces}
    for arm in ARMS:
        if arm not in present:
            found.append(f"There is no {arm} arm, so nothing can be compared with it.")
    conditions: dict[str, set[str]] = {}
    for trace in traces:
        shared = {k: v for k, v in trace.settings.items() if k not in DRAFT_SETTINGS}
        # A seed may differ by prompt and arm; everything else must not.
        shared |= {k: v for k, v in trace.sampling.items() if k != "seed"}
        for key, value in {"engine": trace.engine, **shared}.items():
            conditions.setdefault(key, set()).add(repr(value))
    for key, values in sorted(conditions.items()):
        if len(values) > 1:
            found.append(
                f"The traces were not made under one setting: {key} is "
                f"{' and '.join(sorted(values))}. Their comparison mixes that in."
            )
    return found


def _group_warnings(group: dict[str, Any]) -> list[str]:
    found = []
    if group["prompts"] < FEW_PROMPTS:
        found.append(f"only {group['prompts']} prompts: the intervals are wide and rough.")
    repeats = group["degeneracy"]["speculative"]
    if repeats is not None and repeats["flagged_share"] > FLAGGED_SHARE:
        text = (
            f"{repeats['flagged_share']:.0%} of the prompts gave text that repeats itself. "
            "Acceptance may look good because the text loops"
        )
        without = group["degeneracy"]["acceptance_length_without_flagged"]
        if without is not None:
            text += f"; without these prompts the acceptance length is {interval(without)}"
        found.append(text + ".")
    ratio = group["speed"]["ratio"]
    if ratio["low"] is not None and ratio["low"] <= 1 <= ratio["high"]:
        found.append(
            "the interval of the speed-up includes 1, so a gain is not shown on these prompts."
        )
    elif ratio["value"] is not None and ratio["value"] < 1:
        found.append("speculative decoding was slower than plain decoding.")
    if group["speed"]["unpaired_prompts"]:
        found.append(
            f"{group['speed']['unpaired_prompts']} prompts were answered by one arm only and are "
            "left out of the speeds."
        )
    lengths = [group["responses"][arm] for arm in ARMS]
    if all(lengths):
        fast, plain = (arm["mean_tokens"] for arm in lengths)
        if abs(fast / plain - 1) > LENGTH_DIFFERENCE:
            found.append(
                f"the arms' responses differ in length ({fast:.0f} and {plain:.0f} tokens on "
                "average), so their caches do too."
            )
    return found


def _dtype_warnings(traces: Sequence[Trace]) -> list[str]:
    dtypes = {str(trace.settings.get("dtype", "")).removeprefix("torch.") for trace in traces}
    return [
        f"The target ran in {dtype}: a pass over several tokens rounds otherwise than a pass over "
        "one, so near-ties can fall differently in the two arms. Losslessness is checked in "
        "float32."
        for dtype in sorted(dtypes & {"bfloat16", "float16"})
    ]


def missing(traces: Sequence[Trace], bands: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Fields that are null in some trace: {"field", "arm", "traces", "of", "reason"}."""
    found = []
    for arm in ARMS:
        of_arm = [trace for trace in traces if trace.arm == arm]
        fields = NEEDED_FOR if arm == "speculative" else {
            f: NEEDED_FOR[f] for f in ("first_token_seconds", "decode_seconds", "entropy_lower")
        }  # fmt: skip
        for field, purpose in fields.items():
            count = sum(getattr(trace, field) is None for trace in of_arm)
            if count:
                engines = sorted({t.engine for t in of_arm if getattr(t, field) is None})
                found.append(
                    {
                        "field": field,
                        "arm": arm,
                        "traces": count,
                        "of": len(of_arm),
                        "reason": f"not given by {', '.join(engines)}; needed for {purpose}",
                    }
                )
    for label, reason in (
        (NO_BASELINE, "no autoregressive response, so no band"),
        (UNDETERMINED, "the entropy is unknown, or its two bounds fall in different bands"),
    ):
        if label in bands:
            count = bands[label]["prompts"]
            found.append(
                {"field": "prompt band", "arm": "autoregressive", "traces": count,
                 "of": sum(group["prompts"] for group in bands.values()), "reason": reason}
            )  # fmt: skip
    return found
