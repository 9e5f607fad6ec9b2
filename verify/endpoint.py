"""An OpenAI-compatible server as the target: one request, its tokens and what the server says of
them.

Written for vLLM, and for what SGLang and hosted APIs share with it. Token ids come from the server
where it returns them (vLLM: `return_token_ids`); text alone is the caller's to tokenise. The key
comes from the environment and is in no message, file or log.
"""

import email.utils
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling

KEY_VARIABLES = ("SPARKSMITH_API_KEY", "OPENAI_API_KEY")
_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_LONGEST_WAIT = 300.0
"""Seconds that a server may ask for; more, and the request counts as failed."""


def sampling_options(sampling: Sampling, max_tokens: int, seed: int) -> dict[str, Any]:
    """A request's fields for them; what is off is not sent, since some servers refuse top_k."""
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": sampling.temperature}
    # Servers take 31 bits at least.
    options["seed"] = seed & 0x7FFFFFFF
    if sampling.temperature > 0:
        options["top_p"] = sampling.top_p
        if sampling.top_k:
            options["top_k"] = sampling.top_k
    return options


class RequestError(Exception):
    """A request that the server refuses, or keeps failing; `reason` says which and how often.

    `sent` counts how often it was sent: each may have cost what the server charges.
    """

    def __init__(self, reason: str, sent: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sent = sent


@dataclass(frozen=True, kw_only=True)
class Retries:
    """Waits double from `first` to `longest` seconds, each times a random factor of 0.5 to 1."""

    attempts: int = 6
    first: float = 0.5
    longest: float = 30.0

    def wait(self, attempt: int) -> float:
        """Seconds to wait after the given attempt, the first being 1."""
        return min(self.longest, self.first * 2.0 ** (attempt - 1)) * random.uniform(0.5, 1.0)


@dataclass(frozen=True, kw_only=True)
class ServerFacts:
    """What a server says of itself; None where it does not."""

    url: str
    model: str
    engine: str
    version: str | None
    max_length: int | None


@dataclass(frozen=True, kw_only=True)
class Steps:
    """Speculative decoding of one request, by step: vLLM's `detailed` per-request metrics."""

    accepted: list[int]
    drafted: list[int]
    num_tokens: int


@dataclass(frozen=True, kw_only=True)
class Counters:
    """vLLM's counters of speculative decoding, since the server started."""

    drafts: int
    draft_tokens: int
    accepted: int
    by_position: tuple[int, ...]

    def since(self, before: "Counters") -> "Counters":
        """What came after `before`; ValueError if the server was started anew in between."""
        if before.drafts > self.drafts or before.accepted > self.accepted:
            raise ValueError("the counters went back")
        earlier = before.by_position + (0,) * (len(self.by_position) - len(before.by_position))
        return Counters(
            drafts=self.drafts - before.drafts,
            draft_tokens=self.draft_tokens - before.draft_tokens,
            accepted=self.accepted - before.accepted,
            by_position=tuple(a - b for a, b in zip(self.by_position, earlier, strict=True)),
        )


@dataclass(kw_only=True)
class ServerAnswer:
    """One response. `token_ids` None: the server told its text alone."""

    text: str = ""
    reasoning: str = ""
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = "stop"
    steps: Steps | None = None
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """Streaming: seconds since the request was sent, and tokens that had come by then."""
    prompt_logprobs: list[list[float]] | None = None
    """Of each prompt token's place, the log-probabilities of its likeliest words, falling; the
    first has none."""
    cached_prompt_tokens: int = 0
    kv_transfer_params: Mapping[str, Any] | None = None
    """vLLM's word on what it did with the request's states, such as where it wrote them."""
    seconds: float = 0.0
    sent: int = 1
    """How often the request was sent until it was answered."""


class Endpoint:
    """A server, and one model of it. Threads may share it."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        timeout: float = 600.0,
        retries: Retries | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        """`url` with or without /v1; `model` None is the server's only one.

        Raises UserError for a URL that is none.
        """
        if not url.startswith(("http://", "https://")):
            raise UserError("--endpoint", url, "is no URL", "Write http://HOST:PORT.")
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._retries = retries or Retries()
        key = next((os.environ[name] for name in KEY_VARIABLES if os.environ.get(name)), None)
        self._client = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=256),
            transport=transport,
            # To another host the key and the texts would go along.
            follow_redirects=False,
        )
        self._knows_ids = True
        self._stopping = threading.Event()

    def close(self) -> None:
        """End waits between attempts, and the connections."""
        self._stopping.set()
        self._client.close()

    def describe(self) -> ServerFacts:
        """Ask for the model and the version.

        Raises UserError where nothing answers, the key is refused, or the model is not served.
        """
        try:
            answer = self._client.get("/v1/models")
        except httpx.HTTPError as error:
            raise UserError(
                "--endpoint",
                self.url,
                f"does not answer ({_short(error)})",
                "Start the server, and give its URL as http://HOST:PORT.",
            ) from None
        if answer.status_code in (401, 403):
            raise UserError(
                "--endpoint",
                self.url,
                f"refuses the key (HTTP {answer.status_code})",
                f"Put the server's key into {KEY_VARIABLES[0]}.",
            )
        if answer.is_redirect:
            raise UserError(
                "--endpoint",
                self.url,
                f"redirects to {answer.headers.get('location')}, which is not followed",
                "Give that URL, if it is the server's.",
            )
        models = _models(answer)
        if models is None:
            raise UserError(
                "--endpoint",
                self.url,
                f"is no OpenAI-compatible server (HTTP {answer.status_code} for /v1/models)",
                "Give the URL before /v1.",
            )
        found = self._choose(models)
        version = self._version()
        self._model = str(found["id"])
        return ServerFacts(
            url=self.url,
            model=self._model,
            engine=str(found.get("owned_by") or "unknown"),
            version=version,
            max_length=found.get("max_model_len"),
        )

    def complete(
        self,
        prompt: Sequence[int] | Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        stream: bool = False,
        on_piece: Callable[[str, int], None] = lambda text, tokens: None,
    ) -> ServerAnswer:
        """One response to token ids (/v1/completions) or messages (/v1/chat/completions).

        `options` are the request's other fields: max_tokens, temperature, seed, ... A failure that
        may pass is tried again; RequestError for one that does not pass. `on_piece` hears the text
        and the number of tokens of each piece of a stream, again from the start when it is asked
        for again.
        """
        body: dict[str, Any] = {"model": self._model, **options}
        tokens = bool(prompt) and isinstance(prompt[0], int)
        body["prompt" if tokens else "messages"] = list(prompt)
        path = "/v1/completions" if tokens else "/v1/chat/completions"
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        for attempt in range(1, self._retries.attempts + 1):
            if self._knows_ids:
                body.setdefault("return_token_ids", True)
            else:
                body.pop("return_token_ids", None)
            try:
                answer = self._once(path, body, stream, on_piece)
            except _Refusal as refusal:
                if refusal.unknown_field and self._knows_ids:
                    self._knows_ids = False
                    continue
                if not refusal.transient or attempt == self._retries.attempts:
                    times = f" ({attempt} times)" if attempt > 1 else ""
                    raise RequestError(refusal.reason + times, attempt) from None
                wait = self._retries.wait(attempt) if refusal.after is None else refusal.after
                if wait > _LONGEST_WAIT:
                    reason = f"{refusal.reason}, and asks to wait {wait:.0f} s"
                    raise RequestError(reason, attempt) from None
                if self._stopping.wait(wait):
                    raise RequestError("stopped", attempt) from None
            else:
                answer.sent = attempt
                return answer
        raise RequestError("refuses return_token_ids and what is left", self._retries.attempts)

    def text_of(self, token_ids: Sequence[int]) -> str | None:
        """vLLM's own text of tokens; None where the server has no /detokenize."""
        body = {"model": self._model, "tokens": list(token_ids)}
        try:
            answer = self._client.post("/detokenize", json=body)
            found = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        return str(found["prompt"]) if isinstance(found, dict) and "prompt" in found else None

    def counters(self) -> Counters | None:
        """The server's counters; None where it has none (another engine, or no speculation)."""
        try:
            answer = self._client.get("/metrics")
        except httpx.HTTPError:
            return None
        return read_counters(answer.text) if answer.status_code == 200 else None

    def sglang_acceptance_length(self) -> float | None:
        """SGLang's gauge of accepted tokens a step, None where there is none. Read as documented;
        not tested against a live SGLang."""
        try:
            answer = self._client.get("/metrics")
        except httpx.HTTPError:
            return None
        return read_sglang(answer.text) if answer.status_code == 200 else None

    def _once(
        self,
        path: str,
        body: Mapping[str, Any],
        stream: bool,
        on_piece: Callable[[str, int], None],
    ) -> ServerAnswer:
        start = time.perf_counter()
        try:
            if not stream:
                answer = self._client.post(path, json=body)
                _raise_refusal(answer, answer.text)
                made = _whole(_object(answer.text))
            else:
                with self._client.stream("POST", path, json=body) as answer:
                    if answer.status_code != 200:
                        answer.read()
                        _raise_refusal(answer, answer.text)
                    made = _streamed(
                        answer.iter_lines(), lambda: time.perf_counter() - start, on_piece
                    )
        except httpx.TransportError as error:
            raise _Refusal(_short(error), transient=True) from None
        made.seconds = time.perf_counter() - start
        return made

    def _choose(self, models: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
        names = [str(model.get("id")) for model in models]
        if self._model is None and len(models) == 1:
            return models[0]
        if self._model in names:
            return models[names.index(self._model)]
        problem = "is not served" if self._model else "must be said: the server has several"
        shown = ", ".join(names[:8]) + (", ..." if len(names) > 8 else "")
        raise UserError("--model", self._model, problem, f"Use one of {shown or 'none'}.")

    def _version(self) -> str | None:
        try:
            answer = self._client.get("/version")
            found = answer.json() if answer.status_code == 200 else None
        except (httpx.HTTPError, ValueError):
            return None
        return str(found["version"]) if isinstance(found, dict) and "version" in found else None


class _Refusal(Exception):  # noqa: N818 - never leaves this module
    def __init__(
        self,
        reason: str,
        *,
        transient: bool,
        after: float | None = None,
        unknown_field: bool = False,
    ) -> None:
        super().__init__(reason)
        self.reason, self.transient, self.after = reason, transient, after
        self.unknown_field = unknown_field


def _raise_refusal(answer: httpx.Response, text: str) -> None:
    if answer.status_code == 200:
        return
    said = _message(text)
    if answer.is_redirect:
        said = f"redirects to {answer.headers.get('location')}; give that URL if it is yours"
    raise _Refusal(
        f"HTTP {answer.status_code}: {said}",
        transient=answer.status_code in _TRANSIENT,
        after=_retry_after(answer.headers.get("retry-after")),
        unknown_field=answer.status_code in (400, 422) and "return_token_ids" in text,
    )


def _retry_after(value: str | None) -> float | None:
    """Seconds to wait, of a header that gives seconds or a date (RFC 9110, section 10.2.3)."""
    if value is None:
        return None
    try:
        return max(0.0, float(value))
    except ValueError:
        pass
    try:
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    except ValueError:
        return None


def _message(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        return " ".join(text.split())[:200]
    for key in ("error", "detail", "message"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:300]


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")[:200]


def _models(answer: httpx.Response) -> list[Mapping[str, Any]] | None:
    try:
        data = answer.json()["data"]
    except (ValueError, KeyError, TypeError):
        return None
    return data if isinstance(data, list) and answer.status_code == 200 else None


def _object(text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise _Refusal("an answer that is not JSON", transient=True)
    if "error" in found and "choices" not in found:
        raise _Refusal(_message(text), transient=False)
    return found


def _whole(found: Mapping[str, Any]) -> ServerAnswer:
    made = ServerAnswer(finish_reason="")
    _take(made, found)
    if not made.finish_reason:
        raise _Refusal("an answer without choices", transient=True)
    return made


def _streamed(
    lines: Iterator[str], clock: Callable[[], float], on_piece: Callable[[str, int], None]
) -> ServerAnswer:
    """Put an answer's events together, with the time at which each brought tokens."""
    made = ServerAnswer(finish_reason="")
    pieces = 0
    for line in lines:
        if not line.startswith("data:"):
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            break
        before, said = len(made.text) + len(made.reasoning), len(made.text)
        _take(made, _object(data))
        if made.token_ids is not None:
            count = len(made.token_ids)
        else:
            # Pieces of text are not tokens: they are scaled when the usage is known.
            pieces += len(made.text) + len(made.reasoning) > before
            count = pieces
        known = made.arrivals[-1][1] if made.arrivals else 0
        if count > known:
            made.arrivals.append((clock(), count))
            on_piece(made.text[said:], count - known)
    if not made.finish_reason:
        raise _Refusal("a stream that ended early", transient=True)
    return made


def _take(made: ServerAnswer, found: Mapping[str, Any]) -> None:
    """Add a whole answer, or one event of a stream."""
    for choice in found.get("choices") or ():
        said = choice.get("message") or choice.get("delta") or choice
        made.text += said.get("content") or said.get("text") or ""
        made.reasoning += said.get("reasoning") or said.get("reasoning_content") or ""
        if choice.get("token_ids") is not None:
            made.token_ids = [*(made.token_ids or []), *choice["token_ids"]]
        if choice.get("finish_reason"):
            made.finish_reason = choice["finish_reason"]
        if choice.get("prompt_token_ids") is not None:
            made.prompt_token_ids = list(choice["prompt_token_ids"])
        if choice.get("prompt_logprobs") is not None:
            made.prompt_logprobs = [_likeliest(one) for one in choice["prompt_logprobs"]]
    if found.get("prompt_token_ids") is not None:
        made.prompt_token_ids = list(found["prompt_token_ids"])
    if found.get("kv_transfer_params") is not None:
        made.kv_transfer_params = dict(found["kv_transfer_params"])
    if usage := found.get("usage"):
        made.prompt_tokens = usage.get("prompt_tokens") or 0
        made.completion_tokens = usage.get("completion_tokens") or 0
        details = usage.get("prompt_tokens_details") or {}
        made.cached_prompt_tokens = details.get("cached_tokens") or 0
    metrics = (found.get("metrics") or {}).get("speculative_decoding")
    if metrics and metrics.get("per_step_accepted") is not None:
        made.steps = Steps(
            accepted=list(metrics["per_step_accepted"]),
            drafted=list(metrics["per_step_drafted"]),
            num_tokens=int(metrics["num_spec_tokens"]),
        )


def _likeliest(found: Mapping[str, Mapping[str, Any]] | None) -> list[float]:
    """vLLM's {token: {logprob, rank}} of one prompt token: the likeliest words, and the token
    itself, which counts only if it is one of them."""
    if not found:
        return []
    ranked = sorted((int(one["rank"]), float(one["logprob"])) for one in found.values())
    return [value for place, (rank, value) in enumerate(ranked, 1) if rank == place]


def read_sglang(text: str) -> float | None:
    """`sglang:spec_accept_length` in Prometheus' text form, the mean over workers."""
    values = [
        float(line.rpartition(" ")[2])
        for line in text.splitlines()
        if line.startswith(("sglang:spec_accept_length{", "sglang:spec_accept_length "))
    ]
    return sum(values) / len(values) if values else None


def read_counters(text: str) -> Counters | None:
    """The counters in Prometheus' text form, summed over engines; None if they are not there."""
    totals: dict[str, float] = {}
    positions: dict[int, float] = {}
    for line in text.splitlines():
        if not line.startswith("vllm:spec_decode_num_"):
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        kind = name.removeprefix("vllm:spec_decode_num_")
        if not kind.endswith("_total"):
            continue
        kind = kind.removesuffix("_total")
        if kind == "accepted_tokens_per_pos":
            position = int(labels.partition('position="')[2].partition('"')[0])
            positions[position] = positions.get(position, 0.0) + float(value)
        else:
            totals[kind] = totals.get(kind, 0.0) + float(value)
    if "drafts" not in totals:
        return None
    return Counters(
        drafts=int(totals["drafts"]),
        draft_tokens=int(totals.get("draft_tokens", 0)),
        accepted=int(totals.get("accepted_tokens", 0)),
        by_position=tuple(int(positions[position]) for position in sorted(positions)),
    )
