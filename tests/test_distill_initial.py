"""A draft that starts as the target's last layers computes what they compute."""

from typing import Any

import pytest
import torch
from distill_samples import fitting_draft
from tiny_models import HIDDEN, tiny_model, words
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from sparksmith.distill.initial import start_from_target
from sparksmith.draft.backbone import rotary, rotate
from sparksmith.draft.model import DSparkDraft
from sparksmith.verify.caches import cache_argument
from sparksmith.verify.target import TransformersTarget, decoder_layers

SHAPE: dict[str, Any] = {
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
}


def model_of(kind: str, **changes: Any) -> PreTrainedModel:
    """Norms away from one, so that a norm left out is seen."""
    model = tiny_model(kind, **changes)
    generator = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.add_(0.3 * torch.randn(weight.shape, generator=generator))
    return model


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_layers_norms_and_context_are_the_targets(kind: str) -> None:
    model = model_of(kind)
    target = TransformersTarget(model, (0, 1))
    draft = fitting_draft(target, **SHAPE, target_layer_ids=(0, 1))
    head_norm = draft.layers[0].self_attn.q_norm.weight.clone()
    assert start_from_target(draft, target)
    for own, theirs in zip(draft.layers, decoder_layers(model)[-2:], strict=True):
        wanted = dict(theirs.named_parameters())
        names = [name for name, _ in own.named_parameters() if name in wanted]
        assert len(names) == (11 if kind == "qwen3" else 9)
        assert all(torch.equal(own.get_parameter(name), wanted[name]) for name in names)
    if kind == "llama":
        assert torch.equal(draft.layers[0].self_attn.q_norm.weight, head_norm)
    assert torch.equal(draft.norm.weight, model.model.norm.weight)
    # The deepest tap passes through, the others as noise too small to matter.
    own_tap = draft.fc.weight[:, HIDDEN:] - torch.eye(HIDDEN)
    assert draft.fc.weight[:, :HIDDEN].abs().max() < 0.01
    assert own_tap.abs().max() < 0.01
    assert draft.fc.weight[:, :HIDDEN].abs().max() > 0  # each tap can be learnt


@torch.inference_mode()
def test_context_keys_and_values_are_the_targets_own() -> None:
    """The deepest tap is what the first copied layer reads: its cache must come out the same."""
    model = model_of("qwen3")
    target = TransformersTarget(model, (0, 1))
    draft = fitting_draft(target, **SHAPE, target_layer_ids=(0, 1))
    assert start_from_target(draft, target)
    tokens = torch.tensor(words(9))
    features = target.begin(16).forward(tokens, 1).features
    assert features is not None
    cache = DynamicCache(config=model.config)
    model(input_ids=tokens[None], **cache_argument(model, cache))
    theirs = cache.layers[2]

    def largest_error() -> float:
        attention, context = draft.layers[0].self_attn, draft.fuse(features)
        key = attention.k_norm(attention.k_proj(context).view(9, 2, 8))
        key = rotate(key, rotary(torch.arange(9), 8, draft.config.rope_theta)).transpose(0, 1)
        value = attention.v_proj(context).view(9, 2, 8).transpose(0, 1)
        errors = [
            (key - theirs.keys[0]).abs().max() / theirs.keys.abs().max(),
            (value - theirs.values[0]).abs().max() / theirs.values.abs().max(),
        ]
        return float(max(errors))

    assert largest_error() < 0.05  # the noise of the other taps
    draft.fc.weight.copy_(torch.cat((torch.zeros(HIDDEN, HIDDEN), torch.eye(HIDDEN)), 1))
    assert largest_error() < 1e-5


def unchanged(draft: DSparkDraft, target: TransformersTarget) -> bool:
    before = {name: value.clone() for name, value in draft.state_dict().items()}
    copied = start_from_target(draft, target)
    same = all(torch.equal(value, before[name]) for name, value in draft.state_dict().items())
    assert copied != same
    return same


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen3", {"intermediate_size": 40}),
        ("qwen3", {"num_key_value_heads": 4}),
        ("llama", {"head_dim": 4}),
        ("qwen3", {"num_hidden_layers": 6}),  # more than the target has
        ("gemma2", {}),  # norms around the layers' outputs too, weights as offsets from one
        ("lfm2", {}),
        ("kimi_linear", {}),
    ],
)
def test_other_shapes_leave_the_draft_as_it_is(kind: str, changes: dict[str, Any]) -> None:
    target = TransformersTarget(tiny_model(kind), (0, 2))
    draft = fitting_draft(target, **{**SHAPE, "target_layer_ids": (0, 2), **changes})
    assert unchanged(draft, target)


def test_norms_whose_weight_is_an_offset_are_not_copied() -> None:
    model = model_of("llama")
    target = TransformersTarget(model, (0, 2))
    draft = fitting_draft(target, **SHAPE, target_layer_ids=(0, 2))
    norm = decoder_layers(model)[-1].input_layernorm
    plain = norm.forward
    norm.forward = lambda x: plain(x) * (1 + 1 / norm.weight)  # (1 + weight) * x, as Gemma's
    assert unchanged(draft, target)
