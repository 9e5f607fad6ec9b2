"""The DSpark draft as a drafter: one request's context, and blocks sampled from left to right.

The backbone runs once for the whole block; only the Markov head waits for the token before.
"""

import torch
from torch import Tensor

from sparksmith.draft.decoder import DraftDecoder
from sparksmith.draft.errors import UserError
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.proposal import Proposal
from sparksmith.draft.sampling import Sampling, probabilities, sample


class DSparkDrafter:
    """Drafts for one request with a bound DSpark draft.

    `sampling` is the draft's own: exactness needs only that the probabilities reported are those
    sampled from. `generator` lives on the draft's device.

    A draft ends before the first token whose chance to be reached and accepted, the product of the
    confidences so far, is below `min_survival` (DSpark section 3.2.1): verifying it would cost
    more than it brings. That chance is known before the token is drawn, so both accept rules stay
    exact. 0 drafts whole blocks. Confidences are reported where they were needed for this, or
    asked for with `confidences`.
    """

    def __init__(
        self,
        draft: DSparkDraft,
        sampling: Sampling,
        generator: torch.Generator | None,
        *,
        min_survival: float = 0.0,
        confidences: bool = False,
    ) -> None:
        """Raises UserError for a `min_survival` outside [0, 1], or one that needs a confidence head
        where the draft has none."""
        check_min_survival(min_survival, has_head=draft.confidence_head is not None)
        self._min_survival = min_survival
        self._confidences = draft.confidence_head is not None and (
            confidences or min_survival > 0.0
        )
        self._draft = draft
        self._sampling = sampling
        self._generator = generator
        with torch.inference_mode():
            self._decoder = DraftDecoder(draft)
        self._block = torch.full(
            (draft.config.block_size,), draft.config.mask_token_id, device=draft.fc.weight.device
        )

    @property
    def taps(self) -> tuple[int, ...]:
        return self._draft.config.target_layer_ids

    @torch.inference_mode()
    def update(self, tokens: Tensor, features: Tensor | None) -> None:
        """Append the target features [n, m * Ht] of committed tokens [n] to the context."""
        assert features is not None
        assert features.shape[0] == tokens.shape[0]
        if features.shape[0]:
            self._decoder.append(features)

    @torch.inference_mode()
    def propose(self, anchor: int, num_tokens: int) -> Proposal:
        """Draft at most min(num_tokens, `num_drafts`) tokens; the anchor's slot drafts the first,
        or, in the fill-in form, the slot after it.

        The whole block is computed even if fewer tokens are wanted: a bidirectional block was
        trained to see all its slots.
        """
        block = self._block.clone()
        block[0] = anchor
        first = 0 if self._draft.config.sample_from_anchor else 1
        hidden = self._decoder.block(block)[first:]
        return self._sample(block[0], hidden[: max(num_tokens, 0)])

    def _sample(self, anchor: Tensor, hidden: Tensor) -> Proposal:
        """Sample slot after slot, until the draft is long enough or too unlikely to survive."""
        draft, weights = self._draft, self._decoder.weights
        base = weights.head(hidden)
        previous, state, survival = anchor, None, 1.0
        tokens, rows, confidences = [], [base[:0].float()], [base.new_empty(0, dtype=torch.float32)]
        for slot in range(len(hidden)):
            if self._confidences:
                confidence = draft.confidence_logits(previous, hidden[slot]).float().sigmoid()
                if self._min_survival:
                    survival *= float(confidence)
                    if survival < self._min_survival:
                        break
                confidences.append(confidence[None])
            logits = base[slot : slot + 1]
            if draft.markov_head is not None and weights.markov is not None:
                features, state = draft.markov_head.step(previous, hidden[slot], state)
                logits = logits + weights.markov(features.unsqueeze(0))
            probs = probabilities(logits, self._sampling)
            word = sample(probs, self._generator) if not self._sampling.greedy else probs.argmax(-1)
            previous = draft.target_ids[word].squeeze(0)
            tokens.append(previous)
            rows.append(probs)
        return Proposal(
            tokens=torch.stack(tokens) if tokens else self._block[:0],
            probs=self._over_target(torch.cat(rows)),
            confidences=torch.cat(confidences) if self._confidences else None,
        )

    def _over_target(self, probs: Tensor) -> Tensor:
        """Draft distributions [n, Vd] over the target's vocabulary [n, V], zero elsewhere."""
        config = self._draft.config
        if not config.reduced_vocabulary:
            return probs
        full = probs.new_zeros(probs.shape[0], config.vocab_size)
        return full.scatter_(1, self._draft.target_ids.expand(probs.shape[0], -1), probs)


def check_min_survival(min_survival: float, *, has_head: bool) -> None:
    """Raise UserError for what is no probability, or needs a head that is not there."""
    if not 0.0 <= min_survival <= 1.0:
        raise UserError(
            "min_survival", min_survival, "is not a probability", "Use 0 (off) to 1, such as 0.05."
        )
    if min_survival > 0.0 and not has_head:
        raise UserError(
            "min_survival",
            min_survival,
            "needs a confidence head, and this draft has none",
            "Use 0, or train a draft with a confidence head.",
        )
