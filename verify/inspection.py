"""A draft's folder as the checks want it: read without demanding that anything is right."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from sparksmith.draft.checkpoint import INDEX_FILE, config_values, own_shapes, tensor_shapes
from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.errors import UserError
from sparksmith.draft.layouts import OFFSETS, flatten, own_name, pieces
from sparksmith.draft.manifest import Manifest, read_manifest
from sparksmith.draft.vocabulary import target_ids_of
from sparksmith.verify.check_draft import DRAFT_CHECKS
from sparksmith.verify.check_serving import SERVING_CHECKS
from sparksmith.verify.findings import Check, Finding, Subject, TargetFacts, worst_first
from sparksmith.verify.serve_arguments import ServeArguments

CHECKS: Mapping[str, Check] = {**DRAFT_CHECKS.by_id, **SERVING_CHECKS.by_id}


def inspect(
    folder: Path, target: TargetFacts | None = None, serve: ServeArguments | None = None
) -> Subject:
    """Read a draft's files for checking.

    Raises UserError only where there is nothing to check: no config.json, no readable weights, a
    layout of another kind of draft.
    """
    values = config_values(folder)
    shapes, files = tensor_shapes(folder)
    reading = flatten(values, shapes)
    dtypes, offsets = set(), None
    for name, path in files.items():
        with safe_open(path, framework="pt") as file:
            dtypes.add(file.get_slice(name).get_dtype())
            if own_name(name) == OFFSETS:
                offsets = tuple(file.get_tensor(name).flatten().tolist())
    return Subject(
        values=values,
        flat=reading.values,
        layout=reading.layout,
        shapes=shapes,
        offsets=offsets,
        dtypes=frozenset(dtypes),
        stray=_stray(folder, set(files.values())),
        manifest=_manifest(folder, reading.values, shapes, offsets),
        target=target,
        serve=serve,
        folder=folder,
    )


def _stray(folder: Path, read: set[Path]) -> tuple[str, ...]:
    """An index names the files that are loaded; without one it is all there are."""
    if (folder / INDEX_FILE).is_file():
        return ()
    return tuple(sorted(p.name for p in folder.glob("*.safetensors") if p not in read))


def findings(subject: Subject) -> list[Finding]:
    """What all checks find, errors first."""
    return worst_first(f for check in CHECKS.values() for f in check.findings(subject))


def _manifest(
    folder: Path,
    flat: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    offsets: tuple[int, ...] | None,
) -> Manifest | None:
    """The manifest, if it and the draft can be read; a map that is broken is another check's."""
    try:
        config = DSparkConfig.from_json_dict(flat)
    except UserError:
        return None
    found, _ = pieces(shapes, own_shapes(config), config)
    ids = None
    if OFFSETS in found and offsets is not None:
        try:
            ids = target_ids_of(torch.tensor(offsets), config.vocab_size)
        except UserError:
            return None
    return read_manifest(folder, config, ids, verified=False)
