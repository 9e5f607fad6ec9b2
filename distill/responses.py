"""From prompts to responses on disk: the work of `sparksmith generate`.

Whatever stops it, the next call with the same writer's folder goes on where the disk ends.
"""

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from transformers import PreTrainedTokenizerBase

from sparksmith.distill.generation import BatchGenerator, GenerationSettings, Request, Response
from sparksmith.distill.shards import ResponseRow, ShardWriter
from sparksmith.draft.errors import UserError
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.loading import render_prompt
from sparksmith.verify.prompts import Prompt
from sparksmith.verify.rows import supports_rows
from sparksmith.verify.target import TransformersTarget

DEFAULT_PROMPT_TOKENS = 512

# Finished responses wait for this many of them, or this long, before the disk is asked to keep
# them: waiting for a disk costs milliseconds.
_FLUSH_ROWS = 16
_FLUSH_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class TokenizedPrompt:
    prompt: Prompt
    prompt_ids: list[int]


@dataclass(kw_only=True)
class ResponseCounts:
    """How many responses there are, their tokens, and how they ended."""

    responses: int = 0
    tokens: int = 0
    prompt_tokens: int = 0
    finish_reasons: dict[str, int] = field(default_factory=dict)
    categories: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Watch:
    """What a caller hears and wants while responses are generated.

    `on_progress` hears how many responses were finished and how many tokens made since it was
    last called; `on_response` hears each response, with its features when `capture` is set (rows
    only). When `stop` turns true no further response begins.
    """

    on_progress: Callable[[int, int], None] = lambda responses, tokens: None
    on_response: Callable[[Response], None] = lambda response: None
    stop: Callable[[], bool] = lambda: False
    capture: bool = False


def tokenize_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], *, max_prompt_tokens: int
) -> tuple[list[TokenizedPrompt], int]:
    """The prompts in the chat template, and how many are longer than `max_prompt_tokens`.

    Raises UserError when every prompt is too long.
    """
    kept, shortest = [], 0
    for prompt in prompts:
        ids = render_prompt(tokenizer, prompt.messages)
        shortest = min(shortest or len(ids), len(ids))
        if len(ids) <= max_prompt_tokens:
            kept.append(TokenizedPrompt(prompt=prompt, prompt_ids=ids))
    if not kept:
        raise UserError(
            "--max-prompt-tokens",
            max_prompt_tokens,
            f"leaves no prompt (the shortest of {len(prompts)} has {shortest} tokens)",
            f"Use at least {shortest}, or shorter prompts.",
        )
    return kept, len(prompts) - len(kept)


def prompt_limit(
    target: TransformersTarget, max_prompt_tokens: int | None, *, max_new_tokens: int
) -> int:
    """The longest prompt taken: as asked, else 512 or what the target's context leaves.

    Raises UserError when prompt and response together would not fit the target.
    """
    room = target.max_length - max_new_tokens
    if room < 1 or (max_prompt_tokens or 0) > room:
        asked = f" and --max-prompt-tokens {max_prompt_tokens}" if max_prompt_tokens else ""
        raise UserError(
            "--max-new-tokens",
            max_new_tokens,
            f"{asked} exceed the target's context of {target.max_length} tokens".strip(),
            f"Use less than {target.max_length} together.",
        )
    return max_prompt_tokens or min(DEFAULT_PROMPT_TOKENS, room)


def generate_responses(
    target: TransformersTarget,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[TokenizedPrompt],
    settings: GenerationSettings,
    writer: ShardWriter,
    watch: Watch,
) -> None:
    """Write a response to every prompt that has none in the folder yet.

    A response depends on its prompt, the sampling, the seed and the target alone
    (rounding aside), so a run that was interrupted ends with the same rows as one that was not.
    """
    waiting = {p.prompt.prompt_id: p for p in prompts if p.prompt.prompt_id not in writer.written}
    requests = [
        Request(request_id=name, prompt_ids=prompt.prompt_ids) for name, prompt in waiting.items()
    ]
    pending: list[ResponseRow] = []
    flushed = time.monotonic()

    def flush() -> None:
        nonlocal flushed
        rows = pending.copy()
        pending.clear()
        if rows:
            writer.append(rows)
        flushed = time.monotonic()

    try:
        for response in _responses(target, settings, requests, watch):
            pending.append(_row(tokenizer, waiting[response.request_id].prompt, response))
            watch.on_response(response)
            watch.on_progress(1, 0)
            if len(pending) >= _FLUSH_ROWS or time.monotonic() - flushed > _FLUSH_SECONDS:
                flush()
    finally:
        flush()
    writer.seal()


def _responses(
    target: TransformersTarget,
    settings: GenerationSettings,
    requests: Sequence[Request],
    watch: Watch,
) -> Iterator[Response]:
    if not requests:
        return

    def on_tokens(count: int) -> None:
        watch.on_progress(0, count)

    if supports_rows(target.model):
        longest = max(len(request.prompt_ids) for request in requests)
        generator = BatchGenerator(
            target, settings, max_prompt_tokens=longest, capture=watch.capture
        )
        yield from generator.run(requests, on_tokens, watch.stop)
        return
    # Recurrent, hybrid and sliding-window targets have caches that rows do not model.
    for request in requests:
        if watch.stop():
            return
        yield one_response(target, settings, request, on_tokens)


def one_response(
    target: TransformersTarget,
    settings: GenerationSettings,
    request: Request,
    on_tokens: Callable[[int], None] = lambda count: None,
) -> Response:
    """A response by the decode loop, one stream at a time: right for every target, and slow."""
    digest = hashlib.sha256(f"{settings.seed}:{request.request_id}".encode()).digest()
    result = decode(
        target,
        None,
        request.prompt_ids,
        DecodeSettings(
            sampling=settings.sampling,
            max_new_tokens=settings.max_new_tokens,
            num_tokens=0,
            seed=int.from_bytes(digest[:7]),
        ),
        on_tokens=lambda tokens, _kept: on_tokens(len(tokens)),
    )
    return Response(
        request_id=request.request_id,
        prompt_ids=request.prompt_ids,
        token_ids=result.token_ids,
        finish_reason=result.finish_reason,
    )


def _row(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, response: Response) -> ResponseRow:
    return ResponseRow(
        request_id=response.request_id,
        category=prompt.category,
        messages=[dict(message) for message in prompt.messages],
        prompt_ids=response.prompt_ids,
        token_ids=response.token_ids,
        text=tokenizer.decode(response.token_ids, skip_special_tokens=True),
        finish_reason=response.finish_reason,
    )


def count_responses(rows: Iterable[ResponseRow]) -> ResponseCounts:
    """Add up responses, such as those of `shards.read_responses`."""
    counts = ResponseCounts()
    for row in rows:
        counts.responses += 1
        counts.tokens += len(row.token_ids)
        counts.prompt_tokens += len(row.prompt_ids)
        for tally, name in (
            (counts.finish_reasons, row.finish_reason),
            (counts.categories, row.category or "none"),
        ):
            tally[name] = tally.get(name, 0) + 1
    return counts
