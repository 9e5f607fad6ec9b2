"""The whole path on a tiny target: generate, train, eval; and what each command refuses."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tiny_targets import save_tiny_target

from sparksmith.cli.main import main
from sparksmith.draft.checkpoint import load_draft
from sparksmith.eval.trace import read_traces


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    rows = [{"prompt_id": f"p{n}", "prompt": f"say {n}"} for n in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def responses(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "responses"
    arguments = ["generate", "--target", str(target), "--prompts", str(prompts)]
    arguments += ["--out", str(out), "--max-new-tokens", "24", "--dtype", "float32"]
    assert main(arguments) == 0
    return out


def train(target: Path, responses: Path, out: Path, *more: str) -> int:
    arguments = ["train", "--target", str(target), "--responses", str(responses)]
    arguments += ["--out", str(out), "--layers", "1", "--block-size", "3", "--markov-rank", "8"]
    arguments += ["--draft-vocab", "128", "--taps", "0,1", "--steps", "6", "--held-out", "4"]
    return main([*arguments, "--dtype", "float32", *more])


@pytest.fixture(scope="module")
def draft(target: Path, responses: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "draft"
    assert train(target, responses, out) == 0
    return out


def evaluate(target: Path, draft: str, out: Path, *more: str) -> int:
    arguments = ["eval", "--target", str(target), "--draft", draft, "--out", str(out)]
    return main([*arguments, "--dtype", "float32", "--max-new-tokens", "16", *more])


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return content


def message(capsys: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"\s+", " ", capsys.readouterr().err)


def test_train_leaves_a_draft_and_its_record(draft: Path) -> None:
    config = load_draft(draft / "best").config
    assert (config.block_size, config.target_layer_ids) == (3, (0, 1))
    assert config.draft_vocab_size == 128
    run = record(draft)
    assert run["outcome"] == "complete"
    assert run["results"]["steps"] == 6
    assert run["results"]["expected_acceptance_length"] >= 1.0
    assert run["inputs"]["responses"]["sha256"]


def test_eval_writes_traces_and_reports(target: Path, draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    code = evaluate(
        target, str(draft / "best"), out, "--workload", "code", "--limit", "2", "--lossless", "2"
    )
    assert code == 0
    traces = list(read_traces(out / "traces.jsonl"))
    assert [trace.arm for trace in traces].count("speculative") == 2
    assert len(traces) == 4
    for trace in traces:
        assert trace.entropy_lower is not None
        assert len(trace.entropy_lower) == len(trace.token_ids)
    summary = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert summary["losslessness"]["prompts"] == 2
    assert summary["losslessness"]["differences"] == 0
    assert "code" in summary["workloads"]
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "report.md").is_file()


def test_eval_of_the_ngram_drafter_on_a_file(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert evaluate(target, "ngram", out, "--prompts", str(prompts), "--limit", "2") == 0
    assert len(list(read_traces(out / "traces.jsonl"))) == 4


def test_a_stopped_eval_goes_on(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    options = ("--workload", "code", "--limit", "2", "--lossless", "0")
    assert evaluate(target, "ngram", out, *options) == 0
    lines = (out / "traces.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    # As a kill in the second prompt leaves it: one arm of it, and half a line of the other.
    (out / "traces.partial.jsonl").write_text("".join(lines[:3]) + lines[3][:40], encoding="utf-8")
    (out / "traces.jsonl").unlink()
    assert evaluate(target, "ngram", out, *options) == 0
    resumed = [json.loads(line) for line in (out / "traces.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in lines]
    assert [row["token_ids"] for row in resumed] == [row["token_ids"] for row in before]
    assert resumed[0] == before[0], "the finished prompt was measured again"


def test_train_refuses_another_runs_folder(
    target: Path, responses: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = (draft / "best" / "model.safetensors").read_bytes()
    assert train(target, responses, draft, "--lr", "0.5") == 2
    assert "already holds another run" in message(capsys)
    assert (draft / "best" / "model.safetensors").read_bytes() == best


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--workload", "cooking"), "choose from"),
        (("--max-new-tokens", "100000"), "max_new_tokens"),
        (("--temperature", "-1"), "temperature"),
        (("--accept-rule", "typical"), "--accept-rule"),
    ],
)
def test_eval_refuses(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    wanted: str,
) -> None:
    assert evaluate(target, "ngram", tmp_path / "report", *options) == 2
    assert wanted in message(capsys).lower()
    assert not (tmp_path / "report").exists()


def test_eval_refuses_a_broken_prompt_line(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "fine"}\n{"prompt": \n', encoding="utf-8")
    assert evaluate(target, "ngram", tmp_path / "report", "--prompts", str(broken)) == 2
    assert "broken.jsonl:2" in message(capsys)


def test_eval_refuses_a_draft_of_another_target(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_target(tmp_path / "other", hidden_size=48)
    assert evaluate(other, str(draft / "best"), tmp_path / "report", "--limit", "1") == 2
    assert "the target that this draft was trained for" in message(capsys).lower()
