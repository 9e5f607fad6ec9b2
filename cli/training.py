"""Training with its progress on the screen, for the commands that train."""

from pathlib import Path
from typing import Any

from sparksmith.cli.progress import Bar, duration, progress
from sparksmith.distill.training import Trainer, TrainEvent

HISTORY_FILE = "history.json"


def train_with_progress(trainer: Trainer, *, label: str = "train") -> dict[str, Any]:
    """Run `trainer` to the end of its budget; returns what run.json keeps of it.

    Ctrl-C leaves a state from which the same command goes on.
    """
    budget = trainer.settings.budget
    by_steps = budget.steps is not None
    total = float(budget.steps) if budget.steps is not None else 60.0 * (budget.minutes or 0.0)
    done = float(trainer.progress.step) if by_steps else trainer.progress.seconds
    waited = 0.0
    with progress(label, total=total, unit="steps" if by_steps else "s", done=done) as bar:
        for event in trainer.run():
            waited += event.waited_seconds
            at = float(event.progress.step) if by_steps else min(event.progress.seconds, total)
            bar.at(at, tokens=0, note=_note(event, waited))
            if event.expectation is not None:
                _say_validation(bar, event, trainer.progress.best_acceptance_length)
    state = trainer.progress
    return {
        "steps": state.step,
        "seconds": round(state.seconds, 1),
        "blocks": state.blocks,
        "expected_acceptance_length": round(state.best_acceptance_length, 4),
        "history": state.history,
        "best": str(Path("best")),
    }


def _note(event: TrainEvent, waited: float) -> str:
    state, statistics = event.progress, event.statistics
    speed = state.blocks / max(state.seconds, 1e-9)
    share = waited / max(state.seconds, 1e-9)
    overlap = " ".join(f"{value:.2f}" for value in statistics.overlap)
    return (
        f"step {state.step}, {speed:,.0f} blocks/s, waiting {share:.0%}, "
        f"loss {statistics.loss:.3f}, overlap {overlap}"
    )


def _say_validation(bar: Bar, event: TrainEvent, best: float) -> None:
    assert event.expectation is not None
    length = event.expectation.acceptance_length
    joint = " ".join(f"{value:.2f}" for value in event.expectation.joint)
    mark = "  (best so far)" if length >= best else ""
    bar.say(
        f"  {duration(event.progress.seconds)}: expected acceptance length {length:.3f} on "
        f"held-out responses, P(at least k accepted) {joint}{mark}"
    )
