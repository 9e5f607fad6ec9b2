"""K3 at toy size: each part against its equation, exact caches, two streams told apart."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_samples import fitting_draft
from tiny_models import HIDDEN, tiny_model, words
from torch import Tensor, nn

pytest.importorskip("transformers.models.kimi_linear")

from test_verify_probes import by_heart, run

from sparksmith.draft.errors import UserError
from sparksmith.verify.k3_mini import AttentionResidual, K3MiniMLP, K3MiniMoE, k3_mini, situ
from sparksmith.verify.k3_mini_files import save_k3_mini
from sparksmith.verify.loading import load_target
from sparksmith.verify.target import TransformersTarget

TOKENS = torch.tensor([words(14, seed=3)])


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model("k3_mini")


def close(actual: Tensor, expected: Tensor) -> bool:
    return float((actual - expected).abs().max()) <= 1e-5 * float(expected.abs().max())


def test_situ_by_hand() -> None:
    """At g = 2, u = 30, with K3's constants 4 and 25."""
    expected = 4 * math.tanh(0.5) * (1 / (1 + math.exp(-2))) * 25 * math.tanh(30 / 25)
    found = situ(torch.tensor(2.0), torch.tensor(30.0), 4.0, 25.0)
    assert float(found) == pytest.approx(expected, rel=1e-6)


def outputs(model: Any, *modules: nn.Module) -> list[Any]:
    """What the modules return in one pass over TOKENS."""
    seen: list[Any] = [None] * len(modules)
    handles = [
        module.register_forward_hook(
            lambda _m, _i, out, number=number: seen.__setitem__(number, out)
        )
        for number, module in enumerate(modules)
    ]
    with torch.no_grad():
        model(input_ids=TOKENS)
    for handle in handles:
        handle.remove()
    return [out if isinstance(out, Tensor) else out[0] for out in seen]


def test_the_prefix_sum_is_of_its_blocks_sublayers_alone(model: Any) -> None:
    layers = model.model.layers
    parts = outputs(model, *(part for layer in layers for part in (layer.self_attn, layer.mlp)))
    prefixes = outputs(model, *layers)
    for index in range(len(layers)):
        first = index - index % 2  # blocks of two layers
        expected = torch.stack(parts[2 * first : 2 * index + 2]).sum(0)
        assert close(prefixes[index], expected)


def test_a_mixture_weighs_finished_blocks_and_the_prefix(model: Any) -> None:
    """The second layer's of the second block, vector by vector."""
    layers = model.model.layers
    embedded, block, prefix = outputs(model, model.model.embed_tokens, layers[1], layers[2])
    (mixture,) = outputs(model, layers[3].attention_residual)
    residual: AttentionResidual = layers[3].attention_residual
    with torch.no_grad():
        for place in range(TOKENS.shape[1]):
            vectors = [embedded[0, place], block[0, place], prefix[0, place]]
            scores = []
            for vector in vectors:
                size = (vector.pow(2).mean() + model.config.rms_norm_eps).sqrt()
                normed = vector / size * residual.norm.weight
                scores.append(float(normed @ residual.proj.weight[0]))
            shares = torch.tensor(scores).softmax(0)
            expected = sum(share * vector for share, vector in zip(shares, vectors, strict=True))
            assert close(mixture[0, place], expected)


def test_the_first_layer_reads_the_embedding_alone(model: Any) -> None:
    embedded, mixture = outputs(
        model, model.model.embed_tokens, model.model.layers[0].attention_residual
    )
    assert close(mixture, embedded)


@torch.no_grad()
def test_experts_work_in_the_latent_width(model: Any) -> None:
    moe: K3MiniMoE = model.model.layers[1].mlp
    x = torch.randn(1, 5, HIDDEN, generator=torch.Generator().manual_seed(4))
    found = moe(x)
    for place in range(5):
        vector = x[0, place]
        scores = (moe.gate.weight @ vector).sigmoid()
        top = scores.topk(2).indices
        shares = scores[top] / scores[top].sum() * moe.gate.routed_scaling_factor
        latent = moe.latent_down.weight @ vector
        routed = sum(
            share * moe.experts[int(expert)](latent)
            for share, expert in zip(shares, top, strict=True)
        )
        expected = moe.latent_up.weight @ routed + moe.shared_experts(vector)
        assert close(found[0, place], expected)
    assert isinstance(moe.shared_experts, K3MiniMLP)


