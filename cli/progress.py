"""Progress of long work: a live bar on a terminal, a plain line now and then anywhere else.

Everything goes to stderr, so that stdout holds results only.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
from rich.text import Text

PLAIN_SECONDS = 15.0
"""Seconds between two lines where there is no terminal."""


def duration(seconds: float) -> str:
    """Seconds as people say them: 42 s, 3 min 05 s, 2 h 10 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


class Meter:
    """How far some work is: `done` of `total` units, the tokens made, and the time all that took.

    `total` None means that the end is unknown. Units done before this process began (a resumed
    run) count as done and not towards the speed.
    """

    def __init__(self, unit: str, total: float | None, done: float = 0.0) -> None:
        self.unit = unit
        self.total = total
        self.done = done
        self.tokens = 0
        self.note = ""
        self._done_before = done
        self._started = time.monotonic()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._started

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / max(self.seconds, 1e-9)

    @property
    def seconds_left(self) -> float | None:
        """From the speed so far; None before anything is done or when the end is unknown."""
        made = self.done - self._done_before
        if self.total is None or made <= 0:
            return None
        return max(self.total - self.done, 0.0) * self.seconds / made

    def line(self) -> str:
        """The state in words, the same on a terminal and elsewhere."""
        of = "" if self.total is None else f"/{self.total:,.0f}"
        parts = [f"{self.done:,.0f}{of} {self.unit}".rstrip()]
        if self.tokens:
            parts.append(f"{self.tokens_per_second:,.0f} tokens/s")
        if self.seconds_left:
            parts.append(f"{duration(self.seconds_left)} left")
        if self.note:
            parts.append(self.note)
        return ", ".join(parts)


class Bar:
    """What the working code holds: it advances, notes and says; how that looks is decided here."""

    def __init__(self, meter: Meter, show: Callable[[], None], say: Callable[[str], None]) -> None:
        self.meter = meter
        self._show = show
        self.say = say
        """Print a line above the bar."""

    def advance(self, units: float = 0.0, *, tokens: int = 0, note: str | None = None) -> None:
        """Add finished units and tokens; `note` replaces the text at the end of the line."""
        self.at(self.meter.done + units, tokens=tokens, note=note)

    def at(self, done: float, *, tokens: int = 0, note: str | None = None) -> None:
        """The same with the units done in all (for a budget: the seconds spent)."""
        self.meter.done = done
        self.meter.tokens += tokens
        if note is not None:
            self.meter.note = note
        self._show()


@contextmanager
def progress(
    label: str,
    *,
    total: float | None = None,
    unit: str = "",
    done: float = 0.0,
    console: Console | None = None,
) -> Iterator[Bar]:
    """Show work under `label`: `done` of `total` `unit`s, tokens/s and the time left."""
    console = console or Console(stderr=True)
    meter = Meter(unit, total, done)
    drive = _live if console.is_terminal else _plain
    with drive(label, meter, console) as bar:
        yield bar


class _MeterColumn(ProgressColumn):
    def __init__(self, meter: Meter) -> None:
        super().__init__()
        self._meter = meter

    def render(self, task: Task) -> Text:
        return Text(self._meter.line())


@contextmanager
def _live(label: str, meter: Meter, console: Console) -> Iterator[Bar]:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(24))
    with Progress(*columns, _MeterColumn(meter), console=console) as display:
        task = display.add_task(label, total=meter.total)
        display.update(task, completed=meter.done)
        yield Bar(
            meter,
            show=lambda: display.update(task, completed=meter.done),
            say=lambda text: display.console.print(
                text, highlight=False, markup=False, soft_wrap=True
            ),
        )


@contextmanager
def _plain(label: str, meter: Meter, console: Console) -> Iterator[Bar]:
    def say(text: str) -> None:
        console.print(text, highlight=False, markup=False, soft_wrap=True)

    last = 0.0

    def show() -> None:
        nonlocal last
        if meter.seconds - last >= PLAIN_SECONDS:
            last = meter.seconds
            say(f"{label}: {meter.line()}")

    say(f"{label} ...")
    yield Bar(meter, show, say)
    say(f"{label}: {meter.line()}, done in {duration(meter.seconds)}")
