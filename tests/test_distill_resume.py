"""A run that is killed, interrupted or left goes on to the same bits, or says why it cannot."""

import itertools
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_samples import (
    SAMPLING,
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

from sparksmith.distill.features import OnlineFeatures
from sparksmith.distill.loss import LossWeights
from sparksmith.distill.optimizers import OptimizerSettings
from sparksmith.distill.samples import TrainingSample
from sparksmith.distill.state import STATE_FILE
from sparksmith.distill.training import Trainer
from sparksmith.draft.checkpoint import load_draft
from sparksmith.draft.errors import UserError
from sparksmith.draft.model import DSparkDraft

STEPS = 40


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    return samples_of(TARGET, rollouts(TARGET, 12))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_resuming_is_bit_exact(
    tmp_path: Path, samples: list[TrainingSample], optimizer: Any
) -> None:
    wanted = train_settings(optimizer=OptimizerSettings(name=optimizer))
    whole = tiny_trainer(tmp_path / "whole", samples, wanted)
    losses = [event.statistics.loss for event in whole.run()]
    # Saved and validated after each step, and a new trainer in each of three parts.
    busy = replace(wanted, validate_every_seconds=0.0, save_every_seconds=0.0)
    heard: list[float] = []
    for part in (5, 1, 6):
        run = tiny_trainer(tmp_path / "parts", samples, busy)
        assert run.resume() == bool(heard)
        assert run.progress.step == len(heard)
        heard += [event.statistics.loss for event in itertools.islice(run.run(), part)]
    assert heard == losses
    assert equal(weights(run.draft), weights(whole.draft))
    assert run.progress.blocks == whole.progress.blocks
    assert run.progress.tokens == whole.progress.tokens
    finished = tiny_trainer(tmp_path / "parts", samples, busy)
    assert finished.resume()
    assert list(finished.run()) == []


_CHILD = """
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
import test_distill_resume as tests
tests.long_run(Path(sys.argv[1]))
"""


def long_run(folder: Path) -> None:
    """A run over online features, resumed if there is something to resume."""
    source = OnlineFeatures(TARGET, rollouts(TARGET, 12), SAMPLING, cache_bytes=20_000)
    wanted = train_settings(STEPS, validate_every_seconds=0.05, save_every_seconds=0.02)
    run = Trainer(fitting_draft(TARGET), wanted, folder, (source, source.take([0, 1])))
    run.resume()
    for event in run.run():
        print(event.progress.step, flush=True)


def killed_child(folder: Path, kill_after: float) -> tuple[int, list[int]]:
    """Run `long_run` in a process and kill -9 it `kill_after` seconds after its first step.

    Returns its exit code and the steps that it reported.
    """
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(here), *sys.path])}
    command = [sys.executable, "-c", _CHILD, str(folder)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, cwd=here, env=environment
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        time.sleep(kill_after)
        process.send_signal(signal.SIGKILL)
        lines += process.stdout.read().split()
    return process.returncode, [int(line) for line in lines if line.strip()]


def test_kill_9_costs_nothing(tmp_path: Path) -> None:
    code, steps = killed_child(tmp_path / "killed", 0.2)
    assert code == -signal.SIGKILL
    assert 0 < steps[-1] < STEPS
    long_run(tmp_path / "killed")
    long_run(tmp_path / "whole")
    killed, whole = (load_draft(tmp_path / name / "last") for name in ("killed", "whole"))
    assert equal(weights(killed), weights(whole))
    assert not list((tmp_path / "killed").glob(".*"))  # no half-written state is left


def test_what_a_killed_save_left_is_removed(tmp_path: Path, samples: list[TrainingSample]) -> None:
    """Our own temporary name, and the one that safetensors itself writes to beside a file."""
    list(tiny_trainer(tmp_path, samples, train_settings(1)).run())
    (tmp_path / "last" / ".tmpAb3dEf").write_bytes(b"half a draft")
    (tmp_path / f".{STATE_FILE}.77.tmp").write_bytes(b"half a state")
    assert tiny_trainer(tmp_path, samples, train_settings(2)).resume()
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_another_run_in_the_folder_is_named(tmp_path: Path, samples: list[TrainingSample]) -> None:
    list(tiny_trainer(tmp_path, samples, train_settings(1)).run())
    differing = train_settings(
        5, loss=LossWeights(tv=0.5), optimizer=OptimizerSettings(lr=3e-3, weight_decay=0.1)
    )
    with pytest.raises(UserError) as caught:
        tiny_trainer(tmp_path, samples, differing).resume()
    assert "loss.tv is 0.9 there and 0.5 here" in str(caught.value)
    assert "optimizer.weight_decay is 0.0 there and 0.1 here" in str(caught.value)
    assert "lr" not in str(caught.value)
    for change, name in (
        ({"block_size": 5}, "draft.block_size is 4 there and 5 here"),
        ({"draft_vocab_size": 30}, "draft.draft_vocab_size"),
    ):
        with pytest.raises(UserError, match=name):
            tiny_trainer(tmp_path, samples, train_settings(5), **change).resume()
    with pytest.raises(UserError, match=r"responses\.count is 12 there and 11 here"):
        tiny_trainer(tmp_path, samples[:11], train_settings(5)).resume()
    assert tiny_trainer(tmp_path, samples, train_settings(99, save_every_seconds=5.0)).resume()


def test_other_words_of_the_same_number_are_another_draft(
    tmp_path: Path, samples: list[TrainingSample]
) -> None:
    list(tiny_trainer(tmp_path, samples, train_settings(1), draft_vocab_size=30).run())
    config = fitting_draft(TARGET, draft_vocab_size=30).config
    other = DSparkDraft(config, torch.arange(30))
    other.bind(TARGET.embed_weight, TARGET.head_weight)
    run = Trainer(other, train_settings(1), tmp_path, (InMemory(samples), []))
    with pytest.raises(UserError, match=r"draft\.words"):
        run.resume()


def test_a_broken_state_file_is_named(tmp_path: Path, samples: list[TrainingSample]) -> None:
    (tmp_path / STATE_FILE).write_bytes(b"nothing of the kind")
    with pytest.raises(UserError, match=STATE_FILE):
        tiny_trainer(tmp_path, samples, train_settings()).resume()


def test_a_step_cut_short_is_not_saved(
    tmp_path: Path, samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C may arrive inside the optimizer: half a step is no state to resume from."""
    run = tiny_trainer(tmp_path, samples, train_settings(save_every_seconds=0.0))
    events = run.run()
    next(events)
    saved = (tmp_path / STATE_FILE).read_bytes()

    def interrupted(_factor: float) -> float:
        with torch.no_grad():
            run.draft.fc.weight.add_(1.0)
        raise KeyboardInterrupt

    monkeypatch.setattr(run.optimizers, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(events)
    assert (tmp_path / STATE_FILE).read_bytes() == saved


def test_leaving_the_loop_saves(tmp_path: Path, samples: list[TrainingSample]) -> None:
    run = tiny_trainer(tmp_path, samples, train_settings())
    events = run.run()
    for _ in range(3):
        next(events)
    events.close()
    again = tiny_trainer(tmp_path, samples, train_settings())
    assert again.resume()
    assert again.progress.step == 3
    assert equal(weights(again.draft), weights(run.draft))
    stopped = list(again.run(stop=lambda: again.progress.step >= 5))
    assert [event.progress.step for event in stopped] == [5, 5]  # one counter, shared
