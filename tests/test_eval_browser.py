"""The page in headless Chromium: nothing on the console, every figure drawn, nothing cut off.

Install Chromium with `apt-get install chromium`, or name another build in CHROMIUM.
"""

import html
import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from eval_traces import synthetic_traces

from sparksmith.eval.report import write_reports
from sparksmith.eval.summary import summarise

pytestmark = pytest.mark.browser

# Measures the page in the page, since a dumped document has no sizes.
PROBE = """
<script>
window.addEventListener("load", () => {
  const size = (e) => { const r = e.getBoundingClientRect(); return [r.width, r.height]; };
  const seen = (e) => {
    const [w, h] = size(e), paint = getComputedStyle(e);
    return (w > 0 || h > 0) && paint.visibility === "visible" && paint.display !== "none"
      && (paint.fill !== "none" || paint.stroke !== "none");
  };
  const overlaps = (texts) => texts.flatMap((one, i) => texts.slice(i + 1).filter((other) => {
    const a = one.getBoundingClientRect(), b = other.getBoundingClientRect();
    return a.left < b.right && b.left < a.right && a.top + 3 < b.bottom && b.top + 3 < a.bottom;
  }).map((other) => one.textContent + " / " + other.textContent));
  const figures = [...document.querySelectorAll("figure")].map((figure) => ({
    id: figure.id,
    panels: [...figure.querySelectorAll("svg")].map((svg) => ({
      size: size(svg),
      marks: [...svg.querySelectorAll(".mark")].filter(seen).length,
      curves: [...svg.querySelectorAll("polyline.curve")].filter(seen).length,
      overlaps: overlaps([...svg.querySelectorAll(".row, .panel, .value")]),
      outside: [...svg.querySelectorAll("text, .mark")].filter((e) => {
        const r = e.getBoundingClientRect(), box = svg.getBoundingClientRect();
        return r.left < box.left - 2 || r.right > box.right + 2
          || r.top < box.top - 2 || r.bottom > box.bottom + 2;
      }).map((e) => e.textContent),
    })),
  }));
  const page = document.documentElement;
  const fetched = performance.getEntriesByType("resource").map((entry) => entry.name);
  parent.document.body.dataset.probe = JSON.stringify(
    {figures, fetched, width: window.innerWidth, scroll: page.scrollWidth});
});
</script>
"""


@dataclass(frozen=True)
class Visit:
    """What a page measured of itself, and what it wrote to the console."""

    measured: dict[str, Any]
    console: list[str]


def chromium() -> str:
    """The browser's path; a run in CI must have one, elsewhere the test is skipped."""
    path = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if path and Path(path).exists():
        return path
    message = "Chromium is not installed: apt-get install chromium, or set CHROMIUM to its path."
    if os.environ.get("CI", "").lower() in ("1", "true"):
        pytest.fail(message)
    pytest.skip(message)


def visit(page: Path, folder: Path, width: int) -> Visit:
    """Open a page at a width; the probe is put into a copy, the report itself has no script.

    The copy stands in a frame, because a window of Chromium is never narrower than 500 pixels.
    """
    probed = folder / "probed.html"
    copy = html.escape(page.read_text().replace("</body>", PROBE + "</body>"))
    frame = f'<iframe style="border: 0" width="{width}" height="2400" srcdoc="{copy}"></iframe>'
    probed.write_text(f'<!doctype html><meta charset="utf-8"><body>{frame}</body>')
    done = subprocess.run(
        [
            chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic",
            "--no-first-run", "--disable-background-networking", "--disable-component-update",
            "--disable-sync", "--disable-dev-shm-usage", "--hide-scrollbars",
            "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder / 'profile'}",
            "--enable-logging=stderr", "--window-size=1300,2500", "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = re.search(r'data-probe="([^"]*)"', done.stdout)
    assert found, done.stderr
    return Visit(json.loads(html.unescape(found.group(1))), re.findall(r".*CONSOLE.*", done.stderr))


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lossless = {"prompts": 4, "tokens": 400, "equal": 4, "ties": 0, "differences": 0}
    traces = [
        replace(trace, workload="throughput_16k low entropy") if trace.workload == "chat" else trace
        for trace in synthetic_traces(8)
    ]
    summary = summarise(traces, {"command": "sparksmith eval"}, lossless)
    return write_reports(summary, tmp_path_factory.mktemp("report")).html


@pytest.mark.parametrize("width", [390, 1200])
def test_every_figure_is_drawn_and_nothing_is_cut_off(
    page: Path, tmp_path: Path, width: int
) -> None:
    seen = visit(page, tmp_path, width)
    assert seen.console == []
    assert seen.measured["fetched"] == []
    assert seen.measured["width"] == width
    assert seen.measured["scroll"] <= width
    panels = {figure["id"]: figure["panels"] for figure in seen.measured["figures"]}
    assert {name: len(found) for name, found in panels.items()} == {
        "speed-up": 1, "step-time": 1, "positions": 5, "token-entropy": 6, "prompt-entropy": 5,
    }  # fmt: skip
    for name, found in panels.items():
        for panel in found:
            assert panel["size"][0] > 250, name
            assert panel["size"][1] > 150, name
            assert panel["outside"] == [], name
            assert panel["overlaps"] == [], name
    # Overall and five workloads: a point each, four bars each and the four of the key.
    assert [panel["marks"] for panel in panels["speed-up"]] == [6]
    assert [panel["marks"] for panel in panels["step-time"]] == [6 * 4 + 4]
    # Four drafted positions; eight prompts of five workloads in every scatter.
    assert [(panel["marks"], panel["curves"]) for panel in panels["positions"]] == [(4, 1)] * 5
    assert [panel["marks"] for panel in panels["prompt-entropy"]] == [40] * 5
    assert all(panel["curves"] == 1 and panel["marks"] >= 6 for panel in panels["token-entropy"])


def test_the_check_sees_errors_and_missing_marks(page: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken.html"
    text = page.read_text().replace("</style>", "svg .mark { display: none }</style>")
    broken.write_text(
        text.replace("</body>", '<script>console.error("seen")</script>'
                     '<img src="https://example.invalid/x.png" alt=""></body>')
    )  # fmt: skip
    seen = visit(broken, tmp_path, 800)
    assert any("seen" in line for line in seen.console)
    assert seen.measured["fetched"] == ["https://example.invalid/x.png"]
    marks = [panel["marks"] for f in seen.measured["figures"] for panel in f["panels"]]
    assert set(marks) == {0}
