"""Responses of the target, many rows at a time: the raw material of distillation.

A response depends on its prompt, the sampling settings and the seed alone (rounding aside), not
on the batch it happened to be in: every response has its own stream of uniforms.
"""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from sparksmith.distill.nucleus import nucleus
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.rows import TargetRows
from sparksmith.verify.target import TransformersTarget


@dataclass(frozen=True, kw_only=True)
class Request:
    """One response to generate. `request_id` seeds it, so it must be unique."""

    request_id: str
    prompt_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class GenerationSettings:
    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 192
    batch_size: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise UserError(name, getattr(self, name), "is not positive", "Use 1 or more.")


@dataclass(frozen=True, kw_only=True)
class SampleFeatures:
    """What the trainer needs of the target for one response of R tokens after P prompt tokens.

    The target has run on positions 0 .. P+R-2 (not on the last token). `taps` [P+R-1, m*H];
    `hidden` [R, H] is the head's input at positions P-1 .. P+R-2, so row r is where response token
    r was chosen. `log_norm` [R] and `threshold` [R] describe the distribution it was sampled
    from: scaled logit z = logit / temperature belongs to the kept words iff z >= threshold, and
    has probability exp(z - log_norm).
    """

    taps: Tensor
    hidden: Tensor
    log_norm: Tensor
    threshold: Tensor
    sampling: Sampling | None = None
    """The sampling that they describe; None where whoever made them vouches for it."""


@dataclass(frozen=True, kw_only=True)
class Response:
    request_id: str
    prompt_ids: list[int]
    token_ids: list[int]
    finish_reason: str
    """"stop" if the last token ends the text, "length" if the cap did."""
    features: SampleFeatures | None = None


def uniforms_for(request_id: str, seed: int, count: int) -> np.ndarray:
    """The uniforms [count] of one response: a counter-based generator keyed by seed and request."""
    digest = hashlib.sha256(f"{seed}:{request_id}".encode()).digest()
    key = np.frombuffer(digest[:16], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key)).random(count)


class _Row:
    """One request under way."""

    def __init__(self, request: Request, settings: GenerationSettings) -> None:
        self.request = request
        self.tokens: list[int] = []
        self.uniforms = uniforms_for(request.request_id, settings.seed, settings.max_new_tokens)


class _Capture:
    """Features of the rows under way, in half precision: [rows, capacity, ...]."""

    def __init__(self, target: TransformersTarget, rows: int, capacity: int) -> None:
        width = len(target.recorder.taps) * target.hidden_size
        self.taps = torch.zeros(rows, capacity, width, dtype=torch.bfloat16)
        self.hidden = torch.zeros(rows, capacity, target.hidden_size, dtype=torch.bfloat16)
        self.log_norm = torch.zeros(rows, capacity)
        self.threshold = torch.zeros(rows, capacity)

    def take(
        self, row: int, prompt_length: int, num_tokens: int, sampling: Sampling
    ) -> SampleFeatures:
        end = prompt_length + num_tokens - 1
        start = prompt_length - 1
        return SampleFeatures(
            taps=self.taps[row, :end].clone(),
            hidden=self.hidden[row, start:end].clone(),
            log_norm=self.log_norm[row, start:end].clone(),
            threshold=self.threshold[row, start:end].clone(),
            sampling=sampling,
        )

    def keep(self, rows: list[int]) -> None:
        """Drop every row but these."""
        index = torch.tensor(rows, dtype=torch.long)
        self.taps, self.hidden = self.taps[index], self.hidden[index]
        self.log_norm, self.threshold = self.log_norm[index], self.threshold[index]


