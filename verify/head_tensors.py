"""The few tensors of a target that a draft shares, read without loading the target.

A draft needs its target's embedding, final norm and head. In a checkpoint of hundreds of shards
they lie in two or three of them: the index says which, and only these tensors are read. So a
target needs neither memory nor code to be trained for. Formats: a folder or Hugging Face Hub
repository with `model.safetensors.index.json`, or a single `model.safetensors`.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparksmith.draft.errors import UserError

INDEX_FILE, SINGLE_FILE = "model.safetensors.index.json", "model.safetensors"
_EMBEDDING = re.compile(r"^((?:.+\.)?)(?:embed_tokens|wte|word_embeddings)\.weight$")
_HEAD = re.compile(r"^(?:.+\.)?lm_head\.weight$")
# Towers beside the language model, and prediction layers behind it, have embeddings of their own.
_OTHERS = re.compile(r"(?:^|\.)(?:vision|visual|audio|mtp|draft)")
_NORMS = ("norm.weight", "final_layernorm.weight", "ln_f.weight")


@dataclass(frozen=True, kw_only=True)
class HeadTensors:
    """`embed` [V, H], `norm` [H] and `head` [V, H] as stored; `head` is `embed` where the
    checkpoint ties the two. `names` are their names, `files` those opened, `bytes_read` the size
    of the tensors."""

    embed: Tensor
    norm: Tensor
    head: Tensor
    names: tuple[str, ...]
    files: tuple[Path, ...]
    bytes_read: int

    @property
    def tied(self) -> bool:
        return self.head is self.embed


def read_head_tensors(name_or_path: str | Path, *, revision: str | None = None) -> HeadTensors:
    """Read them from a folder, or fetch the shards that hold them from the Hub.

    Raises UserError where there is no safetensors checkpoint, a tensor cannot be told from its
    name, or a shard is missing or broken.
    """
    folder = Path(name_or_path)
    find = _local(folder) if folder.is_dir() else _remote(str(name_or_path), revision)
    where = _weight_map(str(name_or_path), find)
    embed_name, prefix = _embedding_name(str(name_or_path), where)
    norm_name = _one(
        str(name_or_path),
        "final norm",
        [prefix + norm for norm in _NORMS if prefix + norm in where],
    )
    heads = [name for name in where if _HEAD.match(name) and not _OTHERS.search(name)]
    names = [embed_name, norm_name]
    if heads:
        names.append(_one(str(name_or_path), "head", heads))
    tensors, files = {}, []
    for name in names:
        path = find(where[name])
        if path is None:
            raise UserError(
                "target",
                str(name_or_path),
                f"lacks the shard {where[name]}, which holds {name}",
                "Fetch that file of the checkpoint.",
            )
        if path not in files:
            files.append(path)
        tensors[name] = _read(path, name)
    found = list(tensors.values())
    return HeadTensors(
        embed=found[0],
        norm=found[1],
        head=found[2] if heads else found[0],
        names=tuple(names),
        files=tuple(files),
        bytes_read=sum(tensor.nbytes for tensor in found),
    )


def _local(folder: Path) -> Callable[[str], Path | None]:
    return lambda name: folder / name if (folder / name).is_file() else None


def _remote(name: str, revision: str | None) -> Callable[[str], Path | None]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RemoteEntryNotFoundError

    def find(file: str) -> Path | None:
        try:
            return Path(hf_hub_download(name, file, revision=revision))
        except RemoteEntryNotFoundError:
            return None
        except (OSError, HfHubHTTPError, HFValidationError) as error:
            raise UserError(
                "target",
                name,
                "is neither a folder here nor given by the Hugging Face Hub "
                f"({str(error).strip().partition(chr(10))[0]})",
                "Check the spelling, the network and, for a gated model, your login.",
            ) from None

    return find


def _weight_map(name: str, find: Callable[[str], Path | None]) -> Mapping[str, str]:
    """The file of every tensor."""
    index = find(INDEX_FILE)
    if index is not None:
        try:
            where = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(
                "target",
                name,
                f"has an {INDEX_FILE} that cannot be read ({error})",
                "Fetch it again.",
            ) from None
        return {str(tensor): str(file) for tensor, file in where.items()}
    single = find(SINGLE_FILE)
    if single is None:
        raise UserError(
            "target",
            name,
            f"holds neither {INDEX_FILE} nor {SINGLE_FILE}",
            "Give a checkpoint in safetensors.",
        )
    with _opened(single) as file:
        return dict.fromkeys(file.keys(), SINGLE_FILE)


def _embedding_name(name: str, where: Mapping[str, str]) -> tuple[str, str]:
    """The embedding's name and what stands before it, which the final norm shares."""
    matches = [match for tensor in where if (match := _EMBEDDING.match(tensor))]
    found = {match[0]: match[1] for match in matches if not _OTHERS.search(match[0])}
    chosen = _one(name, "embedding", list(found))
    return chosen, found[chosen]


def _one(target: str, what: str, names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    raise UserError(
        "target",
        target,
        f"has no one {what} that its name tells ({', '.join(names) or 'none'})",
        "Use a decoder-only language model whose tensors have transformers' names.",
    )


def _read(path: Path, name: str) -> Tensor:
    with _opened(path) as file:
        try:
            tensor: Tensor = file.get_tensor(name)
        except SafetensorError as error:
            raise UserError(
                "target", str(path), f"does not hold {name} ({error})", "Fetch it again."
            ) from None
    return tensor


def _opened(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(
            "target", str(path), f"is not a readable safetensors file ({error})", "Fetch it again."
        ) from None
