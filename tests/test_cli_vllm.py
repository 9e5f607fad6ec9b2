"""`sparksmith vllm`: configs without a finding, for every preset's form, hardware and goal."""

import json
import os
import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from draft_models import MLA, tiny_draft

from sparksmith.cli.main import main
from sparksmith.draft.checkpoint import export_draft
from sparksmith.draft.manifest import Manifest, write_manifest
from sparksmith.draft.presets import preset
from sparksmith.draft.rotary import Yarn
from sparksmith.verify.check_serving import KNOWN_KEYS, NEVER
from sparksmith.verify.inspection import findings, inspect
from sparksmith.verify.serve_arguments import ServeArguments
from sparksmith.verify.vllm_config import HARDWARE, Request, memory, plan

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"draft_vocab_size": 20},
    "fill-in": {"sample_from_anchor": False},
    "latent": MLA,
}


def saved(folder: Path, stream: Any = "residual", **changes: Any) -> Path:
    draft = tiny_draft(**changes)
    export_draft(draft, folder)
    write_manifest(Manifest.of(draft.config, draft.target_ids, stream=stream), folder)
    return folder


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("goal", ["latency", "throughput"])
def test_what_is_written_has_no_error(
    kind: str, hardware: str, goal: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "draft", "prefix_sum", **KINDS[kind])
    arguments = ["vllm", str(folder), "--target", "moonshotai/Kimi-K3", "--hardware", hardware]
    assert main([*arguments, "--goal", goal, "--write"]) == 0
    printed = capsys.readouterr().out
    command = (folder / "serve.sh").read_text().split("set -e\n")[1].removesuffix('  "$@"\n')
    assert command.removesuffix(" \\\n") in printed
    serve = ServeArguments.parse(command)
    assert serve.speculative == json.loads((folder / "speculative.json").read_text())
    assert serve.speculative.keys() <= KNOWN_KEYS - NEVER.keys()
    wrong = [f for f in findings(inspect(folder, None, serve)) if f.level == "error"]
    assert wrong == []
    assert os.access(folder / "serve.sh", os.X_OK)
    # Every word of the command survives a shell.
    assert shlex.split(command)[-1].startswith("{") or shlex.split(command)[-2].startswith("{")


def printed_config(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> dict[str, Any]:
    assert main(["vllm", str(folder), "--target", "org/t", "--quiet", *more]) == 0
    config: dict[str, Any] = json.loads(capsys.readouterr().out)
    return config


def test_tokens_follow_the_block(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plain = saved(tmp_path / "plain")
    fill_in = saved(tmp_path / "fill-in", sample_from_anchor=False)
    assert printed_config(plain, capsys)["num_speculative_tokens"] == 4
    assert printed_config(fill_in, capsys)["num_speculative_tokens"] == 3
    assert printed_config(plain, capsys, "--goal", "throughput")["num_speculative_tokens"] == 3


def test_sampling_methods_follow_the_temperature(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "draft")
    warm = printed_config(folder, capsys)
    assert (warm["draft_sample_method"], warm["rejection_sample_method"]) == (
        "probabilistic",
        "block",
    )
    cold = printed_config(folder, capsys, "--temperature", "0")
    assert not {"draft_sample_method", "rejection_sample_method"} & cold.keys()


@pytest.mark.parametrize(("stream", "value"), [("prefix_sum", "0"), ("attn_res_mixture", "1")])
def test_the_stream_that_was_trained_is_served(
    stream: str, value: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "draft", stream, **MLA)
    assert main(["vllm", str(folder), "--target", "moonshotai/Kimi-K3"]) == 0
    assert f"VLLM_KIMI_K3_AUX_ATTN_RES_STREAM={value}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "options", "field"),
    [
        ({"markov_head_type": "rnn"}, (), "markov_head_type"),
        ({"markov_rank": 0, "enable_confidence_head": False}, (), "markov_rank"),
        ({}, ("--hardware", "tpu"), "--hardware"),
        ({}, ("--goal", "fun"), "--goal"),
        ({}, ("--context", "0"), "--context"),
        (
            {"yarn": Yarn(factor=2.0, original_max_position_embeddings=64)},
            ("--context", "256"),
            "--context",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    changes: dict[str, Any],
    options: tuple[str, ...],
    field: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = saved(tmp_path / "draft", **changes)
    assert main(["vllm", str(folder), "--target", "org/t", *options]) == 2
    assert field in capsys.readouterr().err


def test_a_draft_with_an_error_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "draft")
    path = folder / "config.json"
    values = json.loads(path.read_text()) | {"eagle_aux_hidden_state_layer_ids": [1, 4]}
    path.write_text(json.dumps(values))
    assert main(["vllm", str(folder), "--target", "org/t"]) == 2
    assert "tap-override" in re.sub(r"\s+", " ", capsys.readouterr().err)


def test_memory_of_the_k3_draft_by_hand() -> None:
    config = preset("k3-mla")
    request = Request(target="moonshotai/Kimi-K3", draft="d", hardware=HARDWARE["b300"], is_k3=True)
    made = plan(request, config, Manifest.of(config, None))
    taken = memory(made, config, 1_000_000)
    # 8 requests, 5 layers, 576 numbers a position; 8 x 7 tokens over 163,840 words; 2 bytes each.
    assert taken["cache"] == 8 * 5 * 576 * 1_000_000 * 2
    assert taken["logits"] == 8 * 7 * 163_840 * 2
    windowed = replace(preset("k3-gqa"), sliding_window=2048)
    assert memory(made, windowed, 1_000_000)["cache"] == 8 * 5 * 2 * 16 * 64 * 2048 * 2
