"""Responses on disk: shards of JSON lines or Parquet, token ids and all, safe against kill -9.

Rows are first appended to `open.jsonl` and flushed to the disk; a full one is sealed as
`responses-00000.jsonl` or `.parquet`. Whatever moment a process dies at, reopening the folder
finds every flushed response once: a line cut short is dropped, and so are rows that were sealed
before the open file could be removed.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing

OPEN_FILE = "open.jsonl"
ShardFormat = Literal["jsonl", "parquet"]


@dataclass(frozen=True, kw_only=True)
class ResponseRow:
    """One response with everything needed to train on it or to make it again.

    `prompt_ids` are `messages` in the target's chat template up to where the answer begins;
    `token_ids` are the answer, a stop token included. `finish_reason` is "stop" or "length".
    `category` is the prompt's kind, None where its source has none. `reasoning` is the part of the
    answer that a server tells apart from `text`; `token_ids` hold both.
    """

    request_id: str
    category: str | None
    messages: list[dict[str, str]]
    prompt_ids: list[int]
    token_ids: list[int]
    text: str
    finish_reason: str
    reasoning: str = ""


_FIELDS = frozenset(field.name for field in fields(ResponseRow))
_OPTIONAL = frozenset({"reasoning"})
SCHEMA = pa.schema(
    [
        pa.field("request_id", pa.string(), nullable=False),
        pa.field("category", pa.string()),
        pa.field(
            "messages",
            pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())])),
            nullable=False,
        ),
        pa.field("prompt_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("token_ids", pa.list_(pa.int32()), nullable=False),
        pa.field("text", pa.string(), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("reasoning", pa.string()),
    ]
)


class ShardWriter:
    """Appends responses to a folder; `written` are the ids of those it holds."""

    def __init__(
        self, folder: Path, shard_format: ShardFormat = "jsonl", *, rows_per_shard: int = 2000
    ) -> None:
        if rows_per_shard < 1:
            raise UserError("rows_per_shard", rows_per_shard, "is below 1", "Use 1 or more.")
        self.folder = folder
        self._format = shard_format
        self._rows_per_shard = rows_per_shard
        folder.mkdir(parents=True, exist_ok=True)
        shards = shard_paths(folder)
        self._next_shard = 1 + max(
            (int(path.stem.rsplit("-", 1)[1]) for path in shards), default=-1
        )
        self.written = {row.request_id for path in shards for row in read_shard(path)}
        self._open_rows = self._recover(sealed=frozenset(self.written))
        self.written.update(row.request_id for row in self._open_rows)

    def _recover(self, sealed: frozenset[str]) -> list[ResponseRow]:
        """The open file's rows that are in no shard; the file is left holding exactly these."""
        path = self.folder / OPEN_FILE
        if not path.exists():
            return []
        rows, whole_bytes = _whole_rows(path)
        fresh = [row for row in rows if row.request_id not in sealed]
        if len(fresh) < len(rows):
            with replacing(path) as temporary:
                temporary.write_bytes(b"".join(map(_line, fresh)))
        elif whole_bytes < path.stat().st_size:
            os.truncate(path, whole_bytes)
        return fresh

    def append(self, rows: Sequence[ResponseRow]) -> None:
        """Write rows and wait until the disk has them; a response is kept once this returns.

        Raises UserError for an id that is already there. When the disk is full (OSError) the rows
        written before stay readable.
        """
        for row in rows:
            if row.request_id in self.written:
                raise UserError(
                    "request_id", row.request_id, "is in the folder already", "Skip it."
                )
            self.written.add(row.request_id)
        self._write(b"".join(map(_line, rows)))
        self._open_rows += rows
        if len(self._open_rows) >= self._rows_per_shard:
            self.seal()

    def _write(self, data: bytes) -> None:
        path = self.folder / OPEN_FILE
        size = path.stat().st_size if path.exists() else 0
        try:
            with path.open("ab", buffering=0) as file:
                file.write(data)
                os.fsync(file.fileno())
        except OSError as error:
            os.truncate(path, size)
            error.filename = str(path)
            raise
        if path.stat().st_size != size + len(data):
            # The kernel took part of the bytes and did not call that an error.
            os.truncate(path, size)
            raise OSError(28, "No space left on device", str(path))

    def seal(self) -> None:
        """Turn the rows of the open file into a shard of their own; nothing if there are none."""
        if not self._open_rows:
            return
        open_path = self.folder / OPEN_FILE
        path = self.folder / f"responses-{self._next_shard:05d}.{self._format}"
        if self._format == "jsonl":
            open_path.replace(path)
        else:
            with replacing(path) as temporary:
                _write_parquet(temporary, self._open_rows)
            open_path.unlink()
        self._next_shard += 1
        self._open_rows = []


