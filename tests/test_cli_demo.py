"""The demo on a tiny target: it ends with a report, and an interrupted one goes on."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_targets import save_tiny_target

from sparksmith.cli import demo, distilling
from sparksmith.cli import target as targets
from sparksmith.cli.main import main
from sparksmith.distill import responses
from sparksmith.eval.prompt_sets import load_workloads
from sparksmith.verify.embedded import EmbeddedModel


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A random model in the embedded one's place."""
    # A byte is a token, so that the packaged prompts are long.
    folder = save_tiny_target(tmp_path / "target", max_position_embeddings=4096)
    model = EmbeddedModel(path=folder, fetch_seconds=0.0, convert_seconds=0.0)
    for module in (demo, targets):
        monkeypatch.setattr(module, "fetch_with_progress", lambda: model)
    monkeypatch.setattr(distilling, "HELD_OUT", 4)
    monkeypatch.setattr(distilling, "MAX_NEW_TOKENS", 16)
    return folder


def run(out: Path, *more: str) -> int:
    return main(["demo", "--out", str(out), "--budget", "0.1", "--limit", "1", *more])


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return content


@pytest.mark.usefixtures("tiny")
def test_demo_ends_with_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    assert run(out) == 0
    summary = json.loads((out / "report-1" / "report.json").read_text(encoding="utf-8"))
    assert set(summary["workloads"]) == set(demo.WORKLOADS)
    assert summary["losslessness"]["differences"] == 0
    printed = capsys.readouterr().out
    assert str(out / "report-1" / "report.html") in re.sub(r"\s", "", printed)
    assert "generate" in printed.splitlines()[-1]
    results = record(out)["results"]
    assert results["generation_seconds"] > 0
    assert results["seconds"] > 0


@pytest.mark.usefixtures("tiny")
def test_an_interrupted_demo_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "run"

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(distilling.train, "run_training", interrupted)
        assert run(out) == 130
    first = record(out)
    assert first["outcome"] == "interrupted"
    generated = first["results"]["generation_seconds"]
    with monkeypatch.context() as patch:
        # What was generated is there: nothing is generated again.
        patch.setattr(responses, "generate_responses", interrupted)
        assert run(out) == 0
    assert record(out)["results"]["generation_seconds"] == generated


@pytest.mark.parametrize(
    ("options", "field"),
    [
        (("--budget", "0"), "--budget"),
        (("--temperature", "0"), "--temperature"),
        (("--limit", "0"), "--limit"),
        (("--pretrained", "--budget", "3"), "--budget"),
    ],
)
def test_demo_refuses_before_any_work(
    options: tuple[str, ...],
    field: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fetched() -> None:
        raise AssertionError("something was fetched")

    monkeypatch.setattr(demo, "fetch_with_progress", fetched)
    assert main(["demo", "--out", str(tmp_path / "run"), *options]) == 2
    assert f"error: {field}" in capsys.readouterr().err


def test_fewer_prompts_are_spread_over_the_workload() -> None:
    chosen = [prompt.prompt_id for prompt in demo._prompts(demo.QUICK, None)]
    everything = [prompt.prompt_id for prompt in load_workloads(["code"])]
    assert len(everything) == 50
    assert chosen[:6] == [everything[number] for number in (0, 8, 16, 25, 33, 41)]
    assert len(chosen) == len(set(chosen)) == 12


def test_k3s_path_in_miniature(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers.models.kimi_linear")
    monkeypatch.setenv("SPARKSMITH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(distilling, "HELD_OUT", 4)
    monkeypatch.setattr(distilling, "MAX_NEW_TOKENS", 16)
    monkeypatch.setattr(demo, "FULL", demo.Scale(main=1, others=0, max_new_tokens=12, lossless=1))
    assert run(tmp_path / "run", "--target", "k3-mini") == 0
    assert "random weights" in capsys.readouterr().out
    best = tmp_path / "run" / "train" / "best"
    config = json.loads((best / "config.json").read_text(encoding="utf-8"))
    assert config["architectures"] == ["K3DSparkModel"]
    manifest = json.loads((best / "sparksmith.json").read_text(encoding="utf-8"))
    assert manifest["taps"]["stream"] == "prefix_sum"
    summary = json.loads((tmp_path / "run" / "report-1" / "report.json").read_text())
    assert summary["losslessness"]["differences"] == 0


@pytest.mark.parametrize("options", [("--target", "gpt2"), ("--target", "k3-mini", "--pretrained")])
def test_targets_that_the_demo_does_not_have(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["demo", "--out", str(tmp_path / "run"), *options]) == 2
    assert options[-1 if "--pretrained" in options else 0] in capsys.readouterr().err
