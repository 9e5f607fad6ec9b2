"""config.json: what is written, what is read, and what is refused by name."""

from typing import Any

import pytest
from draft_models import tiny_config

from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.errors import UserError

# The released configuration of the Qwen3-8B draft, as vLLM's loader wants it.
QWEN3_8B: dict[str, Any] = {
    "architectures": ["Qwen3DSparkModel"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "rms_norm_eps": 1e-06,
    "max_position_embeddings": 40960,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    "attention_bias": False,
    "tie_word_embeddings": False,
    "target_hidden_size": 4096,
    "target_layer_ids": [1, 9, 17, 25, 33],
    "mask_token_id": 151669,
    "block_size": 7,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}


def test_a_released_configuration_is_read_and_written_again() -> None:
    config = DSparkConfig.from_json_dict(QWEN3_8B)
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert config.rope_theta == 1e6
    assert config.draft_vocab_size == 151936
    assert not config.is_causal
    written = config.to_json_dict()
    # Beside the keys it was read from, every size that an engine would otherwise guess.
    expected = {k: v for k, v in QWEN3_8B.items() if k != "dtype"}
    assert written == {**expected, "draft_vocab_size": 151936, "sample_from_anchor": True}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"is_causal": True},
        {"draft_vocab_size": 20},
        {"markov_head_type": "rnn"},
        {"markov_rank": 0, "enable_confidence_head": False},
        {"confidence_head_with_markov": False},
    ],
)
def test_round_trip(changes: dict[str, Any]) -> None:
    config = tiny_config(**changes)
    assert DSparkConfig.from_json_dict(config.to_json_dict()) == config
    assert ("is_causal" in config.to_json_dict()) == config.is_causal


@pytest.mark.parametrize(
    "key",
    [
        "architectures",
        "hidden_size",
        "head_dim",
        "rms_norm_eps",
        "rope_parameters",
        "target_layer_ids",
        "mask_token_id",
        "markov_rank",
        "block_size",
    ],
)
def test_a_missing_key_is_named(key: str) -> None:
    values = {k: v for k, v in QWEN3_8B.items() if k != key}
    with pytest.raises(UserError, match=key):
        DSparkConfig.from_json_dict(values)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("architectures", ["LlamaForCausalLM"]),
        ("markov_head_type", "lstm"),
        ("attention_bias", True),
        ("hidden_act", "gelu"),
        ("logit_scale", 2.0),
        ("layer_types", ["sliding_attention"] * 4 + ["full_attention"]),
        ("use_sliding_window", True),
        ("rope_parameters", {"rope_type": "yarn", "rope_theta": 1e6}),
        ("sample_from_anchor", "no"),
        ("target_layer_ids", [9, 1]),
        ("target_layer_ids", [1, 1]),
        ("target_layer_ids", []),
        ("target_layer_ids", 3),
        ("mask_token_id", 151936),
        ("draft_vocab_size", 151937),
        ("num_key_value_heads", 5),
        ("hidden_size", "4096"),
        ("block_size", 0),
        ("head_dim", 7),
        ("is_causal", "yes"),
        ("rms_norm_eps", 0.0),
        ("markov_rank", -1),
        ("dflash_config", {"attention_sink_bias": True}),
    ],
)
def test_an_unfit_value_is_named(key: str, value: object) -> None:
    with pytest.raises(UserError) as caught:
        DSparkConfig.from_json_dict({**QWEN3_8B, key: value})
    named = {"num_key_value_heads": "num_attention_heads"}.get(key, key)
    assert named in caught.value.field
    assert caught.value.remedy


def test_causality_is_read_where_engines_read_it() -> None:
    nested = {**QWEN3_8B, "dflash_config": {"causal": True}}
    assert DSparkConfig.from_json_dict(nested).is_causal
    # The top-level key overrides.
    assert not DSparkConfig.from_json_dict({**nested, "is_causal": False}).is_causal


def test_confidence_from_the_markov_embedding_needs_one() -> None:
    with pytest.raises(UserError, match="confidence_head_with_markov"):
        tiny_config(markov_rank=0)


def test_a_window_that_transformers_would_drop_is_refused() -> None:
    values = {**QWEN3_8B, "layer_types": ["sliding_attention"] * 5, "sliding_window": 2048}
    with pytest.raises(UserError, match="use_sliding_window"):
        DSparkConfig.from_json_dict(values)
    config = DSparkConfig.from_json_dict({**values, "use_sliding_window": True})
    assert (config.sliding_window, config.is_causal) == (2048, True)
    nested = {"dflash_config": {"use_swa": True, "swa_window_size": 512}}
    config = DSparkConfig.from_json_dict({**QWEN3_8B, **nested})
    assert (config.sliding_window, config.is_causal) == (512, False)


@pytest.mark.parametrize("window", [3, 0, True])
def test_a_window_holds_a_block(window: int) -> None:
    with pytest.raises(UserError, match="sliding_window"):
        tiny_config(sliding_window=window)


def test_fill_in_blocks_draft_one_token_less() -> None:
    assert tiny_config(sample_from_anchor=False).num_drafts == tiny_config().num_drafts - 1
    with pytest.raises(UserError, match="block_size"):
        tiny_config(sample_from_anchor=False, block_size=1)
