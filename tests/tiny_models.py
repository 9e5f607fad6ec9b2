"""Tiny random targets whose text wanders: greedy decoding of a fresh model soon repeats one word,
and would hide a wrong state."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

VOCABULARY = 67
HIDDEN = 32
LAYERS = 4

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}


def tiny_model(kind: str, *, seed: int = 0, **changes: Any) -> PreTrainedModel:
    """A random model in float32: qwen3, llama, mistral (window 8), gemma2 (windows, capped
    logits), lfm2 (convolutions), kimi_linear (three KDA layers and one MLA layer) or k3_mini (the
    same with Attention Residuals and K3's other parts)."""
    torch.manual_seed(seed)
    model = _BUILD[kind]({**_SIZES, **changes}).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "conv" not in name:
                spread = 1.0 if "embed" in name else 1.5 / weight.shape[1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
        # Far apart logits: rounding never decides between the two top words.
        model.get_output_embeddings().weight.mul_(4.0)
    model.generation_config.eos_token_id = None
    return model


def _qwen3(sizes: dict[str, Any]) -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8))


def _llama(sizes: dict[str, Any]) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**sizes))


def _mistral(sizes: dict[str, Any]) -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**{"sliding_window": 8, **sizes}))


def _gemma2(sizes: dict[str, Any]) -> PreTrainedModel:
    return Gemma2ForCausalLM(
        Gemma2Config(**sizes, head_dim=8, sliding_window=8, final_logit_softcapping=5.0)
    )


def _lfm2(sizes: dict[str, Any]) -> PreTrainedModel:
    return Lfm2ForCausalLM(
        Lfm2Config(
            **sizes,
            layer_types=["conv", "full_attention", "conv", "conv"],
            block_auto_adjust_ff_dim=False,
        )
    )


def _kimi_linear(sizes: dict[str, Any]) -> PreTrainedModel:
    if not hasattr(transformers, "KimiLinearConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Kimi-Linear")
    config = transformers.KimiLinearConfig(
        **{**sizes, "num_key_value_heads": 4},
        layer_types=["linear_attention"] * 3 + ["full_attention"],
        mlp_layer_types=["dense", "sparse", "dense", "dense"],
        moe_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        linear_head_dim=8,
        linear_num_heads=4,
        linear_conv_kernel_dim=4,
    )
    return transformers.KimiLinearForCausalLM(config)


def _k3_mini(sizes: dict[str, Any]) -> PreTrainedModel:
    if not hasattr(transformers, "KimiLinearConfig"):
        pytest.skip(f"transformers {transformers.__version__} has no Kimi-Linear")
    from sparksmith.verify.k3_mini import K3MiniConfig, K3MiniForCausalLM

    depth = sizes["num_hidden_layers"]
    config = K3MiniConfig(
        **{**sizes, "num_key_value_heads": 4},
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(depth)],
        mlp_layer_types=["dense"] + ["sparse"] * (depth - 1),
        attn_res_block_size=2,
        routed_expert_hidden_size=16,
        moe_intermediate_size=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        q_lora_rank=12,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        linear_head_dim=8,
        linear_num_heads=4,
        linear_conv_kernel_dim=4,
    )
    return K3MiniForCausalLM(config)


_BUILD = {
    "qwen3": _qwen3,
    "llama": _llama,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "lfm2": _lfm2,
    "kimi_linear": _kimi_linear,
    "k3_mini": _k3_mini,
}


def words(count: int, seed: int = 0) -> list[int]:
    """A prompt of random words."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()


def full_pass(model: PreTrainedModel, tokens: Sequence[int], taps: Sequence[int] = ()) -> Any:
    """What transformers itself gives for the whole text at once: logits [n, V], and the outputs
    of the tapped layers [n, taps * H]."""
    with torch.inference_mode():
        output = model(
            input_ids=torch.tensor(tokens)[None], use_cache=False, output_hidden_states=True
        )
    # hidden_states[0] is the embedding.
    layers: list[Tensor] = [output.hidden_states[tap + 1][0] for tap in taps]
    return output.logits[0], torch.cat(layers, -1) if layers else None
