"""`sparksmith convert`: what it prints, what it asks for, and that it replaces nothing."""

import json
import re
from pathlib import Path

import pytest
import torch
from draft_models import tiny_draft
from safetensors.torch import load_file
from tiny_models import HIDDEN
from tiny_targets import VOCABULARY, save_tiny_target

from sparksmith.cli.main import main
from sparksmith.draft.checkpoint import save_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    made = tiny_draft(
        bind=False,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        target_layer_ids=(0, 1),
    )
    save_draft(made, tmp_path / "draft")
    return tmp_path / "draft"


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_copies_of_the_targets_tensors(
    draft: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "deepspec"
    assert main(["convert", str(draft), str(out), "--to", "deepspec", "--target", str(target)]) == 0
    printed = words(capsys.readouterr().out)
    assert "vllm -> deepspec" in printed
    assert "taps 0,1" in printed
    assert re.search(r"read [\d.]+ MB", printed)
    tensors, own = load_file(out / "model.safetensors"), load_file(target / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], own["lm_head.weight"])
    assert torch.equal(tensors["embed_tokens.weight"], own["model.embed_tokens.weight"])


def test_what_is_assumed_and_what_is_missing_is_said(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "speculators"
    assert main(["convert", str(draft), str(out), "--to", "speculators"]) == 0
    assert "no target is named" in words(capsys.readouterr().out)
    assert main(["convert", str(out), str(tmp_path / "x"), "--to", "deepspec"]) == 2
    assert "--target" in words(capsys.readouterr().err)
    assert not (tmp_path / "x").exists()


def test_the_manifest_is_always_written(
    draft: Path, target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, last = tmp_path / "speculators", tmp_path / "last"
    assert main(["convert", str(draft), str(out), "--to", "speculators"]) == 0
    assert "trained_length" in words(capsys.readouterr().out)
    manifest = json.loads((out / "sparksmith.json").read_text())
    assert {"target", "trained_length", "taps.stream"} <= set(manifest["assumed"])
    assert main(["convert", str(out), str(last), "--to", "vllm", "--target", "org/t"]) == 0
    manifest = json.loads((last / "sparksmith.json").read_text())
    assert manifest["target"]["name"] == "org/t"
    assert "target" not in manifest["assumed"]
    served = tmp_path / "served"
    assert main(["export", str(last), str(served)]) == 0
    assert json.loads((served / "sparksmith.json").read_text()) == manifest


def test_unfit_requests(draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", str(draft), str(tmp_path / "x"), "--to", "gguf"]) == 2
    assert "speculators" in words(capsys.readouterr().err)
    assert main(["convert", str(draft), str(tmp_path / "x"), "--to", "k3"]) == 2
    assert "latent" in words(capsys.readouterr().err)
    assert main(["convert", str(draft), str(draft), "--to", "vllm"]) == 2
    assert "is not empty" in words(capsys.readouterr().err)
