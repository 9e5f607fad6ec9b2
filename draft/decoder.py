"""The draft's forward for one stream: a growing context cache and one block at a time.

Context keys and values depend on their own position alone, so a committed position is projected
once and never again. The block's own keys are written behind the context's, used, and overwritten.
Shapes: L layers, T context positions, K slots of a block, D head size, H hidden, Vd draft words.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn import functional

from sparksmith.draft.backbone import Attention, DraftLayer, LatentAttention, block_mask
from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.model import BoundWeights, DSparkDraft
from sparksmith.draft.packed import Linear, pack_weight
from sparksmith.draft.rotary import Rotary, rotate, rotate_interleaved

_INITIAL_CAPACITY = 256


@dataclass(frozen=True, kw_only=True)
class _LayerWeights:
    """One layer but for its attention; gate and up joined: a larger product costs less."""

    input_norm: Tensor
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear

    @classmethod
    def of(cls, layer: DraftLayer) -> "_LayerWeights":
        mlp = layer.mlp
        return cls(
            input_norm=layer.input_layernorm.weight.detach(),
            output=pack_weight(layer.self_attn.o_proj.weight),
            mlp_norm=layer.post_attention_layernorm.weight.detach(),
            gate_up=pack_weight(torch.cat((mlp.gate_proj.weight, mlp.up_proj.weight))),
            down=pack_weight(mlp.down_proj.weight),
        )


class _HeadsWeights:
    """The projections of grouped-query attention, joined where they share an input."""

    def __init__(self, attentions: Sequence[Attention]) -> None:
        # One product gives the context keys of all layers, then the values of all layers.
        self.context = pack_weight(
            torch.cat(
                [attention.k_proj.weight for attention in attentions]
                + [attention.v_proj.weight for attention in attentions]
            )
        )
        self.key_norm = torch.stack([attention.k_norm.weight for attention in attentions])
        self.qkv, self.qk_norm = [], []
        for attention in attentions:
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            self.qkv.append(pack_weight(torch.cat([part.weight for part in projections])))
            norms = (
                attention.q_norm.weight.expand(attention.num_heads, -1),
                attention.k_norm.weight.expand(attention.num_kv_heads, -1),
            )
            self.qk_norm.append(torch.cat(norms))  # [query heads + key heads, D]


class _LatentWeights:
    """The projections of latent attention, with those out of the latents kept by head."""

    def __init__(self, attentions: Sequence[LatentAttention]) -> None:
        self.layers = list(attentions)
        # One product gives the context latents of all layers.
        self.context = pack_weight(
            torch.cat([attention.kv_a_proj_with_mqa.weight for attention in attentions])
        )
        self.norm = torch.stack([attention.kv_a_layernorm.weight for attention in attentions])
        self.to_keys, self.to_values = [], []
        for attention in attentions:
            nope, value = attention.sizes.qk_nope_head_dim, attention.sizes.v_head_dim
            weight = torch.unflatten(attention.kv_b_proj.weight.detach(), 0, (-1, nope + value))
            self.to_keys.append(weight[:, :nope])  # [heads, nope, kv_lora_rank]
            self.to_values.append(weight[:, nope:].transpose(1, 2))  # [heads, kv_lora_rank, v]


class DecodingWeights:
    """A draft's weights as decoding wants them; shared by all streams of the draft."""

    def __init__(self, draft: DSparkDraft) -> None:
        with torch.no_grad():
            layers = [layer for layer in draft.layers if isinstance(layer, DraftLayer)]
            self.fuse = pack_weight(draft.fc.weight)
            self.layers = [_LayerWeights.of(layer) for layer in layers]
            self.attention: _HeadsWeights | _LatentWeights = _attention_weights(layers)
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


def _attention_weights(layers: Sequence[DraftLayer]) -> _HeadsWeights | _LatentWeights:
    attentions = [layer.self_attn for layer in layers]
    heads = [attention for attention in attentions if isinstance(attention, Attention)]
    if heads:
        return _HeadsWeights(heads)
    return _LatentWeights([a for a in attentions if isinstance(a, LatentAttention)])


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
        self.draft = draft
        self.weights = decoding_weights(draft)
        self._config = draft.config
        weight = draft.fc.weight
        self._dtype, self._device = weight.dtype, weight.device
        kind = _HeadsCache if draft.config.mla is None else _LatentCache
        self._cache: _Cache = kind(draft, self.weights)

    @property
    def length(self) -> int:
        """Context positions so far."""
        return self._cache.length

    def append(self, features: Tensor) -> None:
        """Add the context positions that follow: target features [n, m * Ht]."""
        fused = self.weights.fuse(features.to(self._device, self._dtype))
        self._cache.append(self._norm(fused, self.draft.hidden_norm.weight))

    def block(self, tokens: Tensor) -> Tensor:
        """Post-norm hidden states [K, H] of a block [anchor, mask, ...] behind the context."""
        x = self.draft.embed(tokens)
        for index, layer in enumerate(self.weights.layers):
            attended = self._cache.attend(index, self._norm(x, layer.input_norm))
            x = x + layer.output(attended)
            gate, up = layer.gate_up(self._norm(x, layer.mlp_norm)).chunk(2, dim=-1)
            x = x + layer.down(functional.silu(gate) * up)
        return self._norm(x, self.draft.norm.weight)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, weight.shape, weight, self._config.rms_norm_eps)


class _Cache:
    """What the context left in every layer, in preallocated tensors that grow by doubling.

    `stores` [..., T, size] hold the positions in their last dimension but one.
    """

    def __init__(self, draft: DSparkDraft) -> None:
        config = draft.config
        weight = draft.fc.weight
        self.length = 0
        self.eps = config.rms_norm_eps
        self.stores: list[Tensor] = []
        self._draft, self._like = draft, weight.new_empty(0).detach()
        self._block_size = config.block_size
        self._capacity = 0
        self._rows = config.num_attention_heads // self.kv_heads(config)
        self._mask: Tensor | None = None
        if config.is_causal:
            mask = block_mask(config, weight.device).to(weight.dtype)
            self._mask = mask.repeat_interleave(self._rows, 0)
        # How far before the anchor's position a context position is beyond each row's window.
        self._too_far: Tensor | None = None
        if config.sliding_window is not None:
            offsets = torch.arange(config.block_size, device=weight.device)
            too_far = config.sliding_window - offsets.repeat_interleave(self._rows)
            self._too_far = too_far[:, None]

    @staticmethod
    def kv_heads(config: DSparkConfig) -> int:
        """Keys a position has; the query heads that share one are rows of the attention."""
        raise NotImplementedError

    def shapes(self) -> Sequence[tuple[int, ...]]:
        """The shape of each store, without positions and size: [..., size]."""
        raise NotImplementedError

    def append(self, context: Tensor) -> None:
        """Add normed fused features [n, H]."""
        raise NotImplementedError

    def attend(self, index: int, x: Tensor) -> Tensor:
        """What the slots x [K, H] of a block see in layer `index`: [K, heads * Dv]."""
        raise NotImplementedError

    def mask(self) -> Tensor | None:
        """Added to scores [rows, length + K]: a causal block, and what a window leaves out."""
        mask = self._mask
        if mask is None and self._too_far is None:
            return None
        if mask is None:
            mask = self._like.new_zeros(self._rows * self._block_size, self._block_size)
        mask = functional.pad(mask, (self.length, 0))
        if self._too_far is not None:
            hidden = torch.arange(self.length, device=mask.device) <= self.length - self._too_far
            mask[:, : self.length].masked_fill_(hidden, float("-inf"))
        return mask

    def positions(self, start: int, count: int) -> Rotary:
        """Cosines and sines [count, D]."""
        return self._cos[start : start + count], self._sin[start : start + count]

    def make_room(self, length: int) -> None:
        """Grow so that `length` context positions and a block behind them fit."""
        needed = length + self._block_size
        if needed <= self._capacity:
            return
        self._capacity = max(2 * self._capacity, needed, _INITIAL_CAPACITY)
        old = self.stores
        self.stores = [
            self._like.new_empty((*shape[:-1], self._capacity, shape[-1]))
            for shape in self.shapes()
        ]
        for new, known in zip(self.stores, old, strict=False):
            new[..., : self.length, :] = known[..., : self.length, :]
        positions = torch.arange(self._capacity, device=self._like.device)
        cos, sin = self._draft.rotary(positions)
        self._cos, self._sin = cos.to(self._like.dtype), sin.to(self._like.dtype)


