"""Our k3_dspark checkpoints in vLLM's own `K3DSparkModel`."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from vllm_drafts import (
    MLA,
    WORDS,
    edit_tensors,
    save_random_draft,
    save_target,
    speculative,
)
from vllm_engine import RefusedError, in_vllm
from vllm_k3_draft import computed, loaded

from sparksmith.draft.rotary import Yarn
from sparksmith.verify.inspection import findings, inspect

pytestmark = pytest.mark.vllm

YARN = Yarn(
    factor=4.0,
    original_max_position_embeddings=64,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "yarn": {"yarn": YARN},
    "no confidence head": {"enable_confidence_head": False},
    "head without Markov state": {"confidence_head_with_markov": False},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def placed(tensors: dict[str, Tensor], layers: int) -> dict[str, Tensor]:
    """Where vLLM puts a checkpoint's tensors: some are rows of a fused one, and the projection
    of the latents is there twice."""
    left = dict(tensors)
    made: dict[str, Tensor] = {}
    projections = []
    for number in range(layers):
        layer = f"layers.{number}"
        latent = left.pop(f"{layer}.self_attn.kv_a_proj_with_mqa.weight")
        query = left.pop(f"{layer}.self_attn.q_a_proj.weight")
        gate, up = (left.pop(f"{layer}.mlp.{part}_proj.weight") for part in ("gate", "up"))
        made[f"model.{layer}.self_attn.fused_qkv_a_proj.weight"] = torch.cat((query, latent))
        made[f"model.{layer}.mlp.gate_up_proj.weight"] = torch.cat((gate, up))
        projections.append(latent)
    made["model.context_kv_proj.weight"] = torch.cat(projections)
    return made | {f"model.{name}": tensor for name, tensor in left.items()}


@pytest.mark.parametrize("form", FORMS)
def test_every_tensor_arrives(form: str, target: Path, tmp_path: Path) -> None:
    draft = save_random_draft(tmp_path / "draft", MLA, **FORMS[form])
    config = speculative(tmp_path / "draft")
    there = {name: torch.from_numpy(p) for name, p in in_vllm(loaded, target, config).items()}
    # Made from kv_b_proj after loading.
    made = ("W_UV", "W_UK_T", "rotary")
    there = {name: p for name, p in there.items() if not name.endswith(made)}
    wanted = placed(load_file(tmp_path / "draft" / "model.safetensors"), len(draft.layers))
    assert there.keys() == wanted.keys()
    for name, tensor in wanted.items():
        # vLLM pads a vocabulary to a multiple of 64.
        assert torch.equal(there[name][: len(tensor)], tensor), name


@pytest.mark.parametrize("form", ["plain", "yarn"])
@pytest.mark.parametrize("length", [9, 150])
def test_the_draft_computes_what_ours_computes(
    form: str, length: int, target: Path, tmp_path: Path
) -> None:
    draft = save_random_draft(tmp_path / "draft", MLA, **FORMS[form])
    config = speculative(tmp_path / "draft")
    generator = torch.Generator().manual_seed(5)
    features = torch.randn(length, 128, generator=generator)
    anchor, mask = 3, WORDS - 1
    block = torch.tensor([anchor, mask, mask, mask])
    embed, head = torch.randn(2, WORDS, 64, generator=generator)
    draft.bind(embed, head)
    given = {"embed": embed, "head": head, "features": features}
    arrays = {name: tensor.detach().numpy() for name, tensor in {**given, "block": block}.items()}
    theirs = in_vllm(computed, target, config, arrays)
    with torch.inference_mode():
        tokens = torch.full((1, length + 1), anchor)
        padded = torch.cat((features, features[:1]))[None]
        hidden = draft.forward_blocks(padded, tokens, torch.tensor([[length]]))[0, 0]
        ours = {
            "context": draft.fuse(features),
            "hidden": hidden,
            "base": draft.base_logits(hidden),
            "markov": draft.markov_bias(block, hidden),
            "confidence": draft.confidence_logits(block, hidden).sigmoid(),
        }
    for stage, wanted in ours.items():
        found = torch.from_numpy(theirs[stage])[..., : wanted.shape[-1]].reshape(wanted.shape)
        close = 1e-4 * wanted.abs().max()
        assert float((found - wanted).abs().max()) < close, stage


def without(*names: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {k: v for k, v in tensors.items() if k not in names}


def test_a_missing_norm_is_refused(target: Path, tmp_path: Path) -> None:
    save_random_draft(tmp_path / "draft", MLA)
    edit_tensors(tmp_path / "draft", without("context_norm.weight"))
    with pytest.raises(RefusedError, match="not initialized from checkpoint"):
        in_vllm(loaded, target, speculative(tmp_path / "draft"))


@pytest.mark.parametrize(
    "name", ["context_proj.weight", "layers.1.mlp.up_proj.weight", "markov_head.markov_w2.weight"]
)
def test_a_missing_projection_is_loaded_as_it_happens(
    name: str, target: Path, tmp_path: Path
) -> None:
    """What `check` calls an error, since vLLM says nothing."""
    save_random_draft(tmp_path / "draft", MLA)
    whole = in_vllm(loaded, target, speculative(tmp_path / "draft"))
    edit_tensors(tmp_path / "draft", without(name))
    short = in_vllm(loaded, target, speculative(tmp_path / "draft"))
    other = [key for key in whole if not np.array_equal(whole[key], short[key])]
    assert len(other) == 1
    found = findings(inspect(tmp_path / "draft", None, None))
    assert [(f.check, f.level) for f in found if f.level == "error"] == [("tensors", "error")]
