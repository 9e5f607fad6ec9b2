"""Prompt lookup: drafts what followed the last occurrence of the current n-gram; no weights.

The weightless baseline: it costs no model pass, and is good exactly where text repeats itself.
"""

import torch
from torch import Tensor

from sparksmith.draft.errors import UserError
from sparksmith.draft.proposal import Proposal


class NgramDrafter:
    """Drafts for one request from its own tokens.

    The longest suffix of the text, of `max_ngram` down to `min_ngram` tokens, that occurred
    before proposes the tokens that followed its most recent earlier occurrence. An index from
    n-gram to position makes a step's cost independent of the text's length.
    """

    def __init__(self, vocab_size: int, *, max_ngram: int = 4, min_ngram: int = 2) -> None:
        if not 1 <= min_ngram <= max_ngram:
            raise UserError(
                "min_ngram",
                min_ngram,
                f"is not between 1 and max_ngram {max_ngram}",
                "Use 1 <= min_ngram <= max_ngram.",
            )
        self._vocab_size = vocab_size
        self._sizes = range(max_ngram, min_ngram - 1, -1)
        self._text: list[int] = []
        # From n-gram to the position after its last occurrence within the committed text.
        self._after: dict[tuple[int, ...], int] = {}

    @property
    def taps(self) -> tuple[int, ...]:
        return ()

    def update(self, tokens: Tensor, features: Tensor | None) -> None:
        """Append committed tokens [n]; there are no features."""
        for token in tokens.tolist():
            self._text.append(token)
            end = len(self._text)
            for size in self._sizes:
                if size <= end:
                    self._after[tuple(self._text[end - size :])] = end

    def propose(self, anchor: int, num_tokens: int) -> Proposal:
        """Draft at most `num_tokens` tokens, none if no suffix occurred before; one-hot probs."""
        drafted = self._lookup(anchor, num_tokens)
        tokens = torch.tensor(drafted, dtype=torch.long)
        probs = torch.zeros(len(drafted), self._vocab_size)
        probs.scatter_(1, tokens.unsqueeze(1), 1.0)
        return Proposal(tokens=tokens, probs=probs)

    def _lookup(self, anchor: int, num_tokens: int) -> list[int]:
        """What followed the suffix that ends in `anchor`; the anchor itself may be the last."""
        for size in self._sizes:
            if size > len(self._text) + 1:
                continue
            suffix = (*self._text[len(self._text) + 1 - size :], anchor)
            after = self._after.get(suffix)
            if after is not None:
                followed = self._text[after : after + num_tokens]
                return [*followed, anchor][:num_tokens]
        return []
