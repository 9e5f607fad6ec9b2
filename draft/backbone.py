"""The draft's decoder layers: Qwen3's, with the target's features as extra keys and values.

Context positions are never queries: each layer projects the same fused features to keys and
values (without its input norm) and only the block's slots attend (DSpark section 3.1). Shapes:
B sequences, A anchors, K slots of a block, C context positions, H hidden, D head size.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparksmith.draft.config import DSparkConfig

Rotary = tuple[Tensor, Tensor]


class RMSNorm(nn.Module):
    """Root-mean-square normalisation over the last dimension."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def rotary(positions: Tensor, head_dim: int, theta: float) -> Rotary:
    """Cosines and sines [..., D] in float32 of the rotary angles at `positions` [...].

    The two halves of a head's dimensions form the pairs (the "neox" order).
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    # Written as transformers and vLLM do it: at position 10,000 rounding is visible.
    angles = positions.float().unsqueeze(-1) * (1.0 / theta**exponents)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos_sin: Rotary) -> Tensor:
    """Rotate x [..., heads, D] by its position's angles, whose shape is [..., D]."""
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in cos_sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


@dataclass(frozen=True, kw_only=True)
class BlockMask:
    """What a slot sees, as terms added to attention scores: 0 for visible, -inf for hidden.

    `context` [B, 1, A, 1, C] hides the anchor's position and all after it; `block` [K, K] (query,
    key) hides later slots of a causal block and is None when the block is bidirectional.
    """

    context: Tensor
    block: Tensor | None

    @classmethod
    def of(cls, anchors: Tensor, context_length: int, config: DSparkConfig) -> "BlockMask":
        positions = torch.arange(context_length, device=anchors.device)
        hidden = positions >= anchors[:, None, :, None, None]
        block = block_mask(config, anchors.device) if config.is_causal else None
        return cls(context=_minus_infinity(hidden), block=block)


def block_mask(config: DSparkConfig, device: torch.device) -> Tensor:
    """The causal mask [K, K] inside a block, as terms added to scores."""
    size = config.block_size
    return _minus_infinity(torch.ones(size, size, dtype=torch.bool, device=device).triu(1))


def _minus_infinity(hidden: Tensor) -> Tensor:
    return torch.zeros(hidden.shape, device=hidden.device).masked_fill(hidden, float("-inf"))


class Attention(nn.Module):
    """Grouped-query attention of the block's slots to the context and to their own block."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.num_kv_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.block_size = config.block_size
        query_size = self.num_heads * self.head_dim
        kv_size = self.num_kv_heads * self.head_dim
        self.q_proj = nn.Linear(config.hidden_size, query_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, x: Tensor, context: Tensor, rotaries: tuple[Rotary, Rotary], mask: BlockMask
    ) -> Tensor:
        """x [B, A*K, H] normed slots, context [B, C, H] fused features; result [B, A*K, H].

        `rotaries` are those of the slots [B, A*K, D] and of the context [C, D].
        """
        batch, num_slots, _ = x.shape
        num_blocks, size = num_slots // self.block_size, self.block_size
        slots, positions = rotaries
        query = rotate(self.q_norm(self._heads(self.q_proj(x))), slots) * self.head_dim**-0.5
        # Query heads of one key/value head become rows beside the slots: no key is repeated.
        query = query.view(batch, num_blocks, size, self.num_kv_heads, -1, self.head_dim)
        query = query.permute(0, 3, 1, 2, 4, 5).flatten(3, 4)  # [B, kv, A, K * group, D]
        own_key, own_value = (
            part.view(batch, num_blocks, size, self.num_kv_heads, self.head_dim).permute(
                0, 3, 1, 2, 4
            )
            for part in self._keys_values(x, slots)
        )
        key, value = (
            part.transpose(1, 2).contiguous() for part in self._keys_values(context, positions)
        )
        out = _two_part_attention(query, (key, value), (own_key, own_value), mask)
        out = torch.unflatten(out, 3, (size, -1)).permute(0, 2, 3, 1, 4, 5)
        projected: Tensor = self.o_proj(out.reshape(batch, num_slots, -1))
        return projected

    def _keys_values(self, x: Tensor, positions: Rotary) -> tuple[Tensor, Tensor]:
        key = rotate(self.k_norm(self._heads(self.k_proj(x))), positions)
        return key, self._heads(self.v_proj(x))

    def _heads(self, x: Tensor) -> Tensor:
        return torch.unflatten(x, -1, (-1, self.head_dim))


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
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, context: Tensor, rotaries: tuple[Rotary, Rotary], mask: BlockMask
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, rotaries, mask)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out
