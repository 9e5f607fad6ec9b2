"""Results of `vllm bench serve --save-result`, in this report's terms.

File format: one JSON object. Its acceptance length counts the bonus token, as ours does; its
tokens/s of one user are the inverse of the time per output token, the first aside.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparksmith.draft.errors import UserError


def read_bench(path: Path) -> tuple[dict[str, Any], str]:
    """A row of the surface of speeds (see `eval.live.surface`), and a note on acceptance.

    Raises UserError for a file that is none, naming what is missing.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "--bench", str(path), f"cannot be read ({error})", "Give what --save-result wrote."
        ) from None
    if not isinstance(found, dict):
        raise UserError("--bench", str(path), "is no JSON object", "Give one result.")
    milliseconds = _number(found, "mean_tpot_ms", path)
    requests = int(_number(found, "completed", path))
    asked = int(found.get("num_prompts") or requests)
    row = {
        "users": int(found.get("max_concurrency") or asked),
        "requests": asked,
        "failed": asked - requests,
        "tokens_per_second_user": 1e3 / milliseconds if milliseconds else None,
        "tokens_per_second_total": _number(found, "output_throughput", path),
    }
    return row, _acceptance(found, path)


def _acceptance(found: Mapping[str, Any], path: Path) -> str:
    drafts = found.get("spec_decode_num_drafts")
    if not drafts:
        return f"{path.name} of vllm bench serve: no speculation."
    accepted = int(_number(found, "spec_decode_accepted_tokens", path))
    return (
        f"{path.name} of vllm bench serve: acceptance length {1 + accepted / drafts:.2f} "
        f"({int(drafts):,} steps, {accepted:,} accepted)."
    )


def _number(found: Mapping[str, Any], name: str, path: Path) -> float:
    value = found.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise UserError(
            f"--bench {path.name}",
            f"{name} {value!r}",
            "is no number",
            "Give what `vllm bench serve --save-result` wrote.",
        )
    return float(value)
