"""sparksmith.json: what a draft was made for, beside its config.json.

A draft of the right shapes for the wrong features loads without a word and accepts nothing. What
config.json cannot say is said here: the target and its revision, the template of the text it was
trained on, which stream was tapped, how far positions were trained, what it reached and on what.
"""

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Literal, get_args

from torch import Tensor

from sparksmith.draft.config import ARCHITECTURE, MLA_ARCHITECTURE, DSparkConfig
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import write_json

MANIFEST_FILE = "sparksmith.json"
FORMAT_VERSION = 1
CONVENTION = "output_of_layer"
"""Tap i is the output of the target's 0-based layer i, before any final norm."""

Stream = Literal["residual", "prefix_sum", "attn_res_mixture"]
"""What "the output of a layer" is: the residual stream of an ordinary target; with Attention
Residuals (K3) the running prefix sum, or the mixture that the next layer consumes."""


@dataclass(frozen=True, kw_only=True)
class TargetIdentity:
    """The target that a draft was trained for; None where it is not known."""

    name: str | None = None
    revision: str | None = None
    tokenizer_sha256: str | None = None
    chat_template_sha256: str | None = None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A figure that the draft reached: `what` on `on`, such as an acceptance length on code."""

    what: str
    value: float
    on: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The content of sparksmith.json.

    `trained_length` is the longest sequence in training, in tokens. `thinking_modes` are those of
    the training text. `vocabulary_sha256` identifies the reduced vocabulary's words. `calibration`
    holds a temperature for each slot's confidence, or None. `assumed` lists fields that nobody
    stated: they were concluded from config.json, and stay marked as such in what is written.
    """

    target: TargetIdentity = field(default_factory=TargetIdentity)
    taps: tuple[int, ...]
    stream: Stream = "residual"
    mask_token_id: int
    block_size: int
    sample_from_anchor: bool
    is_causal: bool
    layout: str
    rope: Mapping[str, Any]
    trained_length: int | None = None
    thinking_modes: tuple[str, ...] = ()
    vocabulary_sha256: str | None = None
    calibration: tuple[float, ...] | None = None
    figures: tuple[Figure, ...] = ()
    assumed: tuple[str, ...] = ()

    @classmethod
    def of(cls, config: DSparkConfig, target_ids: Tensor | None, **known: Any) -> "Manifest":
        """The manifest of a draft of `config`; `known` are the fields that it does not give."""
        values = config.to_json_dict()
        words = target_ids if config.reduced_vocabulary else None
        return cls(
            taps=config.target_layer_ids,
            mask_token_id=config.mask_token_id,
            block_size=config.block_size,
            sample_from_anchor=config.sample_from_anchor,
            is_causal=config.is_causal,
            layout=ARCHITECTURE if config.mla is None else MLA_ARCHITECTURE,
            rope=values["rope_parameters"],
            vocabulary_sha256=None if words is None else vocabulary_hash(words),
            **known,
        )

    def to_json_dict(self) -> dict[str, Any]:
        """`assumed` is written where there is anything in it."""
        values = asdict(self)
        if not self.assumed:
            del values["assumed"]
        taps = {"layers": list(self.taps), "convention": CONVENTION, "stream": values.pop("stream")}
        return {"format_version": FORMAT_VERSION, **values, "taps": taps}

    @classmethod
    def from_json_dict(cls, values: Mapping[str, Any]) -> "Manifest":
        """UserError names the key that is missing, unknown, unfit or of another version."""
        rest = dict(values)
        version = rest.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise _unfit("format_version", version, f"is not {FORMAT_VERSION}")
        taps = rest.pop("taps", None)
        if (
            not isinstance(taps, Mapping)
            or not isinstance(taps.get("layers"), list)
            or not all(map(_is_count, taps["layers"]))
        ):
            raise _unfit("taps", taps, "does not list the layers")
        if taps.get("convention") != CONVENTION:
            raise _unfit("taps.convention", taps.get("convention"), f"is not {CONVENTION}")
        stream = taps.get("stream", "residual")
        if stream not in get_args(Stream):
            raise _unfit("taps.stream", stream, f"is none of {', '.join(get_args(Stream))}")
        known = {field.name for field in fields(cls)} - {"taps", "stream"}
        for name in rest.keys() - known:
            raise _unfit(name, rest[name], "is not a key of this format")
        for name, value in rest.items():
            fits, kind = _KINDS[name]
            if not fits(value):
                raise _unfit(name, value, f"is not {kind}")
        try:
            rest["target"] = TargetIdentity(**rest.get("target", {}))
            rest["figures"] = tuple(Figure(**figure) for figure in rest.get("figures", ()))
            for name in ("thinking_modes", "calibration", "assumed"):
                if rest.get(name) is not None:
                    rest[name] = tuple(rest[name])
            return cls(taps=tuple(taps["layers"]), stream=stream, **rest)
        except TypeError as error:
            raise _unfit("sparksmith.json", sorted(values), f"is incomplete ({error})") from None


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    # No JSON file can hold another.
    return isinstance(value, int | float) and not isinstance(value, bool) and _is_finite(value)


