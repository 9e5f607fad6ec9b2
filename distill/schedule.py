"""How much of a run is done, the learning rate there, and the order in which samples come.

All of it is a function of counters and the seed, so a resumed run needs no generator's state.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from sparksmith.draft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Budget:
    """When training ends: after `steps`, or `minutes` of wall time summed over resumed runs, or
    whichever comes first."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        if self.steps is None and self.minutes is None:
            raise UserError("steps", None, "and minutes are both unset", "Give one of the two.")
        for name, value in (("steps", self.steps), ("minutes", self.minutes)):
            if value is not None and not value > 0:
                raise UserError(name, value, "is not positive", "Give a budget above 0.")

    def fraction(self, step: int, seconds: float) -> float:
        """The share of the budget that is used up after `step` steps and `seconds`, 0 to 1."""
        shares = [0.0]
        if self.steps is not None:
            shares.append(step / self.steps)
        if self.minutes is not None:
            shares.append(seconds / 60 / self.minutes)
        return min(1.0, max(shares))


def learning_rate_factor(fraction: float, warmup: float) -> float:
    """Linear from 0 to 1 over the first `warmup` of the run, then a cosine down to 0."""
    if fraction < warmup:
        # Not 0 in the very first step: it would be wasted.
        return max(fraction / warmup, 0.05)
    return 0.5 * (1.0 + math.cos(math.pi * (fraction - warmup) / max(1e-9, 1.0 - warmup)))


def batches(
    count: int, batch_size: int, length: Callable[[int], int], seed: int, start: int
) -> Iterator[list[int]]:
    """Endless batches of sample numbers from batch `start` on, each epoch in a new order.

    Samples of similar length stand together, so that little is padded; which ones those are
    changes with the epoch. The last batch of an epoch may be smaller.
    """
    per_epoch = math.ceil(count / batch_size)
    epoch, offset = divmod(start, per_epoch)
    while True:
        yield from _epoch(count, batch_size, length, seed + 1_000_003 * epoch)[offset:]
        epoch, offset = epoch + 1, 0


def _epoch(count: int, batch_size: int, length: Callable[[int], int], seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(count, generator=generator).tolist()
    # In a window as large as the set the same samples would meet in every epoch.
    window = batch_size * max(1, min(16, count // (4 * batch_size)))
    grouped = []
    for start in range(0, count, window):
        ordered = sorted(order[start : start + window], key=length)
        grouped += [ordered[at : at + batch_size] for at in range(0, len(ordered), batch_size)]
    shuffled = torch.randperm(len(grouped), generator=generator).tolist()
    return [grouped[index] for index in shuffled]
