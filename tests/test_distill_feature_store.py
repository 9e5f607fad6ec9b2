"""The feature store: what is read is what was written, and every kind of damage is named."""

import json
import math
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_samples import SAMPLING, TAPS, cut, rollouts, tiny_target
from safetensors.torch import load_file, save_file
from tiny_models import HIDDEN, VOCABULARY

from sparksmith.distill.feature_coding import STORE_DTYPES, Coding, StoreDtype
from sparksmith.distill.feature_manifest import Contents
from sparksmith.distill.feature_store import FeatureStore, FeatureWriter, StoredFeatures
from sparksmith.distill.features import OnlineFeatures
from sparksmith.distill.generation import Response, SampleFeatures
from sparksmith.distill.samples import TrainingSample
from sparksmith.distill.tensor_file import TensorFile, TensorFileError
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import sha256_of
from sparksmith.draft.sampling import Sampling

Rows = list[tuple[Response, TrainingSample]]


def contents(dtype: StoreDtype = "float32", **changes: Any) -> Contents:
    values: dict[str, Any] = {
        "target": {"name": "tiny", "sha256": "a" * 64, "dtype": "float32"},
        "taps": TAPS,
        "stream": "residual",
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "sampling": SAMPLING,
        "responses_sampling": SAMPLING,
    }
    return Contents(dtype=dtype, **{**values, **changes})


@pytest.fixture(scope="module")
def rows() -> Rows:
    target = tiny_target()
    responses = [cut(r, 2 + i % 7) for i, r in enumerate(rollouts(target, 12))]
    online = OnlineFeatures(target, responses, SAMPLING, dtype=torch.float32)
    return list(zip(responses, online.take(range(12)), strict=True))


def write(folder: Path, rows: Rows, dtype: StoreDtype = "float32", shard: int = 9000) -> Path:
    writer = FeatureWriter(folder, contents(dtype), shard_bytes=shard)
    for response, sample in rows:
        writer.append(response, sample)
    writer.seal()
    return folder


def tensors(sample: TrainingSample) -> dict[str, torch.Tensor]:
    names = ("taps", "hidden", "log_norm", "threshold")
    return {"tokens": sample.tokens} | {name: getattr(sample.features, name) for name in names}


def same(one: TrainingSample, other: TrainingSample) -> bool:
    pairs = zip(tensors(one).values(), tensors(other).values(), strict=True)
    return one.prompt_length == other.prompt_length and all(torch.equal(a, b) for a, b in pairs)


def test_random_access_gives_what_was_written(rows: Rows, tmp_path: Path) -> None:
    store = FeatureStore.open(write(tmp_path, rows))
    assert len(store) == 12
    assert len(store.shards) > 2
    assert not store.faults
    order = [7, 0, 11, 3, 3]
    for index, sample in zip(order, store.take(order), strict=True):
        assert same(sample, rows[index][1])
        assert sample.features.sampling == SAMPLING
        assert store.length(index) == len(sample.tokens)
    for number, (response, _) in enumerate(rows):
        assert store.index_of(response.request_id) == number
    found = {r.request_id: (r.prompt_ids, r.token_ids, r.finish_reason) for r in store.responses()}
    assert found == {r.request_id: (r.prompt_ids, r.token_ids, r.finish_reason) for r, _ in rows}
    part = StoredFeatures.of(store, [rows[5][0], rows[2][0]])
    assert same(part.take([1])[0], rows[2][1])


def test_other_programs_read_a_shard(rows: Rows, tmp_path: Path) -> None:
    """safetensors' own reader finds the tensors, one sample after the other."""
    write(tmp_path, rows, shard=1 << 30)
    (path,) = tmp_path.glob("*.safetensors")
    found = load_file(path)
    every = torch.cat([sample.features.taps for _, sample in rows])
    assert torch.equal(found["taps"], every)
    assert found["tokens"].tolist() == [t for _, sample in rows for t in sample.tokens.tolist()]


def test_bytes_are_those_that_were_stated(rows: Rows, tmp_path: Path) -> None:
    for dtype in STORE_DTYPES:
        write(tmp_path / dtype, rows, dtype, shard=1 << 30)
        (path,) = (tmp_path / dtype).glob("*.safetensors")
        header = 8 + struct.unpack("<Q", path.read_bytes()[:8])[0]
        coding = contents(dtype).coding
        positions = sum(len(sample.tokens) for _, sample in rows)
        answers = sum(len(response.token_ids) for response, _ in rows)
        stated = positions * coding.bytes_per_position + answers * coding.bytes_per_response_token
        # The target does not run on the last token of a response, whose taps are not there.
        taps = (coding.bytes_per_position - 4) * len(rows)
        assert path.stat().st_size - header == stated - taps


