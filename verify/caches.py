"""Key/value caches that take back rejected tokens.

Attention layers, with or without a sliding window, keep every position and are rewound by
forgetting the last ones. Other layers (linear attention, KDA, convolutions) have folded a rejected
token into a state that cannot be cropped, so the state from before the block is kept and restored.
"""

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
)


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]  # transformers is untyped
    """Keys and values [B, heads, capacity, dim], of which the first `length` positions are in use.

    Appending writes in place instead of copying everything seen so far; rewinding moves `length`.
    With a `window`, attention is handed only the positions that the new tokens may look at
    (transformers' own sliding layer drops the others, and then cannot go back).
    """

    def __init__(self, capacity: int, window: int | None = None) -> None:
        super().__init__()
        self.is_sliding = window is not None
        self.length = 0
        self._capacity = max(capacity, 1)
        self._window = window
        self._key_buffer: Tensor | None = None
        self._value_buffer: Tensor | None = None

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        start, end = self._first_visible, self.length + key_states.shape[-2]
        self._key_buffer = self._with_room(self._key_buffer, key_states, end)
        self._value_buffer = self._with_room(self._value_buffer, value_states, end)
        self._key_buffer[:, :, self.length : end] = key_states
        self._value_buffer[:, :, self.length : end] = value_states
        self.length = end
        self.is_initialized = True
        self.keys = self._key_buffer[:, :, start:end]
        self.values = self._value_buffer[:, :, start:end]
        return self.keys, self.values

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length - self._first_visible, self._first_visible

    def forget_after(self, length: int) -> None:
        """Keep the first `length` positions."""
        assert length <= self.length
        self.length = length

    @property
    def _first_visible(self) -> int:
        """The first position that the next token may look at."""
        return 0 if self._window is None else max(0, self.length - self._window + 1)

    def _with_room(self, buffer: Tensor | None, states: Tensor, needed: int) -> Tensor:
        if buffer is not None and needed <= buffer.shape[-2]:
            return buffer
        capacity = max(self._capacity, needed if buffer is None else 2 * needed)
        grown = states.new_empty(*states.shape[:2], capacity, states.shape[-1])
        if buffer is not None:
            grown[:, :, : self.length] = buffer[:, :, : self.length]
        return grown


class RewindingCache:
    """A transformers cache for one request, with exact undo; `cache` is what the model is given."""

    def __init__(self, config: PreTrainedConfig, capacity: int) -> None:
        self.cache: Cache = DynamicCache(config=config)
        self._attention: list[PreallocatedLayer] = []
        self._stateful: list[Any] = []
        for index, layer in enumerate(self.cache.layers):
            # Exactly these types: their subclasses (indexed, hybrid, quantised) hold more than
            # keys and values, which a shorter length would not bring back.
            if type(layer) is DynamicLayer:
                replacement = PreallocatedLayer(capacity)
            elif type(layer) is DynamicSlidingWindowLayer:
                replacement = PreallocatedLayer(capacity, layer.sliding_window)
            else:
                self._stateful.append(layer)
                continue
            self.cache.layers[index] = replacement
            self._attention.append(replacement)
        self._saved: list[dict[str, Any]] = []

    @property
    def crops(self) -> bool:
        """Whether any length can be gone back to, with no state to restore."""
        return not self._stateful

    def checkpoint(self) -> None:
        """Remember the state of every layer that cannot forget, before a block is run."""
        self._saved = [_copy_state(vars(layer)) for layer in self._stateful]

    def restore(self, length: int) -> None:
        """Go back to `length` positions: any length if the cache crops, else the checkpoint's.

        The checkpoint stays, so that it can be restored again.
        """
        for layer in self._attention:
            layer.forget_after(length)
        for layer, state in zip(self._stateful, self._saved, strict=True):
            vars(layer).update(_copy_state(state))


def _copy_state(state: dict[str, Any]) -> dict[str, Any]:
    """A copy whose tensors share nothing with the original: layers update theirs in place."""
    return {name: _copy_value(value) for name, value in state.items()}


def _copy_value(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copy_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_copy_value(item) for item in value]
    return copy.copy(value)


def cache_argument(model: nn.Module, cache: Cache) -> dict[str, Cache]:
    """The keyword under which `model` takes its cache: transformers renamed it after 5.20."""
    renamed = "cache" in inspect.signature(model.forward).parameters
    return {"cache" if renamed else "past_key_values": cache}
