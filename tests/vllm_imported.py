"""Imported once, in the process from which the tests' vLLM processes are forked."""

from typing import Any

import vllm._custom_ops as ops
from vllm import LLM, SamplingParams  # noqa: F401

_rms_norm = ops.rms_norm


def _rms_norm_by_layer(out: Any, x: Any, weight: Any, epsilon: float) -> None:
    """The norm of [layers, ...] by weights [layers, width]: vLLM's CPU kernel (0.32.0) takes the
    first layer's weights for all, where the CUDA kernel takes each layer's own."""
    if weight.dim() == 1:
        _rms_norm(out, x, weight, epsilon)
        return
    for layer in range(len(weight)):
        _rms_norm(out[layer], x[layer], weight[layer], epsilon)


ops.rms_norm = _rms_norm_by_layer
