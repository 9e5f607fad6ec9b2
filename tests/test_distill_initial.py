"""A draft that starts by regression predicts at once, and its heads look where they should."""

from typing import Any

import pytest
import torch
from distill_samples import (
    SAMPLING,
    TAPS,
    InMemory,
    cut,
    equal,
    fitting_draft,
    rollouts,
    samples_of,
    train_settings,
    weights,
)
from tiny_models import tiny_model
from torch import Tensor

from sparksmith.distill import initial
from sparksmith.distill.initial import start_by_regression
from sparksmith.distill.loss import LossWeights
from sparksmith.distill.objective import Objective
from sparksmith.distill.samples import TrainingSample, make_batch
from sparksmith.distill.training import Trainer
from sparksmith.distill.validation import expected_acceptance
from sparksmith.draft.model import DSparkDraft
from sparksmith.verify.target import TransformersTarget

# Two words of a real model have something in common; those of a tiny random one get it here.
MODEL = tiny_model("qwen3")
with torch.no_grad():
    MODEL.get_input_embeddings().weight.add_(MODEL.get_input_embeddings().weight.std())
TARGET = TransformersTarget(MODEL, TAPS)
THETA = 100.0
WIDE: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 32, "rope_theta": THETA}


@pytest.fixture(scope="module")
def samples() -> list[TrainingSample]:
    return samples_of(TARGET, rollouts(TARGET, 80, length=30))


def fresh_draft(**changes: Any) -> DSparkDraft:
    """A draft as training begins it: plain random weights."""
    torch.manual_seed(3)
    config = fitting_draft(TARGET, **{**WIDE, **changes}).config
    draft = DSparkDraft(config)
    draft.bind(TARGET.embed_weight, TARGET.head_weight)
    return draft


def expected(draft: DSparkDraft, samples: list[TrainingSample]) -> float:
    objective = Objective(draft, LossWeights(), SAMPLING.temperature)
    return expected_acceptance(objective, samples).acceptance_length


def test_it_predicts_responses_that_it_has_not_seen(samples: list[TrainingSample]) -> None:
    draft = fresh_draft()
    before = expected(draft, samples[64:])
    assert start_by_regression(draft, samples[:64])
    assert expected(draft, samples[64:]) > before + 0.05


@pytest.mark.parametrize("causal", [False, True])
def test_heads_look_at_their_distance(samples: list[TrainingSample], causal: bool) -> None:
    """Weights are worked out here, from the projections alone: no part of the attention is used."""
    draft = fresh_draft(is_causal=causal)
    assert start_by_regression(draft, samples[:64])
    batch = make_batch(samples[64:68], draft.config.block_size, 8, None)
    attention: Any = draft.layers[0]
    attention = attention.self_attn
    slots, context = layer_inputs(draft, batch)
    for head, offset in enumerate(initial._FIRST_OFFSETS[: attention.num_heads]):
        for row, anchor in [(0, int(batch.anchors[0, -1])), (1, int(batch.anchors[1, -1]))]:
            own = slots[row, -1]  # [K, H] of the last anchor
            keys = torch.cat((context[row, :anchor], own))
            for slot in range(draft.config.block_size):
                scores = [
                    score(attention, head, (own[slot], anchor + slot), (key, place))
                    for place, key in enumerate(keys)
                ]
                wanted = anchor + slot - offset
                assert max(range(len(keys)), key=scores.__getitem__) == wanted


def layer_inputs(draft: DSparkDraft, batch: Any) -> tuple[Tensor, Tensor]:
    """What the first layer's projections read: slots [B, A, K, H] and context [B, S, H]."""
    tokens = torch.full((*batch.anchors.shape, draft.config.block_size), draft.config.mask_token_id)
    tokens[:, :, 0] = batch.tokens.gather(1, batch.anchors)
    layer: Any = draft.layers[0]
    with torch.no_grad():
        return layer.input_layernorm(draft.embed(tokens)), draft.fuse(batch.features)


