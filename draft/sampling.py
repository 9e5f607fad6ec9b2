"""From logits to the distribution a token is sampled from: temperature, top-k, top-p.

The same function serves the target and the draft, so that what was sampled is what is verified.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparksmith.draft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How a request samples; the order and meaning are transformers': temperature, top-k, top-p.

    `temperature` 0 is greedy decoding (the distribution is one-hot at the argmax). `top_k` 0 and
    `top_p` 1 switch the truncations off.
    """

    temperature: float = 0.7
    top_k: int = 0
    top_p: float = 0.95

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature < float("inf"):
            raise UserError(
                "temperature", self.temperature, "is negative or not finite", "Use 0 or more."
            )
        if self.top_k < 0:
            raise UserError("top_k", self.top_k, "is negative", "Use 0 to switch top-k off.")
        if not 0.0 < self.top_p <= 1.0:
            raise UserError("top_p", self.top_p, "is outside (0, 1]", "Use 1 to switch top-p off.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def probabilities(logits: Tensor, sampling: Sampling) -> Tensor:
    """Distributions [..., V] in float32 (float64 stays) that tokens are sampled from.

    Greedy is one-hot at the first largest logit. Otherwise temperature, then top-k, then top-p,
    as transformers' logits processors apply them: top-k keeps every word that ties with the k-th;
    top-p keeps the smallest set of most likely words whose mass reaches `top_p`.
    """
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.greedy:
        one_hot = torch.zeros_like(logits)
        return one_hot.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    scaled = logits / sampling.temperature
    if sampling.top_k:
        kth = scaled.topk(min(sampling.top_k, scaled.shape[-1])).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    probs = scaled.softmax(-1)
    if sampling.top_p < 1.0:
        probs = _keep_nucleus(probs, sampling.top_p)
    return probs


def _keep_nucleus(probs: Tensor, top_p: float, candidates: int = 64) -> Tensor:
    """Zero the words outside the nucleus and renormalise.

    A full sort of a large vocabulary costs more than a small model's step. The nucleus is nearly
    always among the few dozen most likely words: more are sorted only in rows that lack the mass.
    """
    top, index = probs.topk(min(candidates, probs.shape[-1]))
    kept = top.masked_fill(top.cumsum(-1) - top >= top_p, 0.0)
    kept = kept / kept.sum(-1, keepdim=True)
    result = torch.zeros_like(probs).scatter_(-1, index, kept)
    lacking = top.sum(-1) <= top_p + 1e-4
    if candidates < probs.shape[-1] and bool(lacking.any()):
        result[lacking] = _keep_nucleus(probs[lacking], top_p, 16 * candidates)
    return result


def sample(probs: Tensor, generator: torch.Generator | None) -> Tensor:
    """Draw one token for each distribution; probs [N, V], result [N] int64.

    By inverse CDF: one uniform a row, where an exponential race needs one variate a word. In
    float64 the sum over a large vocabulary keeps the smallest probabilities.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    uniforms = torch.rand(
        (len(probs), 1), dtype=torch.float64, device=probs.device, generator=generator
    )
    # The first word whose cumulative mass exceeds the point; never one of probability 0.
    point = uniforms * cumulative[:, -1:]
    return torch.searchsorted(cumulative, point, right=True).squeeze(-1)
