"""Latent attention: against transformers' DeepSeek-V3, in training and decoding alike, on disk."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import MLA, VOCABULARY, tiny_config, tiny_draft, tiny_features
from safetensors import safe_open
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3Attention,
    DeepseekV3RotaryEmbedding,
)

from sparksmith.draft.backbone import BlockMask, LatentAttention
from sparksmith.draft.checkpoint import load_draft, save_draft
from sparksmith.draft.config import DSparkConfig, MLASizes
from sparksmith.draft.decoder import DraftDecoder
from sparksmith.draft.errors import UserError
from sparksmith.draft.rotary import Yarn, rotary

YARN = Yarn(
    factor=8.0,
    original_max_position_embeddings=64,
    beta_fast=32,
    beta_slow=1,
    mscale=1.0,
    mscale_all_dim=1.0,
)
YARNS = [None, YARN, replace(YARN, mscale=0.7), replace(YARN, mscale=None, mscale_all_dim=None)]
CONTEXT = 9


@pytest.fixture(autouse=True)
def _no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def close(actual: Tensor, expected: Tensor) -> bool:
    """Within 1e-5 of the tensor's largest magnitude, the criterion of agreement in float32."""
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def deepseek(config: DSparkConfig) -> DeepseekV3Config:
    rope = config.to_json_dict()["rope_parameters"]
    return DeepseekV3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        num_key_value_heads=config.num_attention_heads,
        rms_norm_eps=config.rms_norm_eps,
        max_position_embeddings=512,
        rope_parameters=rope,
        rope_interleave=True,
        attn_implementation="eager",
        **vars(config.mla),
    )


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("yarn", YARNS)
@pytest.mark.parametrize("start", [0, 50, 300])
def test_attention_equals_deepseeks(start: int, yarn: Yarn | None, is_causal: bool) -> None:
    """A block behind a context, at positions below, across and beyond the original length 64."""
    config = tiny_config(**MLA, yarn=yarn, is_causal=is_causal)
    draft = tiny_draft(**MLA, yarn=yarn, is_causal=is_causal)
    attention = draft.layers[0].self_attn
    assert isinstance(attention, LatentAttention)
    other = deepseek(config)
    theirs = DeepseekV3Attention(other, 0)
    # Their two latent norms have an epsilon of their own, which cannot be configured.
    for norm in (theirs.q_a_layernorm, theirs.kv_a_layernorm):
        norm.variance_epsilon = config.rms_norm_eps
    theirs.load_state_dict(attention.state_dict())
    size = config.block_size
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(1, CONTEXT + size, config.hidden_size, generator=generator)
    positions = torch.arange(start, start + CONTEXT + size)
    hidden = torch.zeros(CONTEXT + size, CONTEXT + size)
    if is_causal:
        hidden[CONTEXT:, CONTEXT:] = torch.full((size, size), float("-inf")).triu(1)
    embeddings = DeepseekV3RotaryEmbedding(other)(rows, positions[None])
    expected, _ = theirs(rows, embeddings, hidden[None, None])
    cos, sin = draft.rotary(positions)
    rotaries = (
        (cos[None, CONTEXT:], sin[None, CONTEXT:]),
        (cos[:CONTEXT], sin[:CONTEXT]),
    )
    mask = BlockMask.of(torch.tensor([[CONTEXT]]), CONTEXT, config)
    found = attention(rows[:, CONTEXT:], rows[:, :CONTEXT], rotaries, mask)
    assert close(found, expected[:, CONTEXT:])


def test_yarn_far_from_the_original_length_differs_from_no_yarn() -> None:
    positions = torch.tensor([3, 300])
    plain, stretched = rotary(positions, 4, 1e4), rotary(positions, 4, 1e4, YARN)
    assert not close(stretched[0][1], plain[0][1])


def decode_block(draft: Any, features: Tensor, anchor_token: int) -> Tensor:
    decoder = DraftDecoder(draft)
    if len(features):
        decoder.append(features)
    block = torch.full((draft.config.block_size,), draft.config.mask_token_id)
    block[0] = anchor_token
    return decoder.block(block)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("yarn", [None, YARN])
