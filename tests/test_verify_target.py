"""The adapter hands out a model's own logits and features, and refuses what it cannot serve."""

import copy

import pytest
import torch
from tiny_models import HIDDEN, LAYERS, VOCABULARY, full_pass, tiny_model, words
from torch import nn

from sparksmith.draft.errors import UserError
from sparksmith.verify.caches import RewindingCache
from sparksmith.verify.target import TransformersTarget, check_taps, decoder_layers


def test_sizes_and_weights_are_the_models_own():
    model = tiny_model("qwen3")
    target = TransformersTarget(model, (0, 2))
    assert (target.vocab_size, target.hidden_size) == (VOCABULARY, HIDDEN)
    assert (target.num_layers, target.max_length, target.taps) == (LAYERS, 512, (0, 2))
    assert target.embed_weight is model.model.embed_tokens.weight
    assert target.head_weight is model.lm_head.weight


def test_logits_only_where_asked_and_features_everywhere():
    model = tiny_model("qwen3")
    target = TransformersTarget(model, (0, 2))
    rows: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda _, args: rows.append(args[0].shape[1]))
    text = words(9)
    result = target.begin(9).forward(torch.tensor(text), num_logits=2)
    assert rows == [2]
    logits, features = full_pass(model, text, (0, 2))
    assert result.features.shape == (9, 2 * HIDDEN)
    assert torch.allclose(result.logits, logits[-2:], atol=1e-4)
    assert torch.allclose(result.features, features, atol=1e-5)


def test_no_hidden_states_stay_behind():
    target = TransformersTarget(tiny_model("qwen3"), (1,))
    stream = target.begin(9)
    stream.forward(torch.tensor(words(9)), num_logits=1)
    assert target.recorder._outputs == {}
    assert (
        TransformersTarget(tiny_model("llama")).begin(4).forward(torch.tensor([1]), 1).features
        is None
    )


@pytest.mark.parametrize("taps", [(1, 0), (1, 1), (-1, 2), (0, LAYERS - 1), (LAYERS,)])
def test_taps_that_do_not_fit(taps):
    with pytest.raises(UserError, match=r"target_layer_ids.*0 to 2"):
        check_taps(taps, LAYERS)
    with pytest.raises(UserError):
        TransformersTarget(tiny_model("llama"), taps)


def test_taps_that_fit():
    check_taps((), 1)
    check_taps((0, 1, 2), LAYERS)


def test_a_model_without_one_stack_of_layers():
    model = tiny_model("llama")
    model.model.blocks = copy.deepcopy(model.model.layers)
    with pytest.raises(UserError, match="2 stacks of 4 decoder layers"):
        decoder_layers(model)


def test_tokens_that_end_a_text():
    model = tiny_model("llama", eos_token_id=3)
    assert TransformersTarget(model).eos_token_ids == {3}
    # As for `generate`, the generation settings go first.
    model.generation_config.eos_token_id = [5, 6]
    assert TransformersTarget(model).eos_token_ids == {5, 6}
    assert TransformersTarget(tiny_model("llama")).eos_token_ids == frozenset()


def test_plain_head():
    assert TransformersTarget(tiny_model("qwen3")).head_is_plain()
    assert TransformersTarget(tiny_model("kimi_linear")).head_is_plain()


def test_heads_that_are_not_plain():
    # Gemma 2 caps its logits with a tanh.
    assert not TransformersTarget(tiny_model("gemma2")).head_is_plain()
    model = tiny_model("qwen3")
    model.lm_head.bias = nn.Parameter(torch.linspace(-1.0, 1.0, VOCABULARY))
    assert not TransformersTarget(model).head_is_plain()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["qwen3", "mistral", "gemma2", "lfm2", "kimi_linear"])
def test_models_that_rewind_pass_the_check(kind, dtype):
    TransformersTarget(tiny_model(kind).to(dtype)).check_rewind()


def test_a_model_with_states_of_its_own_is_refused():
    """The mean of all embeddings so far, which no cache knows of."""

    class Remembering(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner
            self.weight = inner.weight
            self.seen = torch.zeros(HIDDEN)

        def forward(self, tokens):
            rows = self.inner(tokens)
            self.seen = self.seen + rows[0].sum(0)
            return rows + self.seen

    model = tiny_model("llama")
    model.model.embed_tokens = Remembering(model.model.embed_tokens)
    with pytest.raises(UserError, match="rejected tokens"):
        TransformersTarget(model).check_rewind()


def test_states_that_are_not_restored_are_found(monkeypatch):
    def crop_only(cache, length):
        for layer in cache._attention:
            layer.forget_after(length)

    monkeypatch.setattr(RewindingCache, "restore", crop_only)
    TransformersTarget(tiny_model("qwen3")).check_rewind()
    with pytest.raises(UserError, match="rejected tokens"):
        TransformersTarget(tiny_model("kimi_linear")).check_rewind()
