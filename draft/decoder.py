"""The draft's forward for one stream: a growing context cache and one block at a time.

Context keys and values depend on their own position alone, so a committed position is projected
once and never again. The block's own keys are written behind the context's, used, and overwritten.
Shapes: L layers, T context positions, K slots of a block, D head size, H hidden, Vd draft words.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from sparksmith.draft.backbone import Attention, DraftLayer, block_mask, rotary
from sparksmith.draft.model import BoundWeights, DSparkDraft
from sparksmith.draft.packed import Linear, pack_weight

_INITIAL_CAPACITY = 256


@dataclass(frozen=True, kw_only=True)
class _LayerWeights:
    """One layer with its projections joined: a product over a larger weight costs less."""

    input_norm: Tensor
    qkv: Linear
    qk_norm: Tensor  # [query heads + key heads, D]
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, layer: DraftLayer) -> "_LayerWeights":
        attention, mlp = layer.self_attn, layer.mlp
        norms = (
            attention.q_norm.weight.expand(attention.num_heads, -1),
            attention.k_norm.weight.expand(attention.num_kv_heads, -1),
        )
        projections = (attention.q_proj, attention.k_proj, attention.v_proj)
        return cls(
            input_norm=layer.input_layernorm.weight.detach(),
            qkv=pack_weight(torch.cat([projection.weight for projection in projections])),
            qk_norm=torch.cat(norms),
            output=pack_weight(attention.o_proj.weight),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=pack_weight(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))),
            down=pack_weight(mlp.down_proj.weight),
        )


class DecodingWeights:
    """A draft's weights as decoding wants them; shared by all streams of the draft."""

    def __init__(self, draft: DSparkDraft) -> None:
        with torch.no_grad():
            layers = [layer for layer in draft.layers if isinstance(layer, DraftLayer)]
            attentions: list[Attention] = [layer.self_attn for layer in layers]
            self.fuse = pack_weight(draft.fc.weight)
            # One product gives the context keys of all layers, then the values of all layers.
            self.context_kv = pack_weight(
                torch.cat(
                    [attention.k_proj.weight for attention in attentions]
                    + [attention.v_proj.weight for attention in attentions]
                )
            )
            self.key_norm = torch.stack([attention.k_norm.weight for attention in attentions])
            self.layers = [_LayerWeights.of(layer) for layer in layers]
            bound = draft.bound
            # A reduced vocabulary has rows of its own; the whole head is shared with the target
            # and is not copied for speed.
            head = bound.head.to(draft.fc.weight.dtype)
            self.head: Linear = (
                pack_weight(head)
                if draft.config.reduced_vocabulary
                else partial(functional.linear, weight=head)
            )
            self.markov: Linear | None = None
            if draft.markov_head is not None:
                self.markov = pack_weight(draft.markov_head.markov_w2.weight)


_BUILT: WeakKeyDictionary[DSparkDraft, tuple[Hashable, BoundWeights, DecodingWeights]] = (
    WeakKeyDictionary()
)


def decoding_weights(draft: DSparkDraft) -> DecodingWeights:
    """The draft's decoding weights, built anew after its parameters or bound weights changed.

    A change is seen through the tensors' version counters, which optimizers and
    `load_state_dict` advance.
    """
    key = tuple(
        (weight.data_ptr(), weight.dtype, 0 if weight.is_inference() else weight._version)
        for weight in draft.parameters()
    )
    built = _BUILT.get(draft)
    if built is None or built[0] != key or built[1] is not draft.bound:
        built = (key, draft.bound, DecodingWeights(draft))
        _BUILT[draft] = built
    return built[2]


