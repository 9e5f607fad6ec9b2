"""Features of responses from vLLM servers that write their hidden states to files.

A server that was started as `extraction_server` says runs over prompt + response and writes the
tapped layers' outputs and the last layer's. Its file is read under its lock, checked, turned into
a training sample with the target's final norm and head, and deleted. Only so many requests are
under way at once, so the server's disk holds no more files than that.
"""

import fcntl
import os
import re
import threading
import time
import uuid
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from sparksmith.distill.generation import Response, SampleFeatures
from sparksmith.distill.nucleus import nucleus
from sparksmith.distill.samples import TrainingSample
from sparksmith.distill.tensor_file import TensorFile, TensorFileError
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.endpoint import Endpoint, RequestError
from sparksmith.verify.target_ends import TargetEnds

# What follows is the client's part of vLLM's ExampleHiddenStatesConnector, 0.32 and 0.33.
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,200}\.safetensors")
_LONGEST_POLL = 0.25
_TOLERANCE = 0.05


class CaptureError(Exception):
    """One response could not be captured; the reason, without its id."""


@dataclass(frozen=True, kw_only=True)
class Server:
    """An extraction server, and its `shared_storage_path` as this machine sees it."""

    endpoint: Endpoint
    shared: Path


@dataclass(frozen=True, kw_only=True)
class _States:
    """A server's file: states [n, taps + 1, H], and its own next token."""

    states: Tensor
    next_token: int | None


class ServerFeatures:
    """Hands out training samples of responses, in order, from any number of servers.

    `in_flight` is the most requests that each server has at once, and so the most files. `tag`
    marks this store's requests, so that what a killed run left on a server's disk is found.
    """

    def __init__(
        self,
        servers: Sequence[Server],
        ends: TargetEnds,
        sampling: Sampling,
        *,
        tag: str,
        in_flight: int = 4,
        timeout: float = 300.0,
    ) -> None:
        self.servers = list(servers)
        self.ends = ends
        self.sampling = sampling
        self._tag = f"sparksmith-{tag}-"
        self._in_flight = in_flight
        self._timeout = timeout
        self._busy = [0] * len(self.servers)
        self._choosing = threading.Lock()
        self._stopping = threading.Event()

    def samples(
        self, responses: Sequence[Response]
    ) -> Generator[tuple[Response, TrainingSample | CaptureError], None, None]:
        """Every response with its sample, in the order given, or with why it has none.

        Samples have the states' own numbers, on the CPU.
        """
        waiting = deque(responses)
        under_way: deque[tuple[Response, Future[_States]]] = deque()
        pool = ThreadPoolExecutor(self._in_flight * len(self.servers), "capture")
        try:
            while waiting or under_way:
                while waiting and len(under_way) < self._in_flight * len(self.servers):
                    response = waiting.popleft()
                    under_way.append((response, pool.submit(self._fetch, response)))
                response, future = under_way.popleft()
                try:
                    made: TrainingSample | CaptureError = self._sample(response, future.result())
                except CaptureError as error:
                    made = error
                yield response, made
        finally:
            self._stopping.set()
            pool.shutdown(wait=True, cancel_futures=True)
            self._stopping.clear()
            # Of requests that were given up, or sent twice, a file may have come late.
            self.clear()

    def adopt_dtype(self, response: Response) -> None:
        """Compute in the numbers of the servers' states, told by one response from each server.

        Raises UserError with what is wrong with a server, or where two run in different numbers.
        """
        for number, server in enumerate(self.servers):
            try:
                found = self._ask(server, response)
                if number and found.states.dtype != self.ends.dtype:
                    raise CaptureError("its states have another type than the first server's")
                self.ends = self.ends.cast(found.states.dtype)
                self._sample(response, found)
            except CaptureError as error:
                raise UserError(
                    "--endpoint",
                    server.endpoint.url,
                    f"gives no features ({error})",
                    "Start it as `sparksmith capture --print-server` says.",
                ) from None

    def clear(self) -> int:
        """Delete the files that earlier requests for this store left; returns how many."""
        count = 0
        for shared in {server.shared for server in self.servers}:
            for path in shared.glob(f"*{self._tag}*"):
                if path.name.endswith((".safetensors", ".lock")):
                    with suppress(OSError):
                        path.unlink()
                        count += path.suffix == ".safetensors"
        return count

    def _fetch(self, response: Response) -> _States:
        """From the least busy server, and where that fails from each of the others once."""
        tried: list[int] = []
        while True:
            with self._choosing:
                rest = [n for n in range(len(self.servers)) if n not in tried]
                number = min(rest, key=lambda n: self._busy[n])
                self._busy[number] += 1
            try:
                return self._ask(self.servers[number], response)
            except CaptureError:
                tried.append(number)
                if len(tried) == len(self.servers):
                    raise
            finally:
                with self._choosing:
                    self._busy[number] -= 1

    def _ask(self, server: Server, response: Response) -> _States:
        # The target never ran on the last token of a response.
        sequence = (response.prompt_ids + response.token_ids)[:-1]
        options = {
            "max_tokens": 1,
            "temperature": 0.0,
            "request_id": f"{self._tag}{uuid.uuid4().hex[:12]}",
        }
        try:
            answer = server.endpoint.complete(sequence, options)
        except RequestError as error:
            raise CaptureError(error.reason) from None
        where = (answer.kv_transfer_params or {}).get("hidden_states_path")
        if not isinstance(where, str):
            raise CaptureError(
                "the server does not say where it wrote the states: it does not run with "
                "ExampleHiddenStatesConnector"
            )
        path = inside(server.shared, where)
        try:
            states = self._read(path, sequence)
        finally:
            for name in (path, lock_of(path)):
                with suppress(OSError):
                    name.unlink()
        tokens = answer.token_ids
        return _States(states=states, next_token=tokens[0] if tokens else None)

    def _read(self, path: Path, sequence: list[int]) -> Tensor:
        """The states of a file once its writer has released the lock."""
        self._await_lock(path)
        try:
            with TensorFile(path) as file:
                self._check(file, sequence)
                return file.whole("hidden_states")
        except TensorFileError as error:
            raise CaptureError(f"the server's file {error}") from None
        except OSError as error:
            raise CaptureError(
                f"the server's file cannot be opened ({(error.strerror or '').lower()})"
            ) from None

    def _await_lock(self, path: Path) -> None:
        """Until the file is there and nobody writes it. The server holds the lock from when it
        starts on a request, and writes after its answer."""
        end, pause = time.monotonic() + self._timeout, 0.005
        while True:
            locked = _try_lock(lock_of(path))
            if locked and path.exists():
                return
            if self._stopping.is_set():
                raise CaptureError("stopped")
            if time.monotonic() > end:
                what = "is still being written" if locked is False else "has not appeared"
                raise CaptureError(
                    f"{path.name} {what} after {self._timeout:.0f} s in {path.parent}: see whether "
                    "--shared is the server's shared_storage_path, and use_synchronization_lock on"
                )
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_POLL)

    def _check(self, file: TensorFile, sequence: list[int]) -> None:
        places = file.places
        if places.keys() != {"hidden_states", "token_ids"}:
            raise CaptureError("the server's file does not hold hidden_states and token_ids")
        shape = places["hidden_states"].shape
        wanted = (len(sequence), len(self.ends.taps) + 1, self.ends.hidden_size)
        if shape != wanted:
            raise CaptureError(
                f"the server's states are {list(shape)}, not {list(wanted)} (tokens, captured "
                "layers, width): start it as `capture --print-server` says"
            )
        if places["token_ids"].shape != (len(sequence),):
            raise CaptureError("the server's file has another number of token ids")
        if file.whole("token_ids").tolist() != sequence:
            raise CaptureError("the server ran on other token ids than were sent")

    def _sample(self, response: Response, found: _States) -> TrainingSample:
        ends, states = self.ends, found.states
        if not bool(torch.isfinite(states).all()):
            raise CaptureError("the server's states are not all finite")
        start = len(response.prompt_ids) - 1
        rows = ends.head_input(states[start:, -1].to(ends.device))
        log_norm, threshold = [], []
        logits = rows.new_empty(0)
        for chunk in torch.split(rows, 512):
            logits = ends.logits(chunk)
            _, _, norm, edge = nucleus(logits, self.sampling)
            log_norm.append(norm.float())
            threshold.append(edge.float())
        _check_next(logits[-1].float(), found.next_token)
        return TrainingSample(
            tokens=torch.tensor(response.prompt_ids + response.token_ids),
            prompt_length=len(response.prompt_ids),
            features=SampleFeatures(
                taps=states[:, :-1].flatten(1),
                hidden=rows.cpu(),
                log_norm=torch.cat(log_norm).cpu(),
                threshold=torch.cat(threshold).cpu(),
                sampling=self.sampling,
            ),
        )


