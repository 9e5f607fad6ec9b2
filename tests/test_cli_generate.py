"""`sparksmith generate` on tiny targets: resumes after kill -9, guards its folder, reports."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_targets import EOS, byte_tokenizer, save_tiny_target
from transformers import AutoModelForCausalLM

from sparksmith.cli.main import main
from sparksmith.distill.shards import OPEN_FILE, ResponseRow, read_responses
from sparksmith.verify.loading import render_prompt

NUM_PROMPTS = 80


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"prompt_id": f"p{n}", "prompt": f"say {n} {'x' * (n % 7)}", "category": "abc"[n % 3]}
        for n in range(NUM_PROMPTS)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def options(target: Path, prompts: Path, out: Path, *more: str) -> list[str]:
    return [
        *("generate", "--target", str(target), "--prompts", str(prompts), "--out", str(out)),
        *("--dtype", "float32", "--threads", "1", "--batch-size", "8", "--max-new-tokens", "12"),
        *more,
    ]


def responses(folder: Path) -> dict[str, ResponseRow]:
    rows = list(read_responses(folder))
    found = {row.request_id: row for row in rows}
    assert len(found) == len(rows), "a response is there twice"
    return found


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return content


# A process that dies within its fourth write, as kill -9 at that moment would have it.
DYING = """
import os, signal, sys
from sparksmith.cli.main import main
from sparksmith.distill import shards

write, calls = shards.ShardWriter._write, 0

def dying(self, data):
    global calls
    calls += 1
    if calls == 4:
        with (self.folder / shards.OPEN_FILE).open("ab") as file:
            file.write(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(self, data)

shards.ShardWriter._write = dying
main(sys.argv[1:])
"""


@pytest.mark.parametrize("shard_format", ["jsonl", "parquet"])
def test_killed_and_resumed_equals_undisturbed(
    target: Path, prompts: Path, tmp_path: Path, shard_format: str
) -> None:
    more = ("--format", shard_format, "--rows-per-shard", "20")
    killed, undisturbed = tmp_path / "killed", tmp_path / "undisturbed"
    process = subprocess.run(
        [sys.executable, "-c", DYING, *options(target, prompts, killed, *more)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    assert process.returncode == -signal.SIGKILL
    assert record(killed)["outcome"] == "running"
    before = responses(killed)
    assert 0 < len(before) < NUM_PROMPTS
    assert (killed / f"responses-00000.{shard_format}").exists()
    assert not (killed / OPEN_FILE).read_bytes().endswith(b"\n")

    assert main(options(target, prompts, killed, *more)) == 0
    assert main(options(target, prompts, undisturbed, *more)) == 0
    assert responses(killed) == responses(undisturbed)
    assert len(responses(killed)) == NUM_PROMPTS
    assert before.items() <= responses(killed).items()
    attempts = record(killed)["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["running", "complete"]
    assert record(killed)["results"]["responses"] == NUM_PROMPTS


def test_rows_hold_what_reproduces_them(target: Path, prompts: Path, tmp_path: Path) -> None:
    """Greedy answers are transformers' own for the recorded prompt ids."""
    code = main(options(target, prompts, tmp_path / "out", "--temperature", "0", "--count", "6"))
    assert code == 0
    model = AutoModelForCausalLM.from_pretrained(target, dtype="float32")
    tokenizer = byte_tokenizer()
    for row in responses(tmp_path / "out").values():
        assert row.prompt_ids == render_prompt(tokenizer, row.messages)
        tokens = list(row.prompt_ids)
        for token in row.token_ids:
            logits = model(input_ids=_batch(tokens)).logits[0, -1]
            assert int(logits.argmax()) == token
            tokens.append(token)
        stops = [token in (EOS, 7, 77) for token in row.token_ids]
        assert not any(stops[:-1])
        assert row.finish_reason == ("stop" if stops[-1] else "length")
        assert row.text == tokenizer.decode(row.token_ids, skip_special_tokens=True)
        assert row.category in ("a", "b", "c")


def _batch(tokens: list[int]) -> Any:
    import torch

    return torch.tensor([tokens])


@pytest.mark.parametrize("kind", ["kimi_linear", "mistral"])
def test_targets_without_rows_are_served_one_stream_at_a_time(
    kind: str, prompts: Path, tmp_path: Path
) -> None:
    target = save_tiny_target(tmp_path / "target", kind)
    arguments = options(target, prompts, tmp_path / "out", "--count", "3", "--max-new-tokens", "6")
    assert main(arguments) == 0
    assert len(responses(tmp_path / "out")) == 3


def test_a_folder_of_another_run_is_refused(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(options(target, prompts, out, "--count", "3")) == 0
    written = {path.name: path.read_bytes() for path in out.glob("responses-*")}
    assert main(options(target, prompts, out, "--count", "3", "--temperature", "0.5")) == 2
    message = capsys.readouterr().err
    assert "temperature was 0.7 and is now 0.5" in message
    assert "Give another folder" in message
    other = save_tiny_target(tmp_path / "other", "llama")
    assert main(options(other, prompts, out, "--count", "3")) == 2
    assert "target was" in capsys.readouterr().err
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    assert main(options(target, prompts, tmp_path / "full", "--count", "3")) == 2
    assert "holds no run" in capsys.readouterr().err
    assert written == {path.name: path.read_bytes() for path in out.glob("responses-*")}


def test_a_larger_count_adds_to_what_is_there(target: Path, tmp_path: Path) -> None:
    common = ["generate", "--target", str(target), "--out", str(tmp_path), "--threads", "1"]
    common += ["--dtype", "float32", "--max-new-tokens", "3", "--max-prompt-tokens", "400"]
    assert main([*common, "--count", "4"]) == 0
    first = responses(tmp_path)
    assert main([*common, "--count", "7"]) == 0
    assert len(responses(tmp_path)) > len(first) > 0
    assert first.items() <= responses(tmp_path).items()


def test_prompts_that_are_too_long_are_counted(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "x" * 90}, {"prompt": "short"}]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arguments = options(target, path, tmp_path / "out")
    assert main([*arguments, "--max-prompt-tokens", "60"]) == 0
    assert "1 skipped: longer than 60 tokens" in capsys.readouterr().err
    assert record(tmp_path / "out")["results"]["skipped_prompts"] == 1
    assert main([*arguments, "--max-prompt-tokens", "9"]) == 2
    assert "leaves no prompt (the shortest of 2 has 23 tokens)" in capsys.readouterr().err
    assert main([*arguments, "--max-new-tokens", "512"]) == 2
    assert "context of 512 tokens" in capsys.readouterr().err


def test_a_dataset_is_read_by_name_split_and_column(target: Path, tmp_path: Path) -> None:
    """A folder of JSON lines is a data set of the `datasets` library too."""
    folder = tmp_path / "chats"
    folder.mkdir()
    row = {"talk": [{"role": "user", "content": "hello"}], "id": "same", "label": 1}
    (folder / "train.jsonl").write_text((json.dumps(row) + "\n") * 3, encoding="utf-8")
    common = ["generate", "--target", str(target), "--threads", "1", "--max-new-tokens", "3"]
    common += ["--dtype", "float32", "--out", str(tmp_path / "out"), "--count", "2"]
    assert main([*common, "--dataset", f"{folder}:train:talk"]) == 0
    rows = responses(tmp_path / "out").values()
    assert [row.messages for row in rows] == [[{"role": "user", "content": "hello"}]] * 2
    assert main([*common, "--dataset", f"{folder}:train:nothing"]) == 2