@torch.no_grad()
def test_the_gate_multiplies_the_heads_outputs() -> None:
    model = tiny_model("k3_mini")
    attention = model.model.layers[3].self_attn
    ones = torch.ones(1, 6, HIDDEN)
    attention.g_proj.weight.copy_(torch.full_like(attention.g_proj.weight, 1e3))  # open
    ungated, _ = attention(ones, attention_mask=None)
    attention.g_proj.weight.zero_()  # one half everywhere
    gated, _ = attention(ones, attention_mask=None)
    assert close(gated, ungated / 2)
    assert float(gated.abs().max()) > 0


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(1,) * 14, (5, 9), (6, 1, 4, 3)])
def test_continuation_equals_one_pass(model: Any, cuts: tuple[int, ...]) -> None:
    whole = model(input_ids=TOKENS).logits
    parts, cache, start = [], None, 0
    for size in cuts:
        out = model(input_ids=TOKENS[:, start : start + size], cache=cache, use_cache=True)
        parts.append(out.logits)
        # By either of the names that transformers has had for it.
        cache, start = out.get("cache", out.get("past_key_values")), start + size
    assert close(torch.cat(parts, 1), whole)


def test_rejected_tokens_leave_no_trace(model: Any) -> None:
    TransformersTarget(model).check_rewind()


def test_the_two_streams_are_what_they_say(model: Any) -> None:
    layers = model.model.layers
    prefix, mixture, final = outputs(
        model, layers[0], layers[1].attention_residual, model.model.output_residual
    )
    for stream, expected in (("prefix_sum", prefix), ("attn_res_mixture", mixture)):
        target = TransformersTarget(model, (0, 2), stream)
        features = target.begin(14).forward(TOKENS[0], 1).features
        assert features is not None
        assert close(features[:, :HIDDEN], expected[0])
    assert TransformersTarget(model).stream == "prefix_sum"
    # The mixture behind the last layer is what the final norm reads.
    modules = model.model.tap_modules("attn_res_mixture")
    assert modules[-1] is model.model.output_residual
    assert final.shape == prefix.shape
    with pytest.raises(UserError, match="prefix_sum"):
        TransformersTarget(model, (0,), "residual")
    with pytest.raises(UserError, match="residual"):
        TransformersTarget(tiny_model("qwen3"), (0,), "prefix_sum")


@pytest.mark.parametrize("trained", ["prefix_sum", "attn_res_mixture"])
def test_a_draft_fed_the_other_stream_is_found_out(trained: str) -> None:
    model = tiny_model("k3_mini", num_hidden_layers=8)
    streams = ("prefix_sum", "attn_res_mixture")
    (other,) = set(streams) - {trained}
    right, wrong = (TransformersTarget(model, (1, 3), stream) for stream in (trained, other))
    draft = by_heart(right, fitting_draft(right, target_layer_ids=(1, 3)))
    good, found = run(right, draft)
    assert "probe-stream" not in found
    bad, found = run(wrong, draft)
    assert trained in found["probe-stream"]
    assert bad.accepted < 0.7 * good.accepted


def test_it_is_loaded_from_its_folder(tmp_path: Path) -> None:
    target, tokenizer = load_target(save_k3_mini(tmp_path), dtype="float32", taps=(1, 3))
    assert target.stream == "prefix_sum"
    made = k3_mini(vocab_size=258)
    made.lm_head.weight.data[257] = 0.0
    ids = torch.tensor([tokenizer("def f(x):")["input_ids"]])
    with torch.no_grad():
        assert close(target.model(input_ids=ids).logits, made(input_ids=ids).logits)
    assert target.vocab_size == 258
