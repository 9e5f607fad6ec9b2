"""Training prompts composed from templates, so that a corpus needs no downloaded data set.

The texts live in `prompt_templates/<kind>.toml`; this module only draws from them. A file has
`[templates]` (groups of texts), `[slots]` (lists of values) and `[records.<slot>]` (rows whose
fields belong together). `shared.toml` holds slots that every kind may use.

A hole in a text is `{{slot}}`, with these additions:

- `{{slot#key}}` is the same value wherever the key returns in one prompt;
- `{{slot.field}}` is one field of a record;
- `{{a:slot}}`, `{{cap:slot}}`, `{{s:slot}}`, `{{ing:slot}}` add an article, a capital letter, or
  put the first verb into the third person or the gerund;
- `{{int:3-40}}` and `{{int:3-40#key}}` are whole numbers, both ends included.
"""

import functools
import hashlib
import random
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any

DEFAULT_MIX: Mapping[str, float] = {
    "code": 0.35,
    "creative": 0.25,
    "chat": 0.12,
    "explanation": 0.12,
    "maths": 0.08,
    "extraction": 0.08,
}
KINDS = tuple(DEFAULT_MIX)

# A template whose texts are used up is passed over; this many misses in a row means that the
# whole mixture is used up, which takes a mix of one kind and hundreds of thousands of prompts.
_MAX_MISSES = 2000

_HOLE = re.compile(
    r"\{\{(?:int:(?P<low>\d+)-(?P<high>\d+)|(?:(?P<form>[a-z]+):)?(?P<slot>[a-z][a-z0-9_]*))"
    r"(?:#(?P<key>[a-z0-9]+))?(?:\.(?P<field>[a-z]+))?\}\}"
)
_VOWEL_SOUND = re.compile(r"(?!(?:uni|use|usu|eu|one\b|once|ut[ei]))[aeiou]|hour|honest|heir", re.I)
_DOUBLED = frozenset({"get", "map", "put", "run", "skip", "split", "strip", "swap", "trim", "wrap"})


@dataclass(frozen=True, kw_only=True)
class TrainingPrompt:
    """One user turn, with the kind and the template it was composed from."""

    prompt_id: str
    kind: str
    template: str
    text: str


