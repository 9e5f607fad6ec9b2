"""K3's path over servers, as docs/k3.md has it, on a small real model: every step a command, what
a command writes used as it is."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from vllm_engine import CPU, TOOLS
from vllm_server import printed_server, script_server, vllm_server

from sparksmith.cli.main import main
from sparksmith.eval.trace import read_traces
from sparksmith.verify.embedded import embedded_model

pytestmark = [pytest.mark.vllm, pytest.mark.embedded]

TAPS = "3,9,15,21,27"
INTERPRETED = {**CPU, "PYTHONPATH": TOOLS, "TRITON_INTERPRET": "1"}


def command(*arguments: str | Path) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def test_from_a_servers_answers_to_the_report_of_a_live_server(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = embedded_model()
    responses, features, made, served = (
        tmp_path / name for name in ("responses", "features", "made", "served")
    )
    shared = tmp_path / "shared"
    shared.mkdir()
    asked = ["--count", "24", "--temperature", "0.5", "--max-new-tokens", "40"]
    with vllm_server(folder, tmp_path / "plain.log", environment=CPU) as plain:
        command("generate", "--endpoint", plain, *asked, "--out", responses)

        capturing = ["capture", "--responses", responses, "--target", "embedded", "--taps", TAPS]
        capturing += ["--dtype", "float32", "--shared", shared]
        capsys.readouterr()
        command(*capturing, "--print-server", "--hardware", "cpu")
        printed = capsys.readouterr().out
        with printed_server(printed, tmp_path / "capture.log", CPU) as url:
            command(*capturing, "--endpoint", url, "--out", features)
        assert not list(shared.iterdir())

        shape = ["--layers", "1", "--block-size", "3", "--draft-vocab", "2048"]
        command("train", "--features", features, *shape, "--steps", "40", "--out", made)
        command("export", made / "best", served, "--target", "embedded", "--dtype", "float32")
        command("check", served, "--target", "embedded", "--no-probe")
        serving = ["--target", folder, "--hardware", "cpu", "--temperature", "0"]
        command("vllm", served, *serving, "--context", "512", "--write")

        detailed = ("--per-request-spec-decode-metrics", "detailed")
        script = served / "serve.sh"
        before = script.read_bytes()
        with script_server(script, tmp_path / "fast.log", INTERPRETED, detailed) as fast:
            out = tmp_path / "report"
            arms = ["--endpoint", fast, "--baseline-endpoint", plain]
            how = ["--temperature", "0", "--max-new-tokens", "24", "--limit", "2"]
            workloads = ["--workload", "code", "--workload", "creative"]
            about = ["--target", "embedded", "--draft", served, "--lossless", "2"]
            command("eval", *arms, *how, *workloads, *about, "--out", out)
        assert script.read_bytes() == before

    report: dict[str, Any] = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert report["losslessness"]["equal"] == 2
    assert any("agree" in note for note in report["notes"])
    assert report["settings"]["speculative_config"]["draft_sample_method"] == "greedy"
    assert set(report["workloads"]) == {"code", "creative"}
    for group in report["workloads"].values():
        assert group["acceptance"]["acceptance_length"]["value"] >= 1
        assert group["speed"]["ratio"]["value"] is not None
    by_prompt: dict[tuple[str, str], dict[str, list[int]]] = {}
    for trace in read_traces(out / "traces.jsonl"):
        by_prompt.setdefault((trace.workload, trace.prompt_id), {})[trace.arm] = trace.token_ids
    assert all(arms["speculative"] == arms["autoregressive"] for arms in by_prompt.values())
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "draft_sample_method" in page
    assert os.fspath(folder) not in page
