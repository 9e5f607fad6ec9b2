"""Packed and fused passes give the model's own logits, or are not used."""

import pytest
import torch
from tiny_models import full_pass, tiny_model, words

from sparksmith.draft.packed import packing_helps
from sparksmith.verify.packing import ATTENTION, pack_linears
from sparksmith.verify.target import TransformersTarget

TEXT = words(20)


def replaced(model, suffix: str) -> int:
    return sum(
        "forward" in vars(module)
        for module in model.modules()
        if type(module).__name__.endswith(suffix)
    )


def logits_in_parts(model):
    """Prompt, block and single tokens, as in decoding; [20, V]."""
    stream = TransformersTarget(model).begin(20)
    parts = torch.tensor(TEXT).split([7, 5, 1, 1, 6])
    return torch.cat([stream.forward(part, len(part)).logits for part in parts])


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "lfm2", "kimi_linear"])
def test_logits_stay_the_same(kind, fused):
    model = tiny_model(kind)
    expected, _ = full_pass(model, TEXT)
    # Some releases of transformers start a model with capped logits on its eager attention.
    replaceable = model.config._attn_implementation == "sdpa"
    pack_linears(model, fused=fused)
    found = logits_in_parts(model)
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    # Every layer of the decoder, and the head.
    assert replaced(model, "Linear") >= 20
    assert (replaced(model, "RMSNorm") > 8) is fused
    assert (model.config._attn_implementation == ATTENTION) is (fused and replaceable)


@pytest.mark.skipif(
    not packing_helps(torch.ones(1)), reason="this processor has no packed products"
)
def test_layers_of_one_input_are_one_product():
    model = tiny_model("llama")
    products: list[int] = []
    linear = torch.ops.mkldnn._linear_pointwise

    class Counting(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket is linear:
                products.append(1)
            return function(*args, **(kwargs or {}))

    def count() -> int:
        products.clear()
        with Counting(), torch.inference_mode():
            model(input_ids=torch.tensor(TEXT)[None])
        return len(products)

    pack_linears(model)
    assert count() == 4 * 7 + 1
    model = tiny_model("llama")
    pack_linears(model, fused=True)
    assert count() == 4 * 4 + 1


@pytest.mark.parametrize("change", ["other input", "other result"])
def test_a_model_that_does_not_fit_is_only_packed(change):
    model = tiny_model("llama")
    layer = model.model.layers[1]
    if change == "other input":
        layer.self_attn.k_proj.register_forward_pre_hook(lambda _, args: (args[0] * 2.0,))
    else:
        # An RMS norm that is one only for small inputs, such as the trial of a norm is.
        norm = layer.input_layernorm
        inner = type(norm).forward
        norm.__class__ = type(
            "OddRMSNorm",
            (type(norm),),
            {"forward": lambda self, x: inner(self, x.clamp(-6.0, 6.0))},
        )
        with torch.no_grad():
            model.model.embed_tokens.weight.mul_(20.0)
    expected, _ = full_pass(model, TEXT)
    pack_linears(model, fused=True)
    assert (logits_in_parts(model) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert model.config._attn_implementation == "sdpa"
    assert replaced(model, "RMSNorm") == 0
    assert replaced(model, "Linear") == 4 * 7 + 1


def test_a_forward_that_somebody_else_replaced_is_left_alone():
    model = tiny_model("llama")
    mlp = model.model.layers[0].mlp
    calls: list[int] = []

    def offloaded(x):
        calls.append(1)
        return torch.nn.functional.linear(x, mlp.up_proj.weight)

    mlp.up_proj.forward = offloaded
    pack_linears(model, fused=True)
    assert mlp.up_proj.forward is offloaded
    logits_in_parts(model)
    assert calls
