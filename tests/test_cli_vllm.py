"""`sparksmith vllm`: configs without a finding, for every preset's form, hardware and goal."""

import json
import os
import re
import shlex
import subprocess
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
from sparksmith.verify.target_facts import k3_facts
from sparksmith.verify.vllm_config import HARDWARE, Plan, Request, memory, plan

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced": {"draft_vocab_size": 20},
    "fill-in": {"sample_from_anchor": False},
    "latent": MLA,
}


# K3 takes up to sixteen devices: as many heads.
WIDE: dict[str, Any] = {"hidden_size": 20, "num_attention_heads": 16, "num_key_value_heads": 16}


def k3(folder: Path, **changes: Any) -> Path:
    """K3's configuration at the size of the tiny drafts."""
    text = {
        "num_hidden_layers": 93,
        "hidden_size": 20,
        "vocab_size": 50,
        "max_position_embeddings": 1_048_576,
        **changes,
    }
    folder.mkdir()
    values = {"model_type": "kimi_k3", "text_config": text}
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


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
    folder = saved(tmp_path / "draft", "prefix_sum", **{**KINDS[kind], **WIDE})
    target = k3(tmp_path / "target")
    arguments = ["vllm", str(folder), "--target", str(target), "--hardware", hardware]
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
    folder = saved(tmp_path / "draft", stream, **{**MLA, **WIDE})
    target = k3(tmp_path / "target")
    assert main(["vllm", str(folder), "--target", str(target)]) == 0
    assert f"VLLM_KIMI_K3_AUX_ATTN_RES_STREAM={value}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("changes", "options", "field"),
    [
        ({"markov_head_type": "rnn"}, (), "markov_head_type"),
        ({"markov_rank": 0, "enable_confidence_head": False}, (), "markov_rank"),
        ({}, ("--hardware", "tpu"), "--hardware"),
        ({}, ("--goal", "fun"), "--goal"),
        ({}, ("--context", "0"), "--context"),
        ({}, ("--context", str(2**31 + 1)), "--context"),
        ({}, ("--temperature", "-1"), "--temperature"),
        ({}, ("--temperature", "nan"), "--temperature"),
        ({}, ("--temperature", "inf"), "--temperature"),
        ({}, ("--target", ""), "--target"),
        ({}, ("--target", "/no/such"), "--target"),
        ({}, ("--target", "a b/c"), "--target"),
        # Another width, vocabulary and depth than the published ones of K3.
        ({}, ("--target", "moonshotai/Kimi-K3"), "num_attention_heads"),
        (WIDE, ("--target", "moonshotai/Kimi-K3"), "hidden-size"),
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
    target = [] if "--target" in options else ["--target", "org/t"]
    assert main(["vllm", str(folder), *target, *options]) == 2
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


def planned(name: str, hardware: str, **changes: Any) -> Plan:
    request = Request(
        target="moonshotai/Kimi-K3",
        draft="d",
        hardware=HARDWARE[hardware],
        is_k3=True,
        facts=k3_facts("moonshotai/Kimi-K3"),
    )
    config = preset(name)
    return plan(replace(request, **changes), config, Manifest.of(config, None))


@pytest.mark.parametrize("hardware", HARDWARE)
@pytest.mark.parametrize("goal", ["latency", "throughput"])
@pytest.mark.parametrize("is_k3", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_value_has_a_reason(
    hardware: str, goal: Any, is_k3: bool, temperature: float
) -> None:
    made = planned("k3-mla", hardware, goal=goal, is_k3=is_k3, temperature=temperature)
    emitted = made.options.keys() | made.environment.keys() | made.speculative.keys()
    assert emitted - made.reasons.keys() == set()
    assert made.reasons.keys() - emitted <= {"draft_sample_method"}
    assert all(made.reasons.values())
    # A draft's features are never in the prefix cache, whatever the target.
    assert "no-enable-prefix-caching" in made.options


def test_the_recipes_own_flags() -> None:
    hopper = planned("k3-mla", "h200")
    assert hopper.environment["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    assert hopper.environment["VLLM_ENGINE_READY_TIMEOUT_S"] == "3600"
    assert hopper.environment["VLLM_USE_RUST_FRONTEND"] == "1"
    assert (hopper.options["max-model-len"], hopper.options["max-num-seqs"]) == ("32768", "5")
    rocm = planned("k3-mla", "mi355x", goal="throughput")
    assert rocm.options["max-num-seqs"] == "128"
    assert "FULL_DECODE_ONLY" in (rocm.options["compilation-config"] or "")
    assert rocm.environment["SAFETENSORS_FAST_GPU"] == "1"
    assert rocm.environment["VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4"] == "1"
    assert rocm.environment["AITER_BF16_FP8_MOE_BOUND"] == "0"
    assert planned("k3-mla", "b300").options["max-model-len"] == "1048576"


@pytest.mark.parametrize(
    ("hardware", "size", "nodes"),
    [("b300", 8, None), ("gb300", 8, 2), ("gb200", 16, 4), ("b200", 16, 2), ("h200", 16, 2)],
)
def test_several_nodes_are_one_tensor_parallel_group(
    hardware: str, size: int, nodes: int | None
) -> None:
    made = planned("k3-gqa", hardware, head_node="10.0.0.1")
    # In pipeline stages the recipe serves no draft.
    assert "pipeline-parallel-size" not in made.options
    assert made.options["tensor-parallel-size"] == str(size)
    assert made.options.get("nnodes") == (None if nodes is None else str(nodes))
    assert made.options.get("master-addr") == (None if nodes is None else "10.0.0.1")


def test_heads_that_do_not_divide_over_the_devices_are_refused() -> None:
    config = replace(preset("k3-gqa"), num_attention_heads=24, num_key_value_heads=8)
    request = Request(target="t", draft="d", hardware=HARDWARE["b200"], is_k3=True)
    with pytest.raises(ValueError, match=r"24 do not divide over the 16 devices.*b300"):
        plan(request, config, Manifest.of(config, None))
    odd = replace(config, num_key_value_heads=3)
    request = replace(request, hardware=HARDWARE["b300"])
    with pytest.raises(ValueError, match="num_key_value_heads"):
        plan(request, odd, Manifest.of(odd, None))


@pytest.mark.parametrize("k3_type", [True, False])
def test_k3_is_known_by_its_configuration(
    k3_type: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "draft", "prefix_sum", **{**MLA, **WIDE})
    target = k3(tmp_path / ("served" if k3_type else "kimi-k3"))
    if not k3_type:
        path = target / "config.json"
        path.write_text(path.read_text().replace("kimi_k3", "llama"))
    assert main(["vllm", str(folder), "--target", str(target)]) == 0
    assert ("tool-call-parser" in capsys.readouterr().out) == k3_type


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden_size": 28}, "hidden-size"),
        ({"vocab_size": 60}, "vocab-size"),
        ({"num_hidden_layers": 3}, "tap-range"),
        ({"num_hidden_layers": "x"}, "num_hidden_layers"),
    ],
)
def test_a_target_that_the_draft_does_not_fit_is_refused(
    change: dict[str, Any], field: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "draft", "prefix_sum", **{**MLA, **WIDE})
    target = k3(tmp_path / "target", **change)
    assert main(["vllm", str(folder), "--target", str(target)]) == 2
    assert field in capsys.readouterr().err


def test_a_context_beyond_the_targets_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "draft", **WIDE)
    target = k3(tmp_path / "target", max_position_embeddings=512)
    assert main(["vllm", str(folder), "--target", str(target), "--context", "513"]) == 2
    assert "the target's length" in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert main(["vllm", str(folder), "--target", str(target)]) == 0
    printed = capsys.readouterr().out
    assert "--max-model-len 512 " in printed
    assert "requests of 512 tokens" in printed