Row = Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The texts of one kind: template id to text, and slot name to the rows it may take."""

    templates: Mapping[str, str]
    slots: Mapping[str, Sequence[Row]]


@dataclass(kw_only=True)
class _Scope:
    """What one prompt has drawn so far: keyed values, and the rows used up for each slot."""

    keyed: dict[str, Row] = field(default_factory=dict)
    used: dict[str, set[int]] = field(default_factory=dict)


def compose(
    count: int, *, seed: int = 0, mix: Mapping[str, float] | None = None
) -> Iterator[TrainingPrompt]:
    """Yield `count` prompts with distinct texts, the same ones for the same seed and mix.

    A shorter draw is a prefix of a longer one. `mix` gives kinds relative weights. ValueError
    for a negative count or a bad mix at the call, and when the mix has no further text to give.
    """
    if count < 0:
        raise ValueError(f"count is {count!r}; give a number of prompts that is 0 or more")
    weights = _checked(DEFAULT_MIX if mix is None else mix)
    return _draw(count, random.Random(seed), weights)


def template_ids() -> dict[str, list[str]]:
    """Return the template ids of every kind, in the order of the files."""
    return {kind: list(_load(kind).templates) for kind in KINDS}


def _checked(mix: Mapping[str, float]) -> dict[str, float]:
    for kind, weight in mix.items():
        if kind not in KINDS:
            raise ValueError(f"mix names the kind {kind!r}; use only {', '.join(KINDS)}")
        if not 0 <= weight < float("inf"):
            raise ValueError(f"mix[{kind!r}] is {weight!r}; give a finite weight of 0 or more")
    weights = {kind: mix[kind] for kind in KINDS if mix.get(kind, 0) > 0}
    if not weights:
        raise ValueError(f"mix is {dict(mix)!r}; give at least one kind a weight above 0")
    return weights


def _draw(count: int, rng: random.Random, weights: Mapping[str, float]) -> Iterator[TrainingPrompt]:
    decks: dict[str, list[str]] = {kind: [] for kind in weights}
    seen: set[bytes] = set()
    misses = 0
    while len(seen) < count:
        (kind,) = rng.choices(list(weights), list(weights.values()))
        deck = decks[kind]
        # Dealing from a shuffled deck, rather than drawing freely, bounds a template's share.
        if not deck:
            deck.extend(_load(kind).templates)
            rng.shuffle(deck)
        template = deck.pop()
        text = _expand(_load(kind).templates[template], _load(kind).slots, rng, _Scope()).strip()
        digest = hashlib.sha256(text.encode()).digest()
        if digest in seen:
            misses += 1
            if misses > _MAX_MISSES:
                raise ValueError(
                    f"count is {count!r} but the mix gives only {len(seen)} distinct prompts; "
                    "lower count or add kinds to mix"
                )
            continue
        misses = 0
        prompt_id = f"train-{len(seen):06d}-{digest.hex()[:8]}"
        seen.add(digest)
        yield TrainingPrompt(prompt_id=prompt_id, kind=kind, template=template, text=text)


def _expand(
    text: str, slots: Mapping[str, Sequence[Row]], rng: random.Random, scope: _Scope
) -> str:
    def fill(hole: re.Match[str]) -> str:
        row = _row(hole, slots, rng, scope)
        value = _expand(row[hole["field"] or "value"], slots, rng, scope)
        return _inflect(hole["form"], value)

    return _HOLE.sub(fill, text)


def _row(
    hole: re.Match[str], slots: Mapping[str, Sequence[Row]], rng: random.Random, scope: _Scope
) -> Row:
    key = hole["key"] and f"{hole['slot'] or 'int'}#{hole['key']}"
    if key and key in scope.keyed:
        return scope.keyed[key]
    if hole["slot"]:
        row = _fresh(hole["slot"], slots[hole["slot"]], rng, scope)
    else:
        row = {"value": str(rng.randint(int(hole["low"]), int(hole["high"])))}
    if key:
        # A value with holes of its own is settled now, or its next use would differ.
        row = {name: _expand(value, slots, rng, scope) for name, value in row.items()}
        scope.keyed[key] = row
    return row


def _fresh(slot: str, rows: Sequence[Row], rng: random.Random, scope: _Scope) -> Row:
    """Draw a row that this prompt has not used yet, while the slot still has one."""
    used = scope.used.setdefault(slot, set())
    if len(used) >= len(rows):
        used.clear()
    index = rng.randrange(len(rows))
    while index in used:
        index = rng.randrange(len(rows))
    used.add(index)
    return rows[index]


def _inflect(form: str | None, value: str) -> str:
    if form is None:
        return value
    if form == "a":
        return ("an " if _VOWEL_SOUND.match(value) else "a ") + value
    if form == "cap":
        return value[:1].upper() + value[1:]
    verb, space, rest = value.partition(" ")
    if form == "s":
        return _third_person(verb) + space + rest
    if form == "ing":
        return _gerund(verb) + space + rest
    raise ValueError(f"a template uses the form {form!r}; use a, cap, s or ing")


def _third_person(verb: str) -> str:
    if re.search(r"(?:s|x|z|ch|sh|o)$", verb):
        return verb + "es"
    if re.search(r"[^aeiou]y$", verb):
        return verb[:-1] + "ies"
    return verb + "s"


def _gerund(verb: str) -> str:
    if verb in _DOUBLED:
        return verb + verb[-1] + "ing"
    return re.sub(r"(?<=[^e])e$", "", verb) + "ing"


@functools.cache
def _load(kind: str) -> _Kind:
    """Read one kind's file; ValueError when a text has a hole that no slot or field can fill."""
    own, shared = _parse(kind), _parse("shared")
    templates = {
        f"{kind}-{group}-{number:02d}": text
        for group, texts in own["templates"].items()
        for number, text in enumerate(texts, start=1)
    }
    slots: dict[str, list[Row]] = {}
    for source in (shared, own):
        for name, values in source.get("slots", {}).items():
            slots[name] = [{"value": value} for value in values]
        for name, table in source.get("records", {}).items():
            fields = table["fields"]
            slots[name] = [dict(zip(fields, row, strict=True)) for row in table["rows"]]
    values = (value for rows in slots.values() for row in rows for value in row.values())
    for text in (*templates.values(), *values):
        _check_holes(kind, text, slots)
    return _Kind(templates=templates, slots=slots)


def _check_holes(kind: str, text: str, slots: Mapping[str, Sequence[Row]]) -> None:
    if text.count("{{") != len(_HOLE.findall(text)):
        raise ValueError(f"{kind}.toml has the text {text!r}; correct its malformed hole")
    for hole in _HOLE.finditer(text):
        if hole["slot"] and (hole["field"] or "value") not in slots.get(hole["slot"], [{}])[0]:
            raise ValueError(f"{kind}.toml has the hole {hole[0]!r}; define that slot or field")


def _parse(name: str) -> dict[str, Any]:
    source = files("sparksmith.distill").joinpath("prompt_templates", f"{name}.toml")
    return tomllib.loads(source.read_text(encoding="utf-8"))
