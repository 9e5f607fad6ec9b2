"""Weights that mean harm: refused in an instant, with nothing run and nothing large allocated."""

import io
import json
import pickle
import random
import struct
import time
import tracemalloc
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import tiny_draft

from sparksmith.cli.main import main
from sparksmith.draft.checkpoint import export_draft, load_draft
from sparksmith.draft.errors import UserError

RAN = []


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return RAN.append, ("executed",)


def header(content: Any, data: bytes = b"") -> bytes:
    text = json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + data


def torch_file() -> bytes:
    buffer = io.BytesIO()
    torch.save({"fc.weight": torch.ones(2), "x": Payload()}, buffer)
    return buffer.getvalue()


def archive() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("model.safetensors", b"0" * 100)
    return buffer.getvalue()


def tensor(shape: list[int], offsets: list[int], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


HOSTILE: dict[str, bytes] = {
    "empty": b"",
    "seven bytes": b"1234567",
    "a pickle": pickle.dumps(Payload()),
    "torch.save": torch_file(),
    "a zip": archive(),
    "a header of exabytes": struct.pack("<Q", 1 << 62) + b"{}",
    "a header of gigabytes": struct.pack("<Q", 1 << 32) + b"{}",
    "a header that is not JSON": struct.pack("<Q", 4) + b"nope",
    "a header that is a list": header([1, 2]),
    "deep nesting": header(json.loads("[" * 500 + "]" * 500)),
    "an unknown type": header({"fc.weight": tensor([1], [0, 4], "Q9")}, b"0000"),
    "beyond the file": header({"fc.weight": tensor([1 << 40], [0, 1 << 42])}, b"0000"),
    "overlapping": header({"a": tensor([1], [0, 4]), "b": tensor([1], [2, 6])}, b"000000"),
    "a hole": header({"a": tensor([1], [4, 8])}, b"00000000"),
    "a shape that its bytes do not fill": header({"a": tensor([1 << 50], [0, 4])}, b"0000"),
    "a shape that overflows": header({"a": tensor([1 << 62, 8], [0, 0])}),
    "a negative shape": header({"a": tensor([-1], [0, 4])}, b"0000"),
    "nothing times everything": header({"fc.weight": tensor([0, 1 << 60], [0, 0])}),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("draft")
    export_draft(tiny_draft(), folder / "draft")
    # What is imported for the first time is no one's attack.
    assert main(["check", str(folder / "draft"), "--no-probe"]) == 0
    return folder / "draft"


def with_weights(sound: Path, folder: Path, data: bytes) -> Path:
    folder.mkdir()
    (folder / "config.json").write_bytes((sound / "config.json").read_bytes())
    (folder / "model.safetensors").write_bytes(data)
    return folder


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_weights_are_refused(kind: str, sound: Path, tmp_path: Path) -> None:
    folder = with_weights(sound, tmp_path / "draft", HOSTILE[kind])
    start = time.monotonic()
    tracemalloc.start()
    try:
        with pytest.raises(UserError):
            load_draft(folder)
        assert main(["check", str(folder), "--no-probe"]) in (1, 2)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 50e6
    assert time.monotonic() - start < 5
    assert RAN == []


def test_flipped_bits_of_a_header_never_end_in_a_traceback(sound: Path, tmp_path: Path) -> None:
    data = (sound / "model.safetensors").read_bytes()
    rng = random.Random(0)
    length = struct.unpack("<Q", data[:8])[0]
    refused = 0
    for number in range(150):
        damaged = bytearray(data)
        for _ in range(rng.choice([1, 1, 3])):
            damaged[rng.randrange(8 + length)] ^= 1 << rng.randrange(8)
        folder = with_weights(sound, tmp_path / str(number), bytes(damaged))
        try:
            load_draft(folder)
        except UserError:
            refused += 1
    # A flip in a padding blank harms nothing; nearly all others do.
    assert refused > 100


def test_a_path_in_an_index_does_not_leave_the_folder(sound: Path, tmp_path: Path) -> None:
    folder = with_weights(sound, tmp_path / "draft", b"")
    (folder / "model.safetensors").unlink()
    outside = tmp_path / "outside.safetensors"
    outside.write_bytes((sound / "model.safetensors").read_bytes())
    names = {"weight_map": {"fc.weight": "../outside.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))
    with pytest.raises(UserError):
        load_draft(folder)
