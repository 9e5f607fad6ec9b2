"""`sparksmith check`: findings for people and for programs, exit codes, stories."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import tiny_draft
from tiny_models import HIDDEN
from tiny_targets import VOCABULARY, save_tiny_target

from sparksmith.cli.main import main
from sparksmith.draft.checkpoint import save_draft


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    made = tiny_draft(
        bind=False,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=VOCABULARY,
        target_layer_ids=(0, 1),
    )
    save_draft(made, tmp_path / "draft", dtype=torch.bfloat16)
    return tmp_path / "draft"


def words(text: str) -> str:
    return re.sub(r"\s+", " ", text)


def test_a_sound_draft(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(draft)]) == 0
    assert "no findings" in capsys.readouterr().out


def test_an_error_is_told_and_is_the_exit_code(
    draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = draft / "config.json"
    path.write_text(path.read_text().replace('"hidden_act": "silu"', '"hidden_act": "situ"'))
    assert main(["check", str(draft)]) == 1
    printed = words(capsys.readouterr().out)
    assert "error activation: situ" in printed
    assert "-> Train a draft with silu." in printed
    assert "--explain activation" in printed


def test_json_is_complete(draft: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    serve = 'vllm serve T --speculative-config \'{"method": "eagle3"}\''
    code = main(["check", str(draft), "--target", str(target), "--serve-args", serve, "--json"])
    assert code == 1
    report = json.loads(capsys.readouterr().out)
    assert report["errors"] == sum(f["level"] == "error" for f in report["findings"]) > 0
    (finding,) = [f for f in report["findings"] if f["check"] == "spec-method"]
    assert set(finding) == {"check", "level", "value", "consequence", "remedy"}
    assert report["probes"]["positions"] > 0


def test_a_random_draft_is_found_out_beside_its_target(
    draft: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["check", str(draft), "--target", str(target)])
    printed = words(capsys.readouterr().out)
    assert "probe-chance" in printed
    assert "beside the target, 6" in printed
    assert main(["check", str(draft), "--target", str(target), "--no-probe"]) == 0
    assert "probe-chance" not in capsys.readouterr().out


def test_a_draft_that_cannot_be_loaded_is_not_run(
    draft: Path, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = draft / "config.json"
    path.write_text(
        path.read_text().replace('"target_hidden_size": 32', '"target_hidden_size": 33')
    )
    assert main(["check", str(draft), "--target", str(target)]) == 1
    assert "could not be run" in words(capsys.readouterr().out)


def test_stories(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "--explain", "all"]) == 0
    listed = capsys.readouterr().out.splitlines()
    for name in ("tap-offset", "probe-taps", "draft-tokens"):
        assert any(line.startswith(name) for line in listed)
        assert main(["check", "--explain", name]) == 0
        assert len(capsys.readouterr().out) > 80
    assert main(["check", "--explain", "nothing"]) == 2
    assert "--explain all" in words(capsys.readouterr().err)


def test_nothing_to_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check"]) == 2
    assert main(["check", str(tmp_path)]) == 2
    assert "config.json" in words(capsys.readouterr().err)
    assert main(["check", str(tmp_path / "none")]) == 2
    assert "does not exist" in words(capsys.readouterr().err)


def test_a_file_for_a_draft(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["check"], ["convert", "--to", "vllm"], ["vllm", "--target", "org/t"]):
        out = [str(draft.parent / "out")] if command[0] == "convert" else []
        assert main([*command, str(draft / "model.safetensors"), *out]) == 2
        assert f"is a file. Give the folder that holds it: {draft}" in capsys.readouterr().err


def test_messages_say_what_is_missing(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", str(draft), "--parity"]) == 2
    assert "error: --target is needed for --parity." in words(capsys.readouterr().err)


def test_one_finding_is_not_several(draft: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = draft / "config.json"
    path.write_text(path.read_text().replace('"hidden_act": "silu"', '"hidden_act": "situ"'))
    main(["check", str(draft)])
    assert "1 error\n" in capsys.readouterr().out


def test_json_says_what_ran(draft: Path, target: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def report(*options: str) -> dict[str, Any]:
        main(["check", str(draft), "--target", str(target), "--json", *options])
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    plain = report("--no-probe")
    assert (plain["parity"], plain["probes"], plain["probes_skipped"]) == (None, None, False)
    there = draft.parent / "there"
    convert = ["convert", str(draft), str(there), "--to", "vllm", "--target", str(target)]
    assert main([*convert, "--parity"]) == 0
    shutil.move(there / "parity", draft / "parity")
    capsys.readouterr()
    replayed = report("--parity", "--no-probe")
    assert replayed["parity"] == {"here": True, "endpoint": None, "differences": 0}
    path = draft / "config.json"
    path.write_text(
        path.read_text().replace('"target_hidden_size": 32', '"target_hidden_size": 33')
    )
    broken = report()
    assert (broken["probes"], broken["probes_skipped"]) == (None, True)
