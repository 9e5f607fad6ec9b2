"""Expected acceptance length on held-out rollouts of the target: the number training is for.

It is computed from the two distributions, not counted from samples: see `verify.expected`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sparksmith.distill.objective import Objective
from sparksmith.distill.samples import Batch, TrainingSample, make_batch
from sparksmith.draft.model import DSparkDraft
from sparksmith.verify.expected import expected_accepts


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """`joint` [K]: P(at least k tokens of a block are accepted), averaged over anchors of the
    target's rollouts; `acceptance_length` = 1 + sum of it (the bonus token is counted)."""

    joint: list[float]
    num_blocks: int

    @property
    def acceptance_length(self) -> float:
        return 1.0 + sum(self.joint)


@torch.inference_mode()
def expected_acceptance(
    objective: Objective,
    samples: Sequence[TrainingSample],
    *,
    anchors_per_sample: int = 24,
    batch_size: int = 8,
) -> Expectation:
    """Average over evenly spread anchors of every sample; whole blocks only.

    A sampled rollout is judged by the exact formula, a greedy one by its exact-match prefix.
    """
    draft = objective.draft
    total = torch.zeros(draft.config.block_size, dtype=torch.float64)
    num_blocks = 0
    for start in range(0, len(samples), batch_size):
        part = [sample for sample in samples[start : start + batch_size] if sample.num_anchors > 0]
        if not part:
            continue
        batch = make_batch(part, draft.config.block_size, anchors_per_sample, None)
        joint = _block_acceptance(objective, batch)
        total += joint.double().sum(0)
        num_blocks += len(joint)
    return Expectation(joint=(total / max(1, num_blocks)).tolist(), num_blocks=num_blocks)


def _block_acceptance(objective: Objective, batch: Batch) -> Tensor:
    """joint [blocks, K] for the batch's whole blocks."""
    draft, size = objective.draft, objective.draft.config.block_size
    hidden = draft.forward_blocks(batch.features, batch.tokens, batch.anchors, batch.valid)
    joint = hidden.flatten(0, 2)[batch.slot_index]
    weight = draft.bound.head
    if draft.markov_head is not None:
        markov = draft.markov_features(batch.prev_tokens, hidden)
        joint = torch.cat((joint, markov.flatten(0, 2)[batch.slot_index]), -1)
        weight = torch.cat((weight, draft.markov_head.markov_w2.weight), -1)
    slots, target = objective.slots(batch), objective.target_rows(batch)
    columns = []
    for part in torch.split(torch.arange(len(joint)), 512):
        draft_logits = functional.linear(joint[part], weight).float()
        target_probs = target.probabilities(slots.positions[part])
        draft_probs = (draft_logits / objective.temperature).softmax(-1)
        index = slots.labels[part].clamp(min=0)[:, None]
        said = (slots.labels[part] >= 0).float()
        # A word the draft cannot say has draft probability 0; its target probability only has to
        # be positive, since the ratio is then 0 whatever it is.
        target_token = target_probs.gather(1, index)[:, 0] * said + (1 - said)
        draft_token = draft_probs.gather(1, index)[:, 0] * said
        overlap = torch.minimum(draft_probs, target_probs).sum(-1)
        columns.append(torch.stack((target_token, draft_token, overlap), -1))
    # Slots come block by block; keep the blocks of which every slot is supervised.
    flat = torch.full((batch.valid.numel() * size, 3), float("nan"))
    flat[batch.slot_index] = torch.cat(columns)
    blocks = flat.view(-1, size, 3)
    blocks = blocks[~blocks.isnan().flatten(1).any(1)]
    return expected_accepts(blocks[..., 0], blocks[..., 1], blocks[..., 2])


def draft_vocabulary_coverage(draft: DSparkDraft, samples: Sequence[TrainingSample]) -> float:
    """Share of the samples' response tokens that the draft's vocabulary holds."""
    known = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
    known[draft.target_ids] = True
    response = torch.cat([sample.tokens[sample.prompt_length :] for sample in samples])
    return float(known[response.long()].float().mean())
