"""Expected acceptance length on held-out rollouts of the target: the number training is for.

It is computed from the two distributions, not counted from samples: see `verify.expected`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sparksmith.distill.loss import scaled_logits
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
    greedy: bool = False,
) -> Expectation:
    """Average over evenly spread anchors of every sample; whole blocks only.

    A sampled rollout is judged by the exact formula, a `greedy` one by its exact-match prefix. The
    draft samples at the objective's temperature, untruncated. Every position of a rollout counts
    alike, where a decode loop passes easy stretches in fewer steps.
    """
    draft = objective.draft
    total = torch.zeros(draft.config.block_size, dtype=torch.float64)
    num_blocks = 0
    for start in range(0, len(samples), batch_size):
        part = [sample for sample in samples[start : start + batch_size] if sample.num_anchors > 0]
        if not part:
            continue
        batch = make_batch(part, draft.config.block_size, anchors_per_sample, None)
        joint = _block_acceptance(objective, batch.to(objective.device), greedy)
        total += joint.double().sum(0).cpu()
        num_blocks += len(joint)
    return Expectation(joint=(total / max(1, num_blocks)).tolist(), num_blocks=num_blocks)


def _block_acceptance(objective: Objective, batch: Batch, greedy: bool) -> Tensor:
    """joint [blocks, K] for the batch's whole blocks."""
    size = objective.draft.config.block_size
    features = objective.draft_features(batch)
    slots, target = objective.slots(batch), objective.target_rows(batch)
    columns = []
    for part in torch.split(torch.arange(len(slots.labels), device=objective.device), 256):
        own = (features[0][part], None if features[1] is None else features[1][part])
        logits = scaled_logits(own, objective.draft_weight, objective.temperature)
        labels = slots.labels[part]
        if greedy:
            match = (logits.argmax(-1) == labels).to(logits.dtype)
            columns.append(torch.stack((torch.ones_like(match), match, match), -1))
            continue
        target_probs = target.probabilities(slots.positions[part])
        draft_probs = logits.softmax(-1)
        index = labels.clamp(min=0)[:, None]
        said = labels >= 0
        # A word the draft cannot say has draft probability 0; its target probability only has to
        # be positive, since the ratio is then 0 whatever it is.
        target_token = target_probs.gather(1, index)[:, 0].masked_fill(~said, 1.0)
        draft_token = draft_probs.gather(1, index)[:, 0].masked_fill(~said, 0.0)
        overlap = torch.minimum(draft_probs, target_probs).sum(-1)
        columns.append(torch.stack((target_token, draft_token, overlap), -1))
    # Slots come block by block; keep the blocks of which every slot is supervised.
    rows = torch.cat(columns)
    supervised = torch.zeros(batch.valid.numel() * size, dtype=torch.bool, device=rows.device)
    supervised[batch.slot_index] = True
    flat = rows.new_zeros(len(supervised), 3)
    flat[batch.slot_index] = rows
    blocks = flat.view(-1, size, 3)[supervised.view(-1, size).all(1)]
    return expected_accepts(blocks[..., 0], blocks[..., 1], blocks[..., 2])


def draft_vocabulary_coverage(draft: DSparkDraft, samples: Sequence[TrainingSample]) -> float:
    """Share of the samples' response tokens that the draft's vocabulary holds; NaN of none."""
    known = torch.zeros(draft.config.vocab_size, dtype=torch.bool)
    known[draft.target_ids.cpu()] = True
    if not samples:
        return float("nan")
    response = torch.cat([sample.tokens[sample.prompt_length :] for sample in samples])
    return float(known[response.long()].float().mean())
