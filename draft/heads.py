"""The small heads on top of the backbone: Markov heads (previous token to logits) and confidence.

Every Markov head ends in the same low-rank product: its bias is `features @ markov_w2.T`, so the
features [r] are all that is computed step by step. V target and Vd draft vocabulary, H hidden.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

MarkovHeadType = Literal["vanilla", "gated", "rnn"]


class MarkovHead(nn.Module):
    """The vanilla head: the bias depends on the previous token alone (DSpark eq. 4-6)."""

    def __init__(self, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__()
        self.rank = rank
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def features(self, prev_tokens: Tensor, hidden: Tensor) -> Tensor:
        """Teacher forcing: prev_tokens [..., K], hidden [..., K, H] to features [..., K, r]."""
        embedded: Tensor = self.markov_w1(prev_tokens)
        return embedded

    def step(
        self, prev_token: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """One slot: prev_token [...], hidden [..., H]; features [..., r] and the next state.

        The state before slot 0 is None, and stays None for heads that carry none.
        """
        return self.features(prev_token.unsqueeze(-1), hidden.unsqueeze(-2)).squeeze(-2), state


class GatedMarkovHead(MarkovHead):
    """The slot's hidden state gates the previous token's embedding."""

    def __init__(self, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__(rank, hidden_size, vocab_size, draft_vocab_size)
        self.gate_proj = nn.Linear(hidden_size + rank, rank)

    def features(self, prev_tokens: Tensor, hidden: Tensor) -> Tensor:
        embedded = self.markov_w1(prev_tokens)
        gate = self.gate_proj(torch.cat((hidden, embedded), dim=-1)).sigmoid()
        gated: Tensor = gate * embedded
        return gated


class RnnMarkovHead(MarkovHead):
    """A recurrent state along the block remembers all tokens drafted so far."""

    def __init__(self, rank: int, hidden_size: int, vocab_size: int, draft_vocab_size: int) -> None:
        super().__init__(rank, hidden_size, vocab_size, draft_vocab_size)
        self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)

    def features(self, prev_tokens: Tensor, hidden: Tensor) -> Tensor:
        state: Tensor | None = None
        outputs = []
        for token, slot in zip(prev_tokens.unbind(-1), hidden.unbind(-2), strict=True):
            output, state = self.step(token, slot, state)
            outputs.append(output)
        return torch.stack(outputs, dim=-2)

    def step(
        self, prev_token: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        embedded = self.markov_w1(prev_token)
        if state is None:
            state = torch.zeros_like(embedded)
        joint = self.joint_proj(torch.cat((state, embedded, hidden), dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = gate.sigmoid()
        # The output uses the old state through `joint`: the new one speaks from the next slot on.
        return output.tanh(), gate * state + (1 - gate) * candidate.tanh()


MARKOV_HEADS: dict[MarkovHeadType, Callable[[int, int, int, int], MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
}


class ConfidenceHead(nn.Module):
    """The logit of P(slot accepted | all slots before it accepted) (DSpark eq. 7-8)."""

    def __init__(self, hidden_size: int, rank: int) -> None:
        """`rank` is the size of the Markov embedding beside the hidden state, 0 for none."""
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, embedded: Tensor | None) -> Tensor:
        """hidden [..., H], embedded [..., r] of the previous token; result [...]."""
        joint = hidden if embedded is None else torch.cat((hidden, embedded), dim=-1)
        logits: Tensor = self.proj(joint)
        return logits.squeeze(-1)
