"""A draft's record against a live vLLM: it agrees, and a fault of the engine is named."""

import shutil
from pathlib import Path

import pytest
from vllm_drafts import SPEAKING, edit, save_random_draft, save_speaking_target, speculative
from vllm_engine import DSPARK
from vllm_server import vllm_server

from sparksmith.cli.main import main

pytestmark = pytest.mark.vllm
DETAILED = ("--per-request-spec-decode-metrics", "detailed")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_speaking_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def draft(target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    save_random_draft(folder / "own", SPEAKING)
    arguments = ["convert", str(folder / "own"), str(folder / "draft"), "--to", "vllm"]
    assert main([*arguments, "--target", str(target), "--parity"]) == 0
    return folder / "draft"


def checked(
    draft: Path, target: Path, url: str, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    capsys.readouterr()
    arguments = ["check", str(draft), "--target", str(target), "--no-probe"]
    code = main([*arguments, "--parity", "--endpoint", url])
    return code, " ".join(capsys.readouterr().out.split())


def test_a_server_that_computes_the_same(
    draft: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "log"
    with vllm_server(target, log, speculative=speculative(draft), options=DETAILED) as url:
        code, printed = checked(draft, target, url, capsys)
        assert code == 0, printed
        assert f"{url} gives its text and accepts in every step what it says" in printed
        # Without the target's weights at hand, the counts alone are compared.
        assert main(["check", str(draft), "--parity", "--endpoint", url, "--no-probe"]) == 0


def test_a_server_without_detailed_metrics(
    draft: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with vllm_server(target, tmp_path / "log", environment=DSPARK) as url:
        code, printed = checked(draft, target, url, capsys)
    assert code == 1
    assert "--per-request-spec-decode-metrics detailed" in printed


def test_a_kernel_that_norms_all_layers_alike_is_named(
    draft: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """vLLM's build for CPUs as it is, without the plugin that puts this right."""
    with vllm_server(
        target,
        tmp_path / "log",
        speculative=speculative(draft),
        environment={**DSPARK, "VLLM_PLUGINS": "none"},
        options=DETAILED,
    ) as url:
        code, printed = checked(draft, target, url, capsys)
    assert code == 1
    assert "the first layer's key norm for the context in every layer" in printed


def test_a_draft_served_causally_is_named(
    draft: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    served = tmp_path / "served"
    shutil.copytree(draft, served)
    edit(served, lambda values: values.update(is_causal=True))
    with vllm_server(
        target, tmp_path / "log", speculative=speculative(served), options=DETAILED
    ) as url:
        code, printed = checked(draft, target, url, capsys)
    assert code == 1
    assert "a causal block" in printed
    assert "with it, the counts are just these" in printed
