"""Features from a live vLLM against those of this process, in float32, tap by tap."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from fault_proxy import FAULTS, ONE_BY_ONE, fault_proxy
from torch import Tensor
from torch.nn.functional import cosine_similarity
from vllm_drafts import save_speaking_target
from vllm_engine import CPU
from vllm_server import printed_server

from sparksmith.cli.main import main
from sparksmith.distill.feature_store import FeatureStore

pytestmark = pytest.mark.vllm


def generate(folder: Path, target: str, count: int, length: int) -> Path:
    prompts = folder / "prompts.jsonl"
    rows = [{"prompt_id": f"p{n}", "prompt": f"Say something of {n * n}."} for n in range(count)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    arguments = ["generate", "--target", target, "--prompts", str(prompts), "--dtype", "float32"]
    arguments += ["--max-new-tokens", str(length), "--out", str(folder / "responses")]
    assert main([*arguments, "--temperature", "1.0", "--top-p", "0.9"]) == 0
    return folder / "responses"


def options(target: str, responses: Path, *more: str) -> list[str]:
    arguments = ["capture", "--target", target, "--responses", str(responses)]
    return [*arguments, "--dtype", "float32", "--store", "float32", *more]


@contextmanager
def extraction_server(
    target: str, responses: Path, shared: Path, log: Path, capsys: pytest.CaptureFixture[str]
) -> Iterator[str]:
    """A server started by the command that sparksmith prints."""
    capsys.readouterr()
    arguments = options(target, responses, "--print-server", "--hardware", "cpu")
    assert main([*arguments, "--shared", str(shared)]) == 0
    with printed_server(capsys.readouterr().out, log, CPU) as url:
        yield url


def differences(ours: Path, theirs: Path) -> dict[str, tuple[float, float]]:
    """By tensor, and by tap: the largest difference over the tensor's largest magnitude, and the
    least cosine of a token."""
    one, other = FeatureStore.open(ours), FeatureStore.open(theirs)
    assert one.request_ids == other.request_ids
    worst: dict[str, tuple[float, float]] = {}
    for index in range(len(one)):
        (mine,), (served,) = one.take([index]), other.take([index])
        assert torch.equal(mine.tokens, served.tokens)
        count = len(one.contents.taps)
        pairs: list[tuple[str, Tensor, Tensor]] = [
            (f"tap {tap}", a, b)
            for tap, a, b in zip(
                one.contents.taps,
                mine.features.taps.chunk(count, -1),
                served.features.taps.chunk(count, -1),
                strict=True,
            )
        ]
        pairs.append(("hidden", mine.features.hidden, served.features.hidden))
        for name, a, b in pairs:
            difference = float((a - b).abs().max() / a.abs().max())
            cosine = float(cosine_similarity(a.double(), b.double(), dim=-1).min())
            largest, least = worst.get(name, (0.0, 1.0))
            worst[name] = (max(largest, difference), min(least, cosine))
        assert torch.allclose(mine.features.log_norm, served.features.log_norm, atol=1e-3)
        assert torch.allclose(mine.features.threshold, served.features.threshold, atol=1e-2)
    return worst


def check_equal(ours: Path, theirs: Path) -> None:
    worst = differences(ours, theirs)
    print()
    for name, (difference, cosine) in worst.items():
        print(f"{name}: largest difference {difference:.2e}, least cosine 1 - {1 - cosine:.1e}")
        assert difference <= 1e-5, name
        assert cosine > 1 - 1e-6, name
    assert len(worst) == len(FeatureStore.open(ours).contents.taps) + 1


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(save_speaking_target(tmp_path_factory.mktemp("target")))


def test_a_tiny_target(target: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Equal features; a run killed at several moments and resumed gives the same store; a server
    that captures another number of layers is told from the right one."""
    responses = generate(tmp_path, target, 64, 48)
    shared = tmp_path / "shared"
    shared.mkdir()
    own = ["--taps", "0,1", "--shard-mib", "1"]
    assert main(options(target, responses, *own, "--out", str(tmp_path / "ours"))) == 0
    with extraction_server(target, responses, shared, tmp_path / "log", capsys) as url:
        served = [*own, "--endpoint", url, "--shared", str(shared)]
        theirs = tmp_path / "theirs"
        # Two servers as far as the client knows.
        twice = [*served, "--endpoint", url]
        assert main(options(target, responses, *twice, "--out", str(theirs))) == 0
        with capsys.disabled():
            check_equal(tmp_path / "ours", theirs)
        assert not list(shared.iterdir())
        assert len(FeatureStore.open(theirs).shards) > 1

        # One request at a time rounds alike whenever it runs.
        alone = [*served, "--in-flight", "1"]
        whole, killed = tmp_path / "whole", tmp_path / "killed"
        assert main(options(target, responses, *alone, "--out", str(whole))) == 0
        again = options(target, responses, *alone, "--out", str(killed))
        for shards in (0, 1, 2):
            kill_after(shards, again, killed)
        rng = random.Random(3)
        for _ in range(17):
            kill_after(0, again, killed, rng.uniform(0.0, 1.0))
        assert main(options(target, responses, *alone, "--out", str(killed))) == 0
        for path in whole.glob("features*"):
            assert (killed / path.name).read_bytes() == path.read_bytes()
        time.sleep(1.0)
        assert main(options(target, responses, *alone, "--out", str(killed))) == 0
        assert not list(shared.iterdir())

        # Answers refused, cut short, late, lost: every text is asked for until it is there.
        with fault_proxy(url, ONE_BY_ONE) as (proxied, proxy):
            disturbed = tmp_path / "disturbed"
            through = [*own, "--endpoint", proxied, "--shared", str(shared), "--in-flight", "1"]
            assert main(options(target, responses, *through, "--out", str(disturbed))) == 0
            assert [fault for fault in proxy.suffered if fault != "ok"] == list(FAULTS)
        one, other = FeatureStore.open(whole), FeatureStore.open(disturbed)
        assert one.request_ids == other.request_ids
        for index in range(len(one)):
            (mine,), (served,) = one.take([index]), other.take([index])
            assert torch.equal(mine.features.taps, served.features.taps)
        time.sleep(1.0)
        assert main(options(target, responses, *through, "--out", str(disturbed))) in (0, 2)
        assert not list(shared.iterdir())

        capsys.readouterr()
        wrong = ["--endpoint", url, "--shared", str(shared), "--taps", "0", "--out"]
        assert main(options(target, responses, *wrong, str(tmp_path / "w"))) == 2
        assert "captured layers" in " ".join(capsys.readouterr().err.split())

    # A draft from the server's features, without the target.
    arguments = ["train", "--features", str(theirs), "--target", target, "--steps", "2"]
    arguments += ["--layers", "1", "--block-size", "3", "--draft-vocab", "128"]
    arguments += ["--mask-token-id", "257"]
    assert main([*arguments, "--out", str(tmp_path / "draft")]) == 0


def kill_after(shards: int, arguments: list[str], out: Path, seconds: float = 0.3) -> None:
    """Start capture, and kill it so many seconds after so many shards are there."""
    program = "import sys; from sparksmith.cli.main import main; sys.exit(main(sys.argv[1:]))"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    try:
        while process.poll() is None:
            if (out / "features.json").exists() and len(list(out.glob("*.safetensors"))) >= shards:
                time.sleep(seconds)
                break
            time.sleep(0.01)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.embedded
def test_smollm2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    responses = generate(tmp_path, "embedded", 6, 24)
    shared = tmp_path / "shared"
    shared.mkdir()
    assert main(options("embedded", responses, "--out", str(tmp_path / "ours"))) == 0
    with extraction_server("embedded", responses, shared, tmp_path / "log", capsys) as url:
        served = ["--endpoint", url, "--shared", str(shared), "--out", str(tmp_path / "theirs")]
        assert main(options("embedded", responses, *served)) == 0
    with capsys.disabled():
        check_equal(tmp_path / "ours", tmp_path / "theirs")
    assert not list(shared.iterdir())
