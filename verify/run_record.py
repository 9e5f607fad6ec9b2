"""run.json, beside the files of every long run: what ran, on what, with what outcome.

It also guards the folder: a run is resumed only by a command with the same settings and inputs.
"""

import hashlib
import json
import os
import platform
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import torch

from sparksmith.draft.errors import UserError
from sparksmith.draft.files import sha256_of, write_json

RECORD_FILE = "run.json"
RECORD_VERSION = 1
PACKAGES = ("sparksmith", "torch", "transformers", "datasets", "accelerate", "safetensors")
Outcome = Literal["running", "complete", "interrupted", "failed"]

# A folder up to this size is hashed whole; of a larger one the ends of its files are.
WHOLE_BYTES = 8 << 30
_END_BYTES = 1 << 20


def fingerprint(path: Path) -> dict[str, Any]:
    """A file's or folder's {"path", "bytes", "sha256", "of"}.

    A folder's hash covers the names and hashes of its files. Beyond 8 GiB `of` is "ends": names,
    sizes, and the first and last MiB of each file, since reading terabytes would take an hour.
    """
    if path.is_file():
        return {
            "path": str(path),
            "bytes": path.stat().st_size,
            "sha256": sha256_of(path),
            "of": "content",
        }
    files = sorted(file for file in path.rglob("*") if file.is_file())
    size = sum(file.stat().st_size for file in files)
    digest = hashlib.sha256()
    for file in files:
        part = sha256_of(file) if size <= WHOLE_BYTES else _ends_of(file)
        digest.update(f"{file.relative_to(path).as_posix()}\0{part}\n".encode())
    return {
        "path": str(path),
        "bytes": size,
        "sha256": digest.hexdigest(),
        "of": "content" if size <= WHOLE_BYTES else "ends",
    }


def _ends_of(path: Path) -> str:
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = hashlib.sha256(f"{size}".encode() + file.read(_END_BYTES))
        file.seek(max(size - _END_BYTES, 0))
        digest.update(file.read())
    return digest.hexdigest()


def machine() -> dict[str, Any]:
    """The processor, cores, threads and accelerators that figures depend on; no names of hosts."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "cpu": _cpu_model(),
        "cores": _cores(),
        "threads": torch.get_num_threads(),
        "accelerators": [
            torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())
        ],
    }


def _cores() -> int | None:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count()


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def versions() -> dict[str, str]:
    """Python's and the installed packages' versions."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


class RunRecord:
    """One run's run.json, rewritten whole at every change; `open` begins or resumes a run."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self.path = path
        self.content = content

    @classmethod
    def open(
        cls,
        folder: Path,
        command: str,
        *,
        settings: Mapping[str, Any],
        inputs: Mapping[str, Mapping[str, Any]],
        conditions: Mapping[str, Any] | None = None,
    ) -> "RunRecord":
        """Begin a run in `folder` (made if absent), or another attempt of the one that is there.

        `settings` (seeds among them) and `inputs` (name to `fingerprint` or the like) decide the
        result, so a resumed run must have the same; `conditions` (threads, batch size) may differ
        and are recorded for each attempt. All must be JSON values.

        Raises UserError when the folder holds another run, naming what differs, and as
        `check_folder` does.
        """
        previous = check_folder(folder, command)
        content: dict[str, Any] = {
            "version": RECORD_VERSION,
            "command": command,
            "settings": dict(settings),
            "inputs": {name: dict(value) for name, value in inputs.items()},
            "outcome": "running",
            "results": {},
            "attempts": [],
        }
        if previous is not None:
            _check_same(folder, previous, content)
            content |= {"attempts": previous["attempts"], "results": previous["results"]}
        folder.mkdir(parents=True, exist_ok=True)
        content["attempts"].append(
            {
                "arguments": sys.argv[1:],
                "conditions": dict(conditions or {}),
                "versions": versions(),
                "machine": machine(),
                "started": _now(),
                "ended": None,
                "outcome": "running",
            }
        )
        record = cls(folder / RECORD_FILE, content)
        record.write()
        return record

    @property
    def resumed(self) -> bool:
        return len(self.content["attempts"]) > 1

    def write(self) -> None:
        write_json(self.path, self.content)

    def update(self, **results: Any) -> None:
        """Add to the results (counts, figures, hashes of what was written) and write."""
        self.content["results"].update(results)
        self.write()

    def finish(self, outcome: Outcome, **results: Any) -> None:
        """Record how the attempt ended, and when."""
        attempt = self.content["attempts"][-1]
        attempt["ended"] = _now()
        attempt["outcome"] = self.content["outcome"] = outcome
        self.update(**results)

    def __enter__(self) -> "RunRecord":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Record what ended a run that has not called `finish`."""
        if self.content["attempts"][-1]["ended"] is not None:
            return
        try:
            if kind is None:
                self.finish("complete")
            else:
                self.finish("interrupted" if kind is KeyboardInterrupt else "failed")
        except OSError:
            # The disk that ended the run may refuse this too; the first error is the one to show.
            if kind is None:
                raise


def check_folder(folder: Path, command: str) -> dict[str, Any] | None:
    """The record of the run of `command` that `folder` holds; None when it is absent or empty.

    It costs nothing, so it comes before a model is loaded. Raises UserError when the folder is a
    file, or holds another command's run or other files.
    """
    if folder.exists() and not folder.is_dir():
        raise UserError("--out", str(folder), "is a file", "Give a folder.")
    if (folder / RECORD_FILE).is_file():
        previous = read_record(folder)
        if previous["command"] != command:
            raise UserError(
                "--out",
                str(folder),
                f"already holds another run (of `{previous['command']}`)",
                "Give another folder.",
            )
        return previous
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError(
            "--out",
            str(folder),
            "is not empty and holds no run of sparksmith",
            "Give a new or empty folder.",
        )
    return None


def read_record(folder: Path) -> dict[str, Any]:
    """The content of a folder's run.json; UserError when it is absent or not one."""
    path = folder / RECORD_FILE
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = content["version"] == RECORD_VERSION
    except (OSError, ValueError, KeyError, TypeError):
        known = False
    if not known:
        raise UserError(
            "run", str(path), "is not a run record that this release reads", "Give another folder."
        )
    return content


def _check_same(folder: Path, previous: dict[str, Any], wanted: dict[str, Any]) -> None:
    details = []
    for group in ("settings", "inputs"):
        old, new = previous[group], wanted[group]
        for name in sorted(old.keys() | new.keys()):
            was, now = _essence(old.get(name)), _essence(new.get(name))
            if was != now:
                details.append(f"{name} was {was!r} and is now {now!r}")
    if details:
        raise UserError(
            "--out",
            str(folder),
            f"already holds another run ({'; '.join(details)})",
            "Give another folder, or the same settings to resume that run.",
        )


def _essence(value: Any) -> Any:
    """Of an input only the content counts (a moved file is the same file), and for a target the
    dtype it runs in."""
    if isinstance(value, dict) and "sha256" in value:
        content: str = value["sha256"][:16]
        return f"{content} in {value['dtype']}" if "dtype" in value else content
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
