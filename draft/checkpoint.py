"""Drafts on disk: written in vLLM's flat layouts, read in every public one (see `draft.layouts`).

A loader that only copies what it finds runs with uninitialised memory where a tensor is missing
(vLLM 0.33 does), so loading here demands every tensor and shape, and names all that are wrong.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing, write_json
from sparksmith.draft.layouts import (
    EMBED,
    HEAD,
    OFFSETS,
    Layout,
    Piece,
    Reading,
    file_name,
    flatten,
    layout_config,
    pieces,
)
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.vocabulary import offsets_of, target_ids_of

T = TypeVar("T")

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


def save_draft(draft: DSparkDraft, folder: Path, *, dtype: torch.dtype | None = None) -> None:
    """Write a training checkpoint: the draft's own tensors (and `d2t`), no embedding, no head.

    `dtype` converts the floating-point tensors; None keeps the parameters'. Each file appears
    whole or not at all, config.json last.
    """
    _write(draft, folder, {}, dtype)


def export_draft(
    draft: DSparkDraft,
    folder: Path,
    *,
    embed: Tensor | None = None,
    head: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Write a checkpoint for serving: also the rows that the layout requires.

    A reduced vocabulary requires the head's rows [Vd, H]: from `head` ([V, H] or [Vd, H]) or, if
    None, from the bound target. `embed` [V, H] and a full `head` are shipped only when given.
    """
    config = draft.config
    shipped: dict[str, Tensor] = {}
    if config.reduced_vocabulary and head is None:
        head = draft.bound.head
    if head is not None:
        if config.reduced_vocabulary and head.shape[0] == config.vocab_size:
            head = head.index_select(0, draft.target_ids.to(head.device))
        _check_shape("head", head, (config.draft_vocab_size, config.hidden_size))
        shipped[HEAD] = head
    if embed is not None:
        _check_shape("embedding", embed, (config.vocab_size, config.hidden_size))
        shipped[EMBED] = embed
    _write(draft, folder, shipped, dtype)


@dataclass(frozen=True, kw_only=True)
class DraftFiles:
    """A draft's folder, read but for its tensors; `found` are its own and the shipped ones."""

    folder: Path
    reading: Reading
    config: DSparkConfig
    found: Mapping[str, Piece]
    files: Mapping[str, Path]
    """The file of each tensor, by the file's name for it."""

    def tensor(self, name: str) -> Tensor:
        """One of `found`, as stored."""
        piece = self.found[name]
        path = self.files[piece.name]
        try:
            with safe_open(path, framework="pt") as file:
                whole = file.get_slice(piece.name)
                shape = whole.get_shape()
                rows = slice(piece.start, piece.stop)
                tensor: Tensor = whole[rows] if shape else file.get_tensor(piece.name)
        except SafetensorError as error:
            raise _unreadable(path, error) from error
        except OSError as error:
            raise _closed(path, error) from error
        return tensor


def open_draft(folder: Path) -> DraftFiles:
    """Read and check a draft's folder, in any layout, without its tensors.

    Raises UserError for a missing or broken file, an unfit configuration, and tensors that are
    missing, unknown or misshapen.
    """
    values = config_values(folder)
    shapes, files = tensor_shapes(folder)
    reading = flatten(values, shapes)
    config = DSparkConfig.from_json_dict(reading.values)
    wanted = _required_shapes(config)
    found, unknown = pieces(shapes, wanted, config)
    _check_tensors(folder, (found, unknown), shapes, wanted, config)
    return DraftFiles(folder=folder, reading=reading, config=config, found=found, files=files)


def load_draft(folder: Path, *, dtype: torch.dtype | None = None) -> DSparkDraft:
    """Read a draft, unbound, on the CPU, in the stored dtype or in `dtype`.

    A shipped embedding or head is not read: `bind` the target's. Raises UserError as `open_draft`.
    """
    opened = open_draft(folder)
    config = opened.config
    tensors = {name: opened.tensor(name) for name in own_shapes(config)}
    target_ids = None
    if config.reduced_vocabulary:
        target_ids = target_ids_of(opened.tensor(OFFSETS), config.vocab_size)
    draft = DSparkDraft(config, target_ids)
    draft.to(dtype or tensors["fc.weight"].dtype)
    draft.load_state_dict(tensors)
    return draft


def shipped_head(folder: Path) -> Tensor | None:
    """The head's rows [Vd, H] that an exported draft ships, or None."""
    opened = open_draft(folder)
    return opened.tensor(HEAD) if HEAD in opened.found else None


def read_config(folder: Path) -> DSparkConfig:
    """The configuration of the draft in `folder`; UserError if there is none or it is unfit."""
    values = config_values(folder)
    shapes = tensor_shapes(folder)[0] if _weight_files(folder) else {}
    return DSparkConfig.from_json_dict(flatten(values, shapes).values)


def config_values(folder: Path) -> Mapping[str, Any]:
    """The object in a draft's config.json; UserError where there is none."""
    if folder.is_file():
        raise UserError(
            "draft", str(folder), "is a file", f"Give the folder that holds it: {folder.parent}."
        )
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            "draft",
            str(folder),
            f"has no {CONFIG_FILE}" if folder.is_dir() else "does not exist",
            "Give the folder of a saved draft.",
        )
    return read_object(path)


