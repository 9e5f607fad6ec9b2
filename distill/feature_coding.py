"""How features are stored: in which numbers, and what a token costs.

The 8-bit form stores the taps alone in 8 bits. A decoder's residual stream has a few channels that
are hundreds of times larger than the rest, so one scale for a whole tap would leave the others a
handful of levels. Here 64 channels share a scale (8.25 bits a number), which shuts an outlier up
with its 63 neighbours. The head's input stays in bfloat16: the target's distribution is computed
from it, and an error there would move what the draft is trained to say.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from sparksmith.distill.generation import SampleFeatures
from sparksmith.draft.sampling import Sampling

StoreDtype = Literal["bfloat16", "float32", "int8"]
STORE_DTYPES: tuple[StoreDtype, ...] = ("bfloat16", "float32", "int8")
_GROUP = 64
_LEVELS = 127


@dataclass(frozen=True, kw_only=True)
class Coding:
    """The stored form of the features of m taps of width H."""

    dtype: StoreDtype
    num_taps: int
    hidden_size: int

    @property
    def group(self) -> int:
        """Channels that share a scale: 64, or fewer where 64 does not divide the width."""
        return math.gcd(self.hidden_size, _GROUP)

    @property
    def columns(self) -> Mapping[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Every tensor's type and the shape of one of its rows. Taps have a row for each of the
        P + R - 1 positions that the target ran on, the others one for each of R tokens."""
        width = self.num_taps * self.hidden_size
        floats = torch.float32 if self.dtype == "float32" else torch.bfloat16
        taps: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {"taps": (floats, (width,))}
        if self.dtype == "int8":
            taps = {
                "taps": (torch.int8, (width,)),
                "taps_scale": (torch.bfloat16, (width // self.group,)),
            }
        return {
            **taps,
            "hidden": (floats, (self.hidden_size,)),
            "log_norm": (torch.float32, ()),
            "threshold": (torch.float32, ()),
        }

    @property
    def bytes_per_position(self) -> int:
        """Of the taps, for each position of prompt and response; with its token id."""
        return 4 + sum(self._bytes(name) for name in self.columns if name.startswith("taps"))

    @property
    def bytes_per_response_token(self) -> int:
        """Of the head's input and the two numbers of its distribution, beside the position's."""
        return sum(self._bytes(name) for name in self.columns if not name.startswith("taps"))

    def _bytes(self, name: str) -> int:
        dtype, row = self.columns[name]
        return dtype.itemsize * math.prod(row)

    def encode(self, features: SampleFeatures) -> dict[str, Tensor]:
        """The tensors to store, by the names of `columns`."""
        made = {
            "hidden": features.hidden.to(self.columns["hidden"][0]),
            "log_norm": features.log_norm.float(),
            "threshold": features.threshold.float(),
        }
        if self.dtype != "int8":
            return {"taps": features.taps.to(self.columns["taps"][0]), **made}
        groups = self._groups(features.taps)
        scale = (groups.abs().amax(-1) / _LEVELS).bfloat16()
        # The rounded scale is the one that reading multiplies with.
        steps = groups / scale.float().clamp(min=torch.finfo(torch.float32).tiny)[..., None]
        levels = steps.round().clamp(-_LEVELS, _LEVELS).to(torch.int8)
        return {"taps": levels.flatten(-2), "taps_scale": scale, **made}

    def decode(self, stored: Mapping[str, Tensor], sampling: Sampling | None) -> SampleFeatures:
        """The features again, taps of 8 bits in float32."""
        taps = stored["taps"]
        if self.dtype == "int8":
            groups = self._groups(taps)
            taps = (groups * stored["taps_scale"].float()[..., None]).flatten(-2)
        return SampleFeatures(
            taps=taps,
            hidden=stored["hidden"],
            log_norm=stored["log_norm"],
            threshold=stored["threshold"],
            sampling=sampling,
        )

    def _groups(self, taps: Tensor) -> Tensor:
        """[..., m * H] as [..., groups, channels of one scale], in float32."""
        return taps.float().view(*taps.shape[:-1], -1, self.group)
