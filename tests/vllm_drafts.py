"""Targets and drafts small enough for a test, of sizes that vLLM's attention takes."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from draft_models import tiny_config
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tiny_targets import MASK, VOCABULARY, save_tiny_target
from torch import Tensor

from sparksmith.draft.checkpoint import export_draft
from sparksmith.draft.config import MLASizes
from sparksmith.draft.manifest import Manifest, TargetIdentity, write_manifest
from sparksmith.draft.model import DSparkDraft

WORDS = 12
"""So few that every tenth drafted token is right by chance."""
TARGET: dict[str, Any] = {
    "vocab_size": WORDS,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
_COMMON: dict[str, Any] = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "vocab_size": WORDS,
    "draft_vocab_size": WORDS,
    "mask_token_id": WORDS - 1,
    "target_layer_ids": (0, 2),
    "num_attention_heads": 2,
}
# 32 is the least head size that vLLM's attention knows.
GQA: dict[str, Any] = {**_COMMON, "num_key_value_heads": 1, "head_dim": 32}
# Backends of latent attention want 512 + 64 numbers a position.
MLA: dict[str, Any] = {
    **_COMMON,
    "mla": MLASizes(
        q_lora_rank=24, kv_lora_rank=512, qk_nope_head_dim=32, qk_rope_head_dim=64, v_head_dim=16
    ),
    "num_key_value_heads": 2,
    "head_dim": 96,
    "rope_theta": 20_000.0,
}


def save_target(folder: Path) -> Path:
    """A random Llama of twelve words, without a tokenizer."""
    tiny_model("llama", **TARGET).save_pretrained(folder)
    return folder


def random_draft(sizes: Mapping[str, Any] = GQA, **changes: Any) -> DSparkDraft:
    """Far from its initial values, so that every part of it matters."""
    generator = torch.Generator().manual_seed(3)
    config = tiny_config(**{**sizes, **changes})
    kept = 2 * torch.arange(config.draft_vocab_size) if config.reduced_vocabulary else None
    draft = DSparkDraft(config, kept)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    return draft


def save_random_draft(folder: Path, sizes: Mapping[str, Any] = GQA, **changes: Any) -> DSparkDraft:
    """The same on disk, with its manifest; a reduced vocabulary has the target's rows."""
    draft = random_draft(sizes, **changes)
    head = None
    if draft.config.reduced_vocabulary:
        head = tiny_model("llama", **TARGET).get_output_embeddings().weight.detach()
    export_draft(draft, folder, head=head)
    known = Manifest.of(
        draft.config,
        draft.target_ids,
        stream="prefix_sum" if draft.config.mla else "residual",
        target=TargetIdentity(name="org/target"),
        trained_length=512,
    )
    write_manifest(known, folder)
    return draft


def edit(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change config.json in place."""
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def edit_tensors(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    """Change the weights in place."""
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path, metadata={"format": "pt"})


def speculative(folder: Path, num_tokens: int | None = 4, **more: Any) -> dict[str, Any]:
    made = {"method": "dspark", "model": str(folder), "num_speculative_tokens": num_tokens, **more}
    return {key: value for key, value in made.items() if value is not None}


def save_speaking_target(folder: Path) -> Path:
    """A target with a tokenizer and a chat template, which says twelve words alone."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    save_tiny_target(folder, "llama", **sizes)

    def silence(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        head = tensors["lm_head.weight"].clone()
        kept = torch.arange(64, 64 + WORDS)  # the letters from a
        silent = torch.ones(len(head), dtype=torch.bool)
        silent[kept] = False
        head[silent] = 0.0
        return {**tensors, "lm_head.weight": head}

    edit_tensors(folder, silence)
    return folder


SPEAKING: dict[str, Any] = {
    **GQA,
    "vocab_size": VOCABULARY,
    "draft_vocab_size": VOCABULARY,
    "mask_token_id": MASK,
    "max_position_embeddings": 512,
}
"""A draft for it."""
