"""The draft's decoder layers: Qwen3's or MLA's, with the target's features as keys and values.

Context positions are never queries: each layer projects the same fused features to keys and
values (without its input norm) and only the block's slots attend (DSpark section 3.1). Shapes:
B sequences, A anchors, K slots of a block, C context positions, H hidden, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.rotary import Rotary, rotate, rotate_interleaved


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, kw_only=True)
class BlockMask:
    """What a slot sees, as terms added to attention scores: 0 for visible, -inf for hidden.

    `context` [B, 1, A, 1, C] hides the anchor's position and all after it, and [B, 1, A, K * group,
    C] also what is before a slot's window; `block` [K, K] (query, key) hides later slots of a
    causal block and is None when the block is bidirectional.
    """

    context: Tensor
    block: Tensor | None

    @classmethod
    def of(cls, anchors: Tensor, context_length: int, config: DSparkConfig) -> "BlockMask":
        positions = torch.arange(context_length, device=anchors.device)
        hidden = positions >= anchors[:, None, :, None, None]
        if config.sliding_window is not None:
            offsets = torch.arange(config.block_size, device=anchors.device)
            group = config.num_attention_heads // config.num_key_value_heads
            slots = anchors[:, None, :, None] + offsets.repeat_interleave(group)
            hidden = hidden | (slots[..., None] - positions >= config.sliding_window)
        block = block_mask(config, anchors.device) if config.is_causal else None
        return cls(context=_minus_infinity(hidden), block=block)


def block_mask(config: DSparkConfig, device: torch.device) -> Tensor:
    """The causal mask [K, K] inside a block, as terms added to scores."""
    size = config.block_size
    return _minus_infinity(torch.ones(size, size, dtype=torch.bool, device=device).triu(1))


def _minus_infinity(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))


class BlockAttention(nn.Module):
    """Attention of the block's slots to the context and to their own block.

    How queries, keys and values come about is the subclass's: `heads` query heads, each
    `num_heads / num_kv_heads` of which share a key and a value.
    """

    o_proj: nn.Linear

    def __init__(self, config: DSparkConfig, num_kv_heads: int) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = num_kv_heads
        self.block_size = config.block_size

    def queries(self, x: Tensor, positions: Rotary) -> Tensor:
        """[B, N, heads, D], rotated and scaled, of normed slots x [B, N, H]."""
        raise NotImplementedError

    def keys_values(self, x: Tensor, positions: Rotary) -> tuple[Tensor, Tensor]:
        """Keys [B, N, kv heads, D], rotated, and values [B, N, kv heads, Dv] of x [B, N, H]."""
        raise NotImplementedError

    def forward(
        self, x: Tensor, context: Tensor, rotaries: tuple[Rotary, Rotary], mask: BlockMask
    ) -> Tensor:
        """x [B, A*K, H] normed slots, context [B, C, H] fused features; result [B, A*K, H].

        `rotaries` are those of the slots [B, A*K, D] and of the context [C, D].
        """
        batch, num_slots, _ = x.shape
        num_blocks, size = num_slots // self.block_size, self.block_size
        slots, positions = rotaries
        query = self.queries(x, slots)
        # Query heads of one key/value head become rows beside the slots: no key is repeated.
        query = query.view(batch, num_blocks, size, self.num_kv_heads, -1, query.shape[-1])
        query = query.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)  # [B, kv, A, K * group, D]
        own_key, own_value = (
            torch.unflatten(part, 1, (num_blocks, size)).permute(0, 3, 1, 2, 4)
            for part in self.keys_values(x, slots)
        )
        key, value = (
            part.transpose(1, 2).contiguous() for part in self.keys_values(context, positions)
        )
        out = _two_part_attention(query, (key, value), (own_key, own_value), mask)
        out = torch.unflatten(out, 3, (size, -1)).permute(0, 2, 3, 1, 4, 5)
        projected: Tensor = self.o_proj(out.reshape(batch, num_slots, -1))
        return projected


class Attention(BlockAttention):
    """Grouped-query attention with normed heads, as Qwen3's."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config, config.num_key_value_heads)
        self.head_dim = config.head_dim
        query_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def queries(self, x: Tensor, positions: Rotary) -> Tensor:
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), positions)
        return query * float(self.head_dim**-0.5)

    def keys_values(self, x: Tensor, positions: Rotary) -> tuple[Tensor, Tensor]:
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), positions)
        return key, self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (-1, self.head_dim))