def test_sizes_of_k3() -> None:
    """Five taps of 7168 numbers: 70 KiB a token in bfloat16, and 8.25 bits a number in int8."""
    sizes = {
        dtype: Coding(dtype=dtype, num_taps=5, hidden_size=7168).bytes_per_position
        for dtype in STORE_DTYPES
    }
    assert sizes == {"bfloat16": 71684, "float32": 143364, "int8": 4 + 35840 + 5 * 112 * 2}


def test_bfloat16_is_what_online_features_are(rows: Rows, tmp_path: Path) -> None:
    target = tiny_target()
    online = OnlineFeatures(target, [response for response, _ in rows], SAMPLING)
    store = FeatureStore.open(write(tmp_path, rows, "bfloat16"))
    for index in range(len(rows)):
        assert same(store.take([index])[0], online.take([index])[0])


def test_eight_bits_keep_small_channels_beside_an_outlier() -> None:
    """A channel a thousand times the others' size costs its 63 neighbours, and nobody else."""
    generator = torch.Generator().manual_seed(0)
    taps = torch.randn(50, 2 * 256, generator=generator)
    taps[:, 3] *= 1000.0
    coding = Coding(dtype="int8", num_taps=2, hidden_size=256)
    features = SampleFeatures(
        taps=taps, hidden=taps[:, :256], log_norm=taps[:, 0], threshold=taps[:, 1]
    )
    error = (coding.decode(coding.encode(features), None).taps - taps).abs()
    largest = taps.abs().view(50, 8, 64).amax(-1)
    # Half a step of 1/127 of the group's largest, and what rounding the scale adds.
    assert bool((error.view(50, 8, 64).amax(-1) <= largest * (0.5 / 127 + 2**-8)).all())
    assert float(error[:, 64:].max()) < 0.03


def test_zeros_stay_zeros() -> None:
    coding = Coding(dtype="int8", num_taps=1, hidden_size=64)
    zeros = torch.zeros(3, 64)
    features = SampleFeatures(taps=zeros, hidden=zeros, log_norm=zeros[:, 0], threshold=zeros[:, 0])
    assert not coding.decode(coding.encode(features), None).taps.any()


def test_a_killed_writer_loses_the_open_shard_and_goes_on_alike(rows: Rows, tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", rows)
    killed = tmp_path / "killed"
    for end in (0, 3, 4, 8, 11, 12):
        writer = FeatureWriter(killed, contents(), shard_bytes=9000)
        (killed / ".features-00009.safetensors.1.tmp").write_bytes(b"half a shard")
        kept = len(writer.store)
        for response, sample in rows[kept:end]:
            writer.append(response, sample)
        # And dies here, with the open shard unwritten.
    write_rest = FeatureWriter(killed, contents(), shard_bytes=9000)
    for response, sample in rows[len(write_rest.store) :]:
        write_rest.append(response, sample)
    write_rest.seal()
    names = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in killed.iterdir()) == names
    for name in names:
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


def test_a_shard_that_the_manifest_does_not_know_yet_is_written_again(
    rows: Rows, tmp_path: Path
) -> None:
    whole = write(tmp_path, rows)
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    manifest = json.loads(before["features.json"])
    manifest["shards"].pop()
    (whole / "features.json").write_text(json.dumps(manifest))
    writer = FeatureWriter(whole, contents(), shard_bytes=9000)
    for response, sample in rows[len(writer.store) :]:
        writer.append(response, sample)
    writer.seal()
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 16
    path.write_bytes(data)


def test_a_flipped_byte_spoils_one_sample(rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows, shard=1 << 30)
    path = tmp_path / "features-00000.safetensors"
    with TensorFile(path) as file:
        flip(path, file.places["taps"].start + 5)
    store = FeatureStore.open(tmp_path)
    first = rows[0][0].request_id
    with pytest.raises(UserError, match=f"features-00000.*other bytes for {first}"):
        store.take([0])
    assert same(store.take([5])[0], rows[5][1])
    (fault,) = store.verify()
    assert fault.requests == (first,)
    assert len(store) == 11
    assert first not in store
    assert same(store.take([store.index_of(rows[5][0].request_id)])[0], rows[5][1])


