"""A plugin of vLLM that puts one of its kernels for CPUs right.

A draft's context keys are normed for all its layers at once, with weights [layers, width]. The
kernel for CUDA takes each layer's own; that for CPUs (0.32.0) takes the first layer's for all, so
that a draft of two layers accepts other tokens there than anywhere else.
"""


def install():
    """Replace `vllm._custom_ops.rms_norm` by one that goes layer by layer."""
    import vllm._custom_ops as ops

    original = ops.rms_norm
    if original.__name__ == "rms_norm_by_layer":
        return

    def rms_norm_by_layer(out, x, weight, epsilon):
        if weight.dim() == 1:
            original(out, x, weight, epsilon)
            return
        for layer in range(len(weight)):
            original(out[layer], x[layer], weight[layer], epsilon)

    ops.rms_norm = rms_norm_by_layer
