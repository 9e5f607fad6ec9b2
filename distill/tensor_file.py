"""safetensors files read with distrust: all that a header claims is checked before it is believed.

A feature store may come from anywhere, and a server's files from another machine. A header that
is too long, or that gives tensors a place outside the file, the same place twice, or a size that
is not theirs, is refused without allocating what it asks for. What is left is mapped, not read.
"""

import json
import math
import mmap
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

LONGEST_HEADER = 16 << 20
DTYPES: Mapping[str, torch.dtype] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}
_MOST_DIMENSIONS = 8


class TensorFileError(Exception):
    """What is wrong with a file, as the end of a sentence that begins with its name."""


@dataclass(frozen=True, kw_only=True)
class Place:
    """One tensor of a file: `start` and `end` are bytes from the file's beginning."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


class TensorFile:
    """An open file: `places` by name, and `metadata`. Rows are copied out of the mapping."""

    def __init__(self, path: Path) -> None:
        """Raises TensorFileError for a file that is not whole and consistent, OSError for one that
        cannot be opened. A symbolic link is not followed, and a pipe is not waited for."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise TensorFileError("is not a regular file")
            if status.st_size < 8:
                raise TensorFileError(f"ends after {status.st_size} bytes, within its header")
            # Private and writable: torch warns of buffers that it must not write to.
            self._map = mmap.mmap(descriptor, 0, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
        try:
            self.places, self.metadata = _read_header(self._map)
        except BaseException:
            self._map.close()
            raise

    def rows(self, name: str, start: int, end: int) -> Tensor:
        """Rows start .. end-1 of a tensor's first dimension, as a tensor of its own."""
        place = self.places[name]
        assert 0 <= start <= end <= place.shape[0]
        width = (place.end - place.start) // place.shape[0]
        shape = (end - start, *place.shape[1:])
        if start == end:
            return torch.empty(shape, dtype=place.dtype)
        first = place.start + start * width
        # bytearray() copies: a view would keep the file mapped for as long as the tensor lives.
        data = bytearray(memoryview(self._map)[first : first + (end - start) * width])
        return torch.frombuffer(data, dtype=place.dtype).view(shape)

    def whole(self, name: str) -> Tensor:
        """All rows of a tensor."""
        return self.rows(name, 0, self.places[name].shape[0])

    def close(self) -> None:
        self._map.close()

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _read_header(data: mmap.mmap) -> tuple[dict[str, Place], dict[str, str]]:
    size = len(data)
    length = int.from_bytes(data[:8], "little")
    if length > LONGEST_HEADER:
        raise TensorFileError(f"claims a header of {length} bytes")
    if 8 + length > size:
        raise TensorFileError("ends within its header")
    try:
        header = json.loads(data[8 : 8 + length], object_pairs_hook=_unique)
    except (ValueError, RecursionError):
        raise TensorFileError("has a header that is not JSON with unique keys") from None
    if not isinstance(header, dict):
        raise TensorFileError("has a header that is not an object")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise TensorFileError("has metadata that are not texts")
    places = {name: _place(name, entry, 8 + length) for name, entry in header.items()}
    at = 8 + length
    for name, place in sorted(places.items(), key=lambda item: item[1].start):
        if place.start < at:
            raise TensorFileError(f"puts {name} where another tensor lies")
        if place.start > at:
            raise TensorFileError(f"has a hole before {name}")
        at = place.end
    if at > size:
        raise TensorFileError(f"is cut short: it has {size} of {at} bytes")
    if at < size:
        raise TensorFileError(f"has {size - at} bytes that belong to no tensor")
    return places, metadata


def _place(name: str, entry: Any, base: int) -> Place:
    named = entry.get("dtype") if isinstance(entry, dict) else None
    dtype = DTYPES.get(named) if isinstance(named, str) else None
    if dtype is None:
        raise TensorFileError(f"gives {name} a type that is not known")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _whole_numbers(shape) or not 1 <= len(shape) <= _MOST_DIMENSIONS or 0 in shape:
        raise TensorFileError(f"gives {name} a shape that no tensor has")
    if not _whole_numbers(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise TensorFileError(f"gives {name} a place that is none")
    # Python's integers do not overflow, so an absurd shape cannot pass for a small one.
    if math.prod(shape) * dtype.itemsize != offsets[1] - offsets[0]:
        raise TensorFileError(f"gives {name} a shape that is not the size of its bytes")
    return Place(dtype=dtype, shape=tuple(shape), start=base + offsets[0], end=base + offsets[1])


def _whole_numbers(values: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(value, int) and not isinstance(value, bool) and value >= 0 for value in values
    )


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key twice")
    return made
