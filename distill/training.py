"""The training loop: batches in, checkpoints and progress out, killable at any moment.

The state file holds everything a run is made of; it is replaced in one rename, so a run that is
killed goes on from the last one as if nothing had happened (with a step budget: bit for bit).
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from sparksmith.distill.loss import LossWeights
from sparksmith.distill.objective import Objective, StepStatistics
from sparksmith.distill.optimizers import Optimizers, OptimizerSettings
from sparksmith.distill.samples import TrainingSample, make_batch
from sparksmith.distill.schedule import Budget, batches, learning_rate_factor
from sparksmith.distill.validation import Expectation, expected_acceptance
from sparksmith.draft.checkpoint import save_draft
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing
from sparksmith.draft.model import DSparkDraft

STATE_FILE = "state.safetensors"
BEST, LAST = "best", "last"


class SampleSource(Protocol):
    """Where training samples come from: online features, a cache in memory, later a store."""

    def __len__(self) -> int: ...

    def length(self, index: int) -> int: ...

    def take(self, indices: Sequence[int]) -> list[TrainingSample]: ...


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """What defines a run besides its data; equal settings are demanded when resuming.

    `temperature` is that at which the draft will serve. `batch_size` counts sequences a step,
    `anchors` the most blocks of each.
    """

    budget: Budget
    temperature: float = 0.7
    batch_size: int = 4
    anchors: int = 64
    warmup: float = 0.04
    seed: int = 0
    loss: LossWeights = field(default_factory=LossWeights)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    validate_every_seconds: float = 60.0
    save_every_seconds: float = 60.0

    def __post_init__(self) -> None:
        for name in ("batch_size", "anchors"):
            if getattr(self, name) < 1:
                raise UserError(name, getattr(self, name), "is not positive", "Use 1 or more.")
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
    """Counters of a run, saved with it. `seconds` is wall time over all its parts."""

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

    def resume(self) -> bool:
        """Load the state file if there is one; UserError when it is of another run."""
        path = self.folder / STATE_FILE
        if not path.is_file():
            return False
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            saved = json.loads(metadata["settings"])
            wanted = json.loads(json.dumps(self.settings.comparable()))
            if differing := [key for key in wanted if wanted[key] != saved.get(key)]:
                raise UserError(
                    "out",
                    str(self.folder),
                    f"holds a run with other settings: {', '.join(differing)}",
                    "Give the same settings to resume it, or another folder.",
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        own = {k.removeprefix("draft."): v for k, v in tensors.items() if k.startswith("draft.")}
        self.draft.load_state_dict(own)
        self.optimizers.load_tensors(tensors)
        self.progress = Progress(**json.loads(metadata["progress"]))
        return True

    def run(self, stop: Callable[[], bool] = lambda: False) -> Iterator[TrainEvent]:
        """Train until the budget is used up or `stop` turns true, saving on the way and at the end.

        The state is saved too when the consumer of the events stops early (Ctrl-C).
        """
        settings, progress = self.settings, self.progress
        order = batches(
            len(self.source), settings.batch_size, self.source.length, settings.seed, progress.step
        )
        clock = _Clock(progress.seconds)
        try:
            while not stop():
                progress.seconds = clock.seconds()
                fraction = settings.budget.fraction(progress.step, progress.seconds)
                if fraction >= 1.0:
                    break
                yield self._step(next(order), fraction, clock)
        finally:
            progress.seconds = clock.seconds()
            self.save()

    def _step(self, indices: list[int], fraction: float, clock: "_Clock") -> TrainEvent:
        settings, progress = self.settings, self.progress
        started = time.perf_counter()
        generator = torch.Generator().manual_seed(settings.seed * 1_000_003 + progress.step)
        samples = self.source.take(indices)
        batch = make_batch(samples, self.draft.config.block_size, settings.anchors, generator)
        waited = time.perf_counter() - started
        self.draft.train()
        loss, statistics = self.objective(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        factor = learning_rate_factor(fraction, settings.warmup)
        norm = self.optimizers.step(factor)
        progress.step += 1
        progress.blocks += statistics.num_blocks
        progress.tokens += sum(len(sample.tokens) - sample.prompt_length for sample in samples)
        done = settings.budget.fraction(progress.step, clock.seconds()) >= 1.0
        expectation = None
        if self.held_out and (done or clock.due("validate", settings.validate_every_seconds)):
            expectation = self.validate()
        if clock.due("save", settings.save_every_seconds):
            progress.seconds = clock.seconds()
            self.save()
        return TrainEvent(
            progress=progress,
            fraction=settings.budget.fraction(progress.step, clock.seconds()),
            statistics=statistics,
            learning_rate_factor=factor,
            gradient_norm=norm,
            waited_seconds=waited,
            expectation=expectation,
        )

    def validate(self) -> Expectation:
        """Expected acceptance on the held-out samples; a new best is saved under `best/`."""
        self.draft.eval()
        expectation = expected_acceptance(self.objective, self.held_out)
        progress = self.progress
        progress.history.append(
            {
                "step": progress.step,
                "seconds": round(progress.seconds, 1),
                "acceptance_length": expectation.acceptance_length,
                "joint": expectation.joint,
            }
        )
        if expectation.acceptance_length > progress.best_acceptance_length:
            progress.best_acceptance_length = expectation.acceptance_length
            save_draft(self.draft, self.folder / BEST)
        return expectation

    def save(self) -> None:
        """Replace the state file and `last/`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        tensors = {f"draft.{name}": value for name, value in self.draft.state_dict().items()}
        tensors |= self.optimizers.tensors()
        metadata = {
            "settings": json.dumps(self.settings.comparable()),
            "progress": json.dumps(asdict(self.progress)),
        }
        with replacing(self.folder / STATE_FILE) as temporary:
            save_file(
                {name: value.contiguous() for name, value in tensors.items()}, temporary, metadata
            )
        save_draft(self.draft, self.folder / LAST)


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
