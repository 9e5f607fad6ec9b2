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


def nucleus(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kept words of each row, most likely first, without a dense pass over the vocabulary.

    Returns (words [N, k], probs [N, k], log_norm [N], threshold [N]); probs are those of
    `draft.sampling.probabilities`, zero beyond the kept words. k grows until every row's nucleus
    fits.
    """
    scaled = logits.float() / max(sampling.temperature, 1e-6)
    if sampling.greedy:
        top, words = scaled.max(-1, keepdim=True)
        return words, torch.ones_like(top), top[:, 0], top[:, 0]
    vocab = scaled.shape[-1]
    if sampling.top_k:
        kth = scaled.topk(min(sampling.top_k, vocab)).values[..., -1:]
        scaled = scaled.masked_fill(scaled < kth, float("-inf"))
    total = scaled.logsumexp(-1)
    if sampling.top_p >= 1.0 and not sampling.top_k:
        words = torch.arange(vocab).expand_as(scaled)
        return words, (scaled - total[:, None]).exp(), total, scaled.amin(-1)
    width = 64
    while True:
        top, words = scaled.topk(min(width, vocab))
        probs = (top - total[:, None]).exp()
        if width >= vocab or bool((probs.sum(-1) > sampling.top_p + 1e-5).all()):
            break
        width *= 8
    before = probs.cumsum(-1) - probs
    kept = (before < sampling.top_p) & (probs > 0)
    probs = probs.masked_fill(~kept, 0.0)
    mass = probs.sum(-1)
    # Halfway between the last word kept and the first one dropped, so that logits recomputed with
    # other rounding fall on the same side.
    count = kept.sum(-1, keepdim=True)
    last = top.gather(1, count - 1)
    dropped = top.gather(1, count.clamp(max=top.shape[-1] - 1))
    threshold = torch.where(count < top.shape[-1], (last + dropped) / 2, last - 1e-3)[:, 0]
    return words, probs / mass[:, None], total + mass.log(), threshold


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

    def take(self, row: int, prompt_length: int, num_tokens: int) -> SampleFeatures:
        end = prompt_length + num_tokens - 1
        start = prompt_length - 1
        return SampleFeatures(
            taps=self.taps[row, :end].clone(),
            hidden=self.hidden[row, start:end].clone(),
            log_norm=self.log_norm[row, start:end].clone(),
            threshold=self.threshold[row, start:end].clone(),
        )


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
        self.target = target
        self.settings = settings
        self._capacity = max_prompt_tokens + settings.max_new_tokens
        self._rows = TargetRows(target.model, num_rows=settings.batch_size, capacity=self._capacity)
        self._live: list[_Row | None] = [None] * settings.batch_size
        self._capture = _Capture(target, settings.batch_size, self._capacity) if capture else None
        self._hidden: Tensor | None = None
        if capture:
            target.model.get_output_embeddings().register_forward_pre_hook(self._keep_hidden)

    def _keep_hidden(self, _module: object, inputs: tuple[Tensor, ...]) -> None:
        self._hidden = inputs[0]

    def run(
        self,
        requests: Iterable[Request],
        on_tokens: Callable[[int], None] = lambda count: None,
        stop: Callable[[], bool] = lambda: False,
    ) -> Iterator[Response]:
        """Yield responses as they finish; `on_tokens` hears how many tokens each step made.

        When `stop` turns true no further request starts, and the rows under way are finished.
        """
        waiting = deque(requests)
        while True:
            if stop():
                waiting.clear()
            free = [row for row, live in enumerate(self._live) if live is None]
            # Prefilling a few rows at once is cheaper than one at a time.
            if waiting and (len(free) >= max(1, len(self._live) // 16)):
                starting = [waiting.popleft() for _ in range(min(len(free), len(waiting)))]
                yield from self._start(free[: len(starting)], starting)
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
            assert taps is not None
            self._capture.taps[index, : taps.shape[1]] = taps.to(torch.bfloat16)
        yield from self._choose(rows, logits)

    def _step(self, on_tokens: Callable[[int], None]) -> Iterator[Response]:
        tokens = torch.tensor([live.tokens[-1] if live else 0 for live in self._live])
        # Idle rows are stepped along; their position must stay inside the buffers.
        idle = torch.tensor([live is None for live in self._live])
        self._rows.rows.lengths[idle] = 0
        positions = self._rows.rows.lengths.clone()
        logits = self._rows.step(tokens)
        taps = self.target.recorder.take()
        if self._capture is not None:
            assert taps is not None
            every = torch.arange(len(self._live))
            self._capture.taps[every, positions] = taps[:, 0].to(torch.bfloat16)
        busy = [row for row, live in enumerate(self._live) if live is not None]
        on_tokens(len(busy))
        yield from self._choose(busy, logits[busy])

    def _choose(self, rows: list[int], logits: Tensor) -> Iterator[Response]:
        words, probs, log_norm, threshold = nucleus(logits, self.settings.sampling)
        cumulative = probs.double().cumsum(-1)
        lives = [live for live in (self._live[row] for row in rows) if live is not None]
        uniforms = torch.tensor([live.uniforms[len(live.tokens)] for live in lives])
        drawn = torch.searchsorted(cumulative, (uniforms * cumulative[:, -1])[:, None], right=True)
        last_kept = (probs > 0).sum(-1, keepdim=True) - 1
        chosen = words.gather(1, torch.minimum(drawn, last_kept))[:, 0].tolist()
        if self._capture is not None:
            self._keep(rows, lives, log_norm, threshold)
        for row, live, token in zip(rows, lives, chosen, strict=True):
            live.tokens.append(token)
            stopped = token in self.target.eos_token_ids
            if stopped or len(live.tokens) == self.settings.max_new_tokens:
                yield self._finish(row, live, "stop" if stopped else "length")

    def _keep(
        self, rows: list[int], lives: list[_Row], log_norm: Tensor, threshold: Tensor
    ) -> None:
        assert self._capture is not None
        assert self._hidden is not None
        index = torch.tensor(rows)
        hidden = self._hidden if len(self._hidden) == len(rows) else self._hidden[index]
        at = torch.tensor([len(live.request.prompt_ids) + len(live.tokens) - 1 for live in lives])
        self._capture.hidden[index, at] = hidden.to(torch.bfloat16)
        self._capture.log_norm[index, at] = log_norm
        self._capture.threshold[index, at] = threshold

    def _finish(self, row: int, live: _Row, reason: str) -> Response:
        self._live[row] = None
        prompt = live.request.prompt_ids
        features = None
        if self._capture is not None:
            features = self._capture.take(row, len(prompt), len(live.tokens))
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
        index = torch.tensor(busy, dtype=torch.long)
        self._rows.rows.keep(index)
        self._live = [self._live[row] for row in busy]
        if self._capture is not None:
            for name in ("taps", "hidden", "log_norm", "threshold"):
                setattr(self._capture, name, getattr(self._capture, name)[index])
