"""Kimi K3 at toy size: the same kinds of parts, so that its whole path can be rehearsed anywhere.

KDA layers, the latent attention's projections and the router are transformers' Kimi-Linear. What
makes K3 of it is here: Attention Residuals in blocks, latent attention with an output gate, a
mixture of experts of a smaller width than the model, and SiTU. Weights are random, or briefly
trained; nothing about quality or speed follows for K3.

Shapes: B sequences, S positions, H width, J vectors that a mixture weighs.
"""

import inspect
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.cache_utils import Cache, DynamicCache
from transformers.masking_utils import create_causal_mask, create_recurrent_attention_mask
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.kimi_linear.configuration_kimi_linear import KimiLinearConfig
from transformers.models.kimi_linear.modeling_kimi_linear import (
    KimiLinearAttention,
    KimiLinearDeltaAttention,
    KimiLinearForCausalLM,
    KimiLinearPreTrainedModel,
    KimiLinearRMSNorm,
    KimiLinearTopkRouter,
)

MODEL_TYPE = "k3_mini"

# transformers renamed the cache's keyword after 5.20, in every function at once.
_RENAMED = "cache" in inspect.signature(create_causal_mask).parameters
_CACHE = "cache" if _RENAMED else "past_key_values"
_KDA_CACHE = "cache" if _RENAMED else "cache_params"


class K3MiniConfig(KimiLinearConfig):  # type: ignore[misc]  # transformers is untyped
    """Kimi-Linear's sizes, and what K3 adds.

    `attn_res_block_size` layers form a block of Attention Residuals; `routed_expert_hidden_size`
    is the width in which the routed experts work; SiTU's two constants are K3's.
    """

    model_type = MODEL_TYPE

    attn_res_block_size: int = 4
    routed_expert_hidden_size: int = 32
    activation_situ_beta: float = 4.0
    activation_situ_linear_beta: float = 25.0


def situ(gate: Tensor, up: Tensor, beta: float, linear_beta: float) -> Tensor:
    """SiTU: beta * tanh(g / beta) * sigmoid(g) * linear_beta * tanh(u / linear_beta)."""
    bounded = linear_beta * torch.tanh(up / linear_beta)
    return beta * torch.tanh(gate / beta) * gate.sigmoid() * bounded


