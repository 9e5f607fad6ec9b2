"""A live `vllm serve`, started for tests and stopped after them."""

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from vllm_engine import DSPARK

START_SECONDS = 400


@contextmanager
def vllm_server(
    target: Path,
    log: Path,
    *,
    speculative: Mapping[str, Any] | None = None,
    environment: Mapping[str, str] = DSPARK,
    options: tuple[str, ...] = (),
) -> Iterator[str]:
    """The base URL of a server of `target`, float32 and greedy-exact, once it answers."""
    port = _free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(target)]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "target"]
    command += ["--dtype", "float32", "--enforce-eager", "--no-enable-prefix-caching"]
    command += ["--max-num-seqs", "2", "--max-num-batched-tokens", "512"]
    if "--max-model-len" not in options:
        command += ["--max-model-len", "512"]
    if speculative is not None:
        command += ["--speculative-config", json.dumps(dict(speculative))]
    with _running([*command, *options], environment, log, f"http://127.0.0.1:{port}") as url:
        yield url


@contextmanager
def printed_server(text: str, log: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """The base URL of a server started by a command that sparksmith printed, unedited but for the
    port."""
    port = _free_port()
    words = shlex.split(text.replace("\\\n", " "))
    start = words.index("vllm")
    given = dict(word.split("=", 1) for word in words[:start])
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", *words[start + 1 :]]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with _running(command, {**environment, **given}, log, url) as url:
        yield url


@contextmanager
def script_server(
    script: Path, log: Path, environment: Mapping[str, str], options: tuple[str, ...] = ()
) -> Iterator[str]:
    """The base URL of a server started by a script as it is, with its port and `options`."""
    port = _free_port()
    command = ["sh", str(script), "--host", "127.0.0.1", "--port", str(port), *options]
    # The script's `vllm` is the one of this environment.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    url = f"http://127.0.0.1:{port}"
    with _running(command, {**environment, "PATH": path}, log, url) as url:
        yield url


@contextmanager
def _running(
    command: list[str], environment: Mapping[str, str], log: Path, url: str
) -> Iterator[str]:
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**os.environ, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            _wait(url, process, log)
            yield url
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if process.poll() is not None:
            raise RuntimeError(f"vLLM ended:\n{log.read_text(errors='replace')[-4000:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=2) as answer:
                if answer.status == 200:
                    return
        except OSError:
            pass
        time.sleep(0.5)
    raise RuntimeError(f"vLLM did not start:\n{log.read_text(errors='replace')[-4000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
