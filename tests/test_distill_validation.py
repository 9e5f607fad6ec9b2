"""Expected acceptance on rollouts: against a loop in float64, and against the decode step."""

import pytest
import torch
from distill_samples import SAMPLING, cut, fitting_draft, rollouts, samples_of, tiny_target
from draft_models import MLA
from tiny_models import full_pass
from torch import Tensor

from sparksmith.distill.loss import LossWeights
from sparksmith.distill.objective import Objective
from sparksmith.distill.samples import TrainingSample
from sparksmith.distill.validation import draft_vocabulary_coverage, expected_acceptance
from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.sampling import Sampling, probabilities
from sparksmith.verify.accept import accept_standard
from sparksmith.verify.target import TransformersTarget

K = 4
WIDE = Sampling(temperature=6.0, top_p=0.9)
# The draft samples at the same temperature, untruncated.
DRAFT_SAMPLING = Sampling(temperature=6.0, top_p=1.0)


def objective_for(draft: DSparkDraft, sampling: Sampling) -> Objective:
    return Objective(draft, LossWeights(), sampling.temperature)


def draft_rows(
    draft: DSparkDraft, sample: TrainingSample, anchor: int, temperature: float
) -> Tensor:
    """The draft's distributions [K, V] at an anchor, given the sample's own tokens."""
    hidden = draft.forward_blocks(
        sample.features.taps[None].float(), sample.tokens[None], torch.tensor([[anchor]])
    )
    prev = sample.tokens[anchor : anchor + K][None, None]
    rows = torch.zeros(K, draft.config.vocab_size, dtype=torch.float64)
    logits = draft.logits(prev, hidden)[0, 0].double()
    rows[:, draft.target_ids] = (logits / temperature).softmax(-1)
    return rows


@torch.inference_mode()
@pytest.mark.parametrize("changes", [{}, MLA, {"draft_vocab_size": 30, "markov_head_type": "rnn"}])
def test_against_a_loop_over_blocks(changes: dict[str, object]) -> None:
    target = tiny_target()
    lengths = [12, 4, 5, 1, 9]
    whole = rollouts(target, 5, sampling=WIDE)
    responses = [cut(r, n) for r, n in zip(whole, lengths, strict=True)]
    samples = samples_of(target, responses, WIDE)
    draft = fitting_draft(target, **changes)
    found = expected_acceptance(
        objective_for(draft, WIDE), samples, anchors_per_sample=64, batch_size=2
    )
    joint, blocks = torch.zeros(K, dtype=torch.float64), 0
    for sample in samples:
        for anchor in range(sample.prompt_length, len(sample.tokens) - K):
            logits, _ = full_pass(target.model, sample.tokens.tolist())
            q = draft_rows(draft, sample, anchor, WIDE.temperature)
            prefix = 1.0
            for k in range(K):
                p = probabilities(logits[anchor + k].double(), WIDE)
                joint[k] += prefix * torch.minimum(p, q[k]).sum()
                word = int(sample.tokens[anchor + k + 1])
                prefix *= min(1.0, float(q[k, word] / p[word]))
            blocks += 1
    # Responses of at least K + 1 tokens have n - K whole blocks.
    assert found.num_blocks == blocks == 8 + 1 + 5
    # The features are in bfloat16.
    assert torch.allclose(torch.tensor(found.joint).double(), joint / blocks, rtol=0.03, atol=2e-3)
    assert found.acceptance_length == pytest.approx(1 + sum(found.joint))


def measured(
    target: TransformersTarget, draft: DSparkDraft, samples: list[TrainingSample], anchors: int
) -> Tensor:
    """Accepted counts of real steps: drafter, target pass and accept rule at each whole block."""
    generator = torch.Generator().manual_seed(1)
    counts = []
    for sample in samples:
        spread = torch.linspace(0, sample.num_anchors - 1, anchors).long() + sample.prompt_length
        for anchor in spread.tolist():
            if anchor + K >= len(sample.tokens):
                continue  # not a whole block
            stream = target.begin(64)
            context = stream.forward(sample.tokens[:anchor], 1).features
            drafter = DSparkDrafter(draft, DRAFT_SAMPLING, generator)
            drafter.update(sample.tokens[:anchor], context)
            proposal = drafter.propose(int(sample.tokens[anchor]), K)
            block = torch.cat((sample.tokens[anchor : anchor + 1], proposal.tokens))
            target_probs = probabilities(stream.forward(block, K + 1).logits, WIDE)
            uniforms = torch.rand(K + 1, dtype=torch.float64, generator=generator)
            verdict = accept_standard(target_probs, proposal.probs, proposal.tokens, uniforms)
            counts.append(float(verdict.accepted))
    return torch.tensor(counts)


@torch.inference_mode()
def test_agrees_with_real_decode_steps_at_the_same_anchors() -> None:
    target = tiny_target(sharpness=0.6)
    samples = samples_of(target, rollouts(target, 15, length=16, sampling=WIDE), WIDE)
    draft = fitting_draft(target, draft_vocab_size=30)
    found = expected_acceptance(objective_for(draft, WIDE), samples, anchors_per_sample=10)
    counts = measured(target, draft, samples, 10)
    assert found.num_blocks == len(counts) == 15 * 8
    error = float(counts.std()) / len(counts) ** 0.5
    assert 0.2 < found.acceptance_length - 1 < K - 0.5
    assert abs(found.acceptance_length - 1 - float(counts.mean())) < 4 * error + 0.01


@torch.inference_mode()
def test_greedy_rollouts_count_the_prefix_that_matches() -> None:
    target = tiny_target()
    greedy = Sampling(temperature=0.0)
    responses = rollouts(target, 4, length=10, sampling=greedy)
    serving = Sampling(temperature=0.2, top_p=1.0)
    samples = samples_of(target, responses, serving)
    draft = fitting_draft(target)
    found = expected_acceptance(
        objective_for(draft, serving), samples, anchors_per_sample=64, greedy=True
    )
    joint, blocks = torch.zeros(K), 0
    for sample in samples:
        for anchor in range(sample.prompt_length, len(sample.tokens) - K):
            words = draft_rows(draft, sample, anchor, 1.0).argmax(-1)
            match = (words == sample.tokens[anchor + 1 : anchor + 1 + K]).float()
            joint += match.cumprod(0)
            blocks += 1
    assert found.num_blocks == blocks == 4 * 6
    assert found.joint == pytest.approx((joint / blocks).tolist(), abs=1e-6)


def test_no_whole_block_counts_nothing() -> None:
    target = tiny_target()
    samples = samples_of(target, [cut(r, 4) for r in rollouts(target, 3)])
    found = expected_acceptance(objective_for(fitting_draft(target), SAMPLING), samples)
    assert (found.num_blocks, found.acceptance_length) == (0, 1.0)
    assert expected_acceptance(objective_for(fitting_draft(target), SAMPLING), []).num_blocks == 0


def test_coverage_counts_response_tokens() -> None:
    target = tiny_target()
    responses = rollouts(target, 5)
    samples = samples_of(target, responses)
    draft = fitting_draft(target, draft_vocab_size=30)
    tokens = [token for response in responses for token in response.token_ids]
    share = sum(token in draft.target_ids.tolist() for token in tokens) / len(tokens)
    assert draft_vocabulary_coverage(draft, samples) == pytest.approx(share)
    assert draft_vocabulary_coverage(fitting_draft(target), samples) == 1.0
