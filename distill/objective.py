"""One batch through the draft: the loss that training minimises and what it is made of."""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparksmith.distill.loss import (
    LossWeights,
    Slots,
    TargetRows,
    confidence_loss,
    distillation_loss,
)
from sparksmith.distill.samples import Batch
from sparksmith.draft.errors import UserError
from sparksmith.draft.model import DSparkDraft


@dataclass(frozen=True, kw_only=True)
class StepStatistics:
    """Means over one batch, weighted as in the loss: `ce` (nats), `tv` (raw L1), `confidence`
    (nats) and `loss`; `overlap` [K] is the unweighted mean of sum min(p, q) by slot."""

    loss: float
    ce: float
    tv: float
    confidence: float
    overlap: list[float]
    num_blocks: int
    num_slots: int


class Objective:
    """The loss of DSpark (arXiv 2607.05147, eq. 9-12) for one draft, its target's head and a
    serving temperature."""

    def __init__(self, draft: DSparkDraft, weights: LossWeights, temperature: float) -> None:
        self.draft = draft
        self.weights = weights
        self.temperature = temperature
        config = draft.config
        if not config.sample_from_anchor:
            raise UserError(
                "sample_from_anchor",
                False,
                "is a form that is read and decoded with, and not trained",
                "Train a draft that predicts from the anchor's slot.",
            )
        device = self.device
        self._slot_weights = weights.slot_weights(config.block_size).to(device)
        self._draft_ids = torch.full((config.vocab_size,), -1, device=device)
        self._draft_ids[draft.target_ids.to(device)] = torch.arange(
            config.draft_vocab_size, device=device
        )

    @property
    def device(self) -> torch.device:
        return self.draft.fc.weight.device

    def target_rows(self, batch: Batch) -> TargetRows:
        return TargetRows(
            hidden=batch.hidden,
            log_norm=batch.log_norm,
            threshold=batch.threshold,
            head=self.draft.bound.head,
            temperature=self.temperature,
        )

    def slots(self, batch: Batch, denominators: tuple[float, float] | None = None) -> Slots:
        """The batch's supervised slots; `denominators` are the global sums of slot weights (all,
        sayable) when the batch is one of several of a step."""
        labels = self._draft_ids[batch.labels]
        weights = self._slot_weights[batch.slot_of_block]
        sums = denominators or (float(weights.sum()), float((weights * (labels >= 0)).sum()))
        return Slots(
            positions=batch.positions,
            labels=labels,
            weights=weights / max(sums[0], 1e-9),
            ce_weights=weights / max(sums[1], 1e-9),
        )

    @property
    def draft_weight(self) -> tuple[Tensor, Tensor | None]:
        """The head's rows [Vd, H] and `markov_w2` [Vd, r], if the draft has a Markov head."""
        markov = self.draft.markov_head
        return self.draft.bound.head, None if markov is None else markov.markov_w2.weight

    def draft_features(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """What `draft_weight` turns into logits: hidden states [N, H] and Markov features [N, r]
        of the batch's supervised slots."""
        return self._flat_features(self._hidden(batch), batch)

    def _hidden(self, batch: Batch) -> Tensor:
        """Post-norm hidden states of all slots, [B, A, K, H]."""
        return self.draft.forward_blocks(batch.features, batch.tokens, batch.anchors, batch.valid)

    def _flat_features(self, hidden: Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        flat = hidden.flatten(0, 2)[batch.slot_index]
        if self.draft.markov_head is None:
            return flat, None
        markov = self.draft.markov_features(batch.prev_tokens, hidden)
        return flat, markov.flatten(0, 2)[batch.slot_index]

    def __call__(
        self, batch: Batch, denominators: tuple[float, float] | None = None
    ) -> tuple[Tensor, StepStatistics]:
        """The loss (a scalar with gradient) and its parts."""
        draft = self.draft
        batch = batch.to(self.device)
        hidden, prev_tokens = self._hidden(batch), batch.prev_tokens
        slots = self.slots(batch, denominators)
        loss, each = distillation_loss(
            self._flat_features(hidden, batch),
            self.draft_weight,
            slots,
            self.target_rows(batch),
            self.weights,
        )
        confidence = loss.new_zeros(())
        if draft.confidence_head is not None and self.weights.confidence > 0:
            logits = draft.confidence_logits(prev_tokens, hidden)
            confidence = confidence_loss(
                logits.flatten()[batch.slot_index], each.overlap, slots.weights
            )
            loss = loss + self.weights.confidence * confidence
        counts = torch.bincount(batch.slot_of_block, minlength=draft.config.block_size)
        sums = torch.bincount(
            batch.slot_of_block, each.overlap.double(), minlength=draft.config.block_size
        )
        return loss, StepStatistics(
            loss=float(loss.detach()),
            ce=float((slots.ce_weights * each.negative_log * (slots.labels >= 0)).sum()),
            tv=float((slots.weights * each.distance).sum()),
            confidence=float(confidence.detach()),
            overlap=(sums / counts.clamp(min=1)).tolist(),
            num_blocks=batch.num_blocks,
            num_slots=len(batch.slot_index),
        )