def read_object(path: Path) -> Mapping[str, Any]:
    """The JSON object in a draft's file; UserError for anything else."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError("draft", str(path), f"is not JSON ({error})", "Save it again.") from error
    except OSError as error:
        raise _closed(path, error) from error
    if not isinstance(values, Mapping):
        raise UserError("draft", str(path), "is not a JSON object", "Save it again.")
    return values


def _weight_files(folder: Path) -> list[Path]:
    """The safetensors of a draft: one file, or the shards that an index names."""
    index = folder / INDEX_FILE
    if index.is_file():
        return [folder / name for name in _indexed(index)]
    return [folder / WEIGHTS_FILE] if (folder / WEIGHTS_FILE).is_file() else []


def _indexed(index: Path) -> list[str]:
    """The files that an index names, all of them in its own folder."""
    where = read_object(index).get("weight_map")
    if not isinstance(where, Mapping) or not all(isinstance(n, str) for n in where.values()):
        raise UserError(
            f"{INDEX_FILE} weight_map",
            where,
            "does not give a file for each tensor",
            "Save the draft again, or remove the index of a single file.",
        )
    for tensor, name in where.items():
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise UserError(
                f"{INDEX_FILE} weight_map.{tensor}",
                name,
                "is no safetensors file of this folder",
                "Put all files of the draft into one folder.",
            )
    return sorted(set(where.values()))


def tensor_shapes(folder: Path) -> tuple[dict[str, tuple[int, ...]], dict[str, Path]]:
    """Shape and file of every tensor in the folder, by the file's names; UserError if none."""
    paths = _weight_files(folder)
    if not paths:
        raise UserError(
            "draft", str(folder), f"has no {WEIGHTS_FILE}", "Give the folder of a saved draft."
        )
    shapes, files = {}, {}
    for path in paths:
        if not path.is_file():
            raise UserError("draft", str(path), "is missing, and the index names it", "Fetch it.")
        try:
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118
                    shapes[name] = tuple(file.get_slice(name).get_shape())
                    files[name] = path
        except SafetensorError as error:
            raise _unreadable(path, error) from error
        except OSError as error:
            raise _closed(path, error) from error
    return shapes, files


def _closed(path: Path, error: OSError) -> UserError:
    return UserError(
        "draft",
        str(path),
        f"cannot be read ({error.strerror or error})",
        "Look at its permissions and the disk.",
    )


def _unreadable(path: Path, error: Exception) -> UserError:
    return UserError(
        "draft", str(path), f"is not a readable safetensors file ({error})", "Save it again."
    )


def write_layout(
    tensors: Mapping[str, Tensor],
    config: DSparkConfig,
    folder: Path,
    layout: Layout,
    target: str | None = None,
) -> None:
    """Write own and shipped `tensors` as they are in a layout, config.json last.

    Raises UserError before anything is written where the layout cannot express the draft.
    """
    values = layout_config(config, layout, target)
    dtype = tensors["fc.weight"].dtype
    named = {file_name(name, layout): tensor.contiguous() for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS_FILE) as temporary:
        save_file(named, temporary, metadata={"format": "pt"})
    values["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / CONFIG_FILE, values)


def _write(
    draft: DSparkDraft, folder: Path, shipped: Mapping[str, Tensor], dtype: torch.dtype | None
) -> None:
    dtype = dtype or draft.fc.weight.dtype
    # A copy of every tensor: safetensors refuses memory shared with the target's.
    tensors = {
        name: tensor.detach().to("cpu", dtype, copy=True)
        for name, tensor in {**draft.state_dict(), **shipped}.items()
    }
    if draft.config.reduced_vocabulary:
        tensors[OFFSETS] = offsets_of(draft.target_ids).cpu()
    layout: Layout = "vllm" if draft.config.mla is None else "k3"
    write_layout(tensors, draft.config, folder, layout)


def own_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every trained tensor of a draft of this configuration."""
    # All layers are alike: one is built, whatever a config.json says of their number.
    with torch.device("meta"):
        ids = torch.arange(config.draft_vocab_size)
        state = DSparkDraft(replace(config, num_hidden_layers=1), ids).state_dict()
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in state.items():
        first, _, rest = name.partition("layers.0.")
        numbers = range(config.num_hidden_layers) if rest and not first else (None,)
        for number in numbers:
            own = name if number is None else f"layers.{number}.{rest}"
            shapes[own] = tuple(tensor.shape)
    return shapes


def _required_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """The same with what a reduced vocabulary needs."""
    shapes = own_shapes(config)
    if config.reduced_vocabulary:
        shapes[OFFSETS] = (config.draft_vocab_size,)
    return shapes


def _check_tensors(
    folder: Path,
    read: tuple[Mapping[str, Piece], Iterable[str]],
    shapes: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    config: DSparkConfig,
) -> None:
    found, unknown = read
    shipped = {
        HEAD: (config.draft_vocab_size, config.hidden_size),
        EMBED: (config.vocab_size, config.hidden_size),
    }
    misshapen = []
    for name, shape in sorted({**wanted, **shipped}.items()):
        if name in found:
            seen = piece_shape(found[name], shapes)
            if seen != shape:
                misshapen.append(f"{name} is {list(seen)} but must be {list(shape)}")
    problems = [
        f"{what} {_first(names)}"
        for what, names in (
            ("is missing", sorted(wanted.keys() - found.keys())),
            ("has the unknown", sorted(unknown)),
            ("has the wrong shape:", misshapen),
        )
        if names
    ]
    if problems:
        raise UserError(
            "draft",
            str(folder),
            "; ".join(problems),
            "The weights and their config.json do not belong together: save the draft again.",
        )


def piece_shape(piece: Piece, shapes: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of a piece of a file's tensor; of a fused one that is too short, what is there."""
    whole = shapes[piece.name]
    if not whole:
        return ()
    return (max(0, min(piece.stop, whole[0]) - piece.start), *whole[1:])


def _first(names: list[str]) -> str:
    """The first of perhaps thousands of names."""
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _check_shape(what: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(weight.shape) != shape:
        raise UserError(
            f"target {what}",
            tuple(weight.shape),
            f"is not {shape}, as the draft's checkpoint requires",
            "Export with the target that the draft was trained for.",
        )
