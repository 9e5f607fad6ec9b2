"""SVG by hand: a panel with two linear axes, and marks whose colours are the page's CSS classes.

A fixed picture could not follow the reader's light or dark theme, nor the width of a phone; here
a panel is drawn 340 units wide and the page places one, two or three of them beside one another.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape

Point = tuple[float, float]

# What fits beside a figure on the same line; the whole name is in the title and in the tables.
LONGEST_NAME = 20


def short(name: str) -> str:
    """A name cut to what fits in a figure."""
    return name if len(name) <= LONGEST_NAME else f"{name[: LONGEST_NAME - 3].rstrip()}..."


@dataclass(kw_only=True)
class Panel:
    """One plot. `x_range` and `y_range` are data units; `summary` is read out to who cannot see."""

    key: str
    title: str
    summary: str
    x_range: tuple[float, float]
    y_range: tuple[float, float]
    width: int = 340
    height: int = 236
    left: int = 40
    right: int = 14
    top: int = 30
    bottom: int = 44
    heading: bool = True
    marks: list[str] = field(default_factory=list)

    def x(self, value: float) -> float:
        """Data to horizontal position."""
        low, high = self.x_range
        return self.left + (value - low) / (high - low) * (self.width - self.left - self.right)

    def y(self, value: float) -> float:
        """Data to vertical position."""
        low, high = self.y_range
        bottom = self.height - self.bottom
        return bottom - (value - low) / (high - low) * (bottom - self.top)

    def grid(self, ticks: Sequence[tuple[float, str]]) -> None:
        """Horizontal grid lines with their labels at the left."""
        for value, label in ticks:
            y = self.y(value)
            self.segment((self.left, y), (self.width - self.right, y), "grid")
            self.text((self.left - 6, y + 3.5), label, "tick end")

    def ticks(self, ticks: Sequence[tuple[float, str]], name: str) -> None:
        """Labels under the horizontal axis, and its name."""
        for value, label in ticks:
            self.text((self.x(value), self.height - self.bottom + 15), label, "tick middle")
        middle = (self.left + self.width - self.right) / 2
        self.text((middle, self.height - 9), name, "axis middle")

    def segment(self, start: Point, end: Point, style: str) -> None:
        """A straight line between two positions."""
        self.marks.append(
            f'<line class="{style}" x1="{start[0]:.1f}" y1="{start[1]:.1f}" '
            f'x2="{end[0]:.1f}" y2="{end[1]:.1f}"/>'
        )

    def line(self, points: Sequence[Point], style: str) -> None:
        """A line through points in data units."""
        path = " ".join(f"{self.x(x):.1f},{self.y(y):.1f}" for x, y in points)
        self.marks.append(f'<polyline class="{style}" points="{path}"/>')

    def dot(self, point: Point, style: str, note: str, radius: float = 4) -> None:
        """A point in data units; `note` appears when it is pointed at."""
        self.marks.append(
            f'<circle class="mark {style}" cx="{self.x(point[0]):.1f}" cy="{self.y(point[1]):.1f}" '
            f'r="{radius:g}"><title>{escape(note)}</title></circle>'
        )

    def cross(self, point: Point, style: str, note: str) -> None:
        """A cross in data units, told from a dot without colour."""
        x, y = self.x(point[0]), self.y(point[1])
        self.marks.append(
            f'<path class="mark {style}" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8">'
            f"<title>{escape(note)}</title></path>"
        )

    def whisker(self, x: float, low: float | None, high: float | None, style: str) -> None:
        """A vertical interval in data units; nothing where there is none."""
        if low is not None and high is not None:
            self.segment((self.x(x), self.y(low)), (self.x(x), self.y(high)), style)

    def bar(self, corner: Point, size: tuple[float, float], style: str, note: str) -> None:
        """A rectangle by its upper left corner, in positions."""
        self.marks.append(
            f'<rect class="mark {style}" x="{corner[0]:.1f}" y="{corner[1]:.1f}" '
            f'width="{max(size[0], 0.5):.1f}" height="{size[1]:.1f}"><title>{escape(note)}</title>'
            "</rect>"
        )

    def text(self, at: Point, words: str, style: str) -> None:
        """Text at a position."""
        self.marks.append(
            f'<text class="{style}" x="{at[0]:.1f}" y="{at[1]:.1f}">{escape(words)}</text>'
        )

    def render(self) -> str:
        """The SVG element; it scales with its container and is named and described."""
        name, described = f"{self.key}-title", f"{self.key}-desc"
        heading = f'<text class="panel" x="0" y="14">{escape(short(self.title))}</text>'
        return (
            f'<svg viewBox="0 0 {self.width} {self.height}" role="img" '
            f'aria-labelledby="{name} {described}">'
            f'<title id="{name}">{escape(self.title)}</title>'
            f'<desc id="{described}">{escape(self.summary)}</desc>'
            f"{heading if self.heading else ''}{''.join(self.marks)}</svg>"
        )
