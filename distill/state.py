"""The state file of a training run: weights, optimizers, counters, and what run they belong to.

It is safetensors with JSON in its metadata, and is replaced in one rename: a kill leaves the state
before or the state after, never half of one.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing
from sparksmith.draft.model import DSparkDraft

STATE_FILE = "state.safetensors"


def save_state(
    folder: Path, tensors: Mapping[str, Tensor], identity: dict[str, Any], progress: dict[str, Any]
) -> None:
    """Replace the state file of `folder`; `identity` says what run it is."""
    metadata = {"identity": json.dumps(identity), "progress": json.dumps(progress)}
    with replacing(folder / STATE_FILE) as temporary:
        save_file({name: t.contiguous() for name, t in tensors.items()}, temporary, metadata)


def load_state(
    folder: Path, identity: dict[str, Any]
) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and the progress saved in `folder`, None if there is no state file.

    Raises UserError when the state is of a run that differs from `identity` (each difference is
    named) or cannot be read. Temporary files of a killed run are removed.
    """
    for leftover in folder.glob(f".{STATE_FILE}.*.tmp"):
        leftover.unlink(missing_ok=True)
    # safetensors itself writes to .tmp and six letters beside the file that it is given.
    for leftover in folder.rglob(".tmp??????"):
        leftover.unlink(missing_ok=True)
    path = folder / STATE_FILE
    if not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata()
            saved = json.loads(metadata["identity"])
            progress = json.loads(metadata["progress"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise UserError(
            "out",
            str(path),
            f"is not a training state ({error})",
            "Give another folder, or remove this file to begin again.",
        ) from error
    differences = list(_differences(saved, json.loads(json.dumps(identity)), ""))
    if differences:
        raise UserError(
            "out",
            str(folder),
            f"holds a run with other settings: {'; '.join(differences)}",
            "Give the same settings to resume it, or another folder.",
        )
    return tensors, progress


def draft_identity(draft: DSparkDraft) -> dict[str, Any]:
    """The draft's configuration and, since equal sizes do not mean equal words, its vocabulary."""
    ids = draft.target_ids.to("cpu", torch.int64).contiguous().numpy().tobytes()
    words = hashlib.sha256(ids).hexdigest()[:16]
    return {**draft.config.to_json_dict(), "words": words}


def _differences(saved: Any, wanted: Any, name: str) -> Iterator[str]:
    """Each setting whose values differ, as "loss.tv is 0.9 there and 0.5 here"."""
    if isinstance(saved, dict) and isinstance(wanted, dict):
        for key in sorted(saved.keys() | wanted.keys()):
            inner = f"{name}.{key}" if name else key
            yield from _differences(saved.get(key), wanted.get(key), inner)
    elif saved != wanted:
        yield f"{name} is {saved} there and {wanted} here"
