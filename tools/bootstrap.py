"""Make the virtual environment that `make` runs in, with the torch that suits this machine.

Only the standard library is used, since it runs before anything is installed. A stamp keeps the
hash of what an installation depends on, so a second run returns at once.

Which torch: TORCH, if set (TORCH="torch==2.9.1"); else the one that the running Python already
has; else the CPU build of 2.13.0, where pip's index offers one under that version; else pip's
choice, after saying what that means.
"""

import argparse
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MIN_PYTHON, END_PYTHON = (3, 11), (3, 14)
MIN_TORCH = (2, 9)
CPU_TORCH = "torch==2.13.0"
MIN_PIP = "pip>=25.1"  # the first with --group


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--venv", type=Path, default=ROOT / ".venv")
    options.add_argument("--group", choices=["run", "test", "dev"], default="run")
    arguments = options.parse_args()
    if not MIN_PYTHON <= sys.version_info[:2] < END_PYTHON:
        print(
            f"error: python {sys.version.split()[0]} at {sys.executable} is not supported. "
            "Use 3.11, 3.12 or 3.13: make PYTHON=python3.12 ...",
            file=sys.stderr,
        )
        return 2
    if is_current(arguments.venv, arguments.group):
        return 0
    try:
        install(arguments.venv, arguments.group)
    except subprocess.CalledProcessError as error:
        print(f"error: `{' '.join(map(str, error.cmd))}` failed.", file=sys.stderr)
        return 1
    return 0


def is_current(venv: Path, group: str) -> bool:
    """Whether `venv` holds this group's packages, or those of one that contains it."""
    groups = ["run", "test", "dev"]
    return any(
        (stamp := venv / f".sparksmith-{wider}").is_file()
        and stamp.read_text(encoding="utf-8") == state_hash()
        for wider in groups[groups.index(group) :]
    )


def state_hash() -> str:
    """Everything that decides what an installation holds."""
    parts = [
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        Path(__file__).read_text(encoding="utf-8"),
        os.environ.get("TORCH", ""),
        sys.version,
        str(ROOT),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install(venv: Path, group: str) -> None:
    requirement = os.environ.get("TORCH")
    own_torch = None if requirement else torch_of_this_python()
    say(f"making {venv.name} for python {sys.version.split()[0]}")
    make_venv(venv, system_packages=own_torch is not None)
    pip = [str(venv / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--upgrade", MIN_PIP])
    if own_torch:
        say(f"using the torch {own_torch} that this Python has")
    else:
        requirement = requirement or choose_torch(pip)
        say(f"installing {requirement}")
        run([*pip, "install", "--quiet", requirement])
    say("installing sparksmith and what it requires")
    groups = [] if group == "run" else ["--group", group]
    run([*pip, "install", "--quiet", "--editable", str(ROOT), *groups])
    (venv / f".sparksmith-{group}").write_text(state_hash(), encoding="utf-8")


def torch_of_this_python() -> str | None:
    """The version of the torch that this Python imports, None if there is none of use."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        return None
    numbers = tuple(int(part) for part in version.split("+")[0].split(".")[:2])
    if numbers < MIN_TORCH:
        say(f"not using this Python's torch {version}: it is older than 2.9")
        return None
    return version


def make_venv(venv: Path, *, system_packages: bool) -> None:
    """Make the environment anew, unless it is one of this Python and of this kind already."""
    if same_kind(venv, system_packages):
        return
    command = [sys.executable, "-m", "venv", "--clear"]
    if system_packages:
        command.append("--system-site-packages")
    run([*command, str(venv)])
    if system_packages and sys.prefix != sys.base_prefix:
        # This Python is itself a virtual environment, whose packages venv would pass over.
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        outer = venv / "lib" / version / "site-packages" / "outer-environment.pth"
        outer.write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")


def same_kind(venv: Path, system_packages: bool) -> bool:
    configuration = venv / "pyvenv.cfg"
    if not configuration.is_file():
        return False
    flag = f"include-system-site-packages = {str(system_packages).lower()}"
    probe = [str(venv / "bin" / "python"), "-c", "import sys, pip; print(sys.version)"]
    try:
        found = subprocess.run(probe, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return False
    return found == sys.version and flag in configuration.read_text(encoding="utf-8")


def choose_torch(pip: list[str]) -> str:
    """The CPU build if the index has it under 2.13.0, else pip's choice, announced."""
    if (resolved_torch(pip, CPU_TORCH) or "").endswith("+cpu"):
        return CPU_TORCH
    wanted = f"torch>={MIN_TORCH[0]}.{MIN_TORCH[1]}"
    version = resolved_torch(pip, wanted)
    size = "PyPI's builds for Linux carry CUDA: several GB to download and to store. "
    say(
        f"about to download torch {version or '(pip will say which)'}. "
        + (size if sys.platform == "linux" else "")
        + 'To choose another, stop here and set TORCH="torch==..." or the index that pip uses '
        "(PIP_INDEX_URL, PIP_EXTRA_INDEX_URL; pytorch.org lists those with CPU builds)."
    )
    return wanted


def resolved_torch(pip: list[str], requirement: str) -> str | None:
    """The version that pip would install, None if it finds none."""
    command = [*pip, "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    done = subprocess.run(
        [*command, "--report", "-", requirement], capture_output=True, text=True, check=False
    )
    if done.returncode:
        return None
    version: str = json.loads(done.stdout)["install"][0]["metadata"]["version"]
    return version


def say(text: str) -> None:
    print(f"sparksmith: {text}", file=sys.stderr, flush=True)


def run(command: list[str]) -> None:
    subprocess.run(command, check=True)


if __name__ == "__main__":
    sys.exit(main())
