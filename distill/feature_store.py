"""Features on disk: sharded safetensors beside a manifest, read at random, checked at every read.

A shard holds whole samples one after the other: `tokens` [T] int32 and the tensors of
`feature_coding.Coding`. Its metadata list the samples, each with a CRC-32 of its bytes, so that a
flipped byte spoils one sample and is named when that is read. `features.json` says what the
features are of, and every shard's SHA-256. Shards appear whole, the manifest after them: a writer
killed at any moment loses at most the shard it was filling.
"""

import hashlib
import json
import zlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from sparksmith.distill.feature_coding import Coding
from sparksmith.distill.feature_manifest import (
    MANIFEST_FILE,
    Contents,
    Shard,
    read_manifest,
    whole_number,
    write_manifest,
)
from sparksmith.distill.generation import Response
from sparksmith.distill.samples import TrainingSample
from sparksmith.distill.tensor_file import TensorFile, TensorFileError
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing, sha256_of

SHARD_BYTES = 256 << 20
_MOST_SAMPLES = 20_000
"""In a shard, whose header lists them."""
_OPEN_SHARDS = 32
_REPAIR = "Delete that file and run the same `capture` again: it captures what is missing."


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A file of a store that is not as it was written.

    `requests` are the samples that it costs; None is all of the shard's.
    """

    file: str
    problem: str
    requests: tuple[str, ...] | None = None

    def __str__(self) -> str:
        if self.requests is None:
            return f"{self.file} {self.problem}; none of its samples is usable"
        return f"{self.file} {self.problem} for {_names(self.requests)}; the rest is usable"


@dataclass(frozen=True, kw_only=True)
class _Entry:
    """One sample: where its rows begin in its shard's tensors."""

    request_id: str
    prompt_length: int
    response_length: int
    finish_reason: str
    checksum: int
    shard: int
    token_row: int
    position_row: int
    response_row: int

    @property
    def length(self) -> int:
        return self.prompt_length + self.response_length


class FeatureStore:
    """Reads a store. `faults` are the shards found damaged so far; the other samples are there."""

    def __init__(self, folder: Path, contents: Contents, shards: Sequence[Shard]) -> None:
        self.folder = folder
        self.contents = contents
        self.shards = list(shards)
        self.faults: list[Fault] = []
        self._coding = contents.coding
        self._open: OrderedDict[int, TensorFile] = OrderedDict()
        self._entries: list[_Entry] = []
        self._index: dict[str, int] = {}
        for number, shard in enumerate(self.shards):
            try:
                with self._checked(shard) as file:
                    entries = _entries(file, number, shard, contents)
            except (TensorFileError, OSError) as error:
                self.faults.append(Fault(file=shard.file, problem=_reason(error)))
                continue
            again = [entry.request_id for entry in entries if entry.request_id in self._index]
            if again:
                self.faults.append(
                    Fault(file=shard.file, problem=f"repeats {_names(again)} of another shard")
                )
                continue
            for entry in entries:
                self._index[entry.request_id] = len(self._entries)
                self._entries.append(entry)

    @classmethod
    def open(cls, folder: Path) -> "FeatureStore":
        """Read the manifest and every shard's header, no features.

        Raises UserError where there is no manifest of this format. Damaged shards are in
        `faults`, and their samples left out.
        """
        contents, shards = read_manifest(folder)
        return cls(folder, contents, shards)

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._index

    @property
    def request_ids(self) -> list[str]:
        return [entry.request_id for entry in self._entries]

    @property
    def sha256(self) -> str:
        """Identifies the usable samples."""
        lines = [f"{entry.request_id} {entry.checksum}\n" for entry in self._entries]
        text = self.contents.identity + "".join(lines)
        return hashlib.sha256(text.encode()).hexdigest()

    def index_of(self, request_id: str) -> int:
        """The number of a sample; KeyError if it is not there."""
        return self._index[request_id]

    def length(self, index: int) -> int:
        """Tokens of one sample, prompt included."""
        return self._entries[index].length

    def prompt_length(self, index: int) -> int:
        return self._entries[index].prompt_length

    def take(self, indices: Sequence[int]) -> list[TrainingSample]:
        """The samples of `indices`, in order.

        Raises UserError for one whose bytes are not those that were written.
        """
        return [self._sample(self._entries[index]) for index in indices]

    def responses(self) -> list[Response]:
        """All responses, token ids alone: what choosing a vocabulary and a split needs."""
        made = []
        for entry in self._entries:
            start = entry.token_row
            file = self._file(entry.shard)
            tokens = file.rows("tokens", start, start + entry.length).tolist()
            made.append(
                Response(
                    request_id=entry.request_id,
                    prompt_ids=tokens[: entry.prompt_length],
                    token_ids=tokens[entry.prompt_length :],
                    finish_reason=entry.finish_reason,
                )
            )
        return made

    def verify(self, tick: Callable[[int], None] = lambda count: None) -> list[Fault]:
        """Check every byte against the manifest; `tick` hears of bytes read.

        Damaged samples are named and left out of the store from then on. Returns all faults.
        """
        known = {fault.file for fault in self.faults}
        for number, shard in enumerate(self.shards):
            if shard.file not in known and sha256_of(self.folder / shard.file) != shard.sha256:
                self.faults.append(self._examine(number, shard))
            tick(shard.bytes)
        lost = {request for fault in self.faults for request in fault.requests or ()}
        whole = {fault.file for fault in self.faults if fault.requests is None}
        self._entries = [
            entry
            for entry in self._entries
            if entry.request_id not in lost and self.shards[entry.shard].file not in whole
        ]
        self._index = {entry.request_id: at for at, entry in enumerate(self._entries)}
        return self.faults

    def _examine(self, number: int, shard: Shard) -> Fault:
        bad = []
        for entry in self._entries:
            if entry.shard == number and _checksum(entry, self._stored(entry)) != entry.checksum:
                bad.append(entry.request_id)
        # Where every sample is as it was written, its list of samples is what changed.
        return Fault(
            file=shard.file,
            problem="has other bytes than were written",
            requests=tuple(bad) or None,
        )

    def _checked(self, shard: Shard) -> TensorFile:
        path = self.folder / shard.file
        if not path.exists():
            raise TensorFileError("is missing")
        size = path.stat().st_size
        if size < shard.bytes:
            raise TensorFileError(f"is cut short: it has {size} of {shard.bytes} bytes")
        return TensorFile(path)

    def _file(self, number: int) -> TensorFile:
        """The shard's mapping; few are kept, since each holds a file open."""
        if number in self._open:
            self._open.move_to_end(number)
            return self._open[number]
        shard = self.shards[number]
        try:
            file = self._checked(shard)
            _check_columns(file, shard, self._coding)
        except (TensorFileError, OSError) as error:
            raise UserError("features", shard.file, _reason(error), _REPAIR) from None
        self._open[number] = file
        if len(self._open) > _OPEN_SHARDS:
            self._open.popitem(last=False)[1].close()
        return file

    def _stored(self, entry: _Entry) -> dict[str, Tensor]:
        file = self._file(entry.shard)
        stored = {"tokens": file.rows("tokens", entry.token_row, entry.token_row + entry.length)}
        for name in self._coding.columns:
            start, count = entry.response_row, entry.response_length
            if name.startswith("taps"):
                start, count = entry.position_row, entry.length - 1
            stored[name] = file.rows(name, start, start + count)
        return stored

    def _sample(self, entry: _Entry) -> TrainingSample:
        stored = self._stored(entry)
        if _checksum(entry, stored) != entry.checksum:
            raise UserError(
                "features",
                self.shards[entry.shard].file,
                f"has other bytes for {entry.request_id} than were written",
                _REPAIR,
            )
        return TrainingSample(
            tokens=stored["tokens"].long(),
            prompt_length=entry.prompt_length,
            features=self._coding.decode(stored, self.contents.sampling),
        )


