"""From any layout to any other: the same tensors, bit for bit, under other names and keys.

What a layout cannot express is refused before anything is written; what had to be assumed of the
source is said.
"""

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from sparksmith.draft.checkpoint import DraftFiles, open_draft, write_layout
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing
from sparksmith.draft.layouts import EMBED, HEAD, KEPT, OFFSETS, Layout, check_layout
from sparksmith.draft.manifest import Manifest, for_target, read_manifest, write_manifest
from sparksmith.draft.vocabulary import target_ids_of

PARITY_FILE = "parity/parity.safetensors"
"""See `verify.parity`. In a folder of its own: engines load every safetensors file beside the
weights as weights."""


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """The target's embedding [V, H] and head [V, H], for layouts that ship copies."""

    embed: Tensor
    head: Tensor


@dataclass(frozen=True, kw_only=True)
class Conversion:
    """What was read and written: the layouts, the tensors shipped beside the draft's own, and
    what config.json left open and was assumed; the manifest says what else was."""

    source: Layout
    layout: Layout
    shipped: tuple[str, ...]
    assumed: tuple[str, ...]
    manifest: Manifest


def needed_rows(opened: DraftFiles, layout: Layout) -> tuple[str, ...]:
    """Of embedding and head, the tensors that a layout ships and the source does not have."""
    wanted: tuple[str, ...] = ()
    if layout == "deepspec":
        wanted = (EMBED, HEAD)
    elif opened.config.reduced_vocabulary:
        wanted = (HEAD,)
    return tuple(name for name in wanted if name not in opened.found)


def convert_draft(
    source: Path,
    out: Path,
    layout: Layout,
    *,
    rows: TargetRows | None = None,
    target: str | None = None,
) -> Conversion:
    """Write the draft in `source`, of any layout, to the folder `out` in `layout`.

    `rows` give what the layout ships and the source lacks (`needed_rows`); `target` is the
    target's name, where the manifest does not know it. sparksmith.json is always written, with
    what had to be assumed marked as such. Raises UserError, with nothing written,
    for a source that cannot be read, and a layout that cannot express it.
    """
    opened = open_draft(source)
    config = opened.config
    check_layout(config, layout)
    missing = needed_rows(opened, layout)
    if missing and rows is None:
        raise UserError(
            "--target",
            None,
            f"is needed: {layout} ships {' and '.join(missing)}, and this draft does not",
            "Name the target that the draft was trained for.",
        )
    offsets = opened.tensor(OFFSETS) if OFFSETS in opened.found else None
    target_ids = None if offsets is None else target_ids_of(offsets, config.vocab_size)
    manifest = for_target(read_manifest(source, config, target_ids), target)
    # KEPT follows from the offsets; it is written where it is read.
    tensors = {name: opened.tensor(name) for name in opened.found if name != KEPT}
    if rows is not None:
        dtype = tensors["fc.weight"].dtype
        tensors |= {name: t.to(dtype) for name, t in _shipped(rows, missing, target_ids).items()}
    if layout == "speculators" and target_ids is not None:
        kept = torch.zeros(config.vocab_size, dtype=torch.bool)
        kept[target_ids] = True
        tensors[KEPT] = kept
    write_layout(tensors, config, out, layout, target or manifest.target.name)
    write_manifest(manifest, out)
    if (source / PARITY_FILE).is_file():
        # What the draft computes does not depend on the layout.
        (out / PARITY_FILE).parent.mkdir()
        with replacing(out / PARITY_FILE) as temporary:
            shutil.copyfile(source / PARITY_FILE, temporary)
    return Conversion(
        source=opened.reading.layout,
        layout=layout,
        shipped=tuple(name for name in (EMBED, HEAD) if name in tensors),
        assumed=opened.reading.assumed,
        manifest=manifest,
    )


def _shipped(
    rows: TargetRows, missing: tuple[str, ...], target_ids: Tensor | None
) -> Mapping[str, Tensor]:
    head = rows.head if target_ids is None else rows.head[target_ids]
    return {name: {EMBED: rows.embed, HEAD: head}[name] for name in missing}
