"""What requests to a server have cost, kept on disk: a budget holds over every attempt of a run.

File format: JSON lines, appended as it happens. {"sent": id, "prompt": p, "answer": a} before a
request, with the most it may cost; {"done": id, "prompt": p, "answer": a} after it, with what the
server counted; {"failed": id, "reason": text}. A request that was sent and has neither was in
flight when a process died: it may have cost all it might, and is counted so.
"""

import json
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LEDGER_FILE = "ledger.jsonl"


@dataclass(frozen=True, kw_only=True)
class Prices:
    """Dollars for a million tokens."""

    prompt: float = 0.0
    answer: float = 0.0

    def of(self, prompt_tokens: int, answer_tokens: int) -> float:
        return (prompt_tokens * self.prompt + answer_tokens * self.answer) / 1e6


@dataclass(frozen=True, kw_only=True)
class Budget:
    """What a run may cost in all, its earlier attempts included; None is no limit."""

    tokens: int | None = None
    dollars: float | None = None
    prices: Prices = Prices()


@dataclass(frozen=True, kw_only=True)
class Spent:
    """Tokens of a run so far: those that the server counted, and those of requests whose answer
    never came, at most."""

    prompt: int = 0
    answer: int = 0
    lost_prompt: int = 0
    lost_answer: int = 0
    lost_requests: int = 0

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer + self.lost_prompt + self.lost_answer

    def dollars(self, prices: Prices) -> float:
        return prices.of(self.prompt + self.lost_prompt, self.answer + self.lost_answer)


class Ledger:
    """The costs of one run's folder. Threads may share it."""

    def __init__(self, folder: Path, budget: Budget) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.budget = budget
        self.failed: dict[str, str] = {}
        """Requests set aside in this attempt, with the reason."""
        self._path = folder / LEDGER_FILE
        self._lock = threading.Lock()
        self._flying: dict[str, tuple[int, int]] = {}
        self._prompt = self._answer = 0
        self._lost: list[tuple[int, int]] = []
        for entry in _entries(self._path):
            self._read(entry)
        # What an earlier attempt had in flight will not come any more.
        self._lost += self._flying.values()
        self._flying.clear()

    def _read(self, entry: dict[str, Any]) -> None:
        cost = int(entry.get("prompt", 0)), int(entry.get("answer", 0))
        if "sent" in entry:
            if entry["sent"] in self._flying:
                self._lost.append(self._flying[entry["sent"]])
            self._flying[entry["sent"]] = cost
        elif "done" in entry:
            self._flying.pop(entry["done"], None)
            self._prompt += cost[0]
            self._answer += cost[1]
        elif "failed" in entry:
            self._flying.pop(entry["failed"], None)
            self._prompt += cost[0]

    def spent(self) -> Spent:
        """Of all attempts so far; what is in flight now is not in it."""
        with self._lock:
            return Spent(
                prompt=self._prompt,
                answer=self._answer,
                lost_prompt=sum(prompt for prompt, _ in self._lost),
                lost_answer=sum(answer for _, answer in self._lost),
                lost_requests=len(self._lost),
            )

    def reserve(self, request_id: str, prompt_tokens: int, answer_tokens: int) -> bool:
        """Note that a request is about to be sent, which may cost so much; False, and nothing
        noted, where the budget does not hold that on top of all that is spent and in flight."""
        with self._lock:
            reserved = [*self._flying.values(), *self._lost, (prompt_tokens, answer_tokens)]
            prompt = self._prompt + sum(cost[0] for cost in reserved)
            answer = self._answer + sum(cost[1] for cost in reserved)
            budget = self.budget
            if budget.tokens is not None and prompt + answer > budget.tokens:
                return False
            if budget.dollars is not None and budget.prices.of(prompt, answer) > budget.dollars:
                return False
            self._flying[request_id] = (prompt_tokens, answer_tokens)
            self._write({"sent": request_id, "prompt": prompt_tokens, "answer": answer_tokens})
            return True

    def done(self, request_id: str, prompt_tokens: int, answer_tokens: int) -> None:
        """Note what an answered request cost."""
        with self._lock:
            self._flying.pop(request_id, None)
            self._prompt += prompt_tokens
            self._answer += answer_tokens
            self._write({"done": request_id, "prompt": prompt_tokens, "answer": answer_tokens})

    def fail(self, request_id: str, reason: str) -> None:
        """Note that a request is set aside: its prompt is counted, and no answer."""
        with self._lock:
            prompt, _ = self._flying.pop(request_id, (0, 0))
            self._prompt += prompt
            self.failed[request_id] = reason
            self._write({"failed": request_id, "reason": reason, "prompt": prompt})

    def _write(self, entry: dict[str, Any]) -> None:
        # One write a line: what a killed process has handed over, the system keeps.
        line = json.dumps(entry) + "\n"
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            os.write(descriptor, line.encode("ascii"))
        finally:
            os.close(descriptor)


def _entries(path: Path) -> list[dict[str, Any]]:
    """The whole lines; one cut short is dropped, and the file goes on behind it."""
    if not path.is_file():
        return []
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    entries = []
    for line in whole.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            entries.append(entry)
    return entries