def test_what_is_written_works_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "a draft", **WIDE)
    k3(tmp_path / "target")
    monkeypatch.chdir(tmp_path)
    assert main(["vllm", "a draft", "--target", "target", "--write", "--quiet"]) == 0
    caught = capsys.readouterr()
    config = json.loads(caught.out)
    assert config["model"] == str(folder)
    assert "serve.sh" in caught.err
    assert json.loads((folder / "speculative.json").read_text()) == config
    fake = tmp_path / "bin" / "vllm"
    fake.parent.mkdir()
    fake.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    said = subprocess.run(
        [folder / "serve.sh", "--port", "80"],
        env={"PATH": f"{fake.parent}:{os.environ['PATH']}"},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    assert said[:2] == ["serve", str(tmp_path / "target")]
    assert json.loads(said[said.index("--speculative-config") + 1]) == config
    assert said[-2:] == ["--port", "80"]


def test_a_folder_that_cannot_be_written_to_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = saved(tmp_path / "draft")
    (folder / "serve.sh").mkdir()
    assert main(["vllm", str(folder), "--target", "org/t", "--write"]) == 2
    caught = capsys.readouterr()
    assert caught.out == ""
    assert str(folder) in re.sub(r"\n", "", caught.err)


def test_memory_of_the_k3_draft_by_hand() -> None:
    config = preset("k3-mla")
    made = planned("k3-mla", "b300")
    taken = memory(made, config)
    # 2.388 B trained parameters in bfloat16.
    assert 2 * 2_387e6 < taken["weights"] < 2 * 2_389e6
    # 8 requests, 5 layers, 576 numbers a position in 8 bits; 8 x 7 tokens over 163,840 words.
    assert taken["cache"] == 8 * 5 * 576 * 1_048_576
    assert taken["logits"] == 8 * 7 * 163_840 * 2
    shipped = memory(made, config, ("embed_tokens.weight", "lm_head.weight"))
    assert shipped["weights"] - taken["weights"] == 2 * 2 * 163_840 * 7_168
    # H200s serve five requests of 32,768 tokens, with a cache in the weights' type.
    assert memory(planned("k3-mla", "h200"), config)["cache"] == 5 * 5 * 576 * 32_768 * 2
    asked = planned("k3-mla", "b300", context=4_096, temperature=0.0)
    assert memory(asked, config)["cache"] == 8 * 5 * 576 * 4_096
    assert memory(asked, config)["logits"] == 0
    windowed = replace(preset("k3-gqa"), sliding_window=2048)
    assert memory(made, windowed)["cache"] == 8 * 5 * 2 * 16 * 64 * 2048
    # A CPU computes in four bytes.
    there = planned("k3-mla", "cpu", is_k3=False, context=4_096)
    assert memory(there, config)["cache"] == 2 * 5 * 576 * 4_096 * 4
    # Its drafts are greedy, and no logits of theirs are kept.
    assert memory(there, config)["logits"] == 0


def test_small_figures_are_in_megabytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved(tmp_path / "draft")
    assert main(["vllm", str(folder), "--target", "org/t", "--hardware", "cpu"]) == 0
    printed = capsys.readouterr().out
    # 2 requests, 2 layers, 2 x 2 heads of 8, 1,024 positions, in four bytes.
    assert "0.5 MB of key/value cache for 2 requests of 1,024 tokens" in printed
