"""Every trainable slot predicts a supervised token, from the position where the target chose it."""

import pytest
import torch
from distill_samples import SAMPLING, cut, fitting_draft, rollouts, samples_of, tiny_target
from tiny_models import full_pass

from sparksmith.distill.loss import LossWeights
from sparksmith.distill.objective import Objective
from sparksmith.distill.samples import TrainingSample, check_temperature, make_batch
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import probabilities
from sparksmith.verify.target import TransformersTarget

K = 4
LENGTHS = [20, 1, 2, 9, 3, 6]


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return tiny_target()


@pytest.fixture(scope="module")
def samples(target: TransformersTarget) -> list[TrainingSample]:
    whole = rollouts(target, len(LENGTHS))
    return samples_of(target, [cut(r, n) for r, n in zip(whole, LENGTHS, strict=True)])


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("seed", [0, 1, None])
def test_slots_predict_supervised_tokens(
    target: TransformersTarget, samples: list[TrainingSample], seed: int | None
) -> None:
    batch = make_batch(samples, K, 5, None if seed is None else generator(seed))
    num_anchors = batch.anchors.shape[1]
    objective = Objective(fitting_draft(target), LossWeights(), SAMPLING.temperature)
    target_probs = objective.target_rows(batch).probabilities(batch.positions)
    expected_slots = set()
    for row, sample in enumerate(samples):
        chosen = batch.anchors[row][batch.valid[row]].tolist()
        response = range(sample.prompt_length, len(sample.tokens))
        assert len(set(chosen)) == len(chosen) == min(5, max(0, len(response) - 1))
        assert all(p in response and p + 1 in response for p in chosen)
        for column, anchor in enumerate(chosen):
            for k in range(K):
                if anchor + k + 1 in response:
                    expected_slots.add((row, column, k, anchor))
    found_slots = set()
    for n, flat in enumerate(batch.slot_index.tolist()):
        row, column, k = flat // (num_anchors * K), flat // K % num_anchors, flat % K
        anchor = int(batch.anchors[row, column])
        found_slots.add((row, column, k, anchor))
        sample = samples[row]
        assert batch.slot_of_block[n] == k
        assert batch.labels[n] == sample.tokens[anchor + k + 1]
        assert batch.prev_tokens[row, column, k] == sample.tokens[anchor + k]
        logits, _ = full_pass(target.model, sample.tokens[: anchor + k + 1].tolist())
        expected = probabilities(logits[-1], SAMPLING)
        assert (target_probs[n] - expected).abs().sum() < 0.1  # features are in bfloat16
        assert expected[batch.labels[n]] > 0
    assert found_slots == expected_slots
    assert batch.num_blocks == sum(min(5, n - 1) for n in LENGTHS)


def test_features_and_tokens_are_padded_on_the_right(samples: list[TrainingSample]) -> None:
    batch = make_batch(samples, K, 5, generator())
    for row, sample in enumerate(samples):
        taps = sample.features.taps
        assert torch.equal(batch.features[row, : len(taps)], taps.float())
        assert torch.equal(batch.tokens[row, : len(sample.tokens)], sample.tokens)
        assert not batch.features[row, len(taps) :].any()


def test_anchors_are_the_generators_choice(samples: list[TrainingSample]) -> None:
    first = make_batch(samples, K, 5, generator(3))
    assert torch.equal(first.anchors, make_batch(samples, K, 5, generator(3)).anchors)
    counts = torch.zeros(40)
    for seed in range(400):
        anchors = make_batch(samples[:1], K, 5, generator(seed)).anchors[0]
        counts[anchors] += 1
    start = samples[0].prompt_length
    # 19 candidates, 5 drawn: each 105 times, with a standard deviation of 9.
    assert counts.nonzero().flatten().tolist() == list(range(start, start + 19))
    assert bool(((counts[start : start + 19] - 105).abs() < 40).all())


def test_without_a_generator_anchors_are_spread_evenly(samples: list[TrainingSample]) -> None:
    anchors = make_batch(samples[:1], K, 5, None).anchors[0] - samples[0].prompt_length
    assert anchors.tolist() == [0, 4, 9, 13, 18]


@pytest.mark.parametrize("markov_head_type", ["vanilla", "rnn"])
def test_responses_of_one_token_give_no_slots_and_no_gradient(
    target: TransformersTarget, samples: list[TrainingSample], markov_head_type: str
) -> None:
    draft = fitting_draft(target, markov_head_type=markov_head_type)
    objective = Objective(draft, LossWeights(), SAMPLING.temperature)
    batch = make_batch([samples[1], samples[1]], K, 5, generator())
    assert batch.num_blocks == 0
    loss, statistics = objective(batch)
    assert float(loss.detach()) == statistics.loss == 0.0
    assert statistics.num_slots == 0
    loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in draft.parameters())


def test_features_of_another_temperature_are_refused(samples: list[TrainingSample]) -> None:
    check_temperature(samples, SAMPLING.temperature)
    with pytest.raises(UserError, match="temperature"):
        check_temperature(samples, 0.7)
