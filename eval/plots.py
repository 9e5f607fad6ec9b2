"""The figures of a report, each a set of small panels with equal scales."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sparksmith.eval.bands import EDGES
from sparksmith.eval.findings import interval, words
from sparksmith.eval.plots_speed import speed_panel, step_time_panel
from sparksmith.eval.svg import Panel

Summary = dict[str, Any]

PERCENT_TICKS = [(0.0, "0%"), (0.25, "25%"), (0.5, "50%"), (0.75, "75%"), (1.0, "100%")]
# Share of a panel's height for the bars that show how many tokens a band holds.
STRIP = 0.22


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`panels` are SVG elements; `missing` says why there are none."""

    key: str
    title: str
    caption: str
    panels: list[str]
    missing: str = ""
    wide: bool = False


def figures(summary: Summary) -> list[Figure]:
    """Every figure of the report, in reading order."""
    return [
        _figure(
            summary, speed_panel, key="speed-up", wide=True,
            title="Speed-up of one user's stream",
            caption="tokens/s speculative / tokens/s plain, with the 95% interval over prompts. "
            "Left of the line at 1x, speculation costs time.",
            missing="Needs decode seconds of both arms.",
        ),
        _figure(
            summary, step_time_panel, key="step-time", wide=True,
            title="Where the time goes",
            caption="Upper bar: one speculative step, split into draft, verify and the rest. "
            "Lower bar: the time plain decoding takes for as many tokens as that step emits "
            "(a little under the acceptance length where a stop token or the cap cut a step).",
            missing="Needs draft and verify seconds of each step.",
        ),
        position_figure(summary),
        token_figure(summary),
        prompt_figure(summary),
    ]  # fmt: skip


def _figure(summary: Summary, draw: Callable[[Summary], Panel | None], **about: Any) -> Figure:
    panel = draw(summary)
    return Figure(panels=[] if panel is None else [panel.render()], **about)


def position_figure(summary: Summary) -> Figure:
    """Joint acceptance by position for each workload, the published K3 curves dashed behind."""
    reference = summary["published"]["joint_by_position"]
    groups = {n: g for n, g in summary["workloads"].items() if g["positions"]}
    measured = [group["positions"] for group in groups.values()]
    last = max(len(curve) for curve in [*reference.values(), *measured])
    panels = []
    for number, (name, group) in enumerate(groups.items()):
        rows = group["positions"]
        panel = Panel(
            key=f"position-{number}", title=words(name).capitalize(),
            summary="Joint acceptance by position: "
            + ", ".join(f"{r['position']}: {interval(r['joint'], 2)}" for r in rows),
            x_range=(0.6, last + 0.4), y_range=(0, 1),
        )  # fmt: skip
        panel.grid(PERCENT_TICKS)
        panel.ticks([(k, str(k)) for k in range(1, last + 1)], "drafted position")
        for label, curve in reference.items():
            panel.line(list(enumerate(curve, 1)), "reference")
            # Above the falling curve, from its fifth point on, where it is clear of the data.
            at = min(5, len(curve))
            start = (panel.x(at) - 4, panel.y(curve[at - 1]) - 8)
            panel.text(start, f"K3, {label}", "note")
        points = [(r["position"], r["joint"]) for r in rows if r["joint"]["value"] is not None]
        for k, joint in points:
            panel.whisker(k, joint["low"], joint["high"], "whisker accent")
        panel.line([(k, joint["value"]) for k, joint in points], "curve accent")
        for k, joint in points:
            panel.dot((k, joint["value"]), "accent", f"position {k}: {interval(joint, 3)}")
        accepted = group["acceptance"]["acceptance_length"]
        panel.text((panel.width - panel.right, 14), f"{interval(accepted)} a step", "value end")
        panels.append(panel.render())
    return Figure(
        key="positions", title="Acceptance by position",
        caption="Share of steps whose first k drafted tokens were all accepted (joint), with 95% "
        "intervals over prompts. Dashed: published Kimi K3 curves, for code (4.73 tokens a step) "
        "and creative writing (2.61): another target and other hardware, not comparable.",
        panels=panels, missing="Needs drafted and accepted counts of each step.",
    )  # fmt: skip


def token_figure(summary: Summary) -> Figure:
    """Acceptance of judged tokens by entropy band: all workloads, then each."""
    curves = {"All workloads": summary["token_entropy"]["overall"]}
    if len(summary["workloads"]) > 1:
        curves |= {
            words(n).capitalize(): c for n, c in summary["token_entropy"]["workloads"].items()
        }
    panels = [_token_panel(i, n, c) for i, (n, c) in enumerate(curves.items()) if c is not None]
    return Figure(
        key="token-entropy", title="Acceptance against the target's entropy, per token",
        caption="Points: share of drafted tokens accepted, by the target's entropy at that "
        "position (temperature 1), among those whose earlier drafts were all accepted; the "
        "rejected one is included. Bars: how the judged tokens spread over the bands.",
        panels=panels, missing="Needs the target's entropy at each token.",
    )  # fmt: skip


def _token_panel(number: int, name: str, curve: dict[str, Any]) -> str:
    bands = [band for band in curve["bands"] if band["tokens"]]
    panel = Panel(
        key=f"token-{number}", title=name,
        summary="Acceptance by entropy band in bits: "
        + ", ".join(f"{b['band']}: {interval(b['acceptance'], 2)}" for b in bands),
        x_range=(0, len(EDGES)), y_range=(-STRIP, 1),
    )  # fmt: skip
    panel.grid(PERCENT_TICKS)
    # Ticks stand at the bands' edges: the scale is by band, not linear.
    edges = [(i, f"{edge:g}".removeprefix("0") or "0") for i, edge in enumerate(EDGES)]
    panel.ticks(edges, "target entropy, bits (band edges)")
    panel.text((panel.width - panel.right, 14), f"{curve['tokens']:,} judged", "value end")
    step = panel.x(1) - panel.x(0)
    floor = panel.y(-STRIP)
    tallest = max((band["tokens"] for band in bands), default=1)
    middles = []
    for b, band in enumerate(curve["bands"]):
        if not band["tokens"]:
            continue
        height = (floor - panel.y(0) - 6) * band["tokens"] / tallest
        note = f"{band['band']} bits: {band['tokens']:,} tokens"
        panel.bar((panel.x(b) + 2, floor - height), (step - 4, height), "count", note)
        middles.append((b + 0.5, band))
    for x, band in middles:
        panel.whisker(x, band["acceptance"]["low"], band["acceptance"]["high"], "whisker accent")
    panel.line([(x, band["acceptance"]["value"]) for x, band in middles], "curve accent")
    for x, band in middles:
        note = f"{band['band']} bits: {interval(band['acceptance'], 3)}, {band['tokens']:,} tokens"
        panel.dot((x, band["acceptance"]["value"]), "accent", note)
    return panel.render()


def prompt_figure(summary: Summary) -> Figure:
    """Acceptance length of each prompt against its mean entropy, one workload lit at a time."""
    rows = [
        r for r in summary["prompts"]
        if r["acceptance_length"] is not None and r["entropy_lower"] is not None
    ]  # fmt: skip
    return Figure(
        key="prompt-entropy", title="Acceptance against the target's entropy, per prompt",
        caption="Each point is a prompt: acceptance length against the mean entropy of the plain "
        "response (which the draft cannot move). The other workloads are grey; a cross marks text "
        "that repeats itself.",
        panels=[_prompt_panel(i, n, rows) for i, n in enumerate(summary["workloads"]) if rows],
        missing="Needs the target's entropy at each token of the plain responses.",
    )  # fmt: skip


def _prompt_panel(number: int, name: str, rows: list[dict[str, Any]]) -> str:
    entropy = [(r["entropy_lower"] + r["entropy_upper"]) / 2 for r in rows]
    longest = max(r["acceptance_length"] for r in rows)
    own = [r for r in rows if r["workload"] == name]
    panel = Panel(
        key=f"prompt-{number}", title=words(name).capitalize(),
        summary=f"{len(own)} prompts of {words(name)}: acceptance length against mean entropy.",
        x_range=(0, max(0.5, 1.05 * max(entropy))),
        y_range=(0.9, max(2.0, 1.05 * longest)),
    )  # fmt: skip
    panel.grid([(float(k), str(k)) for k in range(1, int(panel.y_range[1]) + 1)])
    width = next(w for w in (0.1, 0.25, 0.5, 1.0, 2.0, 4.0) if panel.x_range[1] / w <= 8)
    ticks = [(i * width, f"{i * width:g}") for i in range(int(panel.x_range[1] / width) + 1)]
    panel.ticks(ticks, "mean entropy of the plain response, bits a token")
    panel.text((panel.width - panel.right, 14), f"{len(own)} prompts", "value end")
    for lit in (False, True):
        for row, bits in zip(rows, entropy, strict=True):
            if (row["workload"] == name) is not lit:
                continue
            point = (bits, row["acceptance_length"])
            note = f"{row['prompt_id']}: {point[1]:.2f} tokens a step at {bits:.2f} bits"
            if not lit:
                panel.dot(point, "faint", note, radius=2)
            elif row["degenerate"]:
                panel.cross(point, "loop", note + ", repeats itself")
            else:
                panel.dot(point, "accent soft", note, radius=3.5)
    return panel.render()
