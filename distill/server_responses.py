"""Responses of a running server to whole conversations: the work of `generate --endpoint`.

Every assistant turn is the target's own: the first user turn is answered, then the second with
that answer (its reasoning included, as K3 expects) before it, and so on. One row a turn.
"""

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from sparksmith.distill.ledger import Ledger
from sparksmith.distill.shards import ResponseRow, ShardWriter
from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.endpoint import Endpoint, RequestError, ServerAnswer, sampling_options
from sparksmith.verify.loading import render_prompt
from sparksmith.verify.prompts import Prompt


@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """How a server is asked; `extra` goes into every request as it is (chat_template_kwargs)."""

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 256
    concurrency: int = 16
    seed: int = 0
    stream: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class ServerOutcome:
    """What became of the prompts: answered turns of this attempt, conversations set aside with
    their reason, those not begun because the budget was spent, and what was re-tokenised."""

    turns: int = 0
    tokens: int = 0
    retokenised: int = 0
    failed: dict[str, str] = field(default_factory=dict)
    over_budget: int = 0
    retries: int = 0


def turn_id(prompt: Prompt, number: int) -> str:
    """The request id of a conversation's turn, the first being 1."""
    several = sum(message["role"] == "user" for message in prompt.messages) > 1
    return f"{prompt.prompt_id}#{number}" if several else prompt.prompt_id


def estimated_tokens(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase | None, max_new_tokens: int
) -> tuple[int, int]:
    """Prompt tokens, and answer tokens at most, of all conversations: every turn's prompt holds
    the turns and answers before it."""
    prompt_tokens = answer_tokens = 0
    for prompt in prompts:
        history = 0
        for message in prompt.messages:
            history += _length(message["content"], tokenizer)
            if message["role"] == "user":
                prompt_tokens += history
                answer_tokens += max_new_tokens
                history += max_new_tokens
    return prompt_tokens, answer_tokens


def _answer_ids(
    tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, str]], answer: ServerAnswer
) -> list[int]:
    """The answer as the chat template writes it behind the prompt, its reasoning and its end
    included; where the template does not go on from its prompt, the text and the end token."""
    whole = {"role": "assistant", "content": answer.text}
    if answer.reasoning:
        whole["reasoning_content"] = answer.reasoning
    try:
        before = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        after = tokenizer.apply_chat_template([*messages, whole], tokenize=False)
    except (TemplateError, ValueError):
        before, after = "x", ""
    text = after.removeprefix(before).rstrip("\n") if after.startswith(before) else answer.text
    ids = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    end = tokenizer.eos_token_id
    if answer.finish_reason == "stop":
        if end is not None and ids[-1:] != [end]:
            ids.append(end)
    elif end is not None and ids[-1:] == [end]:
        # Cut short, it did not end.
        ids.pop()
    return ids


def _length(text: str, tokenizer: PreTrainedTokenizerBase | None) -> int:
    if tokenizer is None:
        # Four characters a token, and a few tokens of the template.
        return len(text) // 4 + 8
    return len(tokenizer(text, add_special_tokens=False)["input_ids"]) + 8


