"""Prompts from a JSON lines file, whichever of the public layouts it is in.

Only the conversation up to a user turn is a prompt: later turns of a set without recorded
replies (MT-Bench, Spec-Bench) depend on what the model answered, so they are never guessed.
"""

import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from sparksmith.draft.errors import UserError

Message = dict[str, str]
Turns = Literal["first", "all", "whole"]

# What the public files of SPEED-Bench hold where a source may not be redistributed.
PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED"
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
}
ID_FIELDS = ("prompt_id", "task_id", "question_id", "unique_id", "id")
CATEGORY_FIELDS = ("workload", "category", "subset")
LAYOUTS = "messages, conversations, turns, prompt, question, problem, or text"


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One conversation that ends with a user turn, for the target's chat template; or, read as
    "whole", its turns but the assistant's.

    `messages` are {"role", "content"} with roles system, user, assistant, tool; `category` is
    the row's own label (workload, category or subset), None where it has none.
    """

    prompt_id: str
    messages: tuple[Message, ...]
    category: str | None = None


class _BadRowError(ValueError):
    """What is wrong with a row, and what to do; `read_prompts` adds the place."""

    def __init__(self, value: object, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.value = value
        self.problem = problem
        self.remedy = remedy


def read_prompts(path: Path, *, turns: Turns = "first", limit: int | None = None) -> list[Prompt]:
    """Read prompts from JSON lines; blank lines are skipped, rows of several layouts may mix.

    Layouts: {"messages": [{"role", "content"}]}, {"conversations": [{"from" | "role",
    "value" | "content"}]}, {"turns": [str]} (MT-Bench, Spec-Bench, SPEED-Bench), {"prompt"} and
    {"question"} (GSM8K) and {"problem"} (MATH-500) as they are, HumanEval ({"task_id", "prompt",
    "entry_point"}: the instruction is put before the code), MBPP ({"task_id", "text" | "prompt",
    "test_list"}: the tests are put after the task).

    `turns="first"` gives one prompt a row: everything up to its first user turn (with the system
    message; assistant turns before it are dropped). `turns="all"` gives one prompt a user turn,
    with the recorded replies before it; a row with several user turns and no replies is an error.
    `turns="whole"` gives one prompt a row: all user turns without any reply, for a target that
    answers each of them itself.
    `limit` stops after that many prompts.

    Raises UserError with file:line for a missing file, broken JSON, an unknown layout, an empty
    prompt, a placeholder row of SPEED-Bench, a repeated id, or a file without prompts.
    """
    prompts: list[Prompt] = []
    seen: dict[str, int] = {}
    for number, row in _rows(path):
        try:
            found = parse_row(row, default_id=f"{path.stem}:{number}", turns=turns)
        except _BadRowError as error:
            raise UserError(f"{path}:{number}", error.value, error.problem, error.remedy) from None
        for prompt in found:
            if prompt.prompt_id in seen:
                raise UserError(
                    f"{path}:{number}",
                    prompt.prompt_id,
                    f"repeats the id of line {seen[prompt.prompt_id]}",
                    "Give every row its own prompt_id, or remove the repeated row.",
                )
            seen[prompt.prompt_id] = number
            prompts.append(prompt)
            if limit is not None and len(prompts) >= limit:
                return prompts
    if not prompts:
        raise UserError(
            str(path), path.name, "holds no prompts", f"Write one JSON object a line: {LAYOUTS}."
        )
    return prompts


def _rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        file = path.open(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(
            "prompts", str(path), f"cannot be read ({error.strerror})", "Check the path."
        ) from None
    with file:
        try:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                yield number, _object(line, f"{path}:{number}")
        except UnicodeDecodeError as error:
            raise UserError(
                str(path), error.reason, "is not UTF-8 text", "Save the file as UTF-8 JSON lines."
            ) from None


def _object(line: str, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            where,
            line.strip()[:80],
            f"is not JSON ({error.msg} at column {error.colno})",
            "Repair or remove the line; a file has one JSON object a line.",
        ) from None
    if not isinstance(row, dict):
        raise UserError(
            where, line.strip()[:80], "is not a JSON object", f"Write an object: {LAYOUTS}."
        )
    return row


def parse_row(row: dict[str, Any], *, default_id: str, turns: Turns = "first") -> list[Prompt]:
    """The prompts of one row (see `read_prompts`); raises ValueError saying what is wrong."""
    messages = _messages(row)
    for message in messages:
        if PLACEHOLDER in message["content"]:
            raise _BadRowError(
                message["content"][:80],
                "is a placeholder of SPEED-Bench, not a prompt",
                "Fetch the full data with the benchmark's own prepare script, then use its output.",
            )
    prompt_id = next((str(row[f]) for f in ID_FIELDS if row.get(f) is not None), default_id)
    category = next((str(row[f]) for f in CATEGORY_FIELDS if row.get(f)), None)
    if turns == "whole":
        cut = _cuts(messages, "first")[0]
        asked = [m for m in messages if m["role"] != "assistant"]
        last = max(i for i, message in enumerate(asked) if message["role"] == "user")
        kept = tuple(_prefix(asked, max(cut, last)))
        return [Prompt(prompt_id=prompt_id, messages=kept, category=category)]
    cuts = _cuts(messages, turns)
    return [
        Prompt(
            prompt_id=prompt_id if len(cuts) == 1 else f"{prompt_id}#{index}",
            messages=tuple(_prefix(messages, cut)),
            category=category,
        )
        for index, cut in enumerate(cuts, 1)
    ]


def _cuts(messages: list[Message], turns: Literal["first", "all"]) -> list[int]:
    """Indices of the user turns at which a prompt ends."""
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise _BadRowError(
            [m["role"] for m in messages],
            "has no user turn",
            "Add a user message, or drop the row.",
        )
    if turns == "first":
        return users[:1]
    if any(later == earlier + 1 for earlier, later in itertools.pairwise(users)):
        raise _BadRowError(
            len(users),
            "user turns have no recorded replies between them",
            "Take only the first turn of each row, or give the replies as messages.",
        )
    return users


def _prefix(messages: list[Message], cut: int) -> list[Message]:
    """Messages up to `cut`, without replies that precede every user turn (cut conversations)."""
    first_user = next(i for i, message in enumerate(messages) if message["role"] == "user")
    return [
        message
        for i, message in enumerate(messages[: cut + 1])
        if i >= first_user or message["role"] == "system"
    ]


def _messages(row: dict[str, Any]) -> list[Message]:
    for name in ("messages", "conversations", "conversation"):
        if row.get(name) is not None:
            return _chat(row[name], name)
    if row.get("turns") is not None:
        turns = row["turns"]
        if not isinstance(turns, list) or not turns:
            raise _BadRowError(turns, "is not a list of user turns", 'Write "turns": ["..."].')
        if all(isinstance(turn, dict) for turn in turns):
            return _chat(turns, "turns")
        return [{"role": "user", "content": _content(turn, "turns")} for turn in turns]
    return [{"role": "user", "content": _single(row)}]


def _single(row: dict[str, Any]) -> str:
    """The user turn of a row that has one field of text."""
    for name in ("prompt", "question", "problem", "text"):
        if row.get(name) is None:
            continue
        text = _content(row[name], name)
        if name in ("prompt", "text") and isinstance(row.get("test_list"), list):
            tests = "\n".join(str(test) for test in row["test_list"])
            return f"{text}\nYour code should pass these tests:\n\n{tests}"
        if name == "prompt" and row.get("entry_point") is not None:
            return (
                "Complete the following Python function. Answer with the whole function.\n"
                f"```python\n{text.rstrip()}\n```"
            )
        return text
    raise _BadRowError(sorted(row), "is not a known layout", f"Give each row one of: {LAYOUTS}.")


def _chat(value: object, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise _BadRowError(
            value, f"in {name!r} is not a list of messages", "Write a list of role and content."
        )
    messages = []
    for entry in value:
        if not isinstance(entry, dict):
            raise _BadRowError(entry, f"in {name!r} is not a message", "Write role and content.")
        role = entry.get("role", entry.get("from"))
        if not isinstance(role, str) or role.lower() not in ROLES:
            raise _BadRowError(
                role, f"in {name!r} is not a role", f"Use one of {', '.join(sorted(ROLES))}."
            )
        content = entry.get("content", entry.get("value"))
        # Replies may be empty (a tool call); only what a prompt is made of must have text.
        if content is None and ROLES[role.lower()] == "assistant":
            content = ""
        elif ROLES[role.lower()] == "user" or content != "":
            content = _content(content, name)
        messages.append({"role": ROLES[role.lower()], "content": content})
    return messages


def _content(value: object, name: str) -> str:
    """The text of a turn: a string, or a list of {"type": "text", "text": ...} parts."""
    if isinstance(value, list):
        parts = [part.get("text") if isinstance(part, dict) else part for part in value]
        if not all(isinstance(part, str) for part in parts):
            raise _BadRowError(
                str(value)[:80], f"in {name!r} holds parts that are not text", "Keep text only."
            )
        value = "".join(str(part) for part in parts)
    if not isinstance(value, str) or not value.strip():
        raise _BadRowError(
            value, f"in {name!r} is empty or not text", "Write the prompt's text, or drop the row."
        )
    return value