class DraftDecoder:
    """One stream's context cache and block forward; both agree with `forward_blocks`."""

    def __init__(self, draft: DSparkDraft) -> None:
        config = draft.config
        self.draft = draft
        self.weights = decoding_weights(draft)
        self.length = 0
        self._config = config
        weight = draft.fc.weight
        self._dtype, self._device = weight.dtype, weight.device
        self._mask: Tensor | None = None
        if config.is_causal:
            group = config.num_attention_heads // config.num_key_value_heads
            mask = block_mask(config, self._device).to(self._dtype)
            self._mask = mask.repeat_interleave(group, 0)
        self._reserve(_INITIAL_CAPACITY)

    def append(self, features: Tensor) -> None:
        """Add the context positions that follow: target features [n, m * Ht]."""
        config = self._config
        start, end = self.length, self.length + features.shape[0]
        self._make_room(end)
        fused = self.weights.fuse(features.to(self._device, self._dtype))
        fused = self._norm(fused, self.draft.hidden_norm.weight)
        # [n, (keys, values), L, kv heads, D]
        key_value = self.weights.context_kv(fused).view(
            -1, 2, config.num_hidden_layers, config.num_key_value_heads, config.head_dim
        )
        key, value = key_value.unbind(1)
        key = functional.rms_norm(key, (config.head_dim,), eps=config.rms_norm_eps)
        key = key * self.weights.key_norm.unsqueeze(1)
        key = _rotate(key, self._cos[start:end, None, None], self._sin[start:end, None, None])
        self._keys[:, :, start:end] = key.permute(1, 2, 0, 3)
        self._values[:, :, start:end] = value.permute(1, 2, 0, 3)
        self.length = end

    def block(self, tokens: Tensor) -> Tensor:
        """Post-norm hidden states [K, H] of a block [anchor, mask, ...] behind the context."""
        start, end = self.length, self.length + tokens.shape[0]
        cos, sin = self._cos[start:end, None], self._sin[start:end, None]
        x = self.draft.embed(tokens)
        for index, layer in enumerate(self.weights.layers):
            attended = self._attend(index, self._norm(x, layer.input_norm), cos, sin)
            x = x + layer.output(attended)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
        return self._norm(x, self.draft.norm.weight)

    def _attend(self, index: int, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config, layer = self._config, self.weights.layers[index]
        heads, kv_heads, size = config.num_attention_heads, config.num_key_value_heads, x.shape[0]
        qkv = layer.qkv(x).view(size, heads + 2 * kv_heads, config.head_dim)
        query_key, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        query_key = functional.rms_norm(query_key, (config.head_dim,), eps=config.rms_norm_eps)
        query_key = _rotate(query_key * layer.qk_norm, cos, sin)
        query, key = query_key[:, :heads], query_key[:, heads:]
        start, end = self.length, self.length + size
        keys, values = self._keys[index, :, :end], self._values[index, :, :end]
        keys[:, start:] = key.transpose(0, 1)
        values[:, start:] = value.transpose(0, 1)
        # The query heads of one key/value head become rows beside the slots.
        query = query.view(size, kv_heads, -1, config.head_dim).transpose(0, 1).flatten(1, 2)
        mask = None
        if self._mask is not None:
            mask = functional.pad(self._mask, (start, 0))
        out = functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=mask
        )
        out = out.view(kv_heads, size, -1, config.head_dim).transpose(0, 1)
        return out.reshape(size, -1)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)

    def _make_room(self, length: int) -> None:
        """Grow so that `length` context positions and a block behind them fit."""
        capacity = self._cos.shape[0]
        if length + self._config.block_size <= capacity:
            return
        keys, values = self._keys, self._values
        self._reserve(max(2 * capacity, length + self._config.block_size))
        self._keys[:, :, : self.length] = keys[:, :, : self.length]
        self._values[:, :, : self.length] = values[:, :, : self.length]

    def _reserve(self, capacity: int) -> None:
        config = self._config
        shape = (config.num_hidden_layers, config.num_key_value_heads, capacity, config.head_dim)
        self._keys = torch.empty(shape, dtype=self._dtype, device=self._device)
        self._values = torch.empty_like(self._keys)
        positions = torch.arange(capacity, device=self._device)
        cos, sin = rotary(positions, config.head_dim, config.rope_theta)
        self._cos, self._sin = cos.to(self._dtype), sin.to(self._dtype)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin
