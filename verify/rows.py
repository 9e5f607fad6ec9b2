"""Many requests at once, each row at its own position: the target side of fast generation.

Rows are aligned at position 0, so a finished row is refilled by writing a new prompt over it, and
no padding mask is needed in a prefill (padding stands to the right, where a causal model does not
look). Attention-only targets; others are served by transformers' own generate.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicCache, DynamicLayer

from sparksmith.verify.caches import cache_argument

ATTENTION = "sparksmith_rows"
_OTHER_SCORES = ("softcap", "s_aux", "sinks", "position_bias", "sliding_window")


class RowLayer(CacheLayerMixin):  # type: ignore[misc]  # transformers is untyped
    """Keys and values [rows, heads, capacity, dim] of one layer, written row by row."""

    def __init__(self, cache: "RowCache") -> None:
        super().__init__()
        self._cache = cache

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        shape = (self._cache.num_rows, key_states.shape[1], self._cache.capacity)
        # Zeros, since a masked position still enters the weighted sum with weight 0: 0 * NaN.
        self.keys = key_states.new_zeros(*shape, key_states.shape[-1])
        self.values = value_states.new_zeros(*shape, value_states.shape[-1])
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None
        assert self.values is not None
        rows = self._cache.prefill_rows
        if rows is not None:
            self.keys[rows, :, : key_states.shape[2]] = key_states
            self.values[rows, :, : value_states.shape[2]] = value_states
            return key_states, value_states
        every, lengths = self._cache.every_row, self._cache.lengths
        self.keys[every, :, lengths] = key_states[:, :, 0]
        self.values[every, :, lengths] = value_states[:, :, 0]
        longest = self._cache.longest
        return self.keys[:, :, :longest], self.values[:, :, :longest]

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return self._cache.capacity

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._cache.longest, 0


class RowCache:
    """The caches of `num_rows` requests; `cache` is what the model is given."""

    def __init__(
        self, num_layers: int, num_rows: int, capacity: int, device: torch.device | None = None
    ) -> None:
        self.capacity = capacity
        self.prefill_rows: Tensor | None = None
        self.lengths = torch.zeros(num_rows, dtype=torch.long, device=device)
        self.every_row = torch.arange(num_rows, device=device)
        self.longest = 0
        self.cache = Cache(layers=[RowLayer(self) for _ in range(num_layers)])

    @property
    def num_rows(self) -> int:
        return len(self.lengths)

    def keep(self, rows: list[int]) -> None:
        """Drop every row but these, so that a run's last requests do not carry a full batch."""
        index = torch.tensor(rows, dtype=torch.long, device=self.lengths.device)
        self.lengths = self.lengths[index]
        self.every_row = self.every_row[: len(rows)]
        for layer in self.cache.layers:
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[index], layer.values[index]

    def restart(self, rows: list[int]) -> None:
        """Let these rows begin at position 0 again."""
        self.lengths[torch.tensor(rows, dtype=torch.long, device=self.lengths.device)] = 0


def grouped_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one token per row, or causal over a prefill, without repeating the key heads.

    query [B, Hq, n, D], key and value [B, Hkv, L, D]; n is 1 with a mask, or n equals L without.
    The query heads that share a key head stand along the query axis. Raises ValueError for scores
    that are capped or have sinks or a bias.
    """
    for name in _OTHER_SCORES:
        if kwargs.get(name) is not None:
            raise ValueError(f"rows do not compute attention with {name}")
    batch, heads, length, dim = query.shape
    if length > 1 or attention_mask is None:
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=length > 1, scale=scaling, enable_gqa=True
        )
        return out.transpose(1, 2), None
    grouped = query.reshape(batch, key.shape[1], heads // key.shape[1], dim)
    out = torch.nn.functional.scaled_dot_product_attention(
        grouped, key, value, attn_mask=attention_mask, scale=scaling
    )
    return out.reshape(batch, 1, heads, value.shape[-1]), None


AttentionInterface.register(ATTENTION, grouped_attention)


def supports_rows(model: PreTrainedModel) -> bool:
    """Whether rows give this model's own logits; tried on a few tokens, not guessed from names."""
    config = model.config.get_text_config(decoder=True)
    layers = DynamicCache(config=config).layers
    if any(type(layer) is not DynamicLayer for layer in layers):
        return False
    tokens = torch.arange(2, 10, device=model.device).clamp(max=config.vocab_size - 1)
    with torch.inference_mode():
        expected = model(input_ids=tokens[None], use_cache=False).logits[0, -1].float()
        rows = TargetRows(model, num_rows=2, capacity=16)
        try:
            rows.prefill(torch.tensor([1]), [tokens[:-1].tolist()])
            logits = rows.step(torch.stack([tokens[-1], tokens[-1]]))[1].float()
        except (TypeError, ValueError, RuntimeError):
            return False
    tolerance = 1e-3 if model.dtype == torch.float32 else 2e-2
    return bool((logits - expected).abs().max() <= tolerance * expected.abs().max())


class TargetRows:
    """A batch of requests of one target, prefilled and stepped; logits and nothing else."""

    def __init__(self, model: PreTrainedModel, *, num_rows: int, capacity: int) -> None:
        self.model = model
        layers = model.config.get_text_config(decoder=True).num_hidden_layers
        self.rows = RowCache(layers, num_rows, capacity, model.device)

    @torch.inference_mode()
    def prefill(self, rows: Tensor, prompts: list[list[int]]) -> Tensor:
        """Write prompts over `rows`; logits [len(rows), V] after the last token of each."""
        device = self.model.device
        longest = max(len(prompt) for prompt in prompts)
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt)] = torch.tensor(prompt)
        positions = torch.arange(longest, device=device)[None].expand(len(prompts), -1)
        self.rows.prefill_rows = rows = rows.to(device)
        try:
            hidden = self._run(tokens.to(device), positions, None)
        finally:
            self.rows.prefill_rows = None
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=device)
        self.rows.lengths[rows] = lengths
        return self._head(hidden[torch.arange(len(prompts), device=device), lengths - 1])

    @torch.inference_mode()
    def step(self, tokens: Tensor) -> Tensor:
        """Run one token [rows] for every row; logits [rows, V]."""
        lengths = self.rows.lengths
        self.rows.longest = int(lengths.max()) + 1
        columns = torch.arange(self.rows.longest, device=lengths.device)
        visible = columns[None] <= lengths[:, None]
        hidden = self._run(
            tokens.to(lengths.device)[:, None], lengths[:, None], visible[:, None, None]
        )
        self.rows.lengths += 1
        return self._head(hidden[:, 0])

    def _run(self, tokens: Tensor, positions: Tensor, mask: Tensor | None) -> Tensor:
        decoder = self.model.get_decoder()
        before = self.model.config._attn_implementation
        self.model.set_attn_implementation(ATTENTION)
        try:
            output = decoder(
                input_ids=tokens,
                position_ids=positions,
                attention_mask=mask,
                use_cache=True,
                **cache_argument(decoder, self.rows.cache),
            )
        finally:
            self.model.set_attn_implementation(before)
        hidden: Tensor = output.last_hidden_state
        return hidden

    def _head(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.model.get_output_embeddings()(hidden)
        return logits
