"""`eval --endpoint` and `decode --endpoint` against live servers: their counts are those of
in-process decoding, their times those at which tokens came."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fault_proxy import FAULTS, ONE_BY_ONE, fault_proxy
from vllm_drafts import SPEAKING, save_random_draft, save_speaking_target, speculative
from vllm_server import vllm_server

from sparksmith.cli.main import main
from sparksmith.eval.trace import Trace, read_traces

pytestmark = pytest.mark.vllm

COUNT = 6
GREEDY = ["--temperature", "0", "--max-new-tokens", "24"]
DETAILED = ("--per-request-spec-decode-metrics", "detailed")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speaking_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft") / "draft"
    save_random_draft(folder, SPEAKING)
    return folder


@pytest.fixture(scope="module")
def fast(target: Path, draft: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("fast") / "log"
    options = (*DETAILED, "--max-num-seqs", "4")
    with vllm_server(target, log, speculative=speculative(draft), options=options) as url:
        yield url


@pytest.fixture(scope="module")
def plain(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with vllm_server(target, tmp_path_factory.mktemp("plain") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    rows = [
        {"prompt_id": f"p{n}", "prompt": f"say {n}", "workload": ("code", "creative")[n % 2]}
        for n in range(COUNT)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def live(url: str, prompts: Path, out: Path, *more: str) -> int:
    arguments = ["eval", "--endpoint", url, "--prompts", str(prompts), "--out", str(out)]
    return main([*arguments, *GREEDY, *more])


def report(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "report.json").read_text(encoding="utf-8"))
    return content


def by_arm(folder: Path) -> dict[tuple[str, str], Trace]:
    return {(t.arm, t.prompt_id): t for t in read_traces(folder / "traces.jsonl")}


def test_a_live_report_agrees_with_the_one_in_process(
    fast: str, plain: str, target: Path, draft: Path, prompts: Path, tmp_path: Path
) -> None:
    there = ["--target", str(target), "--draft", str(draft)]
    assert live(fast, prompts, tmp_path / "live", "--baseline-endpoint", plain, *there) == 0
    own = ["eval", *there, "--dtype", "float32", "--prompts", str(prompts), *GREEDY]
    assert main([*own, "--min-survival", "0", "--out", str(tmp_path / "own")]) == 0
    served, here = by_arm(tmp_path / "live"), by_arm(tmp_path / "own")
    assert served.keys() == here.keys()
    for key, trace in here.items():
        other = served[key]
        assert other.token_ids == trace.token_ids
        assert other.accepted is not None
        assert trace.accepted is not None
        # The last step here drafts no more than can be emitted.
        assert other.accepted[: len(trace.accepted) - 1] == trace.accepted[:-1]
        # All words but twelve are equally unlikely: twenty leave little open.
        bounds = zip(
            trace.entropy_lower or (), other.entropy_lower or (), other.entropy_upper or (),
            strict=True,
        )  # fmt: skip
        for exact, low, high in bounds:
            assert low - 1e-3 <= exact <= high + 1e-3
        assert other.first_token_seconds is not None
        assert other.decode_seconds is not None
    made = report(tmp_path / "live")
    assert made["losslessness"]["equal"] == made["losslessness"]["prompts"] == COUNT
    (note,) = made["notes"]
    assert "agree" in note
    overall = made["overall"]
    assert overall["speed"]["paired_prompts"] == COUNT
    assert (
        abs(
            overall["acceptance"]["acceptance_length"]["value"]
            - report(tmp_path / "own")["overall"]["acceptance"]["acceptance_length"]["value"]
        )
        < 0.05
    )
    assert made["settings"]["servers"] == {
        "speculative": "vllm 0.32.0",
        "autoregressive": "vllm 0.32.0",
    }
    assert made["settings"]["chat_template_sha256"]
    assert "say 0" in made["settings"]["first_prompt"]


def test_the_counters_alone_give_the_same_acceptance(
    target: Path, draft: Path, prompts: Path, tmp_path: Path, fast: str
) -> None:
    assert live(fast, prompts, tmp_path / "metrics") == 0
    with vllm_server(target, tmp_path / "log", speculative=speculative(draft)) as url:
        assert live(url, prompts, tmp_path / "counters") == 0
    one, other = (report(tmp_path / name) for name in ("metrics", "counters"))
    assert "counters alone" in " ".join(other["notes"])
    for kind in ("steps", "accepted", "drafted"):
        assert one["overall"]["acceptance"][kind] == other["overall"]["acceptance"][kind]
    rates = [
        [row["joint"]["value"] for row in made["overall"]["positions"]] for made in (one, other)
    ]
    assert rates[0] == pytest.approx(rates[1])


def test_a_plain_server_is_recognised_and_serves_as_an_earlier_run(
    fast: str, plain: str, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert live(plain, prompts, tmp_path / "plain") == 0
    assert "drafts nothing" in capsys.readouterr().out
    assert live(fast, prompts, tmp_path / "both", "--baseline-run", str(tmp_path / "plain")) == 0
    assert report(tmp_path / "both")["overall"]["speed"]["paired_prompts"] == COUNT
    assert live(fast, prompts, tmp_path / "x", "--baseline-endpoint", fast) == 2
    assert "drafts tokens itself" in capsys.readouterr().err


def test_several_users_give_a_surface(fast: str, prompts: Path, tmp_path: Path) -> None:
    assert live(fast, prompts, tmp_path / "out", "--concurrency", "1,3") == 0
    rows = report(tmp_path / "out")["surface"]
    assert [row["users"] for row in rows] == [1, 3]
    assert all(row["failed"] == 0 and row["tokens_per_second_user"] > 0 for row in rows)
    assert "Several users at once" in (tmp_path / "out" / "report.html").read_text()


def test_another_user_on_the_server_is_noticed(
    fast: str, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparksmith.eval import live as live_module

    ask = live_module._ask
    strangers = []

    def with_a_stranger(endpoint: Any, prompt: Any, settings: Any) -> Any:
        if len(strangers) == 4:
            endpoint.complete([dict(m) for m in prompt.messages], {"max_tokens": 6})
        strangers.append(1)
        return ask(endpoint, prompt, settings)

    monkeypatch.setattr(live_module, "_ask", with_a_stranger)
    assert live(fast, prompts, tmp_path / "out") == 0
    assert any("another user was on the server" in w for w in report(tmp_path / "out")["warnings"])


def test_an_evaluation_that_was_stopped_goes_on(fast: str, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert live(fast, prompts, out, "--limit", str(COUNT)) == 0
    whole = report(out)
    # As it lies after a kill: some prompts done, a line cut short.
    lines = []
    for trace in read_traces(out / "traces.jsonl"):
        account = {
            "drafts": 0, "drafted": 0, "accepted": 0, "counters": None, "unordered": 0,
            "repeated": 0,
            "cached_prompt_tokens": 0, "without_entropy": 0, "failed": [], "first_prompt": None,
        }  # fmt: skip
        line = {"number": len(lines), "traces": [vars(trace)], "account": account}
        lines.append(json.dumps(line))
    (out / "traces.partial.jsonl").write_text("\n".join(lines[:2]) + "\n" + lines[2][:40])
    assert live(fast, prompts, out, "--limit", str(COUNT)) == 0
    again = report(out)
    assert again["overall"]["acceptance"]["steps"] == whole["overall"]["acceptance"]["steps"]


def test_decode_streams_from_the_server(fast: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["decode", "say 3", "--endpoint", fast, "--temperature", "0"]
    assert main([*arguments, "--max-new-tokens", "20", "--marks", "brackets"]) == 0
    said = capsys.readouterr()
    assert "acceptance length" in said.err
    assert "tokens/s" in said.err
    assert said.out.strip()


def test_every_fault_is_survived(fast: str, prompts: Path, tmp_path: Path) -> None:
    assert live(fast, prompts, tmp_path / "undisturbed") == 0
    # One request says whether the server drafts, one warms it up.
    plan = ["ok", "ok", *ONE_BY_ONE]
    with fault_proxy(fast, plan) as (proxied, proxy):
        assert live(proxied, prompts, tmp_path / "disturbed") == 0
        assert [fault for fault in proxy.suffered if fault != "ok"] == list(FAULTS)
    one, other = by_arm(tmp_path / "undisturbed"), by_arm(tmp_path / "disturbed")
    assert one.keys() == other.keys()
    assert [t.token_ids for t in one.values()] == [t.token_ids for t in other.values()]
    assert [t.accepted for t in one.values()] == [t.accepted for t in other.values()]
    notes = " ".join(report(tmp_path / "disturbed")["notes"])
    assert "requests were sent again after a failure" in notes
    assert "agree" in notes


def test_results_of_vllms_own_benchmark_stand_beside(
    fast: str, target: Path, prompts: Path, tmp_path: Path
) -> None:
    words = [
        sys.executable,
        "-m",
        "vllm.entrypoints.cli.main",
        "bench",
        "serve",
        "--base-url",
        fast,
    ]
    words += ["--model", "target", "--tokenizer", str(target), "--dataset-name", "random"]
    words += ["--random-input-len", "8", "--random-output-len", "8", "--ignore-eos"]
    words += ["--num-prompts", "3", "--max-concurrency", "1", "--save-result"]
    subprocess.run(
        [*words, "--result-filename", str(tmp_path / "bench.json")], check=True, timeout=300
    )
    assert live(fast, prompts, tmp_path / "out", "--bench", str(tmp_path / "bench.json")) == 0
    made = report(tmp_path / "out")
    (row,) = made["surface"]
    assert (row["users"], row["requests"], row["failed"]) == (1, 3, 0)
    theirs = json.loads((tmp_path / "bench.json").read_text())
    (note,) = [note for note in made["notes"] if "vllm bench serve" in note]
    assert f"acceptance length {theirs['spec_decode_acceptance_length']:.2f}" in note


def test_a_server_that_dies_and_comes_back(
    target: Path, draft: Path, prompts: Path, fast: str, tmp_path: Path
) -> None:
    """What failed is said, and asked again; what was measured is not."""
    assert live(fast, prompts, tmp_path / "undisturbed") == 0
    with fault_proxy(fast, ["ok", "ok", "ok", "ok", *["refused"] * 12]) as (proxied, proxy):
        assert live(proxied, prompts, tmp_path / "out") == 0
        assert any("2 requests failed" in w for w in report(tmp_path / "out")["warnings"])
        before = len(proxy.suffered)
        assert live(proxied, prompts, tmp_path / "out") == 0
        # One asks whether the server drafts, one warms it up, one is for the first prompt's text;
        # each of the other two is followed by the pass for its entropies.
        assert len(proxy.suffered) - before == 3 + 2 * 2
    one, other = by_arm(tmp_path / "undisturbed"), by_arm(tmp_path / "out")
    assert one.keys() == other.keys()
    assert all(one[key].token_ids == other[key].token_ids for key in one)
    assert not any("failed" in w for w in report(tmp_path / "out")["warnings"])
    assert not (tmp_path / "out" / "traces.partial.jsonl").exists()
