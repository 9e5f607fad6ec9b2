"""Weights laid out once for small matrix products on a CPU.

Decoding multiplies one to sixteen rows by a large weight. A plain product then spends most of its
time rearranging the weight; oneDNN keeps it rearranged. On a CPU without such kernels, and on any
other device, `pack_weight` is the plain linear function.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Linear = Callable[[Tensor], Tensor]

# The number of rows for which oneDNN chooses its blocking: a step verifies about this many.
_ROWS = 8


def packing_helps(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with this dtype natively on this processor."""
    if weight.device.type != "cpu":
        return False
    if not torch.backends.mkldnn.is_available():  # type: ignore[no-untyped-call]
        return False
    if not hasattr(torch.ops.mkldnn, "_reorder_linear_weight"):
        return False
    if weight.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return weight.dtype == torch.float32


def pack_weight(weight: Tensor, bias: Tensor | None = None) -> Linear:
    """A function x [..., I] -> x @ weight.T + bias [..., O] for inference; weight is [O, I].

    The result owns its copy of the weight: later changes to `weight` do not reach it.
    """
    weight = weight.detach()
    bias = None if bias is None else bias.detach()
    if not packing_helps(weight):
        return lambda x: torch.nn.functional.linear(x, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _ROWS)
    linear = torch.ops.mkldnn._linear_pointwise

    def apply(x: Tensor) -> Tensor:
        y: Tensor = linear(x, packed, bias, "none", [], "")
        return y

    return apply