class FeatureWriter:
    """Appends samples to a store; `store` is what lay there before, read.

    Samples are gathered in memory until they fill a shard.
    """

    def __init__(self, folder: Path, contents: Contents, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Go on with the store in `folder`, or begin one. Shards that are missing or damaged are
        forgotten, and removed: their samples are no longer in `store`, to be captured anew.

        Raises UserError when the folder holds features of something else.
        """
        self.folder = folder
        self.contents = contents
        self.forgotten: list[Fault] = []
        self._coding = contents.coding
        self._shard_bytes = shard_bytes
        folder.mkdir(parents=True, exist_ok=True)
        for left in folder.glob(".features-*.tmp"):
            left.unlink()
        self._shards: list[Shard] = []
        if (folder / MANIFEST_FILE).exists():
            store = FeatureStore.open(folder)
            store.contents.require(contents)
            self.forgotten = store.faults
            damaged = {fault.file for fault in store.faults}
            for name in damaged:
                (folder / name).unlink(missing_ok=True)
            self._shards = [shard for shard in store.shards if shard.file not in damaged]
        write_manifest(self.folder, self.contents, self._shards)
        self.store = FeatureStore.open(folder)
        self._pending: list[tuple[list[Any], dict[str, Tensor]]] = []
        self._pending_bytes = 0
        self._ids = set(self.store.request_ids)

    def append(self, response: Response, sample: TrainingSample) -> None:
        """Add one sample; a full shard is written.

        Raises UserError for an id that is there already, and ValueError for features of other
        shapes than the store's. When the disk is full (OSError) the shards before stay readable.
        """
        if response.request_id in self._ids:
            raise UserError("request_id", response.request_id, "is there already", "Skip it.")
        stored = {"tokens": sample.tokens.to(torch.int32)} | self._coding.encode(sample.features)
        length, response_length = len(sample.tokens), len(sample.tokens) - sample.prompt_length
        for name, (_, row) in self._coding.columns.items():
            count = length - 1 if name.startswith("taps") else response_length
            if stored[name].shape != (count, *row):
                raise ValueError(f"{name} is {tuple(stored[name].shape)}, not {(count, *row)}")
        listed: list[Any] = [
            response.request_id,
            sample.prompt_length,
            response_length,
            response.finish_reason,
        ]
        listed.append(_crc(listed, stored))
        self._ids.add(response.request_id)
        self._pending.append((listed, stored))
        self._pending_bytes += sum(tensor.nbytes for tensor in stored.values())
        if self._pending_bytes >= self._shard_bytes or len(self._pending) >= _MOST_SAMPLES:
            self.seal()

    def seal(self) -> None:
        """Write what is gathered as a shard of its own; nothing if there is none."""
        if not self._pending:
            return
        numbers = [int(shard.file.removesuffix(".safetensors")[-5:]) for shard in self._shards]
        path = self.folder / f"features-{max(numbers, default=-1) + 1:05d}.safetensors"
        listed = [entry for entry, _ in self._pending]
        columns = [stored for _, stored in self._pending]
        tensors = {name: torch.cat([stored[name] for stored in columns]) for name in columns[0]}
        index = json.dumps({"contents": self.contents.identity, "samples": listed})
        with replacing(path) as temporary:
            save_file(tensors, temporary, metadata={"index": index})
            shard = Shard(
                file=path.name,
                samples=len(listed),
                tokens=len(tensors["tokens"]),
                response_tokens=len(tensors["hidden"]),
                bytes=temporary.stat().st_size,
                sha256=sha256_of(temporary),
            )
        self._shards.append(shard)
        write_manifest(self.folder, self.contents, self._shards)
        self._pending, self._pending_bytes = [], 0


@dataclass
class StoredFeatures:
    """Some samples of a store as a trainer takes them, `indices` being their numbers in it."""

    store: FeatureStore
    indices: list[int] = field(default_factory=list)

    @classmethod
    def of(cls, store: FeatureStore, responses: Sequence[Response]) -> "StoredFeatures":
        return cls(store, [store.index_of(response.request_id) for response in responses])

    def __len__(self) -> int:
        return len(self.indices)

    def length(self, index: int) -> int:
        """Tokens of one sample, prompt included."""
        return self.store.length(self.indices[index])

    def take(self, indices: Sequence[int]) -> list[TrainingSample]:
        """The samples of `indices`, in order; UserError for one that was damaged on disk."""
        return self.store.take([self.indices[index] for index in indices])


def _entries(file: TensorFile, number: int, shard: Shard, contents: Contents) -> list[_Entry]:
    """The samples of a shard; TensorFileError unless they account for all of its rows."""
    _check_columns(file, shard, contents.coding)
    try:
        index = json.loads(file.metadata["index"])
        if index["contents"] != contents.identity:
            raise TensorFileError("is of other features: another target, taps or sampling")
        listed = [
            (
                str(name),
                whole_number(prompt, 1),
                whole_number(answer, 1),
                str(reason),
                whole_number(crc),
            )
            for name, prompt, answer, reason, crc in index["samples"]
        ]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise TensorFileError("has no list of its samples") from None
    entries, token_row, response_row = [], 0, 0
    for at, (name, prompt, answer, reason, crc) in enumerate(listed):
        entries.append(
            _Entry(
                request_id=name,
                prompt_length=prompt,
                response_length=answer,
                finish_reason=reason,
                checksum=crc,
                shard=number,
                token_row=token_row,
                # The target never ran on the last token of a response.
                position_row=token_row - at,
                response_row=response_row,
            )
        )
        token_row += prompt + answer
        response_row += answer
    found = (len(entries), token_row, response_row)
    if found != (shard.samples, shard.tokens, shard.response_tokens):
        raise TensorFileError("lists other samples than it holds")
    return entries


def _check_columns(file: TensorFile, shard: Shard, coding: Coding) -> None:
    wanted: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "tokens": (torch.int32, (shard.tokens,))
    }
    for name, (dtype, row) in coding.columns.items():
        rows = shard.tokens - shard.samples if name.startswith("taps") else shard.response_tokens
        wanted[name] = (dtype, (rows, *row))
    found = {name: (place.dtype, place.shape) for name, place in file.places.items()}
    if found != wanted:
        different = sorted(
            name for name in found.keys() | wanted.keys() if found.get(name) != wanted.get(name)
        )
        raise TensorFileError(f"holds other tensors than it should ({', '.join(different)[:200]})")


def _checksum(entry: _Entry, stored: Mapping[str, Tensor]) -> int:
    listed = [
        entry.request_id,
        entry.prompt_length,
        entry.response_length,
        entry.finish_reason,
    ]
    return _crc(listed, stored)


def _crc(listed: Sequence[Any], stored: Mapping[str, Tensor]) -> int:
    """CRC-32 of a sample: its line in the list, then its tensors in the order of their names."""
    crc = zlib.crc32(json.dumps(list(listed)).encode())
    for name in sorted(stored):
        crc = zlib.crc32(stored[name].contiguous().view(torch.uint8).numpy().data, crc)
    return crc


def _reason(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"cannot be opened ({(error.strerror or str(error)).lower()})"
    return str(error)


def _names(requests: Sequence[str]) -> str:
    shown = ", ".join(requests[:5])
    return shown if len(requests) <= 5 else f"{shown} and {len(requests) - 5} more"
