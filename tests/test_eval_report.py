"""The three written forms and the terminal's: complete, self-contained, safe."""

import io
import json
import re
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from eval_traces import baseline_trace, simple_trace, synthetic_traces
from rich.console import Console

from sparksmith.eval.report import flatten, write_reports
from sparksmith.eval.summary import summarise
from sparksmith.eval.terminal import terminal_report
from sparksmith.eval.trace import read_traces, write_traces

LOSSLESS = {"prompts": 4, "tokens": 400, "equal": 4, "ties": 0, "differences": 0}


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    settings = {"command": "sparksmith eval --limit 8", "target": {"name": "tiny", "seed": 0}}
    return summarise(synthetic_traces(8), settings, LOSSLESS)


class Checker(HTMLParser):
    """Counts elements, sees that tags nest, and collects what a browser would fetch."""

    VOID = frozenset({"meta", "link", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.fetched: list[str] = []
        self.ids: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)
        found = dict(attrs)
        self.ids += [value for name, value in attrs if name == "id" and value]
        self.fetched += [
            value
            for name, value in attrs
            if value and (name == "src" or (name == "href" and tag != "a"))
        ]
        if tag == "svg":
            assert found["role"] == "img"
            assert found["aria-labelledby"]

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if self.open and self.open[-1] == tag:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_html_is_one_self_contained_page(tmp_path: Path, summary: dict[str, Any]) -> None:
    page = write_reports(summary, tmp_path).html.read_text()
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.fetched == ["data:,"]
    assert "script" not in checker.seen
    assert not re.search(r"@import|url\(", page)
    # Speed-up, step time; five positions; all workloads and five; five scatters.
    assert checker.seen["svg"] == 2 + 5 + 6 + 5
    assert len(set(checker.ids)) == len(checker.ids)


def test_every_form_tells_the_same_figures(tmp_path: Path, summary: dict[str, Any]) -> None:
    paths = write_reports(summary, tmp_path / "new" / "folder")
    assert json.loads(paths.json.read_text()) == summary
    length = summary["workloads"]["code"]["acceptance"]["acceptance_length"]
    cell = f"{length['value']:.2f} [{length['low']:.2f}, {length['high']:.2f}]"
    for text in (paths.markdown.read_text(), paths.html.read_text(), printed(summary)):
        assert cell in text
        assert "1 + accepted / steps" in text
        assert "K3" in text
    for text in (paths.markdown.read_text(), paths.html.read_text()):
        for entry in summary["definitions"].values():
            assert entry["name"] in text
        for figure in ("4.73", "2.61", "118", "370", "4.49"):
            assert figure in text
        assert "sparksmith eval --limit 8" in text
        assert "target.name" in text


def test_markdown_tables_are_rectangular(tmp_path: Path, summary: dict[str, Any]) -> None:
    lines = write_reports(summary, tmp_path).markdown.read_text().split("\n")
    rows = [line for line in lines if line.startswith("|")]
    assert len(rows) > 60
    for before, after in pairwise(lines):
        if before.startswith("|") and after.startswith("|"):
            assert before.count("|") == after.count("|")


def printed(summary: dict[str, Any], width: int = 100) -> str:
    stream = io.StringIO()
    Console(file=stream, width=width).print(terminal_report(summary))
    return stream.getvalue()


def test_terminal_fits_100_columns_uncut(summary: dict[str, Any]) -> None:
    text = printed(summary)
    assert max(len(line.rstrip()) for line in text.split("\n")) <= 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in text
    assert text.startswith("On code, ")
    for name in ("code", "creative writing", "chat", "maths", "extraction"):
        assert f"\n{name} " in text


def test_names_from_outside_cannot_break_the_page(tmp_path: Path) -> None:
    nasty = "<script>alert('x')</script>|&"
    traces = [
        simple_trace(workload=nasty, prompt_id=nasty, entropy_lower=[0.2] * 7,
                     entropy_upper=[0.2] * 7),
        baseline_trace(workload=nasty, prompt_id=nasty, entropy_lower=[0.2] * 7,
                       entropy_upper=[0.2] * 7),
    ]  # fmt: skip
    paths = write_reports(summarise(traces, {"note": nasty}, None), tmp_path)
    checker = Checker()
    checker.feed(paths.html.read_text())
    assert "script" not in checker.seen
    assert checker.open == []


@pytest.mark.parametrize("missing", ["counts", "times", "entropies", "baseline"])
def test_reports_without_a_kind_of_figure_say_so(tmp_path: Path, missing: str) -> None:
    gone: dict[str, dict[str, None]] = {
        "counts": {"drafted": None, "accepted": None},
        "times": {"draft_seconds": None, "verify_seconds": None, "decode_seconds": None,
                  "first_token_seconds": None},
    }  # fmt: skip
    bits: dict[str, list[float]] = {} if missing == "entropies" else {
        "entropy_lower": [0.2] * 7, "entropy_upper": [0.2] * 7
    }  # fmt: skip
    changes: dict[str, Any] = {**bits, **gone.get(missing, {})}
    traces = [simple_trace(**changes)]
    if missing != "baseline":
        traces.append(baseline_trace(**changes))
    summary = summarise(traces, {}, None)
    paths = write_reports(summary, tmp_path)
    assert "Not measured in this run." in paths.html.read_text()
    if missing != "baseline":
        assert "Not measured" in paths.markdown.read_text()
        assert "not measured" in printed(summary)
    else:
        assert "no autoregressive arm" in " ".join(printed(summary).split())


def test_flatten() -> None:
    nested = {"a": {"b": 1, "c": None}, "d": [1, 2], "e": {}, "f": []}
    assert flatten(nested) == [
        ("a.b", "1"), ("a.c", "none"), ("d", "1, 2"), ("e", "{}"), ("f", "none"),
    ]  # fmt: skip


def test_traces_survive_their_file(tmp_path: Path) -> None:
    traces = [simple_trace(text="caf\u00e9"), baseline_trace()]
    path = tmp_path / "traces.jsonl"
    write_traces(path, traces)
    assert list(read_traces(path)) == traces