def test_decoding_equals_training(yarn: Yarn | None, is_causal: bool) -> None:
    draft = tiny_draft(**MLA, yarn=yarn, is_causal=is_causal)
    features = tiny_features(draft, 1, 20)
    tokens = torch.randint(0, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([[3, 0, 19, 7]])
    hidden = draft.forward_blocks(features, tokens, anchors)
    for block, anchor in enumerate(anchors[0].tolist()):
        decoded = decode_block(draft, features[0, :anchor], int(tokens[0, anchor]))
        assert close(decoded, hidden[0, block])


@pytest.mark.parametrize("is_causal", [False, True])
def test_cached_context_equals_uncached_beyond_the_first_capacity(is_causal: bool) -> None:
    draft = tiny_draft(**MLA, yarn=YARN, is_causal=is_causal)
    features = tiny_features(draft, 300)
    decoder = DraftDecoder(draft)
    block = torch.tensor([9, 7, 7, 7])
    start = 0
    for size in (1, 3, 250, 46):
        decoder.append(features[start : start + size])
        start += size
        cached = decoder.block(block)
        assert close(cached, decode_block(draft, features[:start], 9))
        assert torch.equal(decoder.block(block), cached)


def test_slots_differ() -> None:
    draft = tiny_draft(**MLA)
    hidden = decode_block(draft, tiny_features(draft, 10), 3)[1:]
    distances = torch.cdist(hidden, hidden) + torch.eye(3) * 1e9
    assert float(distances.min()) > 0.05


@pytest.mark.parametrize("yarn", YARNS)
def test_a_saved_draft_comes_back_in_the_k3_layout(yarn: Yarn | None, tmp_path: Path) -> None:
    draft = tiny_draft(**MLA, yarn=yarn, is_causal=True)
    save_draft(draft, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    assert values["architectures"] == ["K3DSparkModel"]
    assert values["model_type"] == "k3_dspark"
    assert values["num_target_layers"] == len(draft.config.target_layer_ids)
    assert "head_dim" not in values
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        names = set(file.keys())
    # The layout's names outside the layers, and one inside.
    assert {"context_proj.weight", "context_norm.weight", "final_norm.weight"} <= names
    assert "layers.1.self_attn.kv_a_proj_with_mqa.weight" in names
    loaded = load_draft(tmp_path)
    assert loaded.config == draft.config
    for name, weight in draft.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], weight)


# The public configuration of a released K3 draft (its `config.json`, keys that vLLM reads).
PUBLIC = {
    "architectures": ["K3DSparkModel"],
    "model_type": "k3_dspark",
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rms_norm_eps": 1e-05,
    "max_position_embeddings": 1048576,
    "rope_theta": 50000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "block_size": 7,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def test_the_public_configuration_is_read() -> None:
    config = DSparkConfig.from_json_dict(PUBLIC)
    assert config.mla == MLASizes(
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    )
    # The softmax scale of 192-wide queries under YaRN x32: (0.1 ln 32 + 1)^2 / sqrt(192).
    assert config.attention_scale == pytest.approx(1.3465735902799727**2 / 192**0.5)
    assert config.rotary_dim == 64
    assert DSparkConfig.from_json_dict(config.to_json_dict()) == config


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"num_target_layers": 93}, "num_target_layers"),
        ({"mla_use_nope": True}, "mla_use_nope"),
        ({"mla_use_output_gate": True}, "mla_use_output_gate"),
        ({"hidden_act": "situ"}, "hidden_act"),
        ({"draft_vocab_size": 32000}, "draft_vocab_size"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim"),
        ({"markov_head_type": "rnn"}, "markov_head_type"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "rope_parameters.factor"),
    ],
)
def test_what_it_does_not_compute_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as error:
        DSparkConfig.from_json_dict({**PUBLIC, **changes})
    assert field in error.value.field


def test_a_missing_size_is_named() -> None:
    values = {name: value for name, value in PUBLIC.items() if name != "q_lora_rank"}
    with pytest.raises(UserError) as error:
        DSparkConfig.from_json_dict(values)
    assert "q_lora_rank" in error.value.field