def _check_next(logits: Tensor, token: int | None) -> None:
    """The server's own greedy token must be the likeliest here, rounding aside: another target, a
    wrong final state or stream would show in nothing else."""
    if token is None:
        return
    spread = logits.max() - logits.min()
    if not 0 <= token < len(logits) or logits.max() - logits[token] > _TOLERANCE * spread:
        raise CaptureError(
            f"the server goes on with token {token}, and its final state through this target's "
            "norm and head does not: it serves another model, or captures another state last"
        )


def inside(shared: Path, where: str) -> Path:
    """The file of `shared` that a server means by `where`, a path on its own machine.

    Its name alone counts, so no answer leads out of the folder. Raises CaptureError for a name
    that is none.
    """
    name = PurePosixPath(where).name
    if not _FILE_NAME.fullmatch(name):
        raise CaptureError(f"the server names a file that is none of its kind: {where[:200]!r}")
    return shared / name


def lock_of(path: Path) -> Path:
    """The lock beside a server's file."""
    return path.with_name(path.name + ".lock")


def _try_lock(path: Path) -> bool | None:
    """Whether the lock is free; None where there is none."""
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        descriptor = os.open(path, flags)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return True


def check_servers(servers: Sequence[Server], longest: int) -> list[str]:
    """Ask every server for its model; returns their versions, one a server.

    Raises UserError for one that does not answer, or takes no texts of `longest` tokens and one
    more, and for a folder that is not there.
    """
    versions = []
    for server in servers:
        if not server.shared.is_dir():
            raise UserError(
                "--shared",
                str(server.shared),
                "is not a folder on this machine",
                "Mount the server's shared_storage_path, and give where it is mounted.",
            )
        facts = server.endpoint.describe()
        if facts.max_length is not None and facts.max_length < longest + 1:
            raise UserError(
                "--endpoint",
                facts.url,
                f"takes {facts.max_length} tokens, and the longest response needs {longest + 1}",
                f"Start it with --max-model-len {longest + 1}.",
            )
        versions.append(f"{facts.engine} {facts.version}")
    return versions
