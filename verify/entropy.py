"""Entropy of the target's next-token distribution, the measure of how predictable a text is."""

import math

import torch
from torch import Tensor


def entropy_bits(logits: Tensor, chunk: int = 256) -> Tensor:
    """Entropy in bits at temperature 1 of each row of `logits` [N, V]; [N] float32.

    Untruncated: the distribution is the target's own, however the request samples. Words at -inf
    have no part in it. Computed in float32 (float64 stays), `chunk` rows at a time, so that the
    extra memory is 3 * chunk * V values.
    """
    entropies = torch.empty(logits.shape[0], dtype=torch.float32, device=logits.device)
    for start in range(0, logits.shape[0], chunk):
        rows = logits[start : start + chunk]
        rows = rows if rows.dtype == torch.float64 else rows.float()
        # entr(p) = -p ln p, and 0 at p = 0, where p * log_softmax would be 0 * inf.
        nats = torch.special.entr(rows.softmax(-1)).sum(-1)
        entropies[start : start + chunk] = nats / math.log(2.0)
    return entropies
