"""Traces from running servers: one user's stream at a time, both arms alternating.

Counts of a step come from vLLM's per-request metrics; its counters say whether they are all. Times
are those at which tokens came, whatever pieces they came in. Entropies come from a pass of their
own over the same tokens, so the timed requests ask for nothing that decoding does not need.
"""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, Literal

from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling
from sparksmith.eval.evaluation import TokenPrompt, prompt_seed
from sparksmith.eval.prompt_sets import EvalPrompt
from sparksmith.eval.trace import Trace
from sparksmith.verify.endpoint import (
    Counters,
    Endpoint,
    RequestError,
    ServerAnswer,
    sampling_options,
)
from sparksmith.verify.entropy import entropy_bounds
from sparksmith.verify.response import DecodeResult

Arm = Literal["speculative", "autoregressive"]
TOP_LOGPROBS = 20
"""vLLM's own limit, unless it is started with a higher --max-logprobs."""
TIE = 1e-3
"""Two top words nearer than this, in natural log-probability, are a tie that rounding decides."""


@dataclass(frozen=True, kw_only=True)
class LiveSettings:
    """How the servers are asked; `described` goes into every trace of both arms."""

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 128
    seed: int = 0
    vocab_size: int | None = None
    """For the upper bound of entropies; None takes the largest in wide use."""
    described: Mapping[str, Any] = field(default_factory=dict)


LARGEST_VOCABULARY = 262_144


@dataclass(frozen=True, kw_only=True)
class Server:
    """One arm: a server, and the name and version of its engine."""

    arm: Arm
    endpoint: Endpoint
    engine: str


