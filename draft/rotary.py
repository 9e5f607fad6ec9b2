"""Rotary position embeddings: frequencies, stretched by YaRN or not, and the two pairings in use.

Qwen3-style heads pair dimension i with i + D/2 ("neox"); MLA heads pair 2i with 2i + 1
("interleaved"). A draft read with the other pairing loads without a word and accepts nothing.
"""

import math
from dataclasses import dataclass
from typing import TypeGuard

import torch
from torch import Tensor

from sparksmith.draft.errors import UserError

Rotary = tuple[Tensor, Tensor]


# Of YaRN's settings: beyond, positions and logarithms of them overflow.
_LEAST, _MOST = 1e-6, float(1 << 31)


def is_positive(value: object) -> TypeGuard[int | float]:
    """Whether `value`, from a JSON file, is a number above 0, and finite as a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False


@dataclass(frozen=True, kw_only=True)
class Yarn:
    """YaRN (arXiv 2309.00071), in transformers' names: positions up to `factor` times
    `original_max_position_embeddings`.

    `mscale` and `mscale_all_dim` are DeepSeek's: with both, cosines and sines are multiplied by
    the ratio of their scales; without, by that of the paper, 0.1 ln(factor) + 1.
    """

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "factor",
            "original_max_position_embeddings",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
        ):
            value = getattr(self, name)
            if value is None and name.startswith("mscale"):
                continue
            at_least = 0.0 if name.startswith("mscale") else _LEAST
            if not (is_positive(value) or value == 0) or not at_least <= value <= _MOST:
                raise UserError(
                    f"rope_parameters.{name}",
                    value,
                    "is not a positive number",
                    "Copy the value with which the draft was trained.",
                )

    @property
    def attention_factor(self) -> float:
        """What cosines and sines are multiplied by."""
        if self.mscale and self.mscale_all_dim:
            return _scale(self.factor, self.mscale) / _scale(self.factor, self.mscale_all_dim)
        return _scale(self.factor, 1.0)

    @property
    def softmax_factor(self) -> float:
        """What an MLA layer's attention scores are multiplied by (DeepSeek's `mscale_all_dim`)."""
        return _scale(self.factor, self.mscale_all_dim) ** 2 if self.mscale_all_dim else 1.0

    def frequencies(self, plain: Tensor, theta: float) -> Tensor:
        """The frequencies [D / 2] in place of `plain`: the fast ones stay, the slow are divided by
        `factor`, with a ramp between."""
        half = len(plain)

        def dimension(rotations: float) -> float:
            turns = self.original_max_position_embeddings / (rotations * 2 * math.pi)
            return half * math.log(turns) / math.log(theta)

        low = max(math.floor(dimension(self.beta_fast)), 0)
        high = min(math.ceil(dimension(self.beta_slow)), 2 * half - 1)
        ramp = torch.arange(half, dtype=torch.float32, device=plain.device) - low
        slow = (ramp / (high - low or 0.001)).clamp(0, 1)
        return plain / self.factor * slow + plain * (1 - slow)


def rotary(positions: Tensor, head_dim: int, theta: float, yarn: Yarn | None = None) -> Rotary:
    """Cosines and sines [..., D] in float32 of the rotary angles at `positions` [...].

    Dimension i and i + D/2 hold the same angle.
    """
    exponents = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    # Written as transformers and vLLM do it: at position 10,000 rounding is visible.
    frequencies = 1.0 / theta**exponents
    factor = 1.0
    if yarn is not None:
        frequencies, factor = yarn.frequencies(frequencies, theta), yarn.attention_factor
    angles = positions.float().unsqueeze(-1) * frequencies
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos() * factor, angles.sin() * factor


def rotate(x: Tensor, cos_sin: Rotary) -> Tensor:
    """Rotate x [..., heads, D], pairs (i, i + D/2), by its position's angles, shaped [..., D]."""
    cos, sin = (part.unsqueeze(-2).to(x.dtype) for part in cos_sin)
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


def rotate_interleaved(x: Tensor, cos_sin: Rotary) -> Tensor:
    """The same for pairs (2i, 2i + 1). The result holds the first of all pairs, then the second:
    an order that queries and keys share, so that their products are those of the pairs."""
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1), cos_sin)


def _scale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
