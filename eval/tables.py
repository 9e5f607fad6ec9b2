"""The tables of a report as rows of text: the terminal, Markdown and HTML print the same cells."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from sparksmith.eval.definitions import DEFINITIONS
from sparksmith.eval.findings import interval, words
from sparksmith.eval.live_findings import surface_rows
from sparksmith.eval.pairing import ARMS

Summary = dict[str, Any]
Group = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """`columns` are headings, the first one naming the rows; `defined` are keys of DEFINITIONS."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    defined: tuple[str, ...] = ()

    @property
    def formulas(self) -> list[tuple[str, str]]:
        """(name, formula) of the figures in this table."""
        return [(DEFINITIONS[key]["name"], DEFINITIONS[key]["formula"]) for key in self.defined]


def tables(summary: Summary) -> list[Table]:
    """All tables of a report, the most asked for first; those without rows are left out."""
    groups = [(words(name), group) for name, group in summary["workloads"].items()]
    if len(groups) > 1:
        groups.append(("overall", summary["overall"]))
    bands = list(summary["entropy_bands"]["bands"].items())
    found = [
        results("results", "By workload", "workload", groups),
        results("bands", "By entropy of the prompt", "bits per token", bands),
        counters(groups),
        positions(groups),
        token_entropy(summary),
        step_time(groups),
        response_counts(groups),
        repetition(groups),
        surface(summary),
    ]
    return [table for table in found if table.rows]


def surface(summary: Summary) -> Table:
    """Speeds with several users at once, one row a number of users."""
    return Table(
        key="surface",
        title="Several users at once",
        columns=("users at once", "tokens/s, one user", "tokens/s, all", "failed requests"),
        rows=surface_rows(summary["surface"]),
    )


def results(key: str, title: str, first: str, groups: list[tuple[str, Group]]) -> Table:
    """Acceptance and speed with their intervals, one row a group."""
    return Table(
        key=key,
        title=title,
        columns=(
            first, "prompts", "acceptance length", "accepted per step", "speed-up",
            "tokens/s speculative", "tokens/s plain",
        ),
        rows=[(name, str(group["prompts"]), *_results_row(group)) for name, group in groups],
        defined=(
            "acceptance_length", "accepted_per_step", "ratio", "tokens_per_second", "interval",
        ),
    )  # fmt: skip


def _results_row(group: Group) -> tuple[str, ...]:
    accepted, speed = group["acceptance"], group["speed"]
    return (
        interval(accepted["acceptance_length"]) if accepted else "-",
        interval(accepted["accepted_per_step"]) if accepted else "-",
        interval(speed["ratio"], unit="x"),
        *(interval(speed[arm]["tokens_per_second"], 1) if speed[arm] else "-" for arm in ARMS),
    )


def counters(groups: list[tuple[str, Group]]) -> Table:
    """The raw counters behind every acceptance figure."""
    names = ("prompts", "responses", "steps", "drafted", "accepted", "tokens", "cut_steps")
    return Table(
        key="counters",
        title="Raw counters",
        columns=("workload", *(name.replace("_", " ") for name in names), "acceptance rate"),
        rows=[
            (
                name,
                *(f"{group['acceptance'][key]:,}" for key in names),
                percent(group["acceptance"]["acceptance_rate"]["value"]),
            )
            for name, group in groups
            if group["acceptance"]
        ],
        defined=("acceptance_rate",),
    )


def positions(groups: list[tuple[str, Group]]) -> Table:
    """Joint and conditional acceptance of each drafted position."""
    return Table(
        key="positions",
        title="Acceptance by position",
        columns=("workload", "position", "joint", "conditional", "accepted", "reached", "drafted"),
        rows=[
            (
                name,
                str(row["position"]),
                interval(row["joint"], 3),
                interval(row["conditional"], 3),
                f"{row['steps_accepted']:,}",
                f"{row['steps_reached']:,}",
                f"{row['steps_drafted']:,}",
            )
            for name, group in groups
            for row in group["positions"]
        ],
        defined=("joint", "conditional", "interval"),
    )