@dataclass(kw_only=True)
class Account:
    """What was seen beside the traces, for the report."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    counters: Counters | None = None
    """The difference over the measured speculative requests."""
    repeated: int = 0
    """Requests that were sent more than once before they were answered."""
    unordered: int = 0
    """Requests whose counts came from the counters alone."""
    cached_prompt_tokens: int = 0
    without_entropy: int = 0
    failed: list[str] = field(default_factory=list)
    first_prompt: list[int] | None = None
    """Token ids of the first prompt as the server rendered it."""

    def add(self, other: "Account") -> None:
        """Take in what was seen with another prompt."""
        self.drafts += other.drafts
        self.drafted += other.drafted
        self.accepted += other.accepted
        if other.counters is not None:
            self.counters = _sum(self.counters, other.counters)
        self.repeated += other.repeated
        self.unordered += other.unordered
        self.cached_prompt_tokens += other.cached_prompt_tokens
        self.without_entropy += other.without_entropy
        self.failed += other.failed
        self.first_prompt = self.first_prompt or other.first_prompt

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> "Account":
        """From what `dataclasses.asdict` made of one, and JSON of that."""
        counters = values["counters"]
        if counters is not None:
            counters = Counters(**{**counters, "by_position": tuple(counters["by_position"])})
        return cls(**{**values, "counters": counters})


def speculates(endpoint: Endpoint, prompt: EvalPrompt, settings: LiveSettings) -> bool:
    """Whether a server drafts, by a short request: its own metrics, else its counters. UserError
    where it does not answer."""
    before = endpoint.counters()
    answer = _must_answer(endpoint, prompt, replace(settings, max_new_tokens=8))
    if answer.steps is not None:
        return True
    after = _settled(endpoint)
    return before is not None and after is not None and after.since(before).drafts > 0


def warm_up(
    servers: Sequence[Server], prompts: Sequence[EvalPrompt], settings: LiveSettings
) -> None:
    """Short requests that are not measured. UserError where a server does not answer them."""
    for prompt in prompts:
        for server in servers:
            _must_answer(server.endpoint, prompt, replace(settings, max_new_tokens=16))


def measure(
    servers: Sequence[Server], prompt: EvalPrompt, settings: LiveSettings
) -> tuple[list[Trace], Account]:
    """The traces of one prompt, the servers asked in the given order, and what was seen beside
    them. A request that keeps failing is noted, and has no trace."""
    account, traces = Account(), []
    for server in servers:
        try:
            answer, counted = _measured(server, prompt, settings)
            trace = _trace(server, prompt, answer, counted, settings, account)
        except RequestError as error:
            name = f"{prompt.workload}/{prompt.prompt_id} ({server.arm})"
            account.failed.append(f"{name}: {error.reason}")
            continue
        traces.append(_with_entropy(server.endpoint, trace, answer, settings, account))
    return traces, account


def _options(prompt: EvalPrompt, settings: LiveSettings) -> dict[str, Any]:
    named = TokenPrompt(prompt_id=prompt.prompt_id, workload=prompt.workload, token_ids=[])
    seed = prompt_seed(settings.seed, named)
    return sampling_options(settings.sampling, settings.max_new_tokens, seed)


def _ask(endpoint: Endpoint, prompt: EvalPrompt, settings: LiveSettings) -> ServerAnswer:
    messages = [dict(message) for message in prompt.messages]
    return endpoint.complete(messages, _options(prompt, settings), stream=True)


def _must_answer(endpoint: Endpoint, prompt: EvalPrompt, settings: LiveSettings) -> ServerAnswer:
    try:
        return _ask(endpoint, prompt, settings)
    except RequestError as error:
        raise UserError("--endpoint", endpoint.url, f"fails: {error}", "Look at its log.") from None


def _measured(
    server: Server, prompt: EvalPrompt, settings: LiveSettings
) -> tuple[ServerAnswer, Counters | None]:
    """An answer, and what the server counted meanwhile (speculative arm)."""
    if server.arm == "autoregressive":
        return _ask(server.endpoint, prompt, settings), None
    before = _settled(server.endpoint)
    answer = _ask(server.endpoint, prompt, settings)
    after = _settled(server.endpoint)
    counted = None
    if before is not None and after is not None:
        try:
            counted = after.since(before)
        except ValueError:
            raise RequestError("the server was started anew during the request", 1) from None
    return answer, counted


def _settled(endpoint: Endpoint) -> Counters | None:
    """The counters once they stand still: an engine writes them a moment after its answer."""
    found = endpoint.counters()
    for _ in range(20):
        if found is None:
            return None
        time.sleep(0.05)
        again = endpoint.counters()
        if again == found:
            break
        found = again
    return found


def kept_steps(
    num_tokens: int, accepted: Sequence[int], drafted: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """An engine's counts with what lies behind the response's end left out: a last step may have
    accepted tokens after the stop, or beyond the cap. None where they do not give `num_tokens`.
    """
    emitted = 1
    kept, tried = [], []
    for count, asked in zip(accepted, drafted, strict=False):
        left = num_tokens - emitted
        if left <= 0:
            break
        kept.append(min(count, left))
        tried.append(max(asked, kept[-1]))
        emitted += min(count + 1, left)
    return (kept, tried) if emitted == num_tokens else None


def _trace(
    server: Server,
    prompt: EvalPrompt,
    answer: ServerAnswer,
    counted: Counters | None,
    settings: LiveSettings,
    account: Account,
) -> Trace:
    if answer.token_ids is None:
        # Without ids the number of tokens is still known, from the usage.
        count = answer.completion_tokens
        token_ids = [-1] * count
        pieces = answer.arrivals[-1][1] if answer.arrivals else 0
        arrivals = [(at, round(n * count / max(pieces, 1))) for at, n in answer.arrivals]
    else:
        token_ids, arrivals = answer.token_ids, answer.arrivals
    if not token_ids:
        raise RequestError("an empty answer", answer.sent)
    if account.first_prompt is None:
        account.first_prompt = answer.prompt_token_ids
    account.cached_prompt_tokens += answer.cached_prompt_tokens
    drafted: list[int] | None = [0] * (len(token_ids) - 1)
    accepted: list[int] | None = list(drafted or [])
    about: dict[str, Any] = {}
    if server.arm == "speculative":
        drafted, accepted, about = _counts(len(token_ids), answer, counted, account)
    first = arrivals[0] if arrivals else None
    # Tokens that came with the first piece took no decoding time that can be seen.
    seconds = arrivals[-1][0] - first[0] if first and len(arrivals) > 1 else None
    return Trace(
        prompt_id=prompt.prompt_id,
        workload=prompt.workload,
        arm=server.arm,
        engine=server.engine,
        prompt_tokens=answer.prompt_tokens or len(answer.prompt_token_ids or ()),
        token_ids=token_ids,
        text=answer.reasoning + answer.text,
        finish_reason="stop" if answer.finish_reason == "stop" else "length",
        drafted=drafted,
        accepted=accepted,
        draft_seconds=None,
        verify_seconds=None,
        first_token_seconds=first[0] if first else None,
        decode_seconds=_decode_seconds(seconds, arrivals, len(token_ids)),
        sampling={
            "temperature": settings.sampling.temperature,
            "top_k": settings.sampling.top_k,
            "top_p": settings.sampling.top_p,
            "seed": _options(prompt, settings)["seed"],
            "max_tokens": settings.max_new_tokens,
        },
        settings={**settings.described, **about},
    )


def _decode_seconds(
    seconds: float | None, arrivals: Sequence[tuple[float, int]], count: int
) -> float | None:
    """From the first token to the last. A first piece of several tokens hides when the first of
    them came, so the time is scaled to all tokens after the first."""
    if seconds is None or count < 2:
        return None
    behind = count - arrivals[0][1]
    return seconds * (count - 1) / behind if behind > 0 else None


def _counts(
    num_tokens: int, answer: ServerAnswer, counted: Counters | None, account: Account
) -> tuple[list[int] | None, list[int] | None, dict[str, Any]]:
    """Drafted and accepted by step, and what the trace says of them."""
    steps = answer.steps
    if steps is not None:
        # The counters of a request that was sent again hold what its lost answer cost, too.
        if counted is None or answer.sent == 1:
            account.drafts += len(steps.accepted)
            account.drafted += sum(steps.drafted)
            account.accepted += sum(steps.accepted)
            if counted is not None:
                account.counters = _sum(account.counters, counted)
        account.repeated += answer.sent > 1
        kept = kept_steps(num_tokens, steps.accepted, steps.drafted)
        about: dict[str, Any] = {"num_tokens": steps.num_tokens}
        return (kept[1], kept[0], about) if kept else (None, None, about)
    if counted is None or not counted.drafts or answer.sent > 1:
        account.repeated += answer.sent > 1
        return None, None, {}
    # How many steps accepted so many is known, and not in which order.
    account.unordered += 1
    reached = [*counted.by_position, 0]
    by_count = [counted.drafts - reached[0]]
    by_count += [a - b for a, b in itertools.pairwise(reached)]
    accepted = [n for n in reversed(range(len(by_count))) for _ in range(by_count[n])]
    # What they emit beyond the response's end was the last step's.
    beyond = sum(accepted) + len(accepted) - (num_tokens - 1)
    if fitting := [n for n in accepted if n >= beyond > 0]:
        accepted.remove(min(fitting))
        accepted.append(min(fitting))
    each = round(counted.draft_tokens / counted.drafts)
    kept = kept_steps(num_tokens, accepted, [each] * len(accepted))
    unordered = {"num_tokens": len(counted.by_position), "steps": "from the counters, unordered"}
    return (kept[1], kept[0], unordered) if kept else (None, None, unordered)


def _sum(one: Counters | None, other: Counters) -> Counters:
    if one is None:
        return other
    positions = itertools.zip_longest(one.by_position, other.by_position, fillvalue=0)
    return Counters(
        drafts=one.drafts + other.drafts,
        draft_tokens=one.draft_tokens + other.draft_tokens,
        accepted=one.accepted + other.accepted,
        by_position=tuple(a + b for a, b in positions),
    )


def _with_entropy(
    endpoint: Endpoint,
    trace: Trace,
    answer: ServerAnswer,
    settings: LiveSettings,
    account: Account,
) -> Trace:
    """The trace with bounds of the target's entropy at every token, from the likeliest words."""
    ordered = "steps" not in trace.settings
    if answer.prompt_token_ids is None or answer.token_ids is None or not ordered:
        account.without_entropy += 1
        return trace
    rows = likeliest(endpoint, answer.prompt_token_ids, answer.token_ids)
    if rows is None:
        account.without_entropy += 1
        return trace
    size = settings.vocab_size or LARGEST_VOCABULARY
    bounds = [entropy_bounds(row, size) for row in rows]
    return replace(
        trace,
        entropy_lower=[round(low, 4) for low, _ in bounds],
        entropy_upper=[round(high, 4) for _, high in bounds],
    )


