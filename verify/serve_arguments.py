"""A `vllm serve` command line, taken apart: what of it concerns a draft."""

import json
import math
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sparksmith.draft.errors import UserError

_SHORT = {
    "-sc": "speculative-config",
    "-tp": "tensor-parallel-size",
    "-pp": "pipeline-parallel-size",
    "-dp": "data-parallel-size",
}
_SPECULATIVE = "speculative-config"
_SPELLED = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}
_NUMBERS = (
    "tensor-parallel-size",
    "pipeline-parallel-size",
    "data-parallel-size",
    "max-model-len",
    "max-num-seqs",
    "max-num-batched-tokens",
)
_VALUED = (*_NUMBERS, *_SPELLED, _SPECULATIVE, "attention-backend", "attention-config")
_COUNTS = (
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "max_model_len",
    "dspark_draft_topk",
)
_ASSIGNMENT = re.compile(r"^[A-Za-z_]\w*=")
_SEPARATOR = re.compile(r"^[;&|]+$")


@dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """`options` by their names without dashes in front (a flag is True, `--no-x` is x: False),
    `environment` of assignments before the command, and the speculative configuration, whole
    numbers in it as such however they were written."""

    options: Mapping[str, str | bool]
    environment: Mapping[str, str]
    speculative: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> "ServeArguments":
        """Read a command line, with or without `vllm serve MODEL` before the options, or a script
        that ends in one. `--a.b value` is the key b of the JSON option a, as vLLM has it.

        Raises UserError for quotes that do not close, an option without its value, a number that
        is none, and a speculative config that is empty or no JSON object.
        """
        prelude, words = _split(text)
        environment = {}
        for word in prelude:
            if _ASSIGNMENT.match(word):
                name, _, value = word.partition("=")
                environment[name] = value
        options = _options(words)
        return cls(
            options=options, environment=environment, speculative=_speculative_config(options)
        )

    def number(self, name: str, default: int | None = None) -> int | None:
        """An option that is a whole number; `8k` and `1M` as vLLM reads them. None or `default`
        for `auto`, and for one that is not given."""
        found = _number(self.options.get(name))
        return default if found is None or found < 0 else found

    def has(self, name: str) -> bool:
        """Whether a flag or option is given, and not switched off."""
        return self.options.get(name, False) is not False

    def json_object(self, name: str) -> Mapping[str, Any]:
        """An option that is a JSON object; empty for anything else."""
        try:
            found = json.loads(str(self.options.get(name)))
        except (ValueError, RecursionError):
            return {}
        return found if isinstance(found, dict) else {}


def _split(text: str) -> tuple[list[str], list[str]]:
    """The words before the command, and the command's own up to where the next begins."""
    # Lines that go on; then comments, and with them a script's first line.
    joined = re.sub(r"\\\r?(\n|\Z)", " ", text)
    joined = "\n".join(line for line in joined.splitlines() if not line.lstrip().startswith("#"))
    lexer = shlex.shlex(joined, posix=True, punctuation_chars=";&|")
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        words = list(lexer)
    except ValueError as error:
        raise UserError(
            "--serve-args", text, f"cannot be read ({error})", "Close the quotes."
        ) from None
    start = next((i for i, word in enumerate(words) if word.rpartition("/")[2] == "vllm"), None)
    if start is None:
        start = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    command = words[start:]
    end = next((i for i, word in enumerate(command) if _SEPARATOR.match(word)), len(command))
    return words[:start], [word for word in command[:end] if word != "$@"]


def _options(words: list[str]) -> dict[str, str | bool]:
    options: dict[str, str | bool] = {}
    dotted: dict[str, dict[str, Any]] = {}
    position = 0
    while position < len(words):
        word = words[position]
        position += 1
        if not re.match(r"--?[A-Za-z]", word):
            continue
        given, equals, value = word.partition("=")
        given, *keys = given.split(".")
        name = _SHORT.get(given, given.lstrip("-").replace("_", "-"))
        taken: str | bool
        if equals:
            taken = value
        elif position < len(words) and not re.match(r"--?[A-Za-z]", words[position]):
            taken = words[position]
            position += 1
        elif name.startswith("no-") and not keys:
            name, taken = name.removeprefix("no-"), False
        else:
            taken = True
        if taken is True and (keys or name in _VALUED):
            raise UserError(word, None, "is given without its value", "Write the value behind it.")
        if keys:
            _put(dotted.setdefault(name, {}), keys, str(taken), word)
        else:
            options[name] = taken
    for name, values in dotted.items():
        whole = _object(name, options[name]) if name in options else {}
        options[name] = json.dumps({**whole, **values})
    for name in _NUMBERS:
        _check_number(name, options.get(name))
    return options


def _put(values: dict[str, Any], keys: list[str], text: str, word: str) -> None:
    """Set a nested key to a value, which is JSON or, if it is none, a string."""
    for key in keys[:-1]:
        values = values.setdefault(key.replace("-", "_"), {})
        if not isinstance(values, dict):
            raise UserError(word, text, "contradicts another option", "Give one of the two.")
    try:
        values[keys[-1].replace("-", "_")] = json.loads(text)
    except (ValueError, RecursionError):
        values[keys[-1].replace("-", "_")] = text


def _number(value: object) -> int | None:
    if not isinstance(value, str) or not value:
        return None
    scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2, "g": 10**9, "G": 1024**3}.get(
        value[-1]
    )
    try:
        found = float(value if scale is None else value[:-1]) * (scale or 1)
    except ValueError:
        return None
    return int(found) if math.isfinite(found) and found.is_integer() else None


def _check_number(name: str, value: object) -> None:
    if value is None or (name == "max-model-len" and value in ("auto", "-1")):
        return
    found = _number(value)
    if found is None or found < 1:
        raise UserError(
            f"--{name}", value, "is not a whole number above 0", "Write one, such as 8 or 32k."
        )


def _object(name: str, text: object) -> dict[str, Any]:
    try:
        found = json.loads(str(text))
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"--{name}", text, f"is not a JSON object ({error})", "Quote it as one word."
        ) from None
    if not isinstance(found, dict):
        raise UserError(
            f"--{name}", text, "is not a JSON object", 'Write {"key": value, ...}, quoted.'
        )
    return found


def _speculative_config(options: Mapping[str, str | bool]) -> dict[str, Any]:
    speculative: dict[str, Any] = {}
    if _SPECULATIVE in options:
        given = _object(_SPECULATIVE, options[_SPECULATIVE])
        speculative = {key.replace("-", "_"): value for key, value in given.items()}
        if not speculative:
            raise UserError(
                f"--{_SPECULATIVE}",
                options[_SPECULATIVE],
                "is empty: no draft is served",
                'Write {"method": "dspark", "model": ..., "num_speculative_tokens": ...}.',
            )
    for option, key in _SPELLED.items():
        if option not in options:
            continue
        if key in speculative:
            raise UserError(
                f"--{option}",
                options[option],
                f"says again what --{_SPECULATIVE} says, which vLLM refuses",
                "Give one of the two.",
            )
        speculative[key] = str(options[option])
    for key in _COUNTS:
        # vLLM's configuration takes these for numbers too.
        value = speculative.get(key)
        if (
            isinstance(value, bool)
            or (isinstance(value, str) and re.match(r"^[+-]?\d{1,9}$", value.strip()))
            or (isinstance(value, float) and math.isfinite(value) and value.is_integer())
        ):
            speculative[key] = int(value)
    return speculative
