"""Training learns, stops before it spoils the weights, and survives kill -9 to the last bit."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_samples import (
    TARGET,
    InMemory,
    equal,
    fitting_draft,
    rollouts,
    samples_of,
    tiny_trainer,
    train_settings,
    weights,
)
from draft_models import MLA

from sparksmith.distill.optimizers import DivergedError, OptimizerSettings
from sparksmith.distill.samples import TrainingSample
from sparksmith.distill.training import Trainer, TrainEvent
from sparksmith.draft.checkpoint import load_draft
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    return samples_of(TARGET, rollouts(TARGET, 12))


@pytest.mark.parametrize(
    ("optimizer", "draft"),
    [("adamw", {"draft_vocab_size": 30}), ("muon", {"draft_vocab_size": 30}), ("adamw", MLA)],
)
def test_a_draft_learns_a_few_samples_by_heart(
    tmp_path: Path, samples: list[TrainingSample], optimizer: Any, draft: dict[str, Any]
) -> None:
    wanted = train_settings(
        60, anchors=64, batch_size=4, optimizer=OptimizerSettings(name=optimizer, lr=2e-2)
    )
    run = tiny_trainer(tmp_path, samples[:4], wanted, **draft)
    events = list(run.run())
    first, last = events[0].statistics, events[-1].statistics
    assert len(events) == 60
    assert last.loss < 0.75 * first.loss
    assert sum(last.overlap) > sum(first.overlap) + 0.5
    assert events[-1].fraction == 1.0
    assert events[0].learning_rate_factor == 0.05
    before = run.progress.history[0]["acceptance_length"]
    assert events[-1].expectation is not None
    assert before == events[-1].expectation.acceptance_length  # validated once, at the end


def test_checkpoints_load_and_history_is_kept(
    tmp_path: Path, samples: list[TrainingSample]
) -> None:
    run = tiny_trainer(
        tmp_path, samples, train_settings(validate_every_seconds=0.0), draft_vocab_size=30
    )
    scores = []
    states = []
    for event in run.run():
        assert event.expectation is not None
        scores.append(event.expectation.acceptance_length)
        states.append(weights(run.draft))
    assert [entry["acceptance_length"] for entry in run.progress.history] == scores
    assert [entry["step"] for entry in run.progress.history] == list(range(1, 13))
    best = max(range(12), key=lambda step: scores[step])
    assert run.progress.best_acceptance_length == scores[best]
    assert equal(weights(load_draft(tmp_path / "best")), states[best])
    last = load_draft(tmp_path / "last")
    assert equal(weights(last), states[-1])
    assert torch.equal(last.target_ids, run.draft.target_ids)


def too_short(samples: list[TrainingSample]) -> list[TrainingSample]:
    """The samples, ended after one token: no slot of them is supervised."""
    return [
        replace(s, tokens=s.tokens[: s.prompt_length + 1], features=replace(
            s.features,
            taps=s.features.taps[: s.prompt_length],
            hidden=s.features.hidden[:1],
            log_norm=s.features.log_norm[:1],
            threshold=s.features.threshold[:1],
        ))
        for s in samples
    ]  # fmt: skip


@pytest.mark.parametrize("held_out", ["nothing", "too short"])
def test_with_nothing_to_measure_the_last_draft_is_the_best(
    tmp_path: Path, samples: list[TrainingSample], held_out: str
) -> None:
    held = too_short(samples[:3]) if held_out == "too short" else []
    wanted = train_settings(4, validate_every_seconds=0.0)
    run = Trainer(fitting_draft(TARGET), wanted, tmp_path, (InMemory(samples), held))
    list(run.run())
    assert run.progress.best_acceptance_length == 0.0
    assert equal(weights(load_draft(tmp_path / "best")), weights(run.draft))


def test_a_run_stopped_in_its_last_validation_validates_when_it_goes_on(
    tmp_path: Path, samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_trainer: Trainer) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "validate", interrupted)
        with pytest.raises(KeyboardInterrupt):
            list(tiny_trainer(tmp_path, samples, train_settings(3)).run())
    assert not (tmp_path / "best").exists()
    run = tiny_trainer(tmp_path, samples, train_settings(3))
    assert run.resume()
    assert list(run.run()) == []
    assert [entry["step"] for entry in run.progress.history] == [3]
    assert equal(weights(load_draft(tmp_path / "best")), weights(run.draft))


@pytest.mark.parametrize("where", ["taps", "log_norm"])
def test_divergence_stops_before_the_weights_are_spoilt(
    tmp_path: Path, samples: list[TrainingSample], where: str
) -> None:
    run = tiny_trainer(tmp_path, samples, train_settings())
    events = run.run()
    next(events)
    before = weights(run.draft)
    broken = [
        replace(s, features=replace(s.features, **{where: getattr(s.features, where) * torch.nan}))
        for s in samples
    ]
    run.source = InMemory(broken)
    with pytest.raises(DivergedError, match=r"step 2.*lower lr than 0\.003"):
        next(events)
    assert equal(weights(run.draft), before)
    assert equal(weights(load_draft(tmp_path / "last")), before)
    assert run.progress.step == 1


def test_minutes_are_a_budget_with_a_last_validation(
    tmp_path: Path, samples: list[TrainingSample]
) -> None:
    run = tiny_trainer(tmp_path, samples, train_settings(None))
    last: TrainEvent | None = None
    started = time.perf_counter()
    for event in run.run():
        last = event
    assert time.perf_counter() - started < 1.2 + 5.0
    assert last is not None
    assert last.fraction == 1.0
    assert last.expectation is not None
    assert run.progress.history[-1]["step"] == run.progress.step
    assert run.progress.seconds >= 1.2


def test_validation_leaves_generators_alone(tmp_path: Path, samples: list[TrainingSample]) -> None:
    run = tiny_trainer(tmp_path, samples, train_settings())
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    before = weights(run.draft)
    first = run.validate()
    assert torch.equal(torch.rand(1), expected)
    assert run.validate() == first
    assert equal(weights(run.draft), before)


def test_features_of_another_temperature_are_refused(samples: list[TrainingSample]) -> None:
    with pytest.raises(UserError, match="temperature"):
        tiny_trainer(Path("unused"), samples, train_settings(temperature=1.0))
    other = samples_of(TARGET, rollouts(TARGET, 1), Sampling(temperature=1.0))
    run = Trainer(
        fitting_draft(TARGET),
        train_settings(temperature=1.0),
        Path("unused"),
        (InMemory(samples), other),
    )
    with pytest.raises(UserError, match="temperature"):
        run._step([0], 0.0)


def test_responses_too_short_to_learn_from_change_nothing(
    tmp_path: Path, samples: list[TrainingSample]
) -> None:
    run = tiny_trainer(tmp_path, too_short(samples), train_settings(3))
    before = weights(run.draft)
    assert [event.statistics.num_slots for event in run.run()] == [0, 0, 0]
    assert equal(weights(run.draft), before)
    assert run.progress.step == 3


@pytest.mark.parametrize(
    "change", [{"batch_size": 0}, {"anchors": 0}, {"temperature": 0.0}, {"warmup": 1.0}]
)
def test_unfit_settings_are_refused(change: dict[str, float]) -> None:
    with pytest.raises(UserError, match=next(iter(change))):
        train_settings(**change)