def likeliest(
    endpoint: Endpoint, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> list[list[float]] | None:
    """Log-probabilities, falling, of the likeliest words where each response token was chosen;
    None where the server does not tell them."""
    options = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": TOP_LOGPROBS}
    try:
        answer = endpoint.complete([*prompt_ids, *token_ids], options)
    except RequestError:
        return None
    rows = answer.prompt_logprobs
    if rows is None or len(rows) != len(prompt_ids) + len(token_ids):
        return None
    return rows[len(prompt_ids) :]


def lossless_live(
    speculative: Endpoint,
    plain: Endpoint,
    prompts: Sequence[EvalPrompt],
    settings: LiveSettings,
    on_prompt: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Greedy texts of both servers compared token by token, as `eval.lossless` does in-process."""
    greedy = replace(settings, sampling=Sampling(temperature=0.0))
    equal, tokens = 0, 0
    parted: list[dict[str, Any]] = []
    for prompt in prompts:
        one, other = (_must_answer(server, prompt, greedy) for server in (speculative, plain))
        mine, theirs = (_compared(answer) for answer in (one, other))
        tokens += len(theirs)
        if mine == theirs:
            equal += 1
        else:
            pairs = zip(mine, theirs, strict=False)
            common = [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)]
            told = other.prompt_token_ids if other.token_ids is not None else None
            gap = _gap(plain, told, [*common, *theirs[len(common) :][:1]])
            parted.append(
                {"prompt_id": prompt.prompt_id, "position": len(common), "relative_gap": gap}
            )
        on_prompt()
    ties = sum(row["relative_gap"] is not None and row["relative_gap"] < TIE for row in parted)
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "equal": equal,
        "ties": ties,
        "differences": len(parted) - ties,
        "parted": parted,
    }


def _compared(answer: ServerAnswer) -> list[int]:
    """Its token ids, or the characters of an answer that has none."""
    if answer.token_ids is not None:
        return answer.token_ids
    return [ord(character) for character in answer.reasoning + answer.text]


def _gap(
    endpoint: Endpoint, prompt_ids: Sequence[int] | None, token_ids: Sequence[int]
) -> float | None:
    """How far the two top words are apart where the last of `token_ids` was chosen."""
    rows = likeliest(endpoint, prompt_ids, token_ids) if prompt_ids and token_ids else None
    return None if rows is None or len(rows[-1]) < 2 else rows[-1][0] - rows[-1][1]


def live_result(
    endpoint: Endpoint,
    text: str,
    settings: LiveSettings,
    on_piece: Callable[[str, int], None] = lambda text, tokens: None,
) -> DecodeResult:
    """One answer to a user's `text`, as the in-process loop gives it; what a server does not tell
    (how long drafting took, what was accepted) is empty. RequestError where it fails."""
    messages = [{"role": "user", "content": text}]
    prompt = EvalPrompt(prompt_id="own", workload="own", messages=tuple(messages))
    options = _options(prompt, settings)
    answer = endpoint.complete(messages, options, stream=True, on_piece=on_piece)
    ids = answer.token_ids or [-1] * answer.completion_tokens
    steps = answer.steps
    kept = kept_steps(len(ids), steps.accepted, steps.drafted) if steps and ids else None
    accepted, drafted = kept or ([], [])
    arrivals = answer.arrivals
    seconds = arrivals[-1][0] - arrivals[0][0] if len(arrivals) > 1 else None
    return DecodeResult(
        token_ids=ids,
        draft_kept=[],
        finish_reason="stop" if answer.finish_reason == "stop" else "length",
        drafted=drafted,
        accepted=accepted,
        draft_seconds=[],
        verify_seconds=[],
        first_token_seconds=arrivals[0][0] if arrivals else answer.seconds,
        decode_seconds=_decode_seconds(seconds, arrivals, len(ids)) or 0.0,
    )


def surface(
    endpoint: Endpoint,
    prompts: Sequence[EvalPrompt],
    settings: LiveSettings,
    users: Sequence[int],
    on_answer: Callable[[int], None] = lambda tokens: None,
) -> list[dict[str, Any]]:
    """What one user gets and what the server gives in all, by the number of users at once.

    tokens_per_second_user: median over requests of (tokens - 1) / decode seconds;
    tokens_per_second_total: all tokens / wall time of the whole set.
    """
    rows = []
    for count in users:
        start = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            answers = list(pool.map(lambda p: _one_user(endpoint, p, settings, on_answer), prompts))
        seconds = time.perf_counter() - start
        speeds = [speed for speed, _ in answers if speed is not None]
        total = sum(tokens for _, tokens in answers)
        rows.append(
            {
                "users": count,
                "requests": len(prompts),
                "failed": sum(not tokens for _, tokens in answers),
                "tokens_per_second_user": median(speeds) if speeds else None,
                "tokens_per_second_total": total / seconds,
            }
        )
    return rows


def _one_user(
    endpoint: Endpoint,
    prompt: EvalPrompt,
    settings: LiveSettings,
    on_answer: Callable[[int], None],
) -> tuple[float | None, int]:
    try:
        answer = _ask(endpoint, prompt, settings)
    except RequestError:
        return None, 0
    count = len(answer.token_ids) if answer.token_ids is not None else answer.completion_tokens
    on_answer(count)
    if len(answer.arrivals) < 2:
        return None, count
    behind = answer.arrivals[-1][1] - answer.arrivals[0][1]
    return behind / (answer.arrivals[-1][0] - answer.arrivals[0][0]), count


def check_speculation(
    servers: Sequence[Server], prompt: EvalPrompt, settings: LiveSettings
) -> None:
    """UserError where a plain arm's server drafts."""
    for server in servers:
        drafts = speculates(server.endpoint, prompt, settings)
        if server.arm == "autoregressive" and drafts:
            raise UserError(
                "--baseline-endpoint",
                server.endpoint.url,
                "drafts tokens itself, so it is no baseline",
                "Start it without --speculative-config.",
            )