def _is_finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def _are_words(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(word, str) for word in value)


def _is_identity(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        word is None or isinstance(word, str) for word in value.values()
    )


def _is_rope(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(part, str) or part is None or _is_number(part) for part in value.values()
    )


def _are_figures(value: object) -> bool:
    return isinstance(value, list) and all(
        isinstance(figure, Mapping)
        and isinstance(figure.get("what"), str)
        and isinstance(figure.get("on"), str)
        and _is_number(figure.get("value"))
        for figure in value
    )


_COUNT: tuple[Callable[[object], bool], str] = (_is_count, "a whole number")
_SWITCH: tuple[Callable[[object], bool], str] = (
    lambda value: isinstance(value, bool),
    "true or false",
)
# What the value of each key must be, and how that is said.
_KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    "target": (_is_identity, "an object of names and hashes"),
    "mask_token_id": _COUNT,
    "block_size": _COUNT,
    "sample_from_anchor": _SWITCH,
    "is_causal": _SWITCH,
    "layout": (lambda value: isinstance(value, str), "a name"),
    "rope": (_is_rope, "an object of settings"),
    "trained_length": (lambda value: value is None or _is_count(value), "a whole number"),
    "thinking_modes": (_are_words, "a list of names"),
    "vocabulary_sha256": (lambda value: value is None or isinstance(value, str), "a hash"),
    "calibration": (
        lambda value: value is None or (isinstance(value, list) and all(map(_is_number, value))),
        "a list of numbers",
    ),
    "figures": (_are_figures, "a list of what was reached, its value and on what"),
    "assumed": (_are_words, "a list of names"),
}


def for_target(manifest: Manifest, name: str | None) -> Manifest:
    """The same, with the target's name where it was not known."""
    if name is None or manifest.target.name is not None:
        return manifest
    return replace(
        manifest,
        target=replace(manifest.target, name=name),
        assumed=tuple(one for one in manifest.assumed if one != "target"),
    )


def write_manifest(manifest: Manifest, folder: Path) -> None:
    """Write sparksmith.json beside the draft in `folder`, atomically."""
    write_json(folder / MANIFEST_FILE, manifest.to_json_dict())


def read_manifest(
    folder: Path, config: DSparkConfig, target_ids: Tensor | None, *, verified: bool = True
) -> Manifest:
    """The manifest in `folder`; without one, what config.json says of it, with the rest assumed.

    Raises UserError where it is broken or, unless `verified` is False, contradicts config.json.
    """
    path = folder / MANIFEST_FILE
    concluded = Manifest.of(
        config, target_ids, assumed=("target", "taps.stream", "trained_length", "thinking_modes")
    )
    if not path.is_file():
        return concluded
    stored = Manifest.from_json_dict(_stored(path))
    if not verified:
        return stored
    for name in (
        "taps",
        "mask_token_id",
        "block_size",
        "sample_from_anchor",
        "is_causal",
        "layout",
        "rope",
        "vocabulary_sha256",
    ):
        if getattr(stored, name) != getattr(concluded, name):
            raise UserError(
                f"{MANIFEST_FILE} {name}",
                getattr(stored, name),
                f"is not what the draft beside it has, {getattr(concluded, name)!r}",
                "Put the files of one draft together, or delete the manifest.",
            )
    return stored


def _stored(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unfit(str(path), "its text", f"is not JSON ({error})") from None
    except OSError as error:
        raise _unfit(str(path), "its text", f"cannot be read ({error.strerror})") from None
    if not isinstance(values, Mapping):
        raise _unfit(str(path), values, "is not an object")
    return values


def stated_stream(folder: Path) -> str | None:
    """The stream of a manifest in `folder`, where it is not the one of ordinary targets; UserError
    where the manifest is broken."""
    path = folder / MANIFEST_FILE
    if not path.is_file():
        return None
    stream = Manifest.from_json_dict(_stored(path)).stream
    return None if stream == "residual" else stream


def vocabulary_hash(target_ids: Tensor) -> str:
    """SHA-256 of the reduced vocabulary's target ids in order: drafts of equally many but other
    words are other drafts."""
    text = ",".join(map(str, target_ids.tolist()))
    return hashlib.sha256(text.encode()).hexdigest()


def _unfit(name: str, value: object, problem: str) -> UserError:
    return UserError(
        f"{MANIFEST_FILE} {name}" if name != MANIFEST_FILE else name,
        value,
        problem,
        "Delete the manifest (config.json then says what it can), or save the draft again.",
    )
