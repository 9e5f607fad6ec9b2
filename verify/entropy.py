"""Entropy of the target's next-token distribution, the measure of how predictable a text is."""

import math
from collections.abc import Sequence

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


def entropy_bounds(logprobs: Sequence[float], vocab_size: int) -> tuple[float, float]:
    """Bounds in bits of a distribution of which only the likeliest words are known.

    `logprobs` are natural, falling. The rest of the probability, none of it on a likelier word
    than the last one known, has least entropy in as few words as can hold it, and most spread
    evenly over the `vocab_size` - k others. No known word: 0 and the vocabulary's logarithm.
    """
    known = [math.exp(value) for value in logprobs]
    if not known:
        return 0.0, math.log2(vocab_size)
    bits = -sum(p * math.log2(p) for p in known if p > 0.0)
    rest, others = max(0.0, 1.0 - sum(known)), vocab_size - len(known)
    least = known[-1]
    # What rounding leaves is no probability of other words.
    if rest < 1e-6 or others <= 0 or least <= 0.0:
        return bits, bits
    whole = int(rest / least)
    part = rest - whole * least
    lower = bits - whole * least * math.log2(least)
    if part > 0.0:
        lower -= part * math.log2(part)
    return lower, max(lower, bits - rest * math.log2(rest / others))