def test_copying_heads_find_the_anchors_word(samples: list[TrainingSample]) -> None:
    """Slow rotary pairs are needed to compare words at any distance: a base of ten million."""
    theta = 1e7
    draft = fresh_draft(num_attention_heads=9, num_key_value_heads=9, rope_theta=theta)
    assert start_by_regression(draft, samples[:64])
    heads = [head for head, offset in enumerate(initial._FIRST_OFFSETS) if offset == initial._COPY]
    assert heads
    attention: Any = draft.layers[0]
    attention = attention.self_attn
    found, by_chance = [], []
    for sample in samples[64:72]:
        batch = make_batch([sample], draft.config.block_size, 6, None)
        slots, context = layer_inputs(draft, batch)
        for number, anchor in enumerate(batch.anchors[0].tolist()):
            same = sample.tokens[1:anchor] == sample.tokens[anchor]
            if not same.any():
                continue
            query = (slots[0, number, 0], anchor)
            for head in heads:
                scores = [
                    score(attention, head, query, (context[0, place], place), theta)
                    for place in range(1, anchor)
                ]
                weights = (torch.tensor(scores) * attention.head_dim**-0.5).softmax(0)
                found.append(float(weights[same].sum()))
                by_chance.append(float(same.float().mean()))
    assert len(found) > 10
    # Five directions for sixty words: they cannot all be told apart here.
    assert sum(found) > 3 * sum(by_chance)


@torch.no_grad()
def score(
    attention: Any,
    head: int,
    query: tuple[Tensor, int],
    key: tuple[Tensor, int],
    theta: float = THETA,
) -> float:
    """The product of a rotated query and key, pairs (i, i + D/2) turned one by one."""
    size = attention.head_dim
    rows = slice(head * size, (head + 1) * size)
    vectors = []
    for projection, norm, (x, place) in (
        (attention.q_proj, attention.q_norm, query),
        (attention.k_proj, attention.k_norm, key),
    ):
        v = projection.weight[rows] @ x
        v = v / (v.pow(2).mean() + norm.eps).sqrt() * norm.weight
        turned = v.clone()
        for i in range(size // 2):
            angle = torch.tensor(place / theta ** (2 * i / size))
            a, b = v[i], v[i + size // 2]
            turned[i] = a * angle.cos() - b * angle.sin()
            turned[i + size // 2] = b * angle.cos() + a * angle.sin()
        vectors.append(turned)
    return float(vectors[0] @ vectors[1])


def test_what_it_cannot_fit_is_left_as_it_was(
    samples: list[TrainingSample], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = fresh_draft()
    before = weights(draft)
    short = samples_of(TARGET, [cut(response, 2) for response in rollouts(TARGET, 3)])
    assert not start_by_regression(draft, short)
    assert not start_by_regression(draft, [])
    monkeypatch.setattr(initial, "LARGEST_WIDTH", 1)
    assert not start_by_regression(draft, samples)
    assert equal(weights(draft), before)


def test_heads_that_share_keys_and_a_reduced_vocabulary(samples: list[TrainingSample]) -> None:
    """A draft of the target's own attention shape starts better than at random, too."""
    draft = fresh_draft(num_key_value_heads=2)
    before = expected(draft, samples[64:])
    assert start_by_regression(draft, samples[:64])
    assert expected(draft, samples[64:]) > before + 0.05


def test_progress_ends_at_its_total(samples: list[TrainingSample], tmp_path: Any) -> None:
    seen: list[tuple[str, int, int]] = []
    run = Trainer(fresh_draft(), train_settings(), tmp_path, (InMemory(samples[:20]), samples[64:]))
    assert run.start(lambda what, done, total: seen.append((what, done, total)))
    for part in ("features", "start by regression"):
        counts = [(done, total) for what, done, total in seen if what == part]
        assert [done for done, _ in counts] == list(range(1, counts[-1][1] + 1))
