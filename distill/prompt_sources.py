"""Where the prompts to generate from come from: a file, a data set, or the packaged templates."""

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sparksmith.distill.prompts import compose
from sparksmith.draft.errors import UserError
from sparksmith.verify.prompts import Prompt, Turns, parse_row, read_prompts


@dataclass(frozen=True, kw_only=True)
class DatasetColumn:
    """A data set of the `datasets` library: NAME, NAME:SPLIT or NAME:SPLIT:COLUMN."""

    name: str
    split: str = "train"
    column: str | None = None

    @classmethod
    def parse(cls, text: str) -> "DatasetColumn":
        """From the command line's form; UserError when it is not one."""
        name, *rest = text.split(":")
        if not name or len(rest) > 2 or not all(rest):
            raise UserError(
                "--dataset",
                text,
                "is not NAME, NAME:SPLIT or NAME:SPLIT:COLUMN",
                "Write for example org/name:train:messages.",
            )
        return cls(**dict(zip(("name", "split", "column"), (name, *rest), strict=False)))


def packaged_prompts(count: int, *, seed: int, mix: Mapping[str, float] | None) -> list[Prompt]:
    """The packaged training prompts, the same for the same seed and mix.

    Raises UserError for a mix or count that the templates cannot give.
    """
    try:
        composed = list(compose(count, seed=seed, mix=mix))
    except ValueError as error:
        raise UserError(
            "--mix", dict(mix or {}), f"does not work ({error})", "Correct --mix or --count."
        ) from None
    return [
        Prompt(
            prompt_id=prompt.prompt_id,
            messages=({"role": "user", "content": prompt.text},),
            category=prompt.kind,
        )
        for prompt in composed
    ]


def file_prompts(path: Path, count: int | None, turns: Turns = "first") -> list[Prompt]:
    """The first `count` prompts of a JSON lines file (see `verify.prompts.read_prompts`)."""
    return read_prompts(path, turns=turns, limit=count)


def dataset_prompts(source: DatasetColumn, count: int | None) -> list[Prompt]:
    """The first `count` prompts of a data set, streamed: no more of it is fetched.

    Raises UserError when it cannot be loaded, or a row is in no known layout.
    """
    from datasets import load_dataset

    try:
        rows: Iterable[Any] = load_dataset(source.name, split=source.split, streaming=True)
        taken = list(itertools.islice(rows, count))
    except (OSError, ValueError, RuntimeError, ImportError) as error:
        raise UserError(
            "--dataset",
            source.name,
            f"cannot be loaded ({type(error).__name__}: {_first_line(error)})",
            "Check the name, the split and the network, or give a file with --prompts.",
        ) from error
    return [_dataset_prompt(source, number, row) for number, row in enumerate(taken)]


def _dataset_prompt(source: DatasetColumn, number: int, row: dict[str, Any]) -> Prompt:
    where = f"{source.name}:{source.split}:{number}"
    if source.column is not None:
        if source.column not in row:
            raise UserError(
                "--dataset", source.column, "is not a column", f"Use one of {sorted(row)}."
            )
        value = row[source.column]
        layout = "prompt" if isinstance(value, str) else "messages"
        if isinstance(value, list) and value and isinstance(value[0], str):
            layout = "turns"
        row = {layout: value}
    try:
        prompt = parse_row(row, default_id=where)[0]
    except ValueError as error:
        raise UserError(
            where,
            str(row)[:80],
            f"is not a prompt ({error})",
            "Name its column: NAME:SPLIT:COLUMN.",
        ) from None
    # A data set's own ids need not be distinct; the place in it is, and the text guards the place.
    digest = hashlib.sha256(json.dumps(prompt.messages).encode()).hexdigest()
    return Prompt(
        prompt_id=f"{where}-{digest[:8]}", messages=prompt.messages, category=prompt.category
    )


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """SHA-256 over ids and messages, in order."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(f"{json.dumps([prompt.prompt_id, prompt.messages])}\n".encode())
    return digest.hexdigest()


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0].rstrip(".")