class LatentAttention(BlockAttention):
    """Multi-head latent attention (MLA, arXiv 2405.04434), as DeepSeek-V3's and K3's draft.

    Queries, and keys with values, pass through normed low-rank latents. A head's query and key are
    [nope | rope]: the rope part of the key is one for all heads, rotated in interleaved pairs.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config, config.num_attention_heads)
        assert config.mla is not None
        self.sizes = sizes = config.mla
        self.scale = config.attention_scale
        hidden, heads, eps = config.hidden_size, self.num_heads, config.rms_norm_eps
        query_size = sizes.qk_nope_head_dim + sizes.qk_rope_head_dim
        kv_size = sizes.qk_nope_head_dim + sizes.v_head_dim
        self.q_a_proj = nn.Linear(hidden, sizes.q_lora_rank, bias=False)
        self.q_a_layernorm = RMSNorm(sizes.q_lora_rank, eps)
        self.q_b_proj = nn.Linear(sizes.q_lora_rank, heads * query_size, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(
            hidden, sizes.kv_lora_rank + sizes.qk_rope_head_dim, bias=False
        )
        self.kv_a_layernorm = RMSNorm(sizes.kv_lora_rank, eps)
        self.kv_b_proj = nn.Linear(sizes.kv_lora_rank, heads * kv_size, bias=False)
        self.o_proj = nn.Linear(heads * sizes.v_head_dim, hidden, bias=False)

    def queries(self, x: Tensor, positions: Rotary) -> Tensor:
        return torch.cat(self.query_parts(x, positions), dim=-1) * self.scale

    def keys_values(self, x: Tensor, positions: Rotary) -> tuple[Tensor, Tensor]:
        latent, rope = self.latents(x, positions)
        expanded = torch.unflatten(self.kv_b_proj(latent), -1, (self.num_heads, -1))
        nope, value = torch.split(
            expanded, [self.sizes.qk_nope_head_dim, self.sizes.v_head_dim], dim=-1
        )
        rope = rope.unsqueeze(-2).expand(*nope.shape[:-1], -1)
        return torch.cat((nope, rope), dim=-1), value

    def query_parts(self, x: Tensor, positions: Rotary) -> tuple[Tensor, Tensor]:
        """The nope part [..., heads, nope] and the rotated rope part, not yet scaled."""
        query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = torch.unflatten(query, -1, (self.num_heads, -1))
        nope, rope = torch.split(
            query, [self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim], dim=-1
        )
        return nope, rotate_interleaved(rope, positions)

    def latents(self, x: Tensor, positions: Rotary) -> tuple[Tensor, Tensor]:
        """What a cache keeps of x [..., H]: normed latents [..., kv_lora_rank] and the rotated
        key part [..., rope] that all heads share."""
        latent, rope = torch.split(
            self.kv_a_proj_with_mqa(x),
            [self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim],
            dim=-1,
        )
        rope = rotate_interleaved(rope.unsqueeze(-2), positions).squeeze(-2)
        return self.kv_a_layernorm(latent), rope


def _two_part_attention(
    query: Tensor, context: tuple[Tensor, Tensor], own: tuple[Tensor, Tensor], mask: BlockMask
) -> Tensor:
    """Attention of query [B, kv, A, K * group, D] over context [B, kv, C, D] and own block.

    The scores against the context and those against the own block [B, kv, A, K, D] are formed
    apart and share one softmax: the columns are C + K a query instead of C + A * K.
    """
    num_blocks = query.shape[2]
    context_key, context_value = context
    own_key, own_value = own
    context_scores = query.flatten(2, 3) @ context_key.transpose(-1, -2)
    context_scores = torch.unflatten(context_scores, 2, (num_blocks, -1))
    context_scores = context_scores + mask.context.to(query.dtype)
    own_scores = query @ own_key.transpose(-1, -2)
    if mask.block is not None:
        group = query.shape[3] // own_key.shape[3]
        own_scores = own_scores + mask.block.repeat_interleave(group, 0).to(query.dtype)
    weights = torch.cat((context_scores, own_scores), dim=-1).softmax(-1)
    seen, block = torch.split(weights, [context_key.shape[2], own_key.shape[3]], dim=-1)
    from_context = torch.unflatten(seen.flatten(2, 3) @ context_value, 2, (num_blocks, -1))
    return from_context + block @ own_value


class MLP(nn.Module):
    """The gated feed-forward layer (SwiGLU)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        down: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return down


class DraftLayer(nn.Module):
    """One pre-norm layer over the block's slots; the context enters by attention only."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn: BlockAttention = (
            Attention(config) if config.mla is None else LatentAttention(config)
        )
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, context: Tensor, rotaries: tuple[Rotary, Rotary], mask: BlockMask
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotaries, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
