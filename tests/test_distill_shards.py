"""Shards keep every response that was flushed, exactly once, whatever moment a writer dies at."""

import errno
import json
import os
from pathlib import Path
from typing import Literal

import pyarrow.parquet as pq
import pytest

from sparksmith.distill.shards import OPEN_FILE, ResponseRow, ShardWriter, read_responses
from sparksmith.draft.errors import UserError

Format = Literal["jsonl", "parquet"]
BOTH = pytest.mark.parametrize("shard_format", ["jsonl", "parquet"])


def row(number: int) -> ResponseRow:
    return ResponseRow(
        request_id=f"r{number}",
        category=None if number % 2 else "code",
        messages=[{"role": "user", "content": "caf\u00e9\u2028\n\U0001f600"}],
        prompt_ids=[1, 2, number],
        token_ids=list(range(number)),
        text="line\u2028separator\x85and\r\nends",
        finish_reason="stop",
    )


@BOTH
def test_rows_come_back_as_they_were_written(tmp_path: Path, shard_format: Format) -> None:
    writer = ShardWriter(tmp_path, shard_format, rows_per_shard=3)
    rows = [row(number) for number in range(8)]
    for start in range(0, 8, 2):
        writer.append(rows[start : start + 2])
    writer.seal()
    assert list(read_responses(tmp_path)) == rows
    assert len(list(tmp_path.glob(f"responses-*.{shard_format}"))) == 2
    assert not (tmp_path / OPEN_FILE).exists()


def test_a_shard_is_readable_without_sparksmith(tmp_path: Path) -> None:
    for shard_format in ("jsonl", "parquet"):
        writer = ShardWriter(tmp_path / shard_format, shard_format)
        writer.append([row(3)])
        writer.seal()
    line = (tmp_path / "jsonl" / "responses-00000.jsonl").read_text(encoding="utf-8")
    table = pq.read_table(tmp_path / "parquet" / "responses-00000.parquet")
    assert json.loads(line) == table.to_pylist()[0]
    assert json.loads(line)["token_ids"] == [0, 1, 2]


@BOTH
@pytest.mark.parametrize("cut", [1, 20, 300])
def test_a_line_cut_short_is_dropped_and_written_again(
    tmp_path: Path, shard_format: Format, cut: int
) -> None:
    ShardWriter(tmp_path, shard_format).append([row(0), row(1), row(2)])
    path = tmp_path / OPEN_FILE
    last_line = len(path.read_bytes().splitlines(keepends=True)[-1])
    os.truncate(path, path.stat().st_size - min(cut, last_line - 1))
    assert [r.request_id for r in read_responses(tmp_path)] == ["r0", "r1"]
    writer = ShardWriter(tmp_path, shard_format)
    assert writer.written == {"r0", "r1"}
    writer.append([row(2)])
    writer.seal()
    assert list(read_responses(tmp_path)) == [row(0), row(1), row(2)]


def test_rows_sealed_before_the_open_file_went_are_not_repeated(tmp_path: Path) -> None:
    """The moment between a Parquet shard's rename and the removal of the open file."""
    writer = ShardWriter(tmp_path, "parquet")
    writer.append([row(0), row(1)])
    before = (tmp_path / OPEN_FILE).read_bytes()
    writer.seal()
    (tmp_path / OPEN_FILE).write_bytes(before)
    assert [r.request_id for r in read_responses(tmp_path)] == ["r0", "r1"]
    writer = ShardWriter(tmp_path, "parquet")
    writer.append([row(2)])
    writer.seal()
    assert [r.request_id for r in read_responses(tmp_path)] == ["r0", "r1", "r2"]


def test_a_shard_torn_by_a_dying_writer_is_never_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path, "parquet")
    writer.append([row(0)])

    def die(path: Path, _rows: object) -> None:
        path.write_bytes(b"half a shard")
        raise KeyboardInterrupt

    monkeypatch.setattr("sparksmith.distill.shards._write_parquet", die)
    with pytest.raises(KeyboardInterrupt):
        writer.seal()
    assert list(read_responses(tmp_path)) == [row(0)]


def test_a_full_disk_loses_nothing_that_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = ShardWriter(tmp_path)
    writer.append([row(0)])

    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        writer.append([row(1)])
    monkeypatch.undo()
    writer = ShardWriter(tmp_path)
    assert writer.written == {"r0"}
    writer.append([row(1)])
    assert list(read_responses(tmp_path)) == [row(0), row(1)]


def test_a_response_is_written_once(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path)
    writer.append([row(0)])
    with pytest.raises(UserError, match="r0"):
        writer.append([row(0)])
    with pytest.raises(UserError, match="r0"):
        ShardWriter(tmp_path).append([row(0)])


@pytest.mark.parametrize("damage", [b"not json\n", b'{"request_id": "x"}\n'])
def test_damage_that_no_dying_writer_leaves_is_reported(tmp_path: Path, damage: bytes) -> None:
    writer = ShardWriter(tmp_path)
    writer.append([row(0)])
    writer.seal()
    path = tmp_path / "responses-00000.jsonl"
    path.write_bytes(damage + path.read_bytes())
    with pytest.raises(UserError, match="line 1"):
        list(read_responses(tmp_path))


def test_broken_parquet_and_an_empty_folder_are_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no responses"):
        list(read_responses(tmp_path))
    (tmp_path / "responses-00000.parquet").write_bytes(b"PAR1")
    with pytest.raises(UserError, match="not a Parquet file"):
        list(read_responses(tmp_path))
