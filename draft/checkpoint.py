"""Drafts on disk: config.json and model.safetensors in vLLM's flat layouts, `Qwen3DSparkModel` and,
for latent attention, `K3DSparkModel`.

A loader that only copies what it finds runs with uninitialised memory where a tensor is missing
(vLLM 0.33 does), so loading here demands every tensor and shape, and names all that are wrong.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing, write_json
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.vocabulary import offsets_of, target_ids_of

T = TypeVar("T")

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
_EMBED, _HEAD, _OFFSETS = "embed_tokens.weight", "lm_head.weight", "d2t"
# Tensors that the layout allows and that say nothing which the draft needs.
_IGNORED = frozenset({_EMBED, _HEAD, "t2d", "mask_embedding"})
# `K3DSparkModel` has other names for the parts outside the layers.
_MLA_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}


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
        shipped[_HEAD] = head
    if embed is not None:
        _check_shape("embedding", embed, (config.vocab_size, config.hidden_size))
        shipped[_EMBED] = embed
    _write(draft, folder, shipped, dtype)


def load_draft(folder: Path, *, dtype: torch.dtype | None = None) -> DSparkDraft:
    """Read a draft, unbound, on the CPU, in the stored dtype or in `dtype`.

    A shipped embedding or head is not read: `bind` the target's. Raises UserError for a missing
    or broken file, an unfit configuration, and tensors that are missing, unknown or misshapen.
    """
    config = read_config(folder)
    path = folder / WEIGHTS_FILE
    if not path.is_file():
        raise UserError(
            "draft", str(folder), f"has no {WEIGHTS_FILE}", "Give the folder of a saved draft."
        )
    try:
        with safe_open(path, framework="pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            draft_shapes = _required_shapes(config)
            _check_tensors(path, shapes, _renamed(config, draft_shapes), config)
            names = _file_names(config, draft_shapes)
            tensors = {name: file.get_tensor(names[name]) for name in draft_shapes}
    except SafetensorError as error:
        raise UserError(
            "draft", str(path), f"is not a readable safetensors file ({error})", "Save it again."
        ) from error
    offsets = tensors.pop(_OFFSETS, None)
    target_ids = None if offsets is None else target_ids_of(offsets, config.vocab_size)
    draft = DSparkDraft(config, target_ids)
    draft.to(dtype or tensors["fc.weight"].dtype)
    draft.load_state_dict(tensors)
    return draft


def shipped_head(folder: Path) -> Tensor | None:
    """The head's rows [Vd, H] that an exported draft ships, or None."""
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        names = file.keys()
        return file.get_tensor(_HEAD) if _HEAD in names else None


def read_config(folder: Path) -> DSparkConfig:
    """The configuration of the draft in `folder`; UserError if there is none or it is unfit."""
    path = folder / CONFIG_FILE
    if not path.is_file():
        raise UserError(
            "draft", str(folder), f"has no {CONFIG_FILE}", "Give the folder of a saved draft."
        )
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError("draft", str(path), f"is not JSON ({error})", "Save it again.") from error
    if not isinstance(values, Mapping):
        raise UserError("draft", str(path), "is not a JSON object", "Save it again.")
    return DSparkConfig.from_json_dict(values)


def _write(
    draft: DSparkDraft, folder: Path, shipped: Mapping[str, Tensor], dtype: torch.dtype | None
) -> None:
    dtype = dtype or draft.fc.weight.dtype
    tensors = {**_renamed(draft.config, draft.state_dict()), **shipped}
    # A copy of every tensor: safetensors refuses memory shared with the target's.
    tensors = {
        name: tensor.detach().to("cpu", dtype, copy=True).contiguous()
        for name, tensor in tensors.items()
    }
    if draft.config.reduced_vocabulary:
        tensors[_OFFSETS] = offsets_of(draft.target_ids).cpu()
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / WEIGHTS_FILE) as temporary:
        save_file(tensors, temporary, metadata={"format": "pt"})
    config: dict[str, Any] = draft.config.to_json_dict()
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / CONFIG_FILE, config)


def _file_names(config: DSparkConfig, names: Iterable[str]) -> dict[str, str]:
    """A file's name of each of the draft's own tensor names."""
    other = _MLA_NAMES if config.mla is not None else {}
    return {name: other.get(name, name) for name in names}


def _renamed(config: DSparkConfig, values: Mapping[str, T]) -> dict[str, T]:
    names = _file_names(config, values)
    return {names[name]: value for name, value in values.items()}


def _required_shapes(config: DSparkConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that a draft of this configuration has."""
    with torch.device("meta"):
        ids = torch.arange(config.draft_vocab_size)
        shapes = {name: tuple(t.shape) for name, t in DSparkDraft(config, ids).state_dict().items()}
    if config.reduced_vocabulary:
        shapes[_OFFSETS] = (config.draft_vocab_size,)
    return shapes


def _check_tensors(
    path: Path,
    found: Mapping[str, tuple[int, ...]],
    wanted: Mapping[str, tuple[int, ...]],
    config: DSparkConfig,
) -> None:
    missing = sorted(wanted.keys() - found.keys())
    unknown = sorted(found.keys() - wanted.keys() - _IGNORED)
    shipped = {
        _HEAD: (config.draft_vocab_size, config.hidden_size),
        _EMBED: (config.vocab_size, config.hidden_size),
    }
    misshapen = [
        f"{name} is {list(found[name])} but must be {list(shape)}"
        for name, shape in sorted({**wanted, **shipped}.items())
        if name in found and found[name] != shape
    ]
    problems = [
        f"{what} {', '.join(names)}"
        for what, names in (
            ("is missing", missing),
            ("has the unknown", unknown),
            ("has the wrong shape:", misshapen),
        )
        if names
    ]
    if problems:
        raise UserError(
            "draft",
            str(path),
            "; ".join(problems),
            "The file and its config.json do not belong together: save or export the draft again.",
        )


def _check_shape(what: str, weight: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(weight.shape) != shape:
        raise UserError(
            f"target {what}",
            tuple(weight.shape),
            f"is not {shape}, as the draft's checkpoint requires",
            "Export with the target that the draft was trained for.",
        )
