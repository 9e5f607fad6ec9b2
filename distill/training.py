"""The training loop: batches in, checkpoints and progress out, killable at any moment.

The state file holds everything a run is made of, so a run that is killed goes on from the last
one as if nothing had happened (with a step budget: bit for bit).
"""

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import torch

from sparksmith.distill.initial import LARGEST_WIDTH, start_by_regression
from sparksmith.distill.loss import LossWeights
from sparksmith.distill.objective import Objective, StepStatistics
from sparksmith.distill.optimizers import DivergedError, Optimizers, OptimizerSettings
from sparksmith.distill.samples import TrainingSample, check_temperature, make_batch
from sparksmith.distill.schedule import Budget, batches, learning_rate_factor
from sparksmith.distill.state import draft_identity, load_state, save_state
from sparksmith.distill.validation import Expectation, expected_acceptance
from sparksmith.draft.checkpoint import save_draft
from sparksmith.draft.errors import UserError
from sparksmith.draft.model import DSparkDraft

BEST, LAST = "best", "last"
START_POSITIONS = 75_000
"""Of the first samples, for the start by regression: on a third as many it overfits
(benchmarks/README.md)."""

Tick = Callable[[str, int, int], None]
"""Told what is being prepared, and how far it is: done and in all."""


class SampleSource(Protocol):
    """Where training samples come from: online features, a cache in memory, later a store."""

    def __len__(self) -> int: ...

    def length(self, index: int) -> int: ...

    def take(self, indices: Sequence[int]) -> list[TrainingSample]: ...


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What defines a run besides its data; equal settings are demanded when resuming.

    `temperature` is that at which the draft will serve. `batch_size` counts sequences a step,
    `anchors` the most blocks of each. `greedy_rollouts` says that the responses are the target's
    greedy ones: validation then counts exact matches, whatever the temperature of training.
    """

    budget: Budget
    temperature: float = 0.7
    batch_size: int = 2
    anchors: int = 128
    warmup: float = 0.04
    greedy_rollouts: bool = False
    seed: int = 0
    loss: LossWeights = field(default_factory=LossWeights)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    validate_every_seconds: float = 60.0
    save_every_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "anchors"):
            if getattr(self, name) < 1:
                raise UserError(name, getattr(self, name), "is not positive", "Use 1 or more.")
        if not 0.0 <= self.warmup < 1.0:
            raise UserError(
                "warmup", self.warmup, "is not a share of the run", "Use 0.04, or 0 for none."
            )
        if not self.temperature > 0:
            raise UserError(
                "temperature",
                self.temperature,
                "gives a one-hot target, which total variation cannot learn from",
                "Train at the serving temperature, or at a low one such as 0.2 for greedy serving.",
            )

    def comparable(self) -> dict[str, Any]:
        """What must be equal for a run to be resumed: all but the budget and the intervals."""
        values = asdict(self)
        for name in ("budget", "validate_every_seconds", "save_every_seconds"):
            del values[name]
        return values


@dataclass
class Progress:
    """Counters of a run, saved with it. `seconds` is wall time over all its parts;
    `best_acceptance_length` is 0 while nothing was measured."""

    step: int = 0
    seconds: float = 0.0
    blocks: int = 0
    tokens: int = 0
    best_acceptance_length: float = 0.0
    history: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class TrainEvent:
    """What the loop reports after a step; `expectation` when it has just validated."""

    progress: Progress
    fraction: float
    statistics: StepStatistics
    learning_rate_factor: float
    gradient_norm: float
    waited_seconds: float
    expectation: Expectation | None


class Trainer:
    """Trains one draft in one folder: `best/`, `last/` and the state file."""

    def __init__(
        self,
        draft: DSparkDraft,
        settings: TrainSettings,
        folder: Path,
        data: tuple[SampleSource, Sequence[TrainingSample]],
    ) -> None:
        """`data` is the training source and the held-out samples."""
        self.draft = draft
        self.settings = settings
        self.folder = folder
        self.source, self.held_out = data
        if len(self.source) == 0:
            raise UserError("responses", 0, "leave nothing to train on", "Generate more of them.")
        self.objective = Objective(draft, settings.loss, settings.temperature)
        self.optimizers = Optimizers(draft, settings.optimizer)
        self.progress = Progress()
        # False while weights and counters do not belong together: not a state to save.
        self._whole = True
        check_temperature(self.held_out, settings.temperature)

    def resume(self) -> bool:
        """Load the state file if there is one; UserError when it is of another run."""
        found = load_state(self.folder, self._identity())
        if found is None:
            return False
        tensors, progress = found
        own = {k.removeprefix("draft."): v for k, v in tensors.items() if k.startswith("draft.")}
        self.draft.load_state_dict(own)
        self.optimizers.load_tensors(tensors)
        self.progress = Progress(**progress)
        return True

    def start(self, tick: Tick = lambda what, done, total: None) -> bool:
        """Start a run that does not resume by regression on its first samples; returns whether
        that was possible (see `start_by_regression`)."""
        if self.draft.fc.in_features > LARGEST_WIDTH:
            return False
        count, positions = 0, 0
        while count < len(self.source) and positions < START_POSITIONS:
            positions += self.source.length(count)
            count += 1
        samples = []
        for index in range(count):
            samples += self.source.take([index])
            tick("features", index + 1, count)
        return start_by_regression(
            self.draft, samples, lambda done, total: tick("start by regression", done, total)
        )

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[TrainEvent]:
        """Train until the budget is used up or `stop` turns true, saving on the way and at the end.

        A run that uses up its budget has validated its last step. The state is saved too when the
        consumer of the events stops early (Ctrl-C). Raises DivergedError when the loss or its
        gradient is not finite; the state saved then is that of the last good step.
        """
        settings, progress = self.settings, self.progress
        order = batches(
            len(self.source), settings.batch_size, self.source.length, settings.seed, progress.step
        )
        clock = _Clock(progress.seconds)
        fraction = settings.budget.fraction(progress.step, progress.seconds)
        try:
            while fraction < 1.0 and not stop():
                event = self._step(next(order), fraction)
                progress.seconds = clock.seconds()
                fraction = settings.budget.fraction(progress.step, progress.seconds)
                if self.held_out and (
                    fraction >= 1.0 or clock.due("validate", settings.validate_every_seconds)
                ):
                    event = replace(event, expectation=self.validate())
                    progress.seconds = clock.seconds()
                    fraction = settings.budget.fraction(progress.step, progress.seconds)
                if clock.due("save", settings.save_every_seconds):
                    self.save()
                yield replace(event, fraction=fraction)
            # A run that was stopped within its last validation has yet to do it.
            validated = progress.history and progress.history[-1]["step"] == progress.step
            if self.held_out and progress.step and fraction >= 1.0 and not validated:
                self.validate()
        finally:
            if self._whole:
                progress.seconds = clock.seconds()
                self.save()

    def _step(self, indices: list[int], fraction: float) -> TrainEvent:
        """One optimizer step; neither time nor what happens between steps enters it."""
        settings, progress = self.settings, self.progress
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + progress.step)
        samples = self.source.take(indices)
        check_temperature(samples, settings.temperature)
        batch = make_batch(samples, self.draft.config.block_size, settings.anchors, generator)
        waited = time.perf_counter() - started
        self.draft.train()
        factor = learning_rate_factor(fraction, settings.warmup)
        loss, statistics = self.objective(batch)
        # Responses of one token have nothing to learn from.
        norm = self._descend(loss, factor) if statistics.num_slots else 0.0
        progress.step += 1
        progress.blocks += statistics.num_blocks
        progress.tokens += sum(len(sample.tokens) - sample.prompt_length for sample in samples)
        self._whole = True
        return TrainEvent(
            progress=progress,
            fraction=fraction,
            statistics=statistics,
            learning_rate_factor=factor,
            gradient_norm=norm,
            waited_seconds=waited,
            expectation=None,
        )

    def _descend(self, loss: torch.Tensor, factor: float) -> float:
        """Backward and one optimizer step; returns the gradient's norm."""
        try:
            if not math.isfinite(float(loss.detach())):
                raise DivergedError(f"the loss is {float(loss.detach())}")
            loss.backward()  # type: ignore[no-untyped-call]
            self._whole = False
            return self.optimizers.step(factor)
        except DivergedError as error:
            self._whole = True
            raise DivergedError(
                f"training diverged at step {self.progress.step + 1}: {error}; the weights are "
                f"those of the step before. Use a lower lr than {self.settings.optimizer.lr} or a "
                "longer warmup, and check the responses' features for values that are not finite."
            ) from None

    def validate(self) -> Expectation:
        """Expected acceptance on the held-out samples; a new best is saved under `best/`.

        Samples without a whole block measure nothing: the latest draft then counts as the best.
        """
        self.draft.eval()
        expectation = expected_acceptance(
            self.objective, self.held_out, greedy=self.settings.greedy_rollouts
        )
        progress = self.progress
        progress.history.append(
            {
                "step": progress.step,
                "seconds": round(progress.seconds, 1),
                "acceptance_length": expectation.acceptance_length,
                "joint": expectation.joint,
            }
        )
        measured = expectation.num_blocks > 0
        better = expectation.acceptance_length > progress.best_acceptance_length
        if measured and better:
            progress.best_acceptance_length = expectation.acceptance_length
        if better or not measured:
            save_draft(self.draft, self.folder / BEST)
            # A run that resumes must know of it, or a worse draft would take its place.
            self.save()
        return expectation

    def save(self) -> None:
        """Replace the state file and `last/`; with nothing held out `best/` is the same draft."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"draft.{name}": value for name, value in self.draft.state_dict().items()}
        tensors |= self.optimizers.tensors()
        save_state(self.folder, tensors, self._identity(), asdict(self.progress))
        save_draft(self.draft, self.folder / LAST)
        if not self.held_out:
            save_draft(self.draft, self.folder / BEST)

    def _identity(self) -> dict[str, Any]:
        lengths = [self.source.length(index) for index in range(len(self.source))]
        digest = hashlib.sha256(repr(lengths).encode()).hexdigest()[:16]
        return {
            **self.settings.comparable(),
            "draft": draft_identity(self.draft),
            "responses": {"count": len(lengths), "lengths": digest},
        }


class _Clock:
    """Wall time of a run over its parts, and intervals within it."""

    def __init__(self, before: float) -> None:
        self._before = before
        self._started = time.perf_counter()
        self._last: dict[str, float] = {}

    def seconds(self) -> float:
        return self._before + time.perf_counter() - self._started

    def due(self, what: str, every: float) -> bool:
        """Whether `every` seconds have passed since this was last due (or since the start)."""
        now = time.perf_counter()
        if now - self._last.get(what, self._started) < every:
            return False
        self._last[what] = now
        return True
