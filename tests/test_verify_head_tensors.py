"""A target's embedding, norm and head from its index, without the rest of the checkpoint."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from tiny_models import tiny_model
from torch import Tensor

from sparksmith.draft.errors import UserError
from sparksmith.verify.head_tensors import INDEX_FILE, read_head_tensors

PREFIX = "language_model."


def tensors() -> dict[str, Tensor]:
    return {
        f"{PREFIX}model.embed_tokens.weight": torch.randn(30, 8).bfloat16(),
        f"{PREFIX}model.norm.weight": torch.randn(8).bfloat16(),
        f"{PREFIX}lm_head.weight": torch.randn(30, 8).bfloat16(),
    }


def sharded(folder: Path, found: dict[str, Tensor]) -> Path:
    """Each tensor in a shard of its own, and an index that names shards which are not there."""
    where = {
        f"{PREFIX}model.layers.0.mlp.gate_proj.weight": "model-00009-of-00096.safetensors",
        "vision_tower.embed_tokens.weight": "model-00096-of-00096.safetensors",
        f"{PREFIX}model.mtp.0.norm.weight": "model-00095-of-00096.safetensors",
    }
    folder.mkdir(exist_ok=True)
    for number, (name, tensor) in enumerate(found.items()):
        where[name] = f"model-{number:05d}-of-00096.safetensors"
        # Beside it a tensor that nobody asked for.
        save_file({name: tensor, "big": torch.zeros(5000)}, folder / where[name])
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    return folder


def test_only_what_is_needed_is_read(tmp_path: Path) -> None:
    stored = tensors()
    found = read_head_tensors(sharded(tmp_path, stored))
    for tensor, name in zip((found.embed, found.norm, found.head), stored, strict=True):
        assert torch.equal(tensor, stored[name])
        assert tensor.dtype == torch.bfloat16
    assert found.bytes_read == 2 * (30 * 8 + 8 + 30 * 8)
    assert len(found.files) == 3
    assert not found.tied


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    stored = tensors()
    del stored[f"{PREFIX}lm_head.weight"]
    found = read_head_tensors(sharded(tmp_path, stored))
    assert found.tied
    assert found.bytes_read == 2 * (30 * 8 + 8)


def test_a_single_file_as_transformers_writes_it(tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    model.save_pretrained(tmp_path)
    found = read_head_tensors(tmp_path)
    assert torch.equal(found.embed, model.get_input_embeddings().weight)
    assert torch.equal(found.head, model.get_output_embeddings().weight)
    assert torch.equal(found.norm, model.model.norm.weight)


@pytest.mark.parametrize("missing", ["model.embed_tokens.weight", "model.norm.weight"])
def test_what_is_not_there_is_named(tmp_path: Path, missing: str) -> None:
    stored = tensors()
    del stored[PREFIX + missing]
    with pytest.raises(UserError, match="embedding" if "embed" in missing else "norm"):
        read_head_tensors(sharded(tmp_path, stored))


def test_a_missing_and_a_broken_shard(tmp_path: Path) -> None:
    folder = sharded(tmp_path, tensors())
    shard = folder / "model-00002-of-00096.safetensors"
    shard.write_bytes(shard.read_bytes()[:40])
    with pytest.raises(UserError, match="00002"):
        read_head_tensors(folder)
    shard.unlink()
    with pytest.raises(UserError, match="00002"):
        read_head_tensors(folder)


def test_no_safetensors(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UserError, match="safetensors"):
        read_head_tensors(tmp_path)


def test_a_name_that_the_hub_cannot_give() -> None:
    # Tests run offline.
    with pytest.raises(UserError, match="Hub"):
        read_head_tensors("nobody/nothing")
