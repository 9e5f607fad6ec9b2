"""What a check looks at, what it finds, and the table of all checks.

A draft that loads and then accepts nothing is the commonest fault of its kind: each check is one
way in which that has happened. The checks themselves are in `check_draft`, `check_serving` and
`probes`; each has an id, a story for `sparksmith check --explain ID`, and findings that say what
was seen, what happens at serving time, and what to do.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, get_args

from sparksmith.draft.checkpoint import own_shapes
from sparksmith.draft.config import MLA_ARCHITECTURE, DSparkConfig
from sparksmith.draft.errors import UserError
from sparksmith.draft.layouts import Layout, Piece, own_name, pieces
from sparksmith.draft.manifest import Manifest
from sparksmith.verify.serve_arguments import ServeArguments

Level = Literal["error", "warning", "note"]
"""An error breaks or ruins serving; a warning may; a note is worth knowing."""
LEVELS: tuple[Level, ...] = get_args(Level)


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as it should be."""

    check: str
    level: Level
    value: str
    """What was seen."""
    consequence: str
    """What happens at serving time if it is ignored."""
    remedy: str


@dataclass(frozen=True, kw_only=True)
class TargetFacts:
    """What the checks need to know of a target, from its configuration and tokenizer."""

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_length: int
    is_k3: bool = False
    special_tokens: Mapping[str, int] = field(default_factory=dict)
    """Begin, end and padding tokens, by their names."""
    words: frozenset[int] | None = None
    """Ids that text may contain; None where no tokenizer is at hand."""
    chat_template_sha256: str | None = None
    tokenizer_sha256: str | None = None
    revision: str | None = None


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A draft's files as they are, perhaps broken, with what is known beside them.

    `values` is its config.json, `flat` the same as the flat layouts have it (empty if it cannot
    be read as one), `shapes` its tensors, `offsets` its `d2t` if it has one.
    """

    values: Mapping[str, Any]
    flat: Mapping[str, Any]
    layout: Layout
    shapes: Mapping[str, tuple[int, ...]]
    offsets: tuple[int, ...] | None = None
    dtypes: frozenset[str] = frozenset()
    stray: tuple[str, ...] = ()
    """Other safetensors files beside the weights, which engines would load with them."""
    manifest: Manifest | None = None
    target: TargetFacts | None = None
    serve: ServeArguments | None = None
    folder: Path | None = None
    """Where the files are, if they are on a disk."""

    @cached_property
    def tensors(self) -> tuple[dict[str, Piece], list[str]]:
        """Tensors by the draft's own names, and unknown ones, as far as config.json lets one
        tell: read once for all checks."""
        try:
            config = DSparkConfig.from_json_dict(self.flat)
        except UserError:
            return {
                own_name(name): Piece(name=name, start=0, stop=shape[0] if shape else 0)
                for name, shape in self.shapes.items()
            }, []
        return pieces(self.shapes, own_shapes(config), config)

    @property
    def latent(self) -> bool:
        return self.flat.get("architectures") == [MLA_ARCHITECTURE]

    @property
    def taps(self) -> list[Any]:
        taps = self.flat.get("target_layer_ids")
        return taps if isinstance(taps, list) else []

    @property
    def tap_numbers(self) -> list[int]:
        """Those of the taps that are numbers."""
        return [tap for tap in self.taps if isinstance(tap, int) and not isinstance(tap, bool)]

    def nested(self, *keys: str) -> Mapping[str, Any]:
        """An object inside config.json; empty where there is none, or something else."""
        found: Any = self.values
        for key in keys:
            found = found.get(key) if isinstance(found, Mapping) else None
        return found if isinstance(found, Mapping) else {}

    @property
    def num_drafts(self) -> int | None:
        """How many tokens a block drafts, where block_size says it."""
        size = self.flat.get("block_size")
        if not isinstance(size, int) or isinstance(size, bool):
            return None
        return size if self.flat.get("sample_from_anchor", True) else size - 1

    def number(self, key: str) -> int | None:
        value = self.flat.get(key)
        return value if isinstance(value, int) and not isinstance(value, bool) else None


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A finding without what its check says of all of them."""

    value: object
    consequence: str
    remedy: str
    level: Level | None = None
    """Other than the check's own."""


@dataclass(frozen=True, kw_only=True)
class Check:
    """One row of the table."""

    id: str
    level: Level
    title: str
    story: str
    run: Callable[[Subject], Iterator[Seen]]

    def findings(self, subject: Subject) -> Iterator[Finding]:
        for seen in self.run(subject):
            yield Finding(
                check=self.id,
                level=seen.level or self.level,
                value=str(seen.value),
                consequence=seen.consequence,
                remedy=seen.remedy,
            )


class Checks:
    """A table of checks, filled by decorated functions; the function's docstring is the story."""

    def __init__(self) -> None:
        self.by_id: dict[str, Check] = {}

    def __call__(
        self, identifier: str, level: Level, title: str
    ) -> Callable[[Callable[[Subject], Iterator[Seen]]], Callable[[Subject], Iterator[Seen]]]:
        def register(
            run: Callable[[Subject], Iterator[Seen]],
        ) -> Callable[[Subject], Iterator[Seen]]:
            assert identifier not in self.by_id
            assert run.__doc__
            story = "\n".join(line.strip() for line in run.__doc__.strip().splitlines())
            self.by_id[identifier] = Check(
                id=identifier, level=level, title=title, story=story, run=run
            )
            return run

        return register


def worst_first(found: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes."""
    return sorted(found, key=lambda finding: LEVELS.index(finding.level))
