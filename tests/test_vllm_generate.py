"""`generate --endpoint` against a live vLLM: what it writes, what it survives, what it costs."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FAULTS, fault_proxy
from vllm_drafts import save_speaking_target
from vllm_server import vllm_server

from sparksmith.cli.main import main
from sparksmith.distill.shards import ResponseRow, read_responses

pytestmark = pytest.mark.vllm

COUNT = 10
GREEDY = ["--temperature", "0", "--max-new-tokens", "20"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speaking_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def url(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("server") / "log"
    with vllm_server(target, log, options=("--max-num-seqs", "8")) as url:
        yield url


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    rows = [{"prompt_id": f"p{n}", "prompt": f"say {n}"} for n in range(COUNT)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def expected(
    target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, ResponseRow]:
    """What the same target answers in-process."""
    out = tmp_path_factory.mktemp("own") / "responses"
    arguments = ["generate", "--target", str(target), "--dtype", "float32", *GREEDY]
    assert main([*arguments, "--prompts", str(prompts), "--out", str(out)]) == 0
    return rows(out)


def rows(folder: Path) -> dict[str, ResponseRow]:
    found = list(read_responses(folder))
    assert len({row.request_id for row in found}) == len(found)
    return {row.request_id: row for row in found}


def ask(url: str, prompts: Path, out: Path, *more: str) -> int:
    arguments = ["generate", "--endpoint", url, "--prompts", str(prompts), "--out", str(out)]
    return main([*arguments, *GREEDY, *more])


def results(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return content


def same(one: dict[str, ResponseRow], other: dict[str, ResponseRow]) -> bool:
    def essence(rows: dict[str, ResponseRow]) -> dict[str, Any]:
        return {
            k: (r.messages, r.prompt_ids, r.token_ids, r.finish_reason) for k, r in rows.items()
        }

    return essence(one) == essence(other)


@pytest.mark.parametrize("how", [[], ["--stream"], ["--batch-size", "1"], ["--format", "parquet"]])
def test_it_writes_what_the_target_answers_in_process(
    how: list[str], url: str, prompts: Path, expected: dict[str, ResponseRow], tmp_path: Path
) -> None:
    assert ask(url, prompts, tmp_path / "out", *how) == 0
    assert same(rows(tmp_path / "out"), expected)
    record = results(tmp_path / "out")
    server = record["attempts"][-1]["conditions"]["server"]
    assert (server["model"], server["engine"], server["version"]) == ("target", "vllm", "0.32.0")
    spent = record["results"]["spent"]
    assert spent["answer"] == sum(len(row.token_ids) for row in expected.values())
    assert spent["prompt"] == sum(len(row.prompt_ids) for row in expected.values())


@pytest.mark.parametrize("stream", [[], ["--stream"]])
def test_every_fault_is_survived(
    stream: list[str],
    url: str,
    prompts: Path,
    expected: dict[str, ResponseRow],
    tmp_path: Path,
) -> None:
    with fault_proxy(url, FAULTS, silence=14.0) as (proxied, proxy):
        patience = ["--timeout", "12", "--batch-size", "3"]
        assert ask(proxied, prompts, tmp_path / "out", *patience, *stream) == 0
        assert [fault for fault in proxy.suffered if fault != "ok"] == list(FAULTS)
        # Slow is not lost: all others are sent again.
        assert len(proxy.suffered) == COUNT + len(FAULTS) - 1
    assert same(rows(tmp_path / "out"), expected)


def test_a_request_that_keeps_failing_is_set_aside(
    url: str,
    target: Path,
    expected: dict[str, ResponseRow],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prompts = tmp_path / "long.jsonl"
    texts = [f"say {n}" for n in range(COUNT)]
    texts[4] = "x" * 600  # longer than the server's context
    lines = [json.dumps({"prompt_id": f"p{n}", "prompt": text}) for n, text in enumerate(texts)]
    prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert ask(url, prompts, tmp_path / "out") == 1
    assert same(rows(tmp_path / "out"), {k: r for k, r in expected.items() if k != "p4"})
    (aside,) = (tmp_path / "out" / "failed.jsonl").read_text().splitlines()
    assert json.loads(aside)["request_id"] == "p4"
    assert "HTTP 400" in json.loads(aside)["reason"]
    assert "1 set aside" in capsys.readouterr().err


def test_every_turn_is_the_targets_own(url: str, target: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "turns.jsonl"
    recorded = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "an answer of somebody else"},
        {"role": "user", "content": "two"},
    ]
    lines = [{"prompt_id": "chat", "messages": recorded}, {"prompt_id": "t", "turns": ["a", "b"]}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    assert ask(url, prompts, tmp_path / "out") == 0
    found = rows(tmp_path / "out")
    assert found.keys() == {"chat#1", "chat#2", "t#1", "t#2"}
    first, second = found["chat#1"], found["chat#2"]
    assert [m["role"] for m in second.messages] == ["system", "user", "assistant", "user"]
    assert second.messages[2]["content"] == first.text
    # The first answer stands in the second prompt, as the server's template writes it.
    assert second.prompt_ids[: len(first.prompt_ids)] == first.prompt_ids


def test_a_server_without_token_ids(
    url: str,
    target: Path,
    prompts: Path,
    expected: dict[str, ResponseRow],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """vLLM told to leave them out, as other servers do."""
    without = ["--extra-body", '{"return_token_ids": false}']
    assert ask(url, prompts, tmp_path / "none", *without) == 2
    assert "--target" in capsys.readouterr().err
    there = ["--target", str(target)]
    assert ask(url, prompts, tmp_path / "out", *without, *there) == 0
    assert f"{COUNT} answers came without token ids" in capsys.readouterr().err
    found = rows(tmp_path / "out")
    assert found.keys() == expected.keys()
    assert all(row.prompt_ids == expected[key].prompt_ids for key, row in found.items())


def test_a_budget_stops_it_and_a_larger_one_goes_on(
    url: str,
    prompts: Path,
    expected: dict[str, ResponseRow],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prices = ["--price-prompt", "0.60", "--price-answer", "2.50", "--batch-size", "1"]
    assert ask(url, prompts, tmp_path / "out", *prices, "--budget", "0.0003") == 0
    said = capsys.readouterr()
    assert "budget reached" in said.err
    spent = results(tmp_path / "out")["results"]["spent"]
    assert 0 < spent["dollars"] <= 0.0003
    assert 0 < len(rows(tmp_path / "out")) < COUNT
    assert ask(url, prompts, tmp_path / "out", *prices, "--budget", "1") == 0
    assert same(rows(tmp_path / "out"), expected)


def test_the_key_is_nowhere(
    url: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    monkeypatch.setenv("SPARKSMITH_API_KEY", "sk-very-secret")
    assert ask(url, prompts, tmp_path / "out") == 0
    said = capfd.readouterr()
    assert "sk-very-secret" not in said.out + said.err
    for file in (tmp_path / "out").iterdir():
        assert b"sk-very-secret" not in file.read_bytes()


def test_killed_at_twenty_moments_it_ends_as_undisturbed(
    url: str, prompts: Path, expected: dict[str, ResponseRow], tmp_path: Path
) -> None:
    arguments = ["generate", "--endpoint", url, "--prompts", str(prompts), *GREEDY]
    arguments += ["--out", str(tmp_path / "out"), "--batch-size", "1"]
    rng = random.Random(7)
    kills = 0
    with fault_proxy(url, ["slow"] * 1000) as (proxied, _proxy):
        arguments[2] = proxied
        while kills < 20:
            process = subprocess.Popen(
                [sys.executable, "-c", "from sparksmith.cli.main import main; main()", *arguments],
                env={**os.environ, "COLUMNS": "80"},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            record, end = tmp_path / "out" / "ledger.jsonl", time.monotonic() + 60
            size = record.stat().st_size if record.exists() else 0
            # From the moment at which it asks.
            while time.monotonic() < end and process.poll() is None:
                if record.exists() and record.stat().st_size > size:
                    break
                time.sleep(0.005)
            time.sleep(rng.uniform(0.0, 0.9))
            process.send_signal(signal.SIGKILL)
            process.wait()
            kills += 1
            if (tmp_path / "out").exists() and len(_safe(tmp_path / "out")) == COUNT:
                break
    assert ask(url, prompts, tmp_path / "out", "--batch-size", "1") == 0
    assert same(rows(tmp_path / "out"), expected)
    spent = results(tmp_path / "out")["results"]["spent"]
    assert spent["lost_requests"] >= 1


def _safe(folder: Path) -> dict[str, ResponseRow]:
    try:
        return rows(folder)
    except ValueError:
        return {}


def test_a_server_that_dies_and_comes_back(
    target: Path, prompts: Path, expected: dict[str, ResponseRow], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with vllm_server(target, tmp_path / "first.log") as first:
        arguments = ["generate", "--endpoint", first, "--prompts", str(prompts), *GREEDY]
        arguments += ["--out", str(out), "--batch-size", "1"]
        process = subprocess.Popen(
            [sys.executable, "-c", "from sparksmith.cli.main import main; main()", *arguments]
        )
        end = time.monotonic() + 60
        while time.monotonic() < end and not _some(out, 2):
            time.sleep(0.01)
    # It stopped answering in the middle; the rest is set aside, with the reason.
    process.wait(timeout=300)
    held = rows(out)
    assert 2 <= len(held) <= COUNT
    assert same(held, {key: expected[key] for key in held})
    aside = out / "failed.jsonl"
    lost = [json.loads(line) for line in aside.read_text().splitlines()] if aside.exists() else []
    assert len(lost) == COUNT - len(held)
    with vllm_server(target, tmp_path / "second.log") as second:
        assert ask(second, prompts, out, "--batch-size", "1") == 0
    assert same(rows(out), expected)
    assert not aside.exists()


def _some(folder: Path, count: int) -> bool:
    return len(_safe(folder)) >= count if folder.exists() else False
