"""Rewinding is exact: after a rejection a stream goes on as one that never saw the rejected."""

import pytest
import torch
from tiny_models import VOCABULARY, full_pass, tiny_model, words
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from sparksmith.verify.caches import PreallocatedLayer, RewindingCache
from sparksmith.verify.target import TransformersTarget

TAPS = (0, 2)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma2", "lfm2", "kimi_linear"])
@pytest.mark.parametrize("seed", [0, 1])
def test_logits_after_rejections_are_those_of_the_text(kind, seed):
    """Blocks of 1 to 8 tokens, of which any number stands, against one pass over the text."""
    text = words(90, seed=seed)
    target = TransformersTarget(tiny_model(kind, seed=seed), TAPS)
    expected_logits, expected_features = full_pass(target.model, text, TAPS)
    stream = target.begin(capacity=10)  # too little: it has to grow
    generator = torch.Generator().manual_seed(seed)
    length, logits, features = 0, [], []
    while length < len(text):
        size, kept = (
            (10, 10) if length == 0 else torch.randint(1, 9, (2,), generator=generator).tolist()
        )
        kept = min(kept, size, len(text) - length)
        right = torch.tensor(text[length : length + kept])
        rejected = torch.randint(0, VOCABULARY, (size - kept,), generator=generator)
        result = stream.forward(torch.cat([right, rejected]), num_logits=size)
        logits.append(result.logits[:kept])
        features.append(result.features[:kept])
        length += kept
        stream.rewind(length)
        assert stream.length == length
    for found, expected in (
        (torch.cat(logits), expected_logits),
        (torch.cat(features), expected_features),
    ):
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


@pytest.mark.parametrize("kind", ["qwen3", "kimi_linear"])
def test_a_block_of_which_nothing_stands(kind):
    """Also when it happens again and again, and right after the prompt."""
    text = words(12)
    target = TransformersTarget(tiny_model(kind))
    stream = target.begin(20)
    stream.forward(torch.tensor(text[:8]), 1)
    for seed in range(3):
        stream.forward(torch.tensor(words(5, seed=50 + seed)), 1)
        stream.rewind(8)
    found = stream.forward(torch.tensor(text[8:]), 4).logits
    expected, _ = full_pass(target.model, text)
    assert (found - expected[8:]).abs().max() <= 1e-5 * expected.abs().max()


def test_only_layers_that_cannot_be_cropped_are_copied():
    def stateful(kind):
        return len(RewindingCache(tiny_model(kind).config, 8)._stateful)

    assert {kind: stateful(kind) for kind in ("qwen3", "mistral", "gemma2")} == {
        "qwen3": 0,
        "mistral": 0,
        "gemma2": 0,
    }
    assert (stateful("kimi_linear"), stateful("lfm2")) == (3, 3)


@pytest.mark.parametrize("window", [None, 2, 4, 6])
def test_layer_hands_out_what_transformers_own_does(window):
    """Keys, values and mask sizes, on either side of the window and beyond the capacity."""
    mine = PreallocatedLayer(5, window)
    theirs = DynamicLayer() if window is None else DynamicSlidingWindowLayer(window)
    for count in (3, 1, 2, 1, 7, 1, 1):
        keys, values = torch.randn(1, 2, count, 4), torch.randn(1, 2, count, 3)
        assert mine.get_mask_sizes(count) == tuple(theirs.get_mask_sizes(count))
        for found, expected in zip(
            mine.update(keys, values), theirs.update(keys, values), strict=True
        ):
            assert torch.equal(found, expected)
        assert mine.get_seq_length() == theirs.get_seq_length()
    assert mine.is_sliding == theirs.is_sliding


def test_growing_keeps_what_was_there():
    layer = PreallocatedLayer(2)
    first = torch.randn(1, 1, 2, 4)
    layer.update(first, first)
    second = torch.randn(1, 1, 3, 4)
    keys, _ = layer.update(second, second)
    assert torch.equal(keys, torch.cat([first, second], 2))
    layer.forget_after(1)
    keys, _ = layer.update(second, second)
    assert torch.equal(keys, torch.cat([first[:, :, :1], second], 2))
