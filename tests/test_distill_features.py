"""Online features against transformers' own hidden states, and the memory they may take."""

import pytest
import torch
from distill_samples import SAMPLING, TAPS, cut, rollouts, tiny_target
from tiny_models import full_pass
from torch import Tensor

from sparksmith.distill.features import OnlineFeatures, require_plain_head
from sparksmith.distill.samples import TrainingSample
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling, probabilities


def tensors(sample: TrainingSample) -> list[Tensor]:
    features = sample.features
    return [sample.tokens, features.taps, features.hidden, features.log_norm, features.threshold]


def same(one: TrainingSample, other: TrainingSample) -> bool:
    pairs = zip(tensors(one), tensors(other), strict=True)
    return all(torch.equal(ours, theirs) for ours, theirs in pairs)


@pytest.mark.parametrize("kind", ["qwen3", "mistral", "lfm2", "kimi_linear"])
def test_features_are_the_models_hidden_states(kind: str) -> None:
    writer = tiny_target()
    responses = [cut(r, 3 + i) for i, r in enumerate(rollouts(writer, 5))]
    target = tiny_target(kind)
    source = OnlineFeatures(target, responses, SAMPLING)
    order = [3, 0, 4, 1, 2, 3]
    for index, sample in zip(order, source.take(order), strict=True):
        response = responses[index]
        text = response.prompt_ids + response.token_ids
        assert sample.tokens.tolist() == text
        logits, taps = full_pass(target.model, text[:-1], TAPS)
        assert torch.allclose(sample.features.taps.float(), taps, rtol=1e-2, atol=1e-2)
        assert len(sample.features.taps) == len(text) - 1
        rows = logits[len(response.prompt_ids) - 1 :]
        plain = sample.features.hidden.float() @ target.head_weight.T
        assert torch.allclose(plain, rows, atol=0.02 * float(rows.abs().max()))
        scaled = rows / SAMPLING.temperature
        kept = scaled >= sample.features.threshold[:, None]
        found = (scaled - sample.features.log_norm[:, None]).exp() * kept
        assert torch.allclose(found, probabilities(rows, SAMPLING), atol=1e-4)


def test_features_do_not_depend_on_what_is_asked_for_together() -> None:
    """A resumed run must see the bits that the killed one saw."""
    target = tiny_target()
    responses = [cut(r, 4 + 2 * i) for i, r in enumerate(rollouts(target, 8))]
    whole = OnlineFeatures(target, responses, SAMPLING).take(range(8))
    for cache_bytes in (0, 1 << 30):
        source = OnlineFeatures(target, responses, SAMPLING, cache_bytes=cache_bytes)
        for index in (7, 2, 2, 5):
            assert same(source.take([index])[0], whole[index])


def test_cached_samples_cost_no_target_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny_target()
    responses = rollouts(target, 6, length=5)
    source = OnlineFeatures(target, responses, SAMPLING)
    first = source.take(range(6))
    monkeypatch.setattr(target.model, "forward", None)
    assert all(one is other for one, other in zip(first, source.take(range(6)), strict=True))


def test_memory_bound() -> None:
    target = tiny_target()
    responses = [cut(r, 3 + 3 * i) for i, r in enumerate(rollouts(target, 6))]
    full = OnlineFeatures(target, responses, SAMPLING).take(range(6))
    room = sum(tensor.nbytes for sample in full[:3] for tensor in tensors(sample)) + 10
    source = OnlineFeatures(target, responses, SAMPLING, cache_bytes=room)
    first = source.take(range(6))
    again = source.take(range(6))
    kept = [one for one, other in zip(first, again, strict=True) if one is other]
    assert len(kept) == 3
    assert sum(tensor.nbytes for sample in kept for tensor in tensors(sample)) <= room
    assert all(map(same, first, full))


def test_captured_features_are_used_only_for_their_own_sampling() -> None:
    target = tiny_target()
    captured = rollouts(target, 3, capture=True)
    (same_sampling, *_) = OnlineFeatures(target, captured, SAMPLING).take([0])
    assert captured[0].features is not None
    assert same_sampling.features is captured[0].features
    other = Sampling(temperature=1.0, top_p=0.9)
    (recomputed, *_) = OnlineFeatures(target, captured, other).take([0])
    assert recomputed.features.sampling == other
    assert not torch.equal(recomputed.features.log_norm, captured[0].features.log_norm)


def test_targets_that_change_their_logits_are_refused() -> None:
    with pytest.raises(UserError, match="Gemma2ForCausalLM"):
        require_plain_head(tiny_target("gemma2"))
    with pytest.raises(UserError, match="Gemma2ForCausalLM"):
        OnlineFeatures(tiny_target("gemma2"), [], SAMPLING)
    for kind in ("qwen3", "llama", "mistral", "lfm2", "kimi_linear"):
        require_plain_head(tiny_target(kind))


def test_the_head_works_again_afterwards() -> None:
    target = tiny_target()
    response = rollouts(target, 1)[0]
    before, _ = full_pass(target.model, response.token_ids)
    OnlineFeatures(target, [response], SAMPLING).take([0])
    after, _ = full_pass(target.model, response.token_ids)
    assert torch.equal(before, after)
    assert not target.model.get_output_embeddings()._forward_pre_hooks
