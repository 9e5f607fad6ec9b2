"""run.json: written at every change, resumed only by the same run, honest about how it ended."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparksmith.draft.errors import UserError
from sparksmith.verify import run_record
from sparksmith.verify.run_record import RunRecord, check_folder, fingerprint, read_record

# As sha256sum has it for 5000 times x.
SHA_OF_5000_X = "c59d3c0480cc2d71"
SETTINGS = {"seed": 3, "temperature": 0.7}


def begin(folder: Path, **changes: Any) -> RunRecord:
    values: dict[str, Any] = {"settings": SETTINGS, "inputs": {"data": {"sha256": "a" * 64}}}
    return RunRecord.open(folder, "generate", **(values | changes))


def test_a_run_records_what_it_was(tmp_path: Path) -> None:
    with begin(tmp_path / "run", conditions={"threads": 2}) as record:
        running = read_record(tmp_path / "run")
        assert running["outcome"] == "running"
        assert not record.resumed
        record.update(tokens=5)
    content = read_record(tmp_path / "run")
    assert content["command"] == "generate"
    assert content["settings"] == SETTINGS
    assert content["outcome"] == "complete"
    assert content["results"] == {"tokens": 5}
    (attempt,) = content["attempts"]
    assert attempt["conditions"] == {"threads": 2}
    assert attempt["versions"].keys() >= {"python", "sparksmith", "torch", "transformers"}
    assert attempt["machine"]["cores"] >= 1
    assert attempt["started"] <= attempt["ended"]


@pytest.mark.parametrize(
    ("error", "outcome"), [(KeyboardInterrupt, "interrupted"), (ValueError, "failed")]
)
def test_what_stops_a_run_is_recorded(
    tmp_path: Path, error: type[BaseException], outcome: str
) -> None:
    with pytest.raises(error), begin(tmp_path):
        raise error
    assert read_record(tmp_path)["outcome"] == outcome


def test_the_same_run_resumes_and_keeps_its_results(tmp_path: Path) -> None:
    begin(tmp_path).update(tokens=5)
    begin(tmp_path).finish("interrupted")
    moved = {"data": {"sha256": "a" * 64, "path": "elsewhere"}}
    with begin(tmp_path, inputs=moved, conditions={"threads": 9}) as record:
        assert record.resumed
    content = read_record(tmp_path)
    assert [attempt["outcome"] for attempt in content["attempts"]] == [
        "running",  # it was killed
        "interrupted",
        "complete",
    ]
    assert content["results"] == {"tokens": 5}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"settings": {**SETTINGS, "seed": 4}}, "seed was 3 and is now 4"),
        ({"settings": {"seed": 3}}, "temperature was 0.7 and is now None"),
        ({"inputs": {"data": {"sha256": "b" * 64}}}, "data was 'aaaa"),
        (
            {"inputs": {"data": {"sha256": "a" * 64, "dtype": "float32"}}},
            "data was 'a{16}' and is now 'a{16} in float32'",
        ),
    ],
)
def test_another_run_is_refused_and_named(
    tmp_path: Path, changes: dict[str, Any], says: str
) -> None:
    begin(tmp_path).finish("complete")
    before = (tmp_path / "run.json").read_bytes()
    with pytest.raises(UserError, match=says):
        begin(tmp_path, **changes)
    with pytest.raises(UserError, match="holds another run"):
        RunRecord.open(tmp_path, "train", settings=SETTINGS, inputs={})
    assert (tmp_path / "run.json").read_bytes() == before


def test_a_folder_with_other_files_or_a_broken_record_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(UserError, match="not empty"):
        begin(tmp_path)
    for broken in ("", "[]", json.dumps({"version": 99})):
        (tmp_path / "run.json").write_text(broken)
        with pytest.raises(UserError, match="not a run record"):
            begin(tmp_path)


def test_a_folder_is_checked_without_a_run(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "absent", "train") is None
    assert check_folder(tmp_path, "train") is None
    begin(tmp_path / "run").finish("complete")
    found = check_folder(tmp_path / "run", "generate")
    assert found is not None
    assert found["outcome"] == "complete"
    with pytest.raises(UserError, match="another run"):
        check_folder(tmp_path / "run", "train")
    with pytest.raises(UserError, match="is a file"):
        check_folder(tmp_path / "run" / "run.json", "train")


def test_fingerprints_follow_content_and_names_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two"):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "sub" / "weights").write_bytes(b"x" * 5000)
    one, two = fingerprint(tmp_path / "one"), fingerprint(tmp_path / "two")
    assert one["sha256"] == two["sha256"]
    assert one["bytes"] == 5000
    (tmp_path / "two" / "sub" / "weights").write_bytes(b"y" + b"x" * 4999)
    assert fingerprint(tmp_path / "two")["sha256"] != one["sha256"]
    (tmp_path / "one" / "sub" / "weights").rename(tmp_path / "one" / "sub" / "other")
    assert fingerprint(tmp_path / "one")["sha256"] != one["sha256"]
    file = tmp_path / "one" / "sub" / "other"
    assert fingerprint(file)["sha256"].startswith(SHA_OF_5000_X)

    monkeypatch.setattr(run_record, "WHOLE_BYTES", 100)
    monkeypatch.setattr(run_record, "_END_BYTES", 10)
    before = fingerprint(tmp_path / "one")
    assert before["of"] == "ends"
    file.write_bytes(b"x" * 4999 + b"y")
    assert fingerprint(tmp_path / "one")["sha256"] != before["sha256"]
