"""report.json, report.md and one self-contained report.html, all from the same summary.

The page has no script and asks nothing of the network: its styles and figures are inside.
"""

from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, FunctionLoader, StrictUndefined
from markupsafe import Markup

from sparksmith.draft.files import write_json, write_text
from sparksmith.eval.findings import about, interval, lossless_sentence, words
from sparksmith.eval.pairing import ARMS
from sparksmith.eval.plots import figures
from sparksmith.eval.tables import tables


@dataclass(frozen=True, kw_only=True)
class ReportPaths:
    """Where the three forms of one report are."""

    json: Path
    markdown: Path
    html: Path


def write_reports(summary: dict[str, Any], folder: Path) -> ReportPaths:
    """Write report.json, report.md and report.html into `folder` (made if absent), atomically.

    Raises OSError where the disk refuses.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = ReportPaths(
        json=folder / "report.json", markdown=folder / "report.md", html=folder / "report.html"
    )
    write_json(paths.json, summary)
    write_text(paths.markdown, render("report.md.j2", summary))
    write_text(paths.html, render("report.html.j2", summary))
    return paths


def render(template: str, summary: dict[str, Any]) -> str:
    """One packaged template filled with a summary."""
    environment = Environment(
        loader=FunctionLoader(_template),
        autoescape=template.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"interval": interval, "words": words, "cell": markdown_cell}
    return environment.get_template(template).render(
        summary=summary,
        tables=tables(summary),
        figures=figures(summary),
        about=about(summary),
        losslessness=lossless_sentence(summary["losslessness"]),
        settings=flatten(summary["settings"]),
        conditions=arm_conditions(summary["conditions"]),
        arms=ARMS,
        style=Markup(_template("report.css")),
        safe_svg=Markup,
    )


def _template(name: str) -> str:
    return (files(__package__) / "templates" / name).read_text(encoding="utf-8")


def markdown_cell(text: str) -> str:
    """Text that cannot break out of a Markdown table cell."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ")


def flatten(value: Any, name: str = "") -> list[tuple[str, str]]:
    """Nested settings as ("target.dtype", "float32") pairs; lists on one line."""
    if isinstance(value, dict) and value:
        return [
            pair
            for key, inner in value.items()
            for pair in flatten(inner, f"{name}.{key}" if name else str(key))
        ]
    if isinstance(value, list):
        return [(name, ", ".join(str(inner) for inner in value) or "none")]
    return [(name, "none" if value is None else str(value))]


def arm_conditions(conditions: dict[str, dict[str, Any]]) -> list[tuple[str, ...]]:
    """Rows (setting, value in each arm) of what the traces say they were made with."""
    flat = [dict(flatten(conditions[arm])) for arm in ARMS]
    names = [name for name in dict.fromkeys(n for arm in flat for n in arm) if name]
    return [(name, *(arm.get(name, "-") for arm in flat)) for name in names]
