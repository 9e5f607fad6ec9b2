"""`sparksmith export`: what an engine gets, compared with the target's own files."""

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
from sparksmith.draft.checkpoint import load_draft, save_draft

WORDS = 1 + 2 * torch.arange(100)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def saved_draft(folder: Path, draft_vocab_size: int) -> Path:
    draft = tiny_draft(
        bind=False,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=draft_vocab_size,
        target_layer_ids=(0, 1),
    )
    save_draft(draft, folder)
    return folder


def test_a_reduced_vocabulary_ships_the_targets_rows(target: Path, tmp_path: Path) -> None:
    made, out = saved_draft(tmp_path / "draft", len(WORDS)), tmp_path / "served"
    assert main(["export", str(made), str(out), "--target", str(target)]) == 0
    tensors = load_file(out / "model.safetensors")
    head = load_file(target / "model.safetensors")["lm_head.weight"]
    assert torch.equal(tensors["lm_head.weight"], head[WORDS].bfloat16())
    assert torch.equal(tensors["d2t"] + torch.arange(len(WORDS)), WORDS)
    assert "embed_tokens.weight" not in tensors
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    again, before = load_draft(out), load_draft(made)
    assert again.config == before.config
    for name, value in before.state_dict().items():
        assert torch.equal(again.state_dict()[name], value.bfloat16())


def test_a_full_vocabulary_needs_no_target_unless_asked(target: Path, tmp_path: Path) -> None:
    made = saved_draft(tmp_path / "draft", VOCABULARY)
    assert main(["export", str(made), str(tmp_path / "lean"), "--target", "/no/such"]) == 0
    assert (
        not {"lm_head.weight", "embed_tokens.weight"}
        & load_file(tmp_path / "lean" / "model.safetensors").keys()
    )
    arguments = ["export", str(made), str(tmp_path / "whole"), "--target", str(target)]
    assert main([*arguments, "--embedding", "--head", "--dtype", "float32"]) == 0
    tensors = load_file(tmp_path / "whole" / "model.safetensors")
    own = load_file(target / "model.safetensors")
    assert torch.equal(tensors["lm_head.weight"], own["lm_head.weight"])
    assert torch.equal(tensors["embed_tokens.weight"], own["model.embed_tokens.weight"])


def test_nothing_is_replaced_and_another_target_is_refused(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = saved_draft(tmp_path / "draft", len(WORDS))
    before = (made / "model.safetensors").read_bytes()
    assert main(["export", str(made), str(made), "--target", str(target)]) == 2
    assert "is not empty" in capsys.readouterr().err
    assert (made / "model.safetensors").read_bytes() == before
    other = save_tiny_target(tmp_path / "other", hidden_size=48)
    assert main(["export", str(made), str(tmp_path / "out"), "--target", str(other)]) == 2
    assert "target that this draft was trained for" in re.sub(r"\s+", " ", capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