class K3MiniMLP(nn.Module):
    """A gated feed-forward layer with SiTU, from `width` through `inner` back to `width`."""

    def __init__(self, config: K3MiniConfig, width: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(width, inner, bias=False)
        self.up_proj = nn.Linear(width, inner, bias=False)
        self.down_proj = nn.Linear(inner, width, bias=False)
        self.betas = (config.activation_situ_beta, config.activation_situ_linear_beta)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(situ(self.gate_proj(x), self.up_proj(x), *self.betas))
        return down


class K3MiniMoE(nn.Module):
    """Sigmoid-routed experts in a latent width, and a shared expert in the model's.

    The tokens go down to the latent width once, through their experts there, and up once.
    """

    def __init__(self, config: K3MiniConfig) -> None:
        super().__init__()
        width, latent = config.hidden_size, config.routed_expert_hidden_size
        inner = config.moe_intermediate_size
        self.gate = KimiLinearTopkRouter(config)
        self.latent_down = nn.Linear(width, latent, bias=False)
        self.latent_up = nn.Linear(latent, width, bias=False)
        self.experts = nn.ModuleList(
            K3MiniMLP(config, latent, inner) for _ in range(config.num_local_experts)
        )
        self.shared_experts = K3MiniMLP(config, width, inner * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        """x [B, S, H]."""
        _, weights, chosen = self.gate(x)  # both [B * S, experts a token]
        latent = self.latent_down(x).flatten(0, -2)
        routed = torch.zeros_like(latent)
        for number, expert in enumerate(self.experts):
            token, place = (chosen == number).nonzero(as_tuple=True)
            if len(token):
                said = expert(latent[token]) * weights[token, place, None].to(latent.dtype)
                routed.index_add_(0, token, said)
        up: Tensor = self.latent_up(routed).view_as(x)
        shared: Tensor = self.shared_experts(x)
        return up + shared


class K3MiniAttention(KimiLinearAttention):  # type: ignore[misc]
    """Kimi-Linear's latent attention without positions, its output gated by the input."""

    def __init__(self, config: K3MiniConfig, layer_idx: int) -> None:
        super().__init__(config, layer_idx)
        self.g_proj = nn.Linear(config.hidden_size, self.num_heads * self.v_head_dim, bias=False)
        self.o_proj.register_forward_pre_hook(self._gated)
        self._gate: Tensor | None = None

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        self._gate = self.g_proj(hidden_states).sigmoid()
        return super().forward(hidden_states, *args, **kwargs)

    def _gated(self, _module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        """The output projection sees the heads' outputs times the gate."""
        assert self._gate is not None
        gated = inputs[0] * self._gate
        self._gate = None
        return (gated,)


class AttentionResidual(nn.Module):
    """A mixture of the blocks behind and the block under way, in place of one residual stream.

    s_j = proj . (rmsnorm(v_j) * norm); the mixture is sum_j softmax(s)_j v_j, over the finished
    blocks' sums (the embedding is the first) and the running prefix sum.
    """

    def __init__(self, config: K3MiniConfig) -> None:
        super().__init__()
        self.norm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.proj = nn.Linear(config.hidden_size, 1, bias=False)

    def forward(self, bank: list[Tensor], prefix: Tensor | None) -> Tensor:
        """`bank` of [B, S, H], `prefix` [B, S, H] or None where its block has just begun."""
        values = torch.stack([*bank, *([] if prefix is None else [prefix])], dim=2)  # [B, S, J, H]
        weights = self.proj(self.norm(values)).softmax(dim=2)
        mixed: Tensor = (weights * values).sum(2)
        return mixed


class K3MiniLayer(nn.Module):
    """KDA or latent attention, then experts or a dense layer; each reads a mixture and adds to the
    prefix sum, which starts anew every `attn_res_block_size` layers."""

    def __init__(self, config: K3MiniConfig, layer_idx: int) -> None:
        super().__init__()
        self.kind = config.layer_types[layer_idx]
        self.begins_block = layer_idx % config.attn_res_block_size == 0
        self.self_attn = (
            K3MiniAttention(config, layer_idx)
            if self.kind == "full_attention"
            else KimiLinearDeltaAttention(config, layer_idx)
        )
        sparse = config.mlp_layer_types[layer_idx] == "sparse"
        self.mlp = (
            K3MiniMoE(config)
            if sparse
            else K3MiniMLP(config, config.hidden_size, config.intermediate_size)
        )
        self.attention_residual = AttentionResidual(config)
        self.mlp_residual = AttentionResidual(config)
        self.input_layernorm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        prefix: Tensor,
        bank: list[Tensor],
        mask: Tensor | None,
        cache: Cache | None,
        **kwargs: Any,
    ) -> tuple[Tensor, list[Tensor]]:
        """The prefix sum after this layer, and the finished blocks."""
        running: Tensor | None = prefix
        if self.begins_block:
            # What has run so far is a finished block; the first is the embedding.
            bank, running = [*bank, prefix], None
        x = self.input_layernorm(self.attention_residual(bank, running))
        if self.kind == "linear_attention":
            kwargs[_KDA_CACHE] = cache
            attended = self.self_attn(x, attention_mask=mask, **kwargs)
        else:
            kwargs[_CACHE] = cache
            attended, _ = self.self_attn(x, attention_mask=mask, **kwargs)
        running = attended if running is None else running + attended
        x = self.post_attention_layernorm(self.mlp_residual(bank, running))
        return running + self.mlp(x), bank


class K3MiniPreTrainedModel(KimiLinearPreTrainedModel):  # type: ignore[misc]
    config_class = K3MiniConfig
    _no_split_modules: ClassVar[list[str]] = ["K3MiniLayer"]
    _can_record_outputs: ClassVar[dict[str, Any]] = {}
    _can_compile_fullgraph = False
    # Found by transformers in a class's source, and inherited: Kimi-Linear's experts are not ours.
    _can_set_experts_implementation_cached_value = False


class K3MiniModel(K3MiniPreTrainedModel):
    """Embedding, layers, the output's mixture and the final norm."""

    def __init__(self, config: K3MiniConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.decoder_layers = [
            K3MiniLayer(config, index) for index in range(config.num_hidden_layers)
        ]
        self.layers = nn.ModuleList(self.decoder_layers)
        self.output_residual = AttentionResidual(config)
        self.norm = KimiLinearRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_init()

    streams = ("prefix_sum", "attn_res_mixture")

    def tap_modules(self, stream: str) -> list[nn.Module]:
        """The module whose output is what a tap of each layer means in a stream.

        The mixture behind layer i is what the attention of layer i + 1 reads.
        """
        if stream == "attn_res_mixture":
            later = [layer.attention_residual for layer in self.decoder_layers[1:]]
            return [*later, self.output_residual]
        return list(self.decoder_layers)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Cache | None]:
        cache = past_key_values if cache is None else cache
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            seen = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device)[None]
            position_ids = position_ids + seen
        inputs = {
            "config": self.config,
            "inputs_embeds": inputs_embeds,
            "attention_mask": attention_mask,
            _CACHE: cache,
            "position_ids": position_ids,
        }
        masks = {
            "full_attention": create_causal_mask(**inputs),
            "linear_attention": create_recurrent_attention_mask(**inputs),
        }
        prefix, bank = inputs_embeds, list[Tensor]()
        for layer in self.decoder_layers:
            prefix, bank = layer(prefix, bank, masks[layer.kind], cache, **kwargs)
        return self.norm(self.output_residual(bank, prefix)), cache


class K3MiniForCausalLM(K3MiniPreTrainedModel, KimiLinearForCausalLM):  # type: ignore[misc]
    """The model with its head."""

    def __init__(self, config: K3MiniConfig) -> None:
        KimiLinearPreTrainedModel.__init__(self, config)
        self.model = K3MiniModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        labels: Tensor | None = None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **kwargs: Any,
    ) -> MoeCausalLMOutputWithPast:
        """Either name of the cache, whatever this transformers calls it."""
        cache = past_key_values if cache is None else cache
        hidden, cache = self.model(input_ids=input_ids, cache=cache, **kwargs)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(hidden[:, kept, :])
        loss = None
        if labels is not None:
            loss = functional.cross_entropy(
                logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
            )
        return MoeCausalLMOutputWithPast(loss=loss, logits=logits, **{_CACHE: cache})