def test_every_flipped_byte_is_found(rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows[:2], shard=1 << 30)
    path = tmp_path / "features-00000.safetensors"
    intact = path.read_bytes()
    generator = torch.Generator().manual_seed(1)
    places = torch.randint(0, len(intact), (150,), generator=generator).tolist()
    for at in [*range(40), *places]:
        flip(path, at)
        store = FeatureStore.open(tmp_path)
        assert store.verify(), at
        for index in range(len(store)):
            number = next(
                n for n, row in enumerate(rows) if row[0].request_id == store.request_ids[index]
            )
            assert same(store.take([index])[0], rows[number][1]), at
        path.write_bytes(intact)


def test_a_missing_or_short_shard_costs_its_samples_alone(rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows)
    first, second, *_ = sorted(tmp_path.glob("*.safetensors"))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    store = FeatureStore.open(tmp_path)
    assert [str(fault) for fault in store.faults] == [
        f"{first.name} is missing; none of its samples is usable",
        f"{second.name} is cut short: it has {second.stat().st_size} of "
        f"{store.shards[1].bytes} bytes; none of its samples is usable",
    ]
    lost = store.shards[0].samples + store.shards[1].samples
    assert len(store) == 12 - lost
    assert same(store.take([0])[0], rows[lost][1])
    assert {fault.file for fault in store.verify()} == {first.name, second.name}


def test_lost_samples_are_captured_again(rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows)
    first = min(tmp_path.glob("*.safetensors"))
    first.unlink()
    writer = FeatureWriter(tmp_path, contents(), shard_bytes=9000)
    assert [fault.file for fault in writer.forgotten] == [first.name]
    for response, sample in rows:
        if response.request_id not in writer.store:
            writer.append(response, sample)
    writer.seal()
    store = FeatureStore.open(tmp_path)
    assert not store.verify()
    for response, sample in rows:
        assert same(store.take([store.index_of(response.request_id)])[0], sample)


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("target", {"target": {"name": "tiny", "sha256": "b" * 64, "dtype": "float32"}}),
        ("target", {"target": {"name": "tiny", "sha256": "a" * 64, "dtype": "bfloat16"}}),
        ("taps", {"taps": (0, 1)}),
        ("stream", {"stream": "prefix_sum"}),
        ("sampling", {"sampling": Sampling(temperature=0.5)}),
        ("dtype", {"dtype": "int8"}),
    ],
)
def test_features_of_something_else_are_not_mixed_in(
    field: str, changes: dict[str, Any], rows: Rows, tmp_path: Path
) -> None:
    write(tmp_path / "one", rows)
    other = contents(**{"dtype": "float32", **changes})
    with pytest.raises(UserError) as caught:
        FeatureWriter(tmp_path / "one", other)
    assert caught.value.field == field
    # Nor by a shard of the other store that was copied over.
    writer = FeatureWriter(tmp_path / "two", other, shard_bytes=9000)
    if "taps" not in changes:
        for response, sample in rows:
            writer.append(response, sample)
        writer.seal()
        stray = tmp_path / "two" / "features-00000.safetensors"
        ours = tmp_path / "one" / stray.name
        manifest = json.loads((tmp_path / "one" / "features.json").read_text())
        manifest["shards"][0]["sha256"] = sha256_of(stray)
        manifest["shards"][0]["bytes"] = stray.stat().st_size
        ours.write_bytes(stray.read_bytes())
        (tmp_path / "one" / "features.json").write_text(json.dumps(manifest))
        (fault,) = FeatureStore.open(tmp_path / "one").faults
        assert fault.file == stray.name


def test_a_renamed_target_is_the_same(rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows)
    moved = {"name": "elsewhere", "path": "/x", "sha256": "a" * 64, "dtype": "float32"}
    assert len(FeatureWriter(tmp_path, contents(target=moved)).store) == 12


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda m: m.update(format_version=2), "format 2"),
        (lambda m: m.pop("taps"), "not well formed"),
        (lambda m: m.update(dtype="float8"), "not well formed"),
        (lambda m: m.update(hidden_size=-1), "not well formed"),
        (lambda m: m["shards"][0].update(file="../elsewhere.safetensors"), "not well formed"),
        (lambda m: m["shards"][0].update(samples="3"), "not well formed"),
        (lambda m: m.update(shards=[[]]), "not well formed"),
    ],
)
def test_a_manifest_that_is_none(change: Any, words: str, rows: Rows, tmp_path: Path) -> None:
    write(tmp_path, rows[:2])
    path = tmp_path / "features.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=words):
        FeatureStore.open(tmp_path)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds no features\.json"):
        FeatureStore.open(tmp_path)


