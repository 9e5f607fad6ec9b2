"""The words a target may sample, found without sorting its vocabulary, and how they are remembered.

A truncated distribution over a large vocabulary is two numbers a position (a normaliser and a
threshold) once the logits can be computed again: that is all that training keeps of it.
"""

import torch
from torch import Tensor
from torch.nn import functional

from sparksmith.draft.sampling import Sampling


def nucleus(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kept words of each row, most likely first, without a dense pass over the vocabulary.

    Returns (words [N, k], probs [N, k], log_norm [N], threshold [N]); probs are those of
    `draft.sampling.probabilities`, zero beyond the kept words. k grows until every row's nucleus
    fits. Where words tie with the last one kept (common in half precision), `log_norm` and
    `threshold` describe all of them as kept, so that their distribution sums to 1; which of them
    were sampled from is the sort's choice.
    """
    scaled = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scaled = scaled / max(sampling.temperature, 1e-6)
    if sampling.greedy:
        top, words = scaled.max(-1, keepdim=True)
        return words, torch.ones_like(top), top[:, 0], top[:, 0]
    vocab = scaled.shape[-1]
    dropped = scaled.new_full((len(scaled), 1), float("-inf"))
    if sampling.top_k:
        kth = scaled.topk(min(sampling.top_k, vocab)).values[..., -1:]
        below = scaled < kth
        dropped = scaled.masked_fill(~below, float("-inf")).amax(-1, keepdim=True)
        scaled = scaled.masked_fill(below, float("-inf"))
    total = scaled.logsumexp(-1)
    if sampling.top_p >= 1.0:
        words = torch.arange(vocab, device=scaled.device).expand_as(scaled)
        last = kth if sampling.top_k else dropped
        return words, (scaled - total[:, None]).exp(), total, _between(last, dropped)
    top, words = _most_likely(scaled, total, sampling.top_p)
    probs = (top - total[:, None]).exp()
    before = probs.cumsum(-1) - probs
    kept = (before < sampling.top_p) & (probs > 0)
    probs = probs.masked_fill(~kept, 0.0)
    mass = probs.sum(-1)
    count = kept.sum(-1, keepdim=True)
    last = top.gather(1, count - 1)
    following = top.gather(1, count.clamp(max=top.shape[-1] - 1))
    following = following.masked_fill(count == top.shape[-1], float("-inf"))
    whole = mass
    if bool((following == last).any()):
        whole = ((scaled >= last) * (scaled - total[:, None]).exp()).sum(-1)
        whole = torch.where((following == last)[:, 0], whole, mass)
    threshold = _between(last, torch.maximum(following, dropped))
    return words, probs / mass[:, None], total + whole.log(), threshold


def _most_likely(scaled: Tensor, total: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """Scaled logits [N, k] in descending order with their words, enough for every row's nucleus.

    Only rows that lack the mass are looked through again, for more words; in the others the places
    beyond the first ones hold -inf and word 0.
    """
    vocab = scaled.shape[-1]
    top, words = scaled.topk(min(64, vocab))
    width = top.shape[-1]
    while width < vocab:
        mass = (top[:, :-1] - total[:, None]).exp().sum(-1)
        lacking = (mass <= top_p + 1e-5).nonzero()[:, 0]
        if not len(lacking):
            break
        more = min(8 * width, vocab) - width
        top = functional.pad(top, (0, more), value=float("-inf"))
        words = functional.pad(words, (0, more))
        width += more
        top[lacking], words[lacking] = scaled[lacking].topk(width)
    return top, words


def _between(last: Tensor, dropped: Tensor) -> Tensor:
    """Thresholds [N] between the last kept and the first dropped scaled logit, each [N, 1].

    Halfway, so that logits recomputed with other rounding fall on the same side; just below
    `last` where the two tie; -inf where nothing is dropped.
    """
    return torch.where(dropped == last, last - 1e-3, (last + dropped) / 2)[:, 0]