class _HeadsCache(_Cache):
    """Keys and values [L, kv heads, T, D] of grouped-query attention."""

    def __init__(self, draft: DSparkDraft, weights: DecodingWeights) -> None:
        super().__init__(draft)
        assert isinstance(weights.attention, _HeadsWeights)
        self._weights = weights.attention
        self._heads = draft.config.num_attention_heads
        self._kv_heads = draft.config.num_key_value_heads
        self._size = draft.config.head_dim
        self._num_layers = draft.config.num_hidden_layers
        self.make_room(0)

    @staticmethod
    def kv_heads(config: DSparkConfig) -> int:
        return config.num_key_value_heads

    def shapes(self) -> Sequence[tuple[int, ...]]:
        return 2 * [(self._num_layers, self._kv_heads, self._size)]

    def append(self, context: Tensor) -> None:
        start, end = self.length, self.length + len(context)
        self.make_room(end)
        # [n, (keys, values), L, kv heads, D]
        key_value = self._weights.context(context).view(
            -1, 2, self._num_layers, self._kv_heads, self._size
        )
        key, value = key_value.unbind(1)
        key = functional.rms_norm(key, (self._size,), eps=self.eps)
        key = key * self._weights.key_norm.unsqueeze(1)
        key = rotate(key.flatten(1, 2), self.positions(start, len(context))).view_as(value)
        keys, values = self.stores
        keys[:, :, start:end] = key.permute(1, 2, 0, 3)
        values[:, :, start:end] = value.permute(1, 2, 0, 3)
        self.length = end

    def attend(self, index: int, x: Tensor) -> Tensor:
        heads, kv_heads, count = self._heads, self._kv_heads, len(x)
        start, end = self.length, self.length + count
        qkv = self._weights.qkv[index](x).view(count, heads + 2 * kv_heads, self._size)
        query_key, value = qkv[:, : heads + kv_heads], qkv[:, heads + kv_heads :]
        query_key = functional.rms_norm(query_key, (self._size,), eps=self.eps)
        query_key = rotate(query_key * self._weights.qk_norm[index], self.positions(start, count))
        query, key = query_key[:, :heads], query_key[:, heads:]
        keys, values = (store[index, :, :end] for store in self.stores)
        keys[:, start:] = key.transpose(0, 1)
        values[:, start:] = value.transpose(0, 1)
        # The query heads of one key/value head become rows beside the slots.
        query = query.view(count, kv_heads, -1, self._size).transpose(0, 1).flatten(1, 2)
        out = functional.scaled_dot_product_attention(
            query[None], keys[None], values[None], attn_mask=self.mask()
        )
        out = out.view(kv_heads, count, -1, self._size).transpose(0, 1)
        return out.reshape(count, -1)


class _LatentCache(_Cache):
    """Latents with the shared rotated key part behind them, [L, T, kv_lora_rank + rope].

    Attention happens among the latents: a query's nope part goes through the transposed key
    expansion instead of every cached position through the expansion (MLA's absorbed form).
    """

    def __init__(self, draft: DSparkDraft, weights: DecodingWeights) -> None:
        super().__init__(draft)
        assert isinstance(weights.attention, _LatentWeights)
        assert draft.config.mla is not None
        self._weights = weights.attention
        self._rank = draft.config.mla.kv_lora_rank
        self._rope = draft.config.mla.qk_rope_head_dim
        self._heads = draft.config.num_attention_heads
        self._num_layers = draft.config.num_hidden_layers
        self._scale = draft.config.attention_scale
        self.make_room(0)

    @staticmethod
    def kv_heads(_config: DSparkConfig) -> int:
        return 1

    def shapes(self) -> Sequence[tuple[int, ...]]:
        return [(self._num_layers, self._rank + self._rope)]

    def append(self, context: Tensor) -> None:
        start, end = self.length, self.length + len(context)
        self.make_room(end)
        latents = self._weights.context(context).view(-1, self._num_layers, self._rank + self._rope)
        latent, rope = torch.split(latents, [self._rank, self._rope], dim=-1)
        latent = functional.rms_norm(latent, (self._rank,), eps=self.eps) * self._weights.norm
        rope = rotate_interleaved(rope, self.positions(start, len(context)))
        self.stores[0][:, start:end] = torch.cat((latent, rope), dim=-1).transpose(0, 1)
        self.length = end

    def attend(self, index: int, x: Tensor) -> Tensor:
        layer, count = self._weights.layers[index], len(x)
        start, end = self.length, self.length + count
        positions = self.positions(start, count)
        nope, rope = layer.query_parts(x, positions)
        absorbed = torch.einsum("khn,hnr->khr", nope, self._weights.to_keys[index])
        # The heads become rows beside the slots: all share one key.
        query = torch.cat((absorbed, rope), dim=-1).flatten(0, 1)
        keys = self.stores[0][index, :end]
        keys[start:] = torch.cat(layer.latents(x, positions), dim=-1)
        out = functional.scaled_dot_product_attention(
            query[None, None],
            keys[None, None],
            keys[None, None, :, : self._rank],
            attn_mask=self.mask(),
            scale=self._scale,
        )
        out = out.view(count, self._heads, self._rank)
        return torch.einsum("khr,hrv->khv", out, self._weights.to_values[index]).flatten(1)
