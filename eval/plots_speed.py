"""Two figures of rows, one row a workload: the speed-up, and the time in a step."""

from typing import Any

from sparksmith.eval.findings import interval, words
from sparksmith.eval.svg import Panel, short

ROW = 46
WIDTH = 420


def _rows(summary: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    groups = [(words(name).capitalize(), group) for name, group in summary["workloads"].items()]
    return groups + ([("Overall", summary["overall"])] if len(groups) > 1 else [])


def speed_panel(summary: dict[str, Any]) -> Panel | None:
    """The ratio of tokens/s by workload with its interval, and a line at 1x."""
    rows = [(name, g["speed"]) for name, g in _rows(summary) if g["speed"]["ratio"]["value"]]
    if not rows:
        return None
    highest = max(s["ratio"]["high"] or s["ratio"]["value"] for _, s in rows)
    end = max(1.5, 0.25 * -(-highest // 0.25))
    panel = Panel(
        key="speed-up", title="Speed-up by workload", heading=False,
        summary="; ".join(f"{name}: {interval(s['ratio'], unit='x')}" for name, s in rows),
        x_range=(0, end), y_range=(0, 1),
        width=WIDTH, height=ROW * len(rows) + 42, left=6, right=12, top=0,
    )  # fmt: skip
    step = 0.5 if end <= 4 else 1.0
    foot = panel.height - panel.bottom
    for i in range(int(end / step) + 1):
        x = panel.x(i * step)
        panel.segment((x, 4), (x, foot), "one" if i * step == 1 else "grid")
    ticks = [(i * step, f"{i * step:g}x") for i in range(int(end / step) + 1)]
    panel.ticks(ticks, "times the speed of plain decoding")
    for number, (name, speed) in enumerate(rows):
        y = ROW * number + 34
        ratio = speed["ratio"]
        panel.text((panel.left, y - 16), short(name), "row backed")
        panel.text((panel.width - panel.right, y - 16), interval(ratio, unit="x"),
                   "value end backed")  # fmt: skip
        panel.segment((panel.x(0), y), (panel.x(ratio["value"]), y), "stem")
        if ratio["low"] is not None:
            panel.segment((panel.x(ratio["low"]), y), (panel.x(ratio["high"]), y), "range accent")
        panel.marks.append(
            f'<circle class="mark accent" cx="{panel.x(ratio["value"]):.1f}" cy="{y}" r="5"/>'
        )
    return panel


def step_time_panel(summary: dict[str, Any]) -> Panel | None:
    """A step's milliseconds by part above the plain milliseconds for as many tokens."""
    rows = [(name, g["time_split"]) for name, g in _rows(summary) if g["time_split"]]
    if not rows:
        return None
    longest = max(max(s["milliseconds_per_step"]["total"], _plain(s) or 0) for _, s in rows)
    panel = Panel(
        key="step-time", title="Time in a step by workload", heading=False,
        summary="; ".join(
            f"{name}: draft {s['share']['draft']:.0%}, verify {s['share']['verify']:.0%}, "
            f"other {s['share']['other']:.0%} of {s['milliseconds_per_step']['total']:.1f} ms"
            for name, s in rows
        ),
        x_range=(0, longest * 1.02), y_range=(0, 1),
        width=WIDTH, height=ROW * len(rows) + 42, left=6, right=12, top=0,
    )  # fmt: skip
    for number, (name, split) in enumerate(rows):
        _step_row(panel, ROW * number, name, split)
    y = panel.height - 22
    x = panel.left
    for part in ("draft", "verify", "other", "plain"):
        panel.bar((x, y), (12, 12), part, part)
        label = "plain decoding, as many tokens" if part == "plain" else part
        panel.text((x + 17, y + 10), label, "tick")
        x += 66
    return panel


def _plain(split: dict[str, Any]) -> float | None:
    """Milliseconds plain decoding takes for the tokens of one speculative step."""
    per_token = split["plain_milliseconds_per_token"]
    return None if per_token is None else per_token * split["tokens_per_step"]


def _step_row(panel: Panel, top: float, name: str, split: dict[str, Any]) -> None:
    spent = split["milliseconds_per_step"]
    plain = _plain(split)
    text = f"{split['tokens_per_step']:.2f} tokens in {spent['total']:.0f} ms"
    panel.text((panel.left, top + 16), short(name), "row")
    panel.text(
        (panel.width - panel.right, top + 16),
        text if plain is None else f"{text}, plain {plain:.0f} ms",
        "value end",
    )
    start = 0.0
    for part in ("draft", "verify", "other"):
        width = panel.x(spent[part]) - panel.x(0)
        note = f"{part}: {spent[part]:.1f} ms, {split['share'][part]:.0%} of the step"
        panel.bar((panel.x(start), top + 22), (width, 12), part, note)
        if width > 34:
            label = f"{split['share'][part]:.0%}"
            panel.text((panel.x(start) + width / 2, top + 31.5), label, f"inside {part}-text")
        start += spent[part]
    if plain is not None:
        note = f"plain decoding: {plain:.1f} ms for as many tokens"
        panel.bar((panel.x(0), top + 35), (panel.x(plain) - panel.x(0), 5), "plain", note)