def hostile(path: Path, header: Any, data: bytes = b"\0" * 16, length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    return path


def entry(shape: list[Any], begin: int, end: int, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ({"a": entry([1 << 62], 0, 16)}, "not the size"),
        ({"a": entry([1 << 32, 1 << 32], 0, 16)}, "not the size"),
        ({"a": entry([2**64 + 4], 0, 16)}, "not the size"),
        ({"a": entry([0, 1 << 62], 0, 0)}, "a shape"),
        ({"a": entry([-4, -1], 0, 16)}, "a shape"),
        ({"a": entry([True, 4], 0, 16)}, "a shape"),
        ({"a": entry([4.0], 0, 16)}, "a shape"),
        ({"a": entry([1] * 40 + [4], 0, 16)}, "a shape"),
        ({"a": entry([4], 16, 0)}, "a place"),
        ({"a": entry([4], 0, 16, "PICKLE")}, "a type"),
        ({"a": entry([4], 0, 16, ["F32"])}, "a type"),
        ({"a": entry([4], 0, 16), "b": entry([2], 8, 16)}, "another tensor lies"),
        ({"a": entry([2], 0, 8), "b": entry([1], 12, 16)}, "a hole"),
        ({"a": entry([4 << 40], 0, 16 << 40)}, "cut short"),
        ({"a": entry([2], 0, 8)}, "belong to no tensor"),
        ({"a": [], "b": 3}, "a type"),
        ([], "not an object"),
        ({"__metadata__": {"x": 1}, "a": entry([4], 0, 16)}, "not texts"),
        (b"[" * 100_000, "not JSON"),
        (b"\x80\x04\x95 a pickle", "not JSON"),
        (b'{"a":1,"a":2}', "unique"),
        (b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}", "not JSON"),
    ],
)
def test_hostile_headers(header: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match=words):
        TensorFile(hostile(tmp_path / "f", header))


@pytest.mark.parametrize("length", [1 << 62, 2**64 - 1, (16 << 20) + 1, 500])
def test_hostile_header_lengths(length: int, tmp_path: Path) -> None:
    with pytest.raises(TensorFileError, match="header"):
        TensorFile(hostile(tmp_path / "f", {"a": entry([4], 0, 16)}, length=length))


def test_random_damage_to_a_header_is_refused_or_harmless(rows: Rows, tmp_path: Path) -> None:
    """Whatever bytes a header is made of, nothing but the file's own errors comes out."""
    save_file({"a": torch.arange(4.0), "b": torch.ones(2, 3)}, tmp_path / "f")
    intact = (tmp_path / "f").read_bytes()
    size = 8 + struct.unpack("<Q", intact[:8])[0]
    generator = torch.Generator().manual_seed(2)
    refused = 0
    for _ in range(1500):
        data = bytearray(intact)
        for at in torch.randint(0, size, (3,), generator=generator).tolist():
            data[at] = int(torch.randint(0, 256, (1,), generator=generator))
        (tmp_path / "g").write_bytes(data)
        try:
            with TensorFile(tmp_path / "g") as file:
                for name, place in file.places.items():
                    whole = file.whole(name)
                    assert whole.numel() == math.prod(place.shape)
        except TensorFileError:
            refused += 1
    assert refused > 1000


def test_links_and_pipes_are_not_opened(tmp_path: Path) -> None:
    import os

    save_file({"a": torch.ones(2)}, tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OSError, match="link"):
        TensorFile(tmp_path / "link")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TensorFileError, match="regular"):
        TensorFile(tmp_path / "pipe")


def test_features_of_another_width_are_not_appended(rows: Rows, tmp_path: Path) -> None:
    writer = FeatureWriter(tmp_path, contents(hidden_size=HIDDEN * 2))
    with pytest.raises(ValueError, match="taps is"):
        writer.append(*rows[0])
    again = FeatureWriter(tmp_path / "b", contents())
    again.append(*rows[0])
    with pytest.raises(UserError, match="there already"):
        again.append(*rows[0])
