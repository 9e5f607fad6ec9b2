"""Tiny random drafts, far from their initial values so that every part of them matters."""

from typing import Any

import torch
from torch import Tensor

from sparksmith.draft.config import DSparkConfig, MLASizes
from sparksmith.draft.model import DSparkDraft

VOCABULARY = 50
MLA: dict[str, Any] = {
    "mla": MLASizes(
        q_lora_rank=12, kv_lora_rank=9, qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=5
    ),
    "num_key_value_heads": 4,
    "head_dim": 10,
}
"""What makes a tiny draft's attention latent."""


def tiny_config(**changes: Any) -> DSparkConfig:
    """Two layers, four query heads on two key/value heads; no two sizes are equal by accident."""
    sizes: dict[str, Any] = {
        "hidden_size": 24,
        "intermediate_size": 40,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "max_position_embeddings": 1024,
        "target_hidden_size": 20,
        "target_layer_ids": (0, 3),
        "mask_token_id": 7,
        "block_size": 4,
        "markov_rank": 6,
    }
    return DSparkConfig(**{**sizes, **changes})


def tiny_draft(*, seed: int = 0, bind: bool = True, **changes: Any) -> DSparkDraft:
    """A random draft, bound to a random embedding and head unless `bind` is False.

    A `draft_vocab_size` below 50 takes every other target word.
    """
    generator = torch.Generator().manual_seed(seed)
    config = tiny_config(**changes)
    target_ids = None
    if config.reduced_vocabulary:
        target_ids = 1 + 2 * torch.arange(config.draft_vocab_size)
    draft = DSparkDraft(config, target_ids)
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.copy_(1 + 0.3 * noise if "norm" in name else 0.3 * noise)
    if bind:
        shape = (config.vocab_size, config.hidden_size)
        draft.bind(torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
    return draft


def tiny_features(draft: DSparkDraft, *sizes: int, seed: int = 1) -> Tensor:
    """Random target features [*sizes, m * Ht]."""
    config = draft.config
    width = config.target_hidden_size * len(config.target_layer_ids)
    return torch.randn(*sizes, width, generator=torch.Generator().manual_seed(seed))
