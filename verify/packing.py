"""A target pass on a CPU in less time: the same numbers from fewer and better-fed operations.

At one user's batch size a pass reads every weight once, and much of the rest is overhead. What is
done here is done to the model itself, so both arms of a comparison have it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from sparksmith.draft.packed import pack_weight
from sparksmith.verify.caches import cache_argument

ATTENTION = "sparksmith_grouped"

# Layers that usually share their input; fused only where a trial shows that they do.
_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def pack_linears(model: PreTrainedModel, *, fused: bool = False) -> None:
    """Prepare every linear layer for small matrix products (see `draft.packed`).

    With `fused`, layers of one input become one product, norms one operation, and grouped-query
    attention under a mask no longer copies its keys and values: kept only if the logits on a
    few tokens stay the same. Inference only: gradients do not flow through a packed layer, and
    its `weight` stays as it was for those who read it.
    """
    if not fused:
        _pack_each(model)
        return
    taken = {module for module in model.modules() if not _is_free(module)}
    expected = _trial(model)
    attention = model.config._attn_implementation
    groups = _fuse_siblings(model)
    _pack_each(model)
    _fuse_norms(model)
    if attention == "sdpa":
        model.set_attn_implementation(ATTENTION)
    found = _trial(model)
    shared = all(group.runs == _TRIAL_PASSES for group in groups)
    tolerance = max(1e-5, 16 * torch.finfo(found.dtype).eps)
    if not shared or not (found - expected).abs().max() <= tolerance * expected.abs().max():
        for module in set(model.modules()) - taken:
            vars(module).pop("forward", None)
        model.set_attn_implementation(attention)
        _pack_each(model)


def _pack_each(model: PreTrainedModel) -> None:
    for module in model.modules():
        if type(module) is nn.Linear and _is_free(module):
            vars(module)["forward"] = pack_weight(module.weight, module.bias)


def _is_free(module: nn.Module) -> bool:
    """Whether nobody has replaced this module's forward (accelerate does, for offloading)."""
    return "forward" not in vars(module)


class _SharedInput:
    """Linear layers of one input, multiplied at once by whichever is called first."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.runs = 0
        biases = [layer.bias for layer in layers if layer.bias is not None]
        self._product = pack_weight(
            torch.cat([layer.weight.detach() for layer in layers]),
            torch.cat([bias.detach() for bias in biases]) if biases else None,
        )
        self._sizes = [layer.out_features for layer in layers]
        self._input: Tensor | None = None
        self._outputs: dict[int, Tensor] = {}

    def part(self, index: int) -> Callable[[Tensor], Tensor]:
        """The layer `index` of them: right for any input, fast for the one just seen."""

        def forward(x: Tensor) -> Tensor:
            if self._input is not x or index not in self._outputs:
                self._input = x
                self._outputs = dict(enumerate(torch.split(self._product(x), self._sizes, -1)))
                self.runs += 1
            output = self._outputs.pop(index)
            if not self._outputs:
                self._input = None
            return output

        return forward


def _fuse_siblings(model: PreTrainedModel) -> list[_SharedInput]:
    groups = []
    for module in model.modules():
        children = dict(module.named_children())
        for names in _SIBLINGS:
            layers = [children.get(name) for name in names]
            linears = [layer for layer in layers if type(layer) is nn.Linear and _is_free(layer)]
            if len(linears) < len(names):
                continue
            alike = {(layer.in_features, layer.bias is None) for layer in linears}
            if len(alike) > 1:
                continue
            group = _SharedInput(linears)
            for index, layer in enumerate(linears):
                vars(layer)["forward"] = group.part(index)
            groups.append(group)
    return groups


def _fuse_norms(model: PreTrainedModel) -> None:
    """Replace RMS norms by torch's, scaled by the weight or by one more than it."""
    for module in model.modules():
        parameters = dict(module.named_parameters(recurse=False))
        epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        named = type(module).__name__.endswith("RMSNorm") and list(parameters) == ["weight"]
        if not (named and _is_free(module) and isinstance(epsilon, float)):
            continue
        weight = parameters["weight"].detach()
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(2, len(weight), generator=generator).to(weight)
        with torch.inference_mode():
            expected = module(x)
        for scale in (weight, 1 + weight):
            fast = _rms_norm(scale, epsilon)
            if torch.allclose(fast(x), expected, rtol=2 * torch.finfo(x.dtype).eps, atol=1e-6):
                vars(module)["forward"] = fast
                break


def _rms_norm(weight: Tensor, epsilon: float) -> Callable[[Tensor], Tensor]:
    def forward(x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, weight.shape, weight, epsilon)

    return forward


class _GroupedMask:
    """The float mask of the last boolean one: every layer of a pass asks for the same."""

    def __init__(self) -> None:
        self._key: tuple[Tensor, int, torch.dtype] | None = None
        self._mask = torch.empty(0)

    def of(self, mask: Tensor, groups: int, dtype: torch.dtype) -> Tensor:
        """mask [B, 1, n, L] as [B, 1, groups * n, L], 0 where it is true and -inf elsewhere."""
        key = self._key
        if key is None or key[0] is not mask or key[1:] != (groups, dtype):
            zeros = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
            self._mask = zeros.masked_fill_(~mask, float("-inf")).repeat(1, 1, groups, 1)
            self._key = (mask, groups, dtype)
        return self._mask


_grouped_mask = _GroupedMask()


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' sdpa attention, except that keys and values under a mask are not repeated.

    query [B, Hq, n, D], key and value [B, Hkv, L, D]. The query heads that share a key head stand
    one after the other along the query axis.
    """
    batch, heads, length, dim = query.shape
    key_heads = key.shape[1]
    if (
        attention_mask is None
        or attention_mask.dtype != torch.bool
        or attention_mask.shape[1] != 1
        or kwargs.get("position_bias") is not None
        or query.requires_grad
    ):
        result: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, **kwargs
        )
        return result
    groups = heads // key_heads
    output = nn.functional.scaled_dot_product_attention(
        query.reshape(batch, key_heads, groups * length, dim),
        key,
        value,
        attn_mask=_grouped_mask.of(attention_mask, groups, query.dtype),
        scale=kwargs.get("scaling"),
    )
    return output.reshape(batch, heads, length, -1).transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)

_TRIAL_PASSES = 3


def _trial(model: PreTrainedModel) -> Tensor:
    """Logits of a prompt, a block and a single token; [12, V] in float32 or wider."""
    cache = DynamicCache(config=model.config.get_text_config(decoder=True))
    vocab_size = model.get_input_embeddings().weight.shape[0]
    tokens = (torch.arange(1, 13, device=model.device) * 37) % vocab_size
    with torch.inference_mode():
        logits = [
            model(input_ids=part[None], use_cache=True, **cache_argument(model, cache)).logits[0]
            for part in tokens.split([6, 5, 1])
        ]
    return torch.cat(logits)
