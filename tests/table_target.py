"""A target whose law is a table: the next word depends on the last one alone, so that whole
responses can be worked out by hand."""

import torch
from torch import Tensor

from sparksmith.draft.proposal import Proposal
from sparksmith.verify.target import TargetPass


class TableTarget:
    """`table` [V, V]: row w is the distribution of the word after w."""

    def __init__(self, table: Tensor, *, max_length: int = 1000) -> None:
        self.logits = table.log()
        self.vocab_size = len(table)
        self.max_length = max_length
        self.eos_token_ids: frozenset[int] = frozenset()
        self.taps: tuple[int, ...] = ()
        self.device = torch.device("cpu")

    def begin(self, capacity: int) -> "TableStream":
        return TableStream(self)


class TableStream:
    def __init__(self, target: TableTarget) -> None:
        self.target = target
        self.length = 0

    def forward(self, tokens: Tensor, num_logits: int) -> TargetPass:
        self.length += len(tokens)
        return TargetPass(logits=self.target.logits[tokens[-num_logits:]], features=None)

    def rewind(self, length: int) -> None:
        assert length <= self.length
        self.length = length


class TableDrafter:
    """Drafts from its own table, and asserts that it is told the text without a gap."""

    taps: tuple[int, ...] = ()

    def __init__(self, table: Tensor, seed: int = 0) -> None:
        self.table = table
        self.generator = torch.Generator().manual_seed(seed)
        self.told: list[int] = []
        self.asked: list[int] = []

    def update(self, tokens: Tensor, features: Tensor | None) -> None:
        assert features is None
        self.told.extend(tokens.tolist())

    def propose(self, anchor: int, num_tokens: int) -> Proposal:
        self.asked.append(num_tokens)
        tokens = [anchor]
        for _ in range(num_tokens):
            row = self.table[tokens[-1]]
            tokens.append(int(torch.multinomial(row, 1, generator=self.generator)))
        return Proposal(
            tokens=torch.tensor(tokens[1:], dtype=torch.long),
            probs=self.table[tokens[:-1]].reshape(num_tokens, len(self.table)),
        )


def counting_table(vocab_size: int) -> Tensor:
    """The target that counts: after w comes w + 1, and after the last word 0."""
    return torch.eye(vocab_size).roll(1, dims=1)
