"""Configurations by name: public K3 drafts restated, and small ones of the same form.

Sizes and positions are those of the drafts' public `config.json`; a draft trained here for K3 may
start from either. All are for a target of 7,168 wide layers and 163,840 words, but the mini ones.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from sparksmith.draft.config import DSparkConfig, MLASizes
from sparksmith.draft.errors import UserError
from sparksmith.draft.rotary import Yarn

_K3_VOCABULARY = 163_840
_K3_WIDTH = 7_168

_MLA = DSparkConfig(
    hidden_size=_K3_WIDTH,
    intermediate_size=14_336,
    num_hidden_layers=5,
    num_attention_heads=64,
    num_key_value_heads=64,
    head_dim=192,
    vocab_size=_K3_VOCABULARY,
    draft_vocab_size=_K3_VOCABULARY,
    rms_norm_eps=1e-5,
    rope_theta=50_000.0,
    yarn=Yarn(
        factor=32.0,
        original_max_position_embeddings=32_768,
        beta_fast=32,
        beta_slow=1,
        mscale=1.0,
        mscale_all_dim=1.0,
    ),
    mla=MLASizes(
        q_lora_rank=1_536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    max_position_embeddings=1_048_576,
    target_hidden_size=_K3_WIDTH,
    target_layer_ids=(2, 23, 47, 71, 89),
    mask_token_id=163_837,
    block_size=7,
    markov_rank=256,
)
_MINI: Mapping[str, Any] = {
    "hidden_size": 64,
    "target_hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 258,
    "draft_vocab_size": 258,
    "target_layer_ids": (1, 3, 5),
    "mask_token_id": 257,
    "markov_rank": 16,
}
_GQA = replace(
    _MLA,
    mla=None,
    num_key_value_heads=16,
    head_dim=64,
    rope_theta=10_000.0,
    yarn=Yarn(factor=16.0, original_max_position_embeddings=65_536),
    target_layer_ids=(7, 23, 51, 67, 83),
    mask_token_id=163_824,
)

PRESETS: Mapping[str, DSparkConfig] = {
    "k3-mla": _MLA,
    "k3-gqa": _GQA,
    # Wider attention; its public draft ships its own embedding and head.
    "k3-gqa-96": replace(
        _GQA,
        num_attention_heads=96,
        yarn=None,
        target_layer_ids=(23, 47, 71, 87, 91),
        mask_token_id=163_837,
        block_size=8,
    ),
    # The same two forms, in the width of `k3-mini`.
    "k3-mla-mini": replace(
        _MLA,
        **_MINI,
        mla=MLASizes(
            q_lora_rank=32,
            kv_lora_rank=64,
            qk_nope_head_dim=16,
            qk_rope_head_dim=8,
            v_head_dim=16,
        ),
        num_key_value_heads=4,
        head_dim=24,
    ),
    "k3-gqa-mini": replace(_GQA, **_MINI, num_key_value_heads=2, head_dim=32),
}


def preset(name: str) -> DSparkConfig:
    """The configuration of that name; UserError for a name that is none."""
    if name not in PRESETS:
        raise UserError("--preset", name, "is unknown", f"Use one of {', '.join(PRESETS)}.")
    return PRESETS[name]