AutoConfig.register(MODEL_TYPE, K3MiniConfig, exist_ok=True)
AutoModelForCausalLM.register(K3MiniConfig, K3MiniForCausalLM, exist_ok=True)


def k3_mini(*, seed: int = 0, **changes: Any) -> K3MiniForCausalLM:
    """A random model of eight layers (every fourth is latent attention) in two blocks, in float32.

    Its head is scaled so that the two likeliest words are far apart: a random model's are nearly
    tied, and rounding would choose between them.
    """
    sizes: dict[str, Any] = {
        "vocab_size": 259,
        "hidden_size": 64,
        "intermediate_size": 128,
        "moe_intermediate_size": 48,
        "routed_expert_hidden_size": 32,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    sizes |= changes
    depth = sizes["num_hidden_layers"]
    sizes.setdefault(
        "layer_types",
        ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(depth)],
    )
    sizes.setdefault("mlp_layer_types", ["dense"] + ["sparse"] * (depth - 1))
    torch.manual_seed(seed)
    model = K3MiniForCausalLM(K3MiniConfig(**sizes))
    model.eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2 and "conv" not in name:
                spread = 1.0 if "embed" in name else 1.5 / weight.shape[1] ** 0.5
                weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
        model.lm_head.weight.mul_(4.0)
    model.generation_config.eos_token_id = None
    return model