class ServerResponses:
    """One attempt at all conversations, several at a time."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: ServerSettings,
        writer: ShardWriter,
        ledger: Ledger,
        known: Mapping[str, ResponseRow],
        tokenizer: PreTrainedTokenizerBase | None = None,
        on_turn: Callable[[ResponseRow], None] = lambda row: None,
    ) -> None:
        """`known` are the rows that the folder holds, by their id; `tokenizer` makes ids of texts
        where the server tells none."""
        self._endpoint = endpoint
        self._settings = settings
        self._writer = writer
        self._ledger = ledger
        self._known = dict(known)
        self._tokenizer = tokenizer
        self.on_turn = on_turn
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.outcome = ServerOutcome()

    def run(self, prompts: Sequence[Prompt]) -> ServerOutcome:
        """Answer what is not answered yet. Ctrl-C, or an error of the disk, ends all requests;
        what is answered stays."""
        waiting = iter([prompt for prompt in prompts if not self._is_done(prompt)])
        running: set[Future[None]] = set()
        with ThreadPoolExecutor(self._settings.concurrency) as pool:
            try:
                while True:
                    while len(running) < self._settings.concurrency:
                        prompt = next(waiting, None)
                        if prompt is None:
                            break
                        running.add(pool.submit(self._converse, prompt))
                    if not running:
                        break
                    finished, running = wait(running, return_when=FIRST_COMPLETED)
                    for future in finished:
                        future.result()
            except BaseException:
                self._stop.set()
                self._endpoint.close()
                raise
        self._writer.seal()
        return self.outcome

    def _is_done(self, prompt: Prompt) -> bool:
        turns = sum(message["role"] == "user" for message in prompt.messages)
        return turn_id(prompt, turns) in self._known

    def _converse(self, prompt: Prompt) -> None:
        """Every turn of one conversation, from the first that has no row yet."""
        history: list[dict[str, Any]] = []
        number = 0
        for message in prompt.messages:
            history.append(dict(message))
            if message["role"] != "user":
                continue
            number += 1
            name = turn_id(prompt, number)
            row = self._known.get(name)
            if row is None:
                if self._stop.is_set():
                    return
                row = self._turn(prompt, name, history)
                if row is None:
                    return
            answer = {"role": "assistant", "content": row.text}
            if row.reasoning:
                answer["reasoning_content"] = row.reasoning
            history.append(answer)

    def _turn(self, prompt: Prompt, name: str, history: list[dict[str, Any]]) -> ResponseRow | None:
        """One answered turn, on disk; None where it is set aside."""
        settings = self._settings
        asked = sum(_length(str(message["content"]), self._tokenizer) for message in history)
        if not self._ledger.reserve(name, asked, settings.max_new_tokens):
            with self._lock:
                self.outcome.over_budget += 1
            return None
        try:
            answer = self._endpoint.complete(history, self._options(name), stream=settings.stream)
            row = self._row(prompt, name, history, answer)
        except RequestError as error:
            if self._stop.is_set():
                return None
            self._set_aside(name, error.reason)
            return None
        with self._lock:
            # The response first: a death in between counts it as lost, and loses nothing.
            self._writer.append([row])
            self._ledger.done(name, len(row.prompt_ids), len(row.token_ids))
            self.outcome.turns += 1
            self.outcome.tokens += len(row.token_ids)
            self.outcome.retries += answer.sent - 1
            self.outcome.retokenised += answer.token_ids is None
            self.on_turn(row)
        return row

    def _set_aside(self, name: str, reason: str) -> None:
        with self._lock:
            self._ledger.fail(name, reason)
            self.outcome.failed[name] = reason

    def _options(self, name: str) -> dict[str, Any]:
        settings = self._settings
        digest = hashlib.sha256(f"{settings.seed}:{name}".encode()).digest()
        seed = int.from_bytes(digest[:4])
        options = sampling_options(settings.sampling, settings.max_new_tokens, seed)
        return {**options, **settings.extra}

    def _row(
        self, prompt: Prompt, name: str, history: list[dict[str, Any]], answer: ServerAnswer
    ) -> ResponseRow:
        messages = [{"role": m["role"], "content": str(m["content"])} for m in history]
        prompt_ids, token_ids = answer.prompt_token_ids, answer.token_ids
        if prompt_ids is None or token_ids is None:
            if self._tokenizer is None:
                raise UserError(
                    "--target",
                    None,
                    "is needed: this server tells no token ids, so its texts must be tokenised",
                    "Give the target's folder or name; of it the tokenizer alone is read.",
                )
            if prompt_ids is None:
                prompt_ids = render_prompt(self._tokenizer, messages)
            if token_ids is None:
                token_ids = _answer_ids(self._tokenizer, messages, answer)
        if not token_ids:
            raise RequestError("an empty answer", answer.sent)
        return ResponseRow(
            request_id=name,
            category=prompt.category,
            messages=messages,
            prompt_ids=list(prompt_ids),
            token_ids=list(token_ids),
            text=answer.text,
            finish_reason=answer.finish_reason,
            reasoning=answer.reasoning,
        )