class BatchGenerator:
    """Keeps `batch_size` rows busy until the requests are used up.

    With `capture`, every response carries its `SampleFeatures`: the pass that chose a token has
    its taps at hand, so features cost nothing but memory.
    """

    def __init__(
        self,
        target: TransformersTarget,
        settings: GenerationSettings,
        *,
        max_prompt_tokens: int,
        capture: bool = False,
    ) -> None:
        """Raises UserError when prompt and response together do not fit the target."""
        self.target = target
        self.settings = settings
        self._max_prompt = max_prompt_tokens
        self._capacity = max_prompt_tokens + settings.max_new_tokens
        if self._capacity > target.max_length:
            raise UserError(
                "max_new_tokens",
                settings.max_new_tokens,
                f"after prompts of {max_prompt_tokens} tokens is beyond the target's "
                f"{target.max_length} positions",
                "Use fewer, or shorter prompts.",
            )
        self._capturing = capture
        self._capture: _Capture | None = None
        self._hidden: Tensor | None = None
        self._live: list[_Row | None] = []

    def run(
        self,
        requests: Iterable[Request],
        on_tokens: Callable[[int], None] = lambda count: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Response]:
        """Yield responses as they finish; `on_tokens` hears how many tokens each pass made.

        When `stop` turns true no further request starts, and the rows under way are finished.
        Raises UserError, before any work, for a prompt that is empty or too long.
        """
        settings = self.settings
        waiting = deque(_alike(list(requests), settings.batch_size))
        for request in waiting:
            _check_prompt(request, self._max_prompt)
        self._rows = TargetRows(
            self.target.model, num_rows=settings.batch_size, capacity=self._capacity
        )
        self._live = [None] * settings.batch_size
        if self._capturing:
            self._capture = _Capture(self.target, settings.batch_size, self._capacity)
        head = self.target.model.get_output_embeddings()
        hook = head.register_forward_pre_hook(self._keep_hidden) if self._capturing else None
        try:
            yield from self._serve(waiting, on_tokens, stop)
        finally:
            if hook is not None:
                hook.remove()
            del self._rows
            self._live, self._capture, self._hidden = [], None, None

    def _keep_hidden(self, _module: object, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0]

    def _serve(
        self, waiting: deque[Request], on_tokens: Callable[[int], None], stop: Callable[[], bool]
    ) -> Iterator[Response]:
        while True:
            if stop():
                waiting.clear()
            free = [row for row, live in enumerate(self._live) if live is None]
            # Prefilling a few rows at once is cheaper than one at a time, and many at once are
            # padded to the longest of many.
            few = max(1, len(self._live) // 16)
            if waiting and len(free) >= few:
                starting = [waiting.popleft() for _ in range(min(len(free), len(waiting), 2 * few))]
                on_tokens(len(starting))
                yield from self._start(free[: len(starting)], starting)
                if len(free) - len(starting) >= few:
                    continue
            elif not waiting and free:
                self._shrink()
                if not self._live:
                    return
            if any(self._live):
                yield from self._step(on_tokens)

    def _start(self, rows: list[int], requests: list[Request]) -> Iterator[Response]:
        for row, request in zip(rows, requests, strict=True):
            self._live[row] = _Row(request, self.settings)
        index = torch.tensor(rows)
        logits = self._rows.prefill(index, [request.prompt_ids for request in requests])
        taps = self.target.recorder.take()
        if self._capture is not None:
            assert taps is not None, "the target has no taps"
            self._capture.taps[index, : taps.shape[1]] = taps.to("cpu", torch.bfloat16)
        yield from self._choose(rows, logits, self._hidden)

    def _step(self, on_tokens: Callable[[int], None]) -> Iterator[Response]:
        busy = [row for row, live in enumerate(self._live) if live is not None]
        # Idle rows are stepped along; their position must stay inside the buffers.
        idle = [row for row, live in enumerate(self._live) if live is None]
        self._rows.rows.restart(idle)
        tokens = [live.tokens[-1] if live else 0 for live in self._live]
        positions = self._rows.rows.lengths.to("cpu", copy=True)  # the step advances them
        logits = self._rows.step(torch.tensor(tokens))
        taps = self.target.recorder.take()
        if self._capture is not None:
            assert taps is not None, "the target has no taps"
            every = torch.arange(len(self._live))
            self._capture.taps[every, positions] = taps[:, 0].to("cpu", torch.bfloat16)
        on_tokens(len(busy))
        hidden = None if self._hidden is None else self._hidden[busy]
        yield from self._choose(busy, logits[busy], hidden)

    def _choose(self, rows: list[int], logits: Tensor, hidden: Tensor | None) -> Iterator[Response]:
        """Draw the next token of `rows` from logits [len(rows), V]; `hidden` made them."""
        words, probs, log_norm, threshold = nucleus(logits, self.settings.sampling)
        lives = [live for live in (self._live[row] for row in rows) if live is not None]
        uniforms = torch.tensor(
            [live.uniforms[len(live.tokens)] for live in lives], dtype=torch.float64
        )
        cumulative = probs.double().cumsum(-1)
        total = cumulative[:, -1:].contiguous()
        drawn = torch.searchsorted(cumulative, uniforms[:, None].to(total) * total, right=True)
        # The product can round up to the total: the last word of positive probability is meant.
        drawn = torch.minimum(drawn, torch.searchsorted(cumulative, total))
        chosen = words.gather(1, drawn)[:, 0].tolist()
        if self._capture is not None:
            assert hidden is not None
            self._keep(rows, lives, hidden, (log_norm, threshold))
        for row, live, token in zip(rows, lives, chosen, strict=True):
            live.tokens.append(token)
            stopped = token in self.target.eos_token_ids
            if stopped or len(live.tokens) == self.settings.max_new_tokens:
                yield self._finish(row, live, "stop" if stopped else "length")

    def _keep(
        self, rows: list[int], lives: list[_Row], hidden: Tensor, scalars: tuple[Tensor, Tensor]
    ) -> None:
        assert self._capture is not None
        index = torch.tensor(rows)
        at = torch.tensor([len(live.request.prompt_ids) + len(live.tokens) - 1 for live in lives])
        self._capture.hidden[index, at] = hidden.to("cpu", torch.bfloat16)
        self._capture.log_norm[index, at] = scalars[0].cpu()
        self._capture.threshold[index, at] = scalars[1].cpu()

    def _finish(self, row: int, live: _Row, reason: str) -> Response:
        self._live[row] = None
        prompt = live.request.prompt_ids
        features = None
        if self._capture is not None:
            features = self._capture.take(
                row, len(prompt), len(live.tokens), self.settings.sampling
            )
        return Response(
            request_id=live.request.request_id,
            prompt_ids=prompt,
            token_ids=live.tokens,
            finish_reason=reason,
            features=features,
        )

    def _shrink(self) -> None:
        """Drop idle rows once no request waits: the last responses need not carry a full batch."""
        busy = [row for row, live in enumerate(self._live) if live is not None]
        if len(busy) * 4 > len(self._live) * 3:
            return
        self._rows.rows.keep(busy)
        self._live = [self._live[row] for row in busy]
        if self._capture is not None:
            self._capture.keep(busy)


def _alike(requests: list[Request], window: int) -> list[Request]:
    """The requests in an order in which prompts of about one length follow each other.

    Rows that start together are padded to the longest of them. Only within `window` requests, so
    that a run that is stopped has not left the long ones to the end.
    """
    ordered = []
    for start in range(0, len(requests), window):
        part = requests[start : start + window]
        ordered += sorted(part, key=lambda request: len(request.prompt_ids))
    return ordered


def _check_prompt(request: Request, most: int) -> None:
    count = len(request.prompt_ids)
    if not 1 <= count <= most:
        raise UserError(
            f"prompt {request.request_id}",
            f"{count} tokens",
            f"is not between 1 and max_prompt_tokens ({most})",
            "Shorten it, or allow longer prompts.",
        )
