"""A batch's loss against a draft evaluated block by block and the formula in float64."""

import math
from typing import Any

import pytest
import torch
from distill_samples import SAMPLING, cut, fitting_draft, rollouts, samples_of, tiny_target
from draft_models import MLA
from torch import Tensor

from sparksmith.distill.loss import LossWeights
from sparksmith.distill.objective import Objective
from sparksmith.distill.samples import TrainingSample, make_batch
from sparksmith.draft.model import DSparkDraft

WEIGHTS = LossWeights(ce=0.3, tv=0.9, confidence=0.7, gamma=3.0)


def reference(draft: DSparkDraft, samples: list[TrainingSample], head: Tensor) -> Tensor:
    """The loss over every anchor: one block at a time, dense distributions, autograd."""
    config = draft.config
    terms: list[list[Tensor]] = []
    for sample in samples:
        start, end = sample.prompt_length, len(sample.tokens)
        for anchor in range(start, end - 1):
            hidden = draft.forward_blocks(
                sample.features.taps[None].double(),
                sample.tokens[None],
                torch.tensor([[anchor]]),
            )
            slots = torch.arange(config.block_size)
            prev = sample.tokens[(anchor + slots).clamp(max=end - 1)][None, None]
            logits = draft.logits(prev, hidden)[0, 0] / SAMPLING.temperature
            confidence = draft.confidence_logits(prev, hidden)[0, 0]
            for k in range(min(config.block_size, end - 1 - anchor)):
                q = torch.zeros(config.vocab_size, dtype=torch.float64)
                q[draft.target_ids] = logits[k].softmax(-1)
                row = anchor + k + 1 - start
                z = head.double() @ sample.features.hidden[row].double() / SAMPLING.temperature
                p = (z - sample.features.log_norm[row]).exp()
                p = p * (z >= sample.features.threshold[row])
                label = int(sample.tokens[anchor + k + 1])
                says = label in draft.target_ids.tolist()
                overlap = torch.minimum(p, q).sum()
                # The lost share of p, as the loss counts it: p sums to 1 up to bfloat16.
                distance = 2 * (q - p).clamp(min=0).sum()
                c = torch.sigmoid(confidence[k])
                soft = overlap.detach()
                bce = -(soft * c.log() + (1 - soft) * (1 - c).log())
                nll = -q[label].log() if says else torch.zeros((), dtype=torch.float64)
                w = math.exp(-k / WEIGHTS.gamma)
                terms.append(
                    [w * nll, w * distance, w * bce, torch.tensor(w), torch.tensor(w * says)]
                )
    ce, tv, bce, w, w_sayable = (torch.stack(column).sum() for column in zip(*terms, strict=True))
    return WEIGHTS.ce * ce / w_sayable + (WEIGHTS.tv * tv + WEIGHTS.confidence * bce) / w


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"markov_head_type": "rnn", "draft_vocab_size": 30},
        {"markov_head_type": "gated", "is_causal": True},
        MLA,
        {"markov_rank": 0, "confidence_head_with_markov": False},
    ],
)
def test_loss_and_gradients_of_every_parameter(changes: dict[str, Any]) -> None:
    target = tiny_target()
    responses = [cut(r, n) for r, n in zip(rollouts(target, 3), (7, 2, 4), strict=True)]
    samples = samples_of(target, responses)
    draft = fitting_draft(target, **changes).double()
    draft.bind(target.embed_weight.double(), target.head_weight.double())
    expected = reference(draft, samples, target.head_weight)
    expected.backward()
    wanted = {name: p.grad for name, p in draft.named_parameters()}
    draft.zero_grad()
    batch = make_batch(samples, draft.config.block_size, 64, torch.Generator().manual_seed(0))
    loss, statistics = Objective(draft, WEIGHTS, SAMPLING.temperature)(batch)
    loss.backward()
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=1e-6)
    assert statistics.loss == pytest.approx(
        WEIGHTS.ce * statistics.ce
        + WEIGHTS.tv * statistics.tv
        + WEIGHTS.confidence * statistics.confidence
    )
    scale = max(float(grad.abs().max()) for grad in wanted.values() if grad is not None)
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None, name
        error = (parameter.grad - wanted[name]).abs().max()
        # The rotary embedding is in float32 in both, rounded in another order.
        assert error <= 1e-5 * scale, name


def test_two_micro_batches_with_the_steps_denominators() -> None:
    target = tiny_target()
    samples = samples_of(target, rollouts(target, 4, length=8))
    draft = fitting_draft(target, draft_vocab_size=30).double()
    draft.bind(target.embed_weight.double(), target.head_weight.double())
    objective = Objective(draft, WEIGHTS, SAMPLING.temperature)
    whole = make_batch(samples, 4, 64, torch.Generator())
    slots = WEIGHTS.slot_weights(4)[whole.slot_of_block]
    says = torch.isin(whole.labels, draft.target_ids)
    sums = float(slots.sum()), float((slots * says).sum())
    expected, _ = objective(whole)
    expected.backward()
    wanted = [p.grad.clone() for p in draft.parameters()]
    draft.zero_grad()
    total = 0.0
    for part in (samples[:1], samples[1:]):
        loss, _ = objective(make_batch(part, 4, 64, torch.Generator()), sums)
        loss.backward()
        total += float(loss.detach())
    assert total == pytest.approx(float(expected.detach()), rel=1e-6)
    for parameter, grad in zip(draft.parameters(), wanted, strict=True):
        assert torch.allclose(parameter.grad, grad, rtol=1e-4, atol=1e-7)
