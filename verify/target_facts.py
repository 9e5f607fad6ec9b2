"""A target's sizes where they can be read without the network and without loading anything.

A serve command is often written on a laptop for a target that is far away: what its config.json
says in a folder or in the Hub's cache, and the published sizes of K3, are enough to compare.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

from sparksmith.draft.errors import UserError
from sparksmith.verify.findings import TargetFacts

K3_TYPE = "kimi_k3"
"""model_type of K3's config.json."""
_MINI_TYPE = "k3_mini"
_SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")


def k3_facts(name: str) -> TargetFacts:
    """K3's published sizes, for a target that is called `name`."""
    return TargetFacts(
        name=name,
        num_layers=93,
        hidden_size=7_168,
        vocab_size=163_840,
        max_length=1_048_576,
        is_k3=True,
    )


def known_facts(name: str) -> TargetFacts | None:
    """What config.json of a folder, or of a repository in the Hub's cache, says of a target; for
    K3 by name, what was published. None where neither is there.

    Raises UserError for an empty name, a path that holds no configuration, and a configuration
    that does not give the sizes.
    """
    if not name.strip():
        raise UserError(
            "--target", name, "is empty", "Name the target as `vllm serve` does, or its folder."
        )
    folder = Path(name)
    if folder.exists() or folder.is_absolute() or name.startswith((".", "~")):
        path = folder / "config.json"
        if not path.is_file():
            raise UserError(
                "--target",
                name,
                "holds no config.json" if folder.exists() else "does not exist",
                "Give the target's folder, or its name on the Hub.",
            )
        return read_facts(path, name)
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        cached = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise UserError(
            "--target",
            name,
            "is neither a folder nor a name on the Hub",
            "Write ORGANISATION/NAME, or the path of a folder.",
        ) from None
    if isinstance(cached, str):
        return read_facts(Path(cached), name)
    return k3_facts(name) if "kimi-k3" in name.lower() else None


def read_facts(path: Path, name: str) -> TargetFacts:
    """The sizes in a target's config.json; UserError where it does not say them."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            "--target", str(path), f"cannot be read ({error})", "Fetch the target again."
        ) from None
    if not isinstance(values, Mapping):
        raise UserError("--target", str(path), "is not a JSON object", "Fetch the target again.")
    text = values.get("text_config")
    text = text if isinstance(text, Mapping) else values
    depth, width, words = (_size(text, key, path) for key in _SIZES)
    length = text.get("max_position_embeddings")
    return TargetFacts(
        name=name,
        num_layers=depth,
        hidden_size=width,
        vocab_size=words,
        max_length=length if _is_size(length) else 1 << 20,
        is_k3=values.get("model_type") in (K3_TYPE, _MINI_TYPE),
    )


def _size(text: Mapping[str, Any], key: str, path: Path) -> int:
    value = text.get(key)
    if not _is_size(value):
        raise UserError(
            f"--target config.json {key}",
            value,
            f"is not a size, in {path}",
            "Give a language model's folder or name.",
        )
    return value


def _is_size(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
