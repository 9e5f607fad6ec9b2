"""The environment that make works in: which torch it takes, and when it is current."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "bootstrap.py"


@pytest.fixture
def bootstrap() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bootstrap", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def resolving(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]
) -> None:
    monkeypatch.setattr(
        bootstrap, "resolved_torch", lambda _pip, requirement: versions.get(requirement)
    )


def test_the_cpu_build_is_taken_where_the_index_has_it(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolving(bootstrap, monkeypatch, {"torch==2.13.0": "2.13.0+cpu", "torch>=2.9": "2.14.1"})
    assert bootstrap.choose_torch([]) == "torch==2.13.0"
    assert capsys.readouterr().err == ""


def test_a_large_download_is_announced_with_the_way_out(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    resolving(bootstrap, monkeypatch, {"torch==2.13.0": "2.13.0", "torch>=2.9": "2.14.1"})
    monkeypatch.setattr("sys.platform", "linux")
    assert bootstrap.choose_torch([]) == "torch>=2.9"
    message = capsys.readouterr().err
    for words in (
        "about to download torch 2.14.1",
        "CUDA",
        "several GB",
        "TORCH=",
        "PIP_INDEX_URL",
    ):
        assert words in message


def test_an_environment_is_current_until_what_it_was_made_of_changes(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("TORCH", raising=False)
    assert not bootstrap.is_current(tmp_path, "run")
    (tmp_path / ".sparksmith-test").write_text(bootstrap.state_hash(), encoding="utf-8")
    assert bootstrap.is_current(tmp_path, "run")  # the test group contains what a run needs
    assert bootstrap.is_current(tmp_path, "test")
    assert not bootstrap.is_current(tmp_path, "dev")
    monkeypatch.setenv("TORCH", "torch==2.9.1")
    assert not bootstrap.is_current(tmp_path, "run")


def test_a_torch_that_is_too_old_is_not_used(
    bootstrap: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    for version, used in (("2.8.1", None), ("2.9.0+cu128", "2.9.0+cu128"), ("3.0", "3.0")):
        monkeypatch.setattr("importlib.metadata.version", lambda _name, found=version: found)
        assert bootstrap.torch_of_this_python() == used
