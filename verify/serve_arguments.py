"""A `vllm serve` command line, taken apart: what of it concerns a draft."""

import json
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
}
_SPELLED = {"spec-method": "method", "spec-model": "model", "spec-tokens": "num_speculative_tokens"}


@dataclass(frozen=True, kw_only=True)
class ServeArguments:
    """`options` by their names without dashes in front (a flag is True, `--no-x` is x: False),
    `environment` of assignments before the command, and the speculative configuration."""

    options: Mapping[str, str | bool]
    environment: Mapping[str, str]
    speculative: Mapping[str, Any]

    @classmethod
    def parse(cls, text: str) -> "ServeArguments":
        """Read a command line, with or without `vllm serve MODEL` before the options.

        Raises UserError for quotes that do not close and a speculative config that is not JSON.
        """
        try:
            words = shlex.split(text)
        except ValueError as error:
            raise UserError(
                "--serve-args", text, f"cannot be read ({error})", "Close the quotes."
            ) from None
        environment: dict[str, str] = {}
        while words and "=" in words[0] and not words[0].startswith("-"):
            name, _, value = words.pop(0).partition("=")
            environment[name] = value
        options: dict[str, str | bool] = {}
        position = 0
        while position < len(words):
            word = words[position]
            position += 1
            if not word.startswith("-"):
                continue
            name, equals, value = word.partition("=")
            name = _SHORT.get(name, name.lstrip("-").replace("_", "-"))
            if equals:
                options[name] = value
            elif position < len(words) and not re.match(r"--?[A-Za-z]", words[position]):
                options[name] = words[position]
                position += 1
            elif name.startswith("no-"):
                options[name.removeprefix("no-")] = False
            else:
                options[name] = True
        speculative: dict[str, Any] = {}
        given = options.get("speculative-config")
        if isinstance(given, str):
            try:
                speculative = dict(json.loads(given))
            except (ValueError, TypeError) as error:
                raise UserError(
                    "--speculative-config",
                    given,
                    f"is not a JSON object ({error})",
                    "Quote it as one word.",
                ) from None
            speculative = {key.replace("-", "_"): value for key, value in speculative.items()}
        for option, key in _SPELLED.items():
            if option in options:
                spelled = str(options[option])
                speculative[key] = int(spelled) if spelled.isdigit() else spelled
        return cls(options=options, environment=environment, speculative=speculative)

    def number(self, name: str, default: int | None = None) -> int | None:
        """An option that is a whole number; `8k` and `1M` as vLLM reads them."""
        value = self.options.get(name)
        if not isinstance(value, str):
            return default
        scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 1024**2}.get(value[-1:])
        digits = value if scale is None else value[:-1]
        try:
            return int(float(digits) * (scale or 1))
        except ValueError:
            return default

    def has(self, name: str) -> bool:
        """Whether a flag or option is given, and not switched off."""
        return self.options.get(name, False) is not False
