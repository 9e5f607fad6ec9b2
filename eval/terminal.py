"""The report for a terminal of 100 columns or fewer: headline, warnings, then three tables."""

from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from sparksmith.eval.findings import lossless_sentence, words
from sparksmith.eval.live_findings import surface_rows
from sparksmith.eval.pairing import ARMS
from sparksmith.eval.tables import percent

WIDTH = 100

Summary = dict[str, Any]


def terminal_report(summary: Summary) -> RenderableType:
    """What `sparksmith eval` prints at the end; give it to a rich Console."""
    parts: list[RenderableType] = [
        Text(summary["title"], style="bold"),
        Text(),
        headline_table(summary),
        Text("[low, high]: 95% interval by bootstrap over prompts.", style="dim"),
        Text("acceptance length = 1 + accepted / steps (bonus token counted)", style="dim"),
        Text("speed-up = tokens/s speculative / tokens/s plain, first token aside", style="dim"),
        Text(),
        position_table(summary),
        Text("joint: the first k drafted tokens of a step were all accepted", style="dim"),
        Text(),
        time_table(summary),
    ]
    if summary["token_entropy"]["overall"] is not None:
        parts += [Text(), entropy_table(summary)]
    parts.append(Text())
    check = summary["losslessness"]
    failed = check is not None and bool(check.get("differences"))
    parts.append(Text(lossless_sentence(check), style="bold red" if failed else ""))
    for note in summary["notes"]:
        parts.append(Text(note))
    if summary["surface"]:
        parts[-1:-1] = [surface_table(summary), Text()]
    for warning in summary["warnings"]:
        parts.append(Padding(Text(f"! {warning}", style="yellow"), (0, 0, 0, 2)))
    for row in summary["missing"]:
        note = f"- not measured: {row['field']} ({row['arm']}), {row['reason']}"
        parts.append(Padding(Text(note, style="dim"), (0, 0, 0, 2)))
    return Group(*parts)


_NAME_WIDTH = 10


def _table(*columns: str) -> RichTable:
    table = RichTable(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for number, column in enumerate(columns):
        # Figures never wrap; a narrow terminal breaks the names between words.
        table.add_column(
            column,
            justify="right" if number else "left",
            no_wrap=number > 0,
            min_width=0 if number else _NAME_WIDTH,
        )
    return table


def _groups(summary: Summary) -> list[tuple[str, dict[str, Any]]]:
    groups = [(words(name), group) for name, group in summary["workloads"].items()]
    return groups + ([("overall", summary["overall"])] if len(groups) > 1 else [])


def _estimate(estimate: dict[str, Any] | None, digits: int = 2, unit: str = "") -> Text:
    """Value in bold, interval dim."""
    if estimate is None or estimate["value"] is None:
        return Text("-", style="dim")
    text = Text(f"{estimate['value']:.{digits}f}{unit}", style="bold")
    if estimate["low"] is not None:
        text.append(
            f" [{estimate['low']:.{digits}f}, {estimate['high']:.{digits}f}]", style="not bold dim"
        )
    return text


def headline_table(summary: Summary) -> RichTable:
    """One line a workload: acceptance length, speed-up, tokens/s of both arms."""
    table = _table(
        "workload",
        "acceptance length",
        "speed-up",
        "tokens/s",
        "plain",
        "accepted\na step",
        "prompts",
    )
    table.padding = (0, 1, 0, 0)  # eighty columns
    for name, group in _groups(summary):
        accepted, speed = group["acceptance"], group["speed"]
        table.add_row(
            name,
            _estimate(accepted and accepted["acceptance_length"]),
            _speed_up(speed["ratio"]),
            *(
                f"{speed[arm]['tokens_per_second']['value']:.1f}"
                if speed[arm] and speed[arm]["tokens_per_second"]["value"] is not None
                else "-"
                for arm in ARMS
            ),
            _value(accepted and accepted["accepted_per_step"]["value"]),
            str(group["prompts"]),
        )
    return table


def _value(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _speed_up(ratio: dict[str, Any]) -> Text:
    """Green where the interval is above 1, red where it is below."""
    text = _estimate(ratio, unit="x")
    if ratio["low"] is not None and ratio["low"] > 1:
        text.stylize("green", 0, text.plain.index("x") + 1)
    elif ratio["high"] is not None and ratio["high"] < 1:
        text.stylize("red", 0, text.plain.index("x") + 1)
    return text


def position_table(summary: Summary) -> RichTable:
    """Joint acceptance of the first eight positions, one line a workload, K3's below."""
    reference = summary["published"]["joint_by_position"]
    length = max([len(g["positions"]) for _, g in _groups(summary)] + [1])
    shown = min(8, length)
    table = _table("joint acceptance", *(str(k + 1) for k in range(shown)))
    for name, group in _groups(summary):
        rates = [row["joint"]["value"] for row in group["positions"][:shown]]
        table.add_row(name, *(percent(r, 0) for r in rates), *[""] * (shown - len(rates)))
    for name, curve in reference.items():
        cells = [percent(rate, 0) for rate in curve[:shown]]
        table.add_row(
            f"published K3, {name}", *cells, *[""] * (shown - len(cells)), style="dim italic"
        )
    return table


def time_table(summary: Summary) -> RichTable:
    """Shares of a step and time to first token."""
    table = _table("time", "draft", "verify", "other", "ms a step", "plain ms", "first token ms")
    for name, group in _groups(summary):
        split, found = group["time_split"], group["responses"]["speculative"]
        first = found["first_token_seconds"]["median"] if found else None
        table.add_row(
            name,
            *(percent(split and split["share"][part], 0) for part in ("draft", "verify", "other")),
            _value(split and split["milliseconds_per_step"]["total"], 1),
            _value(split and split["plain_milliseconds_per_token"], 1),
            _value(None if first is None else 1e3 * first, 0),
        )
    return table


def surface_table(summary: Summary) -> RichTable:
    """What one user gets, and the server in all, by users at once."""
    table = _table("users at once", "tokens/s, one user", "tokens/s, all", "failed")
    for row in surface_rows(summary["surface"]):
        table.add_row(*row)
    return table


def entropy_table(summary: Summary) -> RichTable:
    """Acceptance of judged tokens by band of the target's entropy, with a bar."""
    table = _table("target entropy, bits", "acceptance", "tokens", "")
    table.columns[-1].justify = "left"
    for band in summary["token_entropy"]["overall"]["bands"]:
        if band["tokens"]:
            bar = "#" * round(30 * band["acceptance"]["value"])
            table.add_row(
                band["band"], _estimate(band["acceptance"]), f"{band['tokens']:,}",
                Text(bar, style="blue"),
            )  # fmt: skip
    return table
