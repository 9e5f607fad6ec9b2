"""features.json, the manifest of a feature store: what its features are of, and its shards."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sparksmith.distill.feature_coding import STORE_DTYPES, Coding, StoreDtype
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import write_json
from sparksmith.draft.sampling import Sampling

MANIFEST_FILE = "features.json"
FORMAT_VERSION = 1
_OTHER_FOLDER = "Give another folder, or the same settings."
# A name that leads nowhere else.
_SHARD_NAME = re.compile(r"features-[0-9]{5,9}\.safetensors")


@dataclass(frozen=True, kw_only=True)
class Contents:
    """What all features of a store are of, and how they are stored.

    `target` identifies the model ({name, sha256, ...}) and the numbers it ran in. `sampling` is
    the distribution that `log_norm` and `threshold` describe, `responses_sampling` the one that
    the responses were drawn from; the two differ for greedy responses, whose draft is trained at
    a low temperature.
    """

    target: Mapping[str, Any]
    taps: tuple[int, ...]
    stream: str
    dtype: StoreDtype
    hidden_size: int
    vocab_size: int
    sampling: Sampling
    responses_sampling: Sampling

    @property
    def coding(self) -> Coding:
        return Coding(dtype=self.dtype, num_taps=len(self.taps), hidden_size=self.hidden_size)

    @property
    def identity(self) -> str:
        """Short hash of all this; every shard carries it, so that a stray one is recognised."""
        text = json.dumps(self._essence())
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def require(self, other: "Contents") -> None:
        """UserError for the first thing in which `other`, what was asked for, differs."""
        own, wanted = self._essence(), other._essence()
        for name, value in own.items():
            if wanted[name] != value:
                raise UserError(
                    name, wanted[name], f"is not that of the features, {value!r}", _OTHER_FOLDER
                )

    def _essence(self) -> dict[str, Any]:
        """Of the target, what tells it from others: a moved or renamed folder is the same."""
        values = {**asdict(self), "taps": list(self.taps)}
        keys = ("wheel_sha256", "sha256", "commit", "name")
        key = next(key for key in keys if self.target.get(key))
        values["target"] = f"{self.target[key]} in {self.target.get('dtype')}"
        return values


@dataclass(frozen=True, kw_only=True)
class Shard:
    """One shard as the manifest lists it; `tokens` counts prompts and responses."""

    file: str
    samples: int
    tokens: int
    response_tokens: int
    bytes: int
    sha256: str


def write_manifest(folder: Path, contents: Contents, shards: Sequence[Shard]) -> None:
    """Replace a store's features.json, with the counts of all its shards."""
    coding = contents.coding
    write_json(
        folder / MANIFEST_FILE,
        {
            "format_version": FORMAT_VERSION,
            **asdict(contents),
            "taps": list(contents.taps),
            "bytes_per_position": coding.bytes_per_position,
            "bytes_per_response_token": coding.bytes_per_response_token,
            "samples": sum(shard.samples for shard in shards),
            "tokens": sum(shard.tokens for shard in shards),
            "response_tokens": sum(shard.response_tokens for shard in shards),
            "shards": [asdict(shard) for shard in shards],
        },
    )


def read_manifest(folder: Path) -> tuple[Contents, list[Shard]]:
    """What the features of a folder are of, and its shards.

    Raises UserError where features.json is absent, of another version, or not well formed.
    """
    path = folder / MANIFEST_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        version = values["format_version"]
    except OSError:
        raise UserError(
            "--features",
            str(folder),
            f"holds no {MANIFEST_FILE}",
            "Give a folder that `sparksmith capture` wrote.",
        ) from None
    except (ValueError, KeyError, TypeError, RecursionError):
        raise _unfit(path, "is not a manifest of features") from None
    if version != FORMAT_VERSION:
        raise _unfit(path, f"is of format {version!r}, and this release reads {FORMAT_VERSION}")
    try:
        contents = Contents(
            target=dict(values["target"]),
            taps=tuple(whole_number(tap) for tap in values["taps"]),
            stream=str(values["stream"]),
            dtype=STORE_DTYPES[STORE_DTYPES.index(values["dtype"])],
            hidden_size=whole_number(values["hidden_size"], least=1),
            vocab_size=whole_number(values["vocab_size"], least=1),
            sampling=Sampling(**values["sampling"]),
            responses_sampling=Sampling(**values["responses_sampling"]),
        )
        shards = [Shard(**shard) for shard in values["shards"]]
        for shard in shards:
            for count in (shard.samples, shard.tokens, shard.response_tokens, shard.bytes):
                whole_number(count, least=1)
            if not _SHARD_NAME.fullmatch(shard.file):
                raise ValueError(f"{shard.file!r} is not the name of a shard")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _unfit(path, f"is not well formed ({error})") from None
    return contents, shards


def whole_number(value: Any, least: int = 0) -> int:
    """The value, if it is an integer of at least `least`; ValueError if not."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{value!r} is not a whole number from {least} on")
    return value


def _unfit(path: Path, problem: str) -> UserError:
    return UserError(
        "features", str(path), problem, "Capture again, or give a folder of this release."
    )
