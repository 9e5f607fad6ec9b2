"""The prompts of an evaluation: packaged workloads by name, or a file in a public set's layout."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import as_file, files
from pathlib import Path

from sparksmith.draft.errors import UserError
from sparksmith.verify.prompts import Message, Prompt, read_prompts


@dataclass(frozen=True, kw_only=True)
class EvalPrompt:
    """A prompt and the workload it is reported under; (workload, prompt_id) is unique."""

    prompt_id: str
    workload: str
    messages: tuple[Message, ...]


def known_workloads() -> list[str]:
    """Names of the packaged workloads, sorted."""
    folder = files(__package__) / "workloads"
    if not folder.is_dir():
        return []
    return sorted(
        entry.name.removesuffix(".jsonl")
        for entry in folder.iterdir()
        if entry.name.endswith(".jsonl")
    )


def load_workloads(
    names: Sequence[str] | None = None, *, limit: int | None = None
) -> list[EvalPrompt]:
    """Prompts of packaged workloads, `limit` a workload (its first ones), all by default.

    Raises UserError for a name that is not packaged (the known ones are listed) or twice given.
    """
    check_limit(limit)
    known = known_workloads()
    chosen = known if names is None else list(names)
    for name in chosen:
        if name not in known:
            raise UserError(
                "workload", name, "is not a packaged workload", f"Choose from {', '.join(known)}."
            )
        if chosen.count(name) > 1:
            raise UserError("workload", name, "is named twice", "Name each workload once.")
    prompts: list[EvalPrompt] = []
    for name in chosen:
        with as_file(files(__package__) / "workloads" / f"{name}.jsonl") as path:
            prompts += [_under(prompt, name) for prompt in read_prompts(path, limit=limit)]
    return prompts


def load_file(
    path: Path, *, workload: str | None = None, limit: int | None = None
) -> list[EvalPrompt]:
    """Prompts of a JSON lines file (layouts: `verify.prompts.read_prompts`), first turns only.

    Each row is reported under `workload`, else its own category, else the file's name; `limit`
    is the number of prompts of each workload. Raises UserError naming file:line.
    """
    check_limit(limit)
    kept: list[EvalPrompt] = []
    counts: dict[str, int] = {}
    for prompt in read_prompts(path):
        name = workload or prompt.category or path.name.split(".")[0]
        counts[name] = counts.get(name, 0) + 1
        if limit is None or counts[name] <= limit:
            kept.append(_under(prompt, name))
    return kept


def check_limit(limit: int | None) -> None:
    """Raise UserError unless `limit` is None or at least 1."""
    if limit is not None and limit < 1:
        raise UserError("limit", limit, "is not a number of prompts", "Give 1 or more.")


def _under(prompt: Prompt, workload: str) -> EvalPrompt:
    return EvalPrompt(prompt_id=prompt.prompt_id, workload=workload, messages=prompt.messages)