def token_entropy(summary: Summary) -> Table:
    """Acceptance of judged tokens by the target's entropy, all workloads together."""
    curve = summary["token_entropy"]["overall"]
    return Table(
        key="token_entropy",
        title="Acceptance against the target's entropy, per token",
        columns=("bits", "judged tokens", "accepted", "acceptance"),
        rows=[
            (
                band["band"],
                f"{band['tokens']:,}",
                f"{band['accepted']:,}",
                interval(band["acceptance"], 3),
            )
            for band in (curve["bands"] if curve else [])
            if band["tokens"]
        ],
        defined=("token_acceptance", "entropy", "interval"),
    )


def step_time(groups: list[tuple[str, Group]]) -> Table:
    """Milliseconds and shares of draft, verify and the rest; plain decoding beside them."""

    def rows() -> Iterator[tuple[str, ...]]:
        for name, group in groups:
            split = group["time_split"]
            if split is None:
                continue
            part = {
                key: f"{split['milliseconds_per_step'][key]:.1f} ({percent(share, 0)})"
                for key, share in split["share"].items()
            }
            plain = split["plain_milliseconds_per_token"]
            yield (
                name, part["draft"], part["verify"], part["other"],
                f"{split['milliseconds_per_step']['total']:.1f}",
                f"{split['tokens_per_step']:.2f}", "-" if plain is None else f"{plain:.1f}",
            )  # fmt: skip

    return Table(
        key="step_time",
        title="Time in a step, milliseconds (share)",
        columns=(
            "workload", "draft", "verify", "other", "step", "tokens emitted per step",
            "plain decoding, per token",
        ),
        rows=list(rows()),
        defined=("time_split",),
    )  # fmt: skip


def response_counts(groups: list[tuple[str, Group]]) -> Table:
    """Lengths, time to first token and finish reasons of both arms."""
    rows = []
    for name, group in groups:
        for arm in ARMS:
            found = group["responses"][arm]
            if found is None:
                continue
            first = found["first_token_seconds"]
            reasons = ", ".join(f"{k} {v}" for k, v in found["finish_reasons"].items())
            rows.append(
                (
                    name, arm, str(found["responses"]), f"{found['tokens']:,}",
                    f"{found['mean_tokens']:.0f}",
                    *("-" if first[k] is None else f"{1e3 * first[k]:.0f}"
                      for k in ("median", "p90")),
                    reasons,
                )
            )  # fmt: skip
    return Table(
        key="responses",
        title="Responses",
        columns=(
            "workload", "arm", "responses", "tokens", "mean tokens", "first token ms, median",
            "p90", "finished by",
        ),
        rows=rows,
        defined=("first_token",),
    )  # fmt: skip


def repetition(groups: list[tuple[str, Group]]) -> Table:
    """The degeneracy guard of both arms."""
    rows = []
    for name, group in groups:
        for arm in ARMS:
            found = group["degeneracy"][arm]
            if found is None:
                continue
            distinct = ("-" if v is None else f"{v:.2f}" for v in found["distinct"].values())
            rows.append(
                (
                    name, arm, f"{found['flagged_prompts']} ({percent(found['flagged_share'], 0)})",
                    *distinct, f"{found['longest_loop_tokens']} tokens",
                )
            )  # fmt: skip
    return Table(
        key="repetition",
        title="Repetition",
        columns=(
            "workload", "arm", "prompts flagged", "distinct-1", "distinct-2", "distinct-3",
            "distinct-4", "longest loop",
        ),
        rows=rows,
        defined=("distinct",),
    )  # fmt: skip


def percent(value: float | None, digits: int = 1) -> str:
    """A share as "12.3%", a dash for None."""
    return "-" if value is None else f"{100 * value:.{digits}f}%"
