"""`sparksmith capture`, and training from what it wrote."""

import json
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_cli_path import generate
from tiny_targets import save_tiny_target

from sparksmith.cli.main import main
from sparksmith.distill.feature_store import FeatureStore
from sparksmith.draft.convert import PARITY_FILE
from sparksmith.verify import loading
from sparksmith.verify.serve_arguments import ServeArguments


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
    assert generate(target, prompts, out) == 0
    return out


def capture(target: Path, responses: Path, out: Path, *more: str) -> int:
    arguments = ["capture", "--target", str(target), "--responses", str(responses)]
    arguments += ["--out", str(out), "--taps", "0,1", "--dtype", "float32"]
    return main([*arguments, *more])


@pytest.fixture(scope="module")
def features(target: Path, responses: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "features"
    assert capture(target, responses, out) == 0
    return out


def train(out: Path, *more: str) -> int:
    arguments = ["train", "--out", str(out), "--layers", "1", "--block-size", "3"]
    arguments += ["--markov-rank", "8", "--draft-vocab", "128", "--steps", "6", "--held-out", "4"]
    return main([*arguments, "--dtype", "float32", *more])


def said(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    return " ".join((captured.out + captured.err).split())


def test_training_from_the_store_is_training_from_the_target(
    target: Path,
    responses: Path,
    features: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    online = ["--target", str(target), "--responses", str(responses), "--taps", "0,1"]
    assert train(tmp_path / "online", *online) == 0
    # No target in memory: its layers cannot be loaded at all.
    monkeypatch.setattr(loading, "_model", None)
    stored = ["--target", str(target), "--features", str(features)]
    capsys.readouterr()
    assert train(tmp_path / "stored", *stored) == 0
    # Embedding, norm and head of 258 words and 32 numbers each, in four bytes.
    assert "read 0.1 MB" in said(capsys)
    results = []
    for name in ("online", "stored"):
        results.append(load_file(tmp_path / name / "best" / "model.safetensors"))
        record = json.loads((tmp_path / name / "run.json").read_text())
        results.append(record["results"]["expected_acceptance_length"])
        manifest = json.loads((tmp_path / name / "best" / "sparksmith.json").read_text())
        results.append({**manifest, "target": manifest["target"]["tokenizer_sha256"]})
    ours, length, manifest, theirs, other_length, other_manifest = results
    assert length == other_length
    assert length is not None
    assert manifest == other_manifest
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        # The store has the shards' order, and regression sums in it.
        assert torch.allclose(tensor, theirs[name], atol=1e-5), name
    assert not (tmp_path / "stored" / "best" / PARITY_FILE).exists()


def test_the_features_know_their_target(
    features: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_target(tmp_path / "other", "llama")
    code = train(tmp_path / "out", "--features", str(features), "--target", str(other))
    assert code == 2
    assert "did not give these features" in said(capsys)
    assert train(tmp_path / "own", "--features", str(features)) == 0


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--taps", "0,2"], "--taps: (0, 2) is not that of the features"),
        (["--temperature", "0.3"], "capture with --temperature 0.3"),
        (["--top-p", "0.5"], "capture with --top-p 0.5"),
        (["--responses", "x"], "Give one of the two"),
        (["--stream", "prefix_sum"], "--stream"),
    ],
)
def test_what_does_not_fit_the_features(
    more: list[str],
    words: str,
    features: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert train(tmp_path / "out", "--features", str(features), *more) == 2
    assert words in said(capsys)
    assert not (tmp_path / "out").exists()


def test_neither_responses_nor_features(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train(tmp_path / "out") == 2
    assert "--responses" in said(capsys)


def test_greedy_responses_are_captured_for_a_temperature(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate(target, prompts, tmp_path / "greedy", "--temperature", "0") == 0
    capsys.readouterr()
    out = tmp_path / "features"
    assert capture(target, tmp_path / "greedy", out) == 2
    assert "--temperature 0.2" in said(capsys)
    assert capture(target, tmp_path / "greedy", out, "--temperature", "0.2") == 0
    assert train(tmp_path / "out", "--features", str(out), "--target", str(target)) == 0
    settings = json.loads((tmp_path / "out" / "run.json").read_text())["settings"]
    assert settings["temperature"] == 0.2
    assert settings["greedy_rollouts"] is True


def test_a_second_run_captures_what_was_added(
    target: Path, prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answered, out = tmp_path / "responses", tmp_path / "features"
    assert generate(target, prompts, answered, "--count", "10") == 0
    assert capture(target, answered, out) == 0
    assert generate(target, prompts, answered, "--count", "15") == 0
    capsys.readouterr()
    assert capture(target, answered, out) == 0
    assert "15 responses, 10 captured already" in said(capsys)
    assert len(FeatureStore.open(out)) == 15
    assert capture(target, answered, out, "--taps", "1") == 2
    assert "taps was [0, 1] and is now [1]" in said(capsys)


def test_sizes_are_said_before_and_found_after(
    target: Path, responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert capture(target, responses, tmp_path / "out", "--store", "int8") == 0
    # Two taps of 32 numbers in 8 bits, each with a scale of two bytes, and a token id.
    assert "int8: 72 bytes for each token of prompt and response and 72 more" in said(capsys)
    manifest = json.loads((tmp_path / "out" / "features.json").read_text())
    assert manifest["bytes_per_position"] == 72
    assert manifest["samples"] == 24


def test_a_full_disk_is_seen_before_the_work(
    target: Path,
    responses: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from sparksmith.cli import capture as command

    class Usage:
        free = 1000

    monkeypatch.setattr(command.shutil, "disk_usage", lambda path: Usage)
    assert capture(target, responses, tmp_path / "out") == 2
    assert "GB left" in said(capsys)
    assert not list((tmp_path / "out").glob("*.safetensors"))


def test_verify_names_what_is_damaged(
    target: Path, responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert capture(target, responses, out) == 0
    assert main(["capture", "--verify", str(out)]) == 0
    assert "24 samples in 1 shards, as they were written" in said(capsys)
    (shard,) = out.glob("*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(data)
    assert main(["capture", "--verify", str(out)]) == 1
    assert f"damaged: {shard.name} has other bytes than were written for" in said(capsys)
    # Training goes on with the rest, and says so.
    assert train(tmp_path / "draft", "--features", str(out), "--target", str(target)) == 0
    assert f"left out: {shard.name}" in said(capsys)
    shard.unlink()
    assert main(["capture", "--verify", str(out)]) == 1
    assert "is missing" in said(capsys)
    assert train(tmp_path / "none", "--features", str(out), "--target", str(target)) == 2
    assert "no usable sample" in said(capsys)
    assert capture(target, responses, out) == 0
    assert main(["capture", "--verify", str(out)]) == 0


def test_what_storing_costs_is_printed(
    target: Path, responses: Path, features: Path, tmp_path: Path, capsys: Any
) -> None:
    assert train(tmp_path / "draft", "--features", str(features), "--target", str(target)) == 0
    capsys.readouterr()
    best = str(tmp_path / "draft" / "best")
    assert capture(target, responses, features, "--measure", best) == 0
    printed = capsys.readouterr().out
    assert "on the target's own float32" in printed
    lines = [line.split() for line in printed.splitlines() if line.startswith("  ")]
    assert [line[0] for line in lines] == ["bfloat16", "float32", "int8"]
    assert lines[1][2] == "(+0.0000),"
    assert capture(target, responses, tmp_path / "f", "--measure", best, "--taps", "1") == 2
    assert "taps [0, 1]" in said(capsys)


def test_the_servers_command(
    target: Path, responses: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["capture", "--responses", str(responses), "--target", str(target)]
    arguments += ["--taps", "0,1", "--print-server"]
    assert main([*arguments, "--shared", "/mnt/states"]) == 0
    command = capsys.readouterr().out
    parsed = ServeArguments.parse(command.replace("\\\n", " "))
    assert shlex.split(command.replace("\\\n", " "))[:3] == ["vllm", "serve", str(target)]
    assert parsed.speculative == {
        "method": "extract_hidden_states",
        "num_speculative_tokens": 1,
        # Outputs of layers 0 and 1, and of the last of four.
        "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}},
    }
    assert parsed.options["enable-prefix-caching"] is False
    assert parsed.options["enable-chunked-prefill"] is False
    connector = json.loads(str(parsed.options["kv-transfer-config"]))
    assert connector["kv_connector"] == "ExampleHiddenStatesConnector"
    assert connector["kv_connector_extra_config"]["shared_storage_path"] == "/mnt/states"
    longest = parsed.number("max-model-len")
    assert longest is not None
    assert longest <= (parsed.number("max-num-batched-tokens") or 0)
    assert main(arguments) == 2
    assert "--shared" in said(capsys)


def test_k3s_server_captures_the_mixture(
    responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers.models.kimi_linear")
    mini = save_tiny_target(tmp_path / "mini", "k3_mini")
    arguments = ["capture", "--responses", str(responses), "--target", str(mini), "--taps", "0,1"]
    arguments += ["--print-server", "--shared", "/mnt/states"]
    assert main([*arguments, "--stream", "attn_res_mixture"]) == 0
    command = capsys.readouterr().out
    assert command.startswith("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1 vllm serve")
    assert "--trust-remote-code" in command


def test_a_target_that_did_not_answer(
    responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_target(tmp_path / "other", "llama")
    assert capture(other, responses, tmp_path / "out") == 2
    assert "did not give the responses" in said(capsys)


def test_a_server_that_is_not_there(
    target: Path, responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--endpoint", "http://127.0.0.1:9", "--shared", str(tmp_path)]
    assert capture(target, responses, tmp_path / "out", *more) == 2
    assert "does not answer" in said(capsys)
    assert capture(target, responses, tmp_path / "out", "--endpoint", "http://127.0.0.1:9") == 2
    assert "--shared" in said(capsys)


def test_responses_of_a_server_and_an_empty_one(
    target: Path, responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server's name for its model cannot be compared with a folder; an empty answer is left."""
    given = tmp_path / "responses"
    shutil.copytree(responses, given)
    record = json.loads((given / "run.json").read_text())
    record["inputs"]["target"] = {"model": "served"}
    (given / "run.json").write_text(json.dumps(record))
    (shard,) = given.glob("*.jsonl")
    rows = [json.loads(line) for line in shard.read_text().splitlines()]
    rows[3]["token_ids"] = []
    shard.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert capture(target, given, tmp_path / "out") == 0
    assert "a server's model served; whether that is" in said(capsys)
    store = FeatureStore.open(tmp_path / "out")
    assert store.request_ids == [row["request_id"] for row in rows if row["token_ids"]]
