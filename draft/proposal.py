"""What a drafter hands to the verifier, and the two methods that make a drafter."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """The drafted tokens of one step.

    `tokens` [K] are target vocabulary ids, K may be 0. `probs` [K, V] float32 are the
    distributions the tokens were drawn from, over the target's vocabulary (one-hot when the
    drafter is deterministic): verification is exact only with the distribution as sampled.
    `confidences` [K] are P(token k accepted | all before it accepted), where the drafter has them.
    """

    tokens: Tensor
    probs: Tensor
    confidences: Tensor | None = None


class Drafter(Protocol):
    """One request's drafter: told what the target committed, asked for what comes next."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs `update` needs, ascending; empty if none."""
        ...

    def update(self, tokens: Tensor, features: Tensor | None) -> None:
        """Append committed tokens [n] and their target features [n, len(taps) * H] (or None).

        The first call of a request carries the prompt. The anchor is not among the tokens: the
        target has not run on it yet.
        """
        ...

    def propose(self, anchor: int, num_tokens: int) -> Proposal:
        """Draft at most `num_tokens` tokens to follow `anchor`, the last token emitted."""
        ...
