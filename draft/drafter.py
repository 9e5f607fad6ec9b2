"""The DSpark draft as a drafter: one request's context, and blocks sampled from left to right.

The backbone runs once for the whole block; only the Markov head waits for the token before.
"""

import torch
from torch import Tensor

from sparksmith.draft.decoder import DraftDecoder
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.proposal import Proposal
from sparksmith.draft.sampling import Sampling, probabilities, sample


class DSparkDrafter:
    """Drafts for one request with a bound DSpark draft.

    `sampling` is the draft's own: exactness needs only that the probabilities reported are those
    sampled from. `generator` lives on the draft's device. Confidences are computed on request:
    a loop that verifies every drafted token has no use for them.
    """

    def __init__(
        self,
        draft: DSparkDraft,
        sampling: Sampling,
        generator: torch.Generator | None,
        *,
        confidences: bool = False,
    ) -> None:
        self._confidences = confidences
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
        """Draft min(num_tokens, block_size) tokens; the anchor's own slot drafts the first.

        The whole block is computed even if fewer tokens are wanted: a bidirectional block was
        trained to see all its slots.
        """
        block = self._block.clone()
        block[0] = anchor
        hidden = self._decoder.block(block)[: max(num_tokens, 0)]
        tokens, probs = self._sample(block[0], hidden)
        confidences = None
        if self._confidences and self._draft.confidence_head is not None:
            previous = torch.cat((block[:1], tokens))[: len(tokens)]
            logits = self._draft.confidence_logits(previous, hidden)
            confidences = logits.float().sigmoid()
        return Proposal(tokens=tokens, probs=probs, confidences=confidences)

    def _sample(self, anchor: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Sample slot after slot: target ids [n] and their distributions [n, V]."""
        draft, weights = self._draft, self._decoder.weights
        base = weights.head(hidden)
        previous, state = anchor, None
        tokens, rows = anchor.new_empty(len(hidden)), []
        for slot in range(len(hidden)):
            logits = base[slot : slot + 1]
            if draft.markov_head is not None and weights.markov is not None:
                features, state = draft.markov_head.step(previous, hidden[slot], state)
                logits = logits + weights.markov(features.unsqueeze(0))
            probs = probabilities(logits, self._sampling)
            word = sample(probs, self._generator) if not self._sampling.greedy else probs.argmax(-1)
            previous = draft.target_ids[word].squeeze(0)
            tokens[slot] = previous
            rows.append(probs)
        drafted = torch.cat(rows) if rows else base.float()
        return tokens, self._over_target(drafted)

    def _over_target(self, probs: Tensor) -> Tensor:
        """Draft distributions [n, Vd] over the target's vocabulary [n, V], zero elsewhere."""
        config = self._draft.config
        if not config.reduced_vocabulary:
            return probs
        full = probs.new_zeros(probs.shape[0], config.vocab_size)
        return full.scatter_(1, self._draft.target_ids.expand(probs.shape[0], -1), probs)