def shard_paths(folder: Path) -> list[Path]:
    """The sealed shards of a folder, in the order they were written."""
    paths = [*folder.glob("responses-*.jsonl"), *folder.glob("responses-*.parquet")]
    return sorted(paths, key=lambda path: path.stem)


def read_responses(folder: Path) -> Iterator[ResponseRow]:
    """Every response of a folder once, whether or not the run that writes it has ended.

    Raises UserError when the folder holds none, or a shard is damaged.
    """
    seen: set[str] = set()
    for path in shard_paths(folder):
        for row in read_shard(path):
            seen.add(row.request_id)
            yield row
    open_path = folder / OPEN_FILE
    for row in _whole_rows(open_path)[0] if open_path.exists() else []:
        if row.request_id not in seen:
            seen.add(row.request_id)
            yield row
    if not seen:
        raise UserError(
            "responses",
            str(folder),
            "holds no responses",
            "Give a folder that `sparksmith generate` has written.",
        )


def read_shard(path: Path) -> Iterator[ResponseRow]:
    """The rows of one sealed shard; UserError with the place when it is damaged."""
    if path.suffix == ".jsonl":
        rows, whole_bytes = _whole_rows(path)
        if whole_bytes < path.stat().st_size:
            raise _damaged(path, "ends within a line")
        yield from rows
        return
    try:
        for record in pq.read_table(path, schema=SCHEMA).to_pylist():
            yield ResponseRow(**{**record, "reasoning": record["reasoning"] or ""})
    except (pa.ArrowException, OSError) as error:
        raise _damaged(path, f"is not a Parquet file of responses ({error})") from error


def _whole_rows(path: Path) -> tuple[list[ResponseRow], int]:
    """The rows of complete lines, and how many bytes these take.

    Only the last line may be incomplete, since a process can only die while appending. A crash of
    the machine may also leave it complete in length but not in content.
    """
    data = path.read_bytes()
    lines = data.splitlines(keepends=True)
    rows: list[ResponseRow] = []
    whole = 0
    for number, line in enumerate(lines, 1):
        row = _parse(line)
        if row is None or not line.endswith(b"\n"):
            if number < len(lines):
                raise _damaged(path, f"has a broken line {number}")
            break
        rows.append(row)
        whole += len(line)
    return rows, whole


def _parse(line: bytes) -> ResponseRow | None:
    try:
        record: Any = json.loads(line)
    except ValueError:
        return None
    if not isinstance(record, dict) or record.keys() | _OPTIONAL != _FIELDS:
        return None
    return ResponseRow(**record)


def _line(row: ResponseRow) -> bytes:
    # ASCII only: a Unicode line separator within a text must not end a line.
    return (json.dumps(asdict(row)) + "\n").encode("ascii")


def _write_parquet(path: Path, rows: Sequence[ResponseRow]) -> None:
    table = pa.Table.from_pylist([asdict(row) for row in rows], schema=SCHEMA)
    pq.write_table(table, path, compression="zstd")


def _damaged(path: Path, problem: str) -> UserError:
    return UserError(
        "responses", str(path), problem, "Remove that file; generating again makes its responses."
    )
