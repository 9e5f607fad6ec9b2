"""Rows at positions of their own give the logits of an ordinary pass, or say that they cannot."""

import pytest
import torch
from tiny_models import full_pass, tiny_model, words
from transformers import PreTrainedModel

from sparksmith.verify.rows import TargetRows, supports_rows


@pytest.mark.parametrize("kind", ["qwen3", "llama"])
def test_prefill_step_and_refill_give_the_models_logits(kind: str) -> None:
    model = tiny_model(kind)
    texts = [words(3, seed=1), words(8, seed=2), words(1, seed=3)]
    rows = TargetRows(model, num_rows=3, capacity=16)
    prefilled = rows.prefill(torch.arange(3), texts)

    def assert_logits(logits: torch.Tensor) -> None:
        for row, text in enumerate(texts):
            expected, _ = full_pass(model, text)
            assert torch.allclose(logits[row], expected[-1], atol=1e-4)

    assert_logits(prefilled)
    for step in range(3):
        new = words(3, seed=10 + step)
        for text, token in zip(texts, new, strict=True):
            text.append(token)
        assert_logits(rows.step(torch.tensor(new)))
    # Row 1 ends; a shorter text takes its place while the others go on.
    texts[1] = words(2, seed=20)
    refilled = rows.prefill(torch.tensor([1]), [texts[1]])
    assert torch.allclose(refilled[0], full_pass(model, texts[1])[0][-1], atol=1e-4)
    new = words(3, seed=30)
    for text, token in zip(texts, new, strict=True):
        text.append(token)
    assert_logits(rows.step(torch.tensor(new)))
    # Row 0 is dropped.
    rows.rows.keep([1, 2])
    del texts[0]
    new = words(2, seed=40)
    for text, token in zip(texts, new, strict=True):
        text.append(token)
    assert_logits(rows.step(torch.tensor(new)))


def test_the_models_own_attention_is_put_back() -> None:
    model = tiny_model("qwen3")
    before = model.config._attn_implementation
    rows = TargetRows(model, num_rows=1, capacity=8)
    rows.prefill(torch.tensor([0]), [[1, 2]])
    assert model.config._attn_implementation == before
    with pytest.raises((IndexError, RuntimeError)):
        rows.prefill(torch.tensor([0]), [[1] * 9])  # beyond the capacity
    assert model.config._attn_implementation == before
    assert rows.rows.prefill_rows is None


@pytest.mark.parametrize(
    ("model", "supported"),
    [
        (lambda: tiny_model("qwen3"), True),
        (lambda: tiny_model("llama"), True),
        (lambda: tiny_model("llama", tie_word_embeddings=True), True),
        (lambda: tiny_model("mistral"), False),
        (lambda: tiny_model("gemma2"), False),
        (lambda: tiny_model("lfm2"), False),
        (lambda: tiny_model("kimi_linear"), False),
    ],
)
def test_only_full_attention_is_served_by_rows(model: object, supported: bool) -> None:
    built = model()  # type: ignore[operator]
    assert isinstance(built, PreTrainedModel)
    assert supports_rows(built) == supported


def test_logits_changed_after_the_head_are_not_served() -> None:
    model = tiny_model("qwen3")
    original = model.forward

    def capped(*args: object, **kwargs: object) -> object:
        output = original(*args, **kwargs)
        output.logits = 5 * torch.tanh(output.logits / 5)
        return output

    model.forward = capped
    assert not supports_rows(model)
