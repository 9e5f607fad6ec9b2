"""The target that a command was given: the embedded one, a folder, or a name on the Hub."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedTokenizerBase

    from sparksmith.verify.embedded import EmbeddedModel
    from sparksmith.verify.target import TransformersTarget
    from sparksmith.verify.target_ends import TargetEnds

TARGET_PANEL = "Target"
K3_MINI = "k3-mini"

TargetName = Annotated[
    str,
    typer.Option(
        "--target",
        help="A transformers folder, a name on the Hub, `embedded` (SmolLM2-135M-Instruct), or "
        "`k3-mini` (K3's parts at toy size, random weights).",
        rich_help_panel=TARGET_PANEL,
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto, float32, bfloat16 or float16; auto is bfloat16 where the device has it.",
        rich_help_panel=TARGET_PANEL,
    ),
]
Device = Annotated[
    str, typer.Option(help="Where the target runs: cpu or cuda.", rich_help_panel=TARGET_PANEL)
]
Threads = Annotated[
    int, typer.Option(help="CPU threads; 0 leaves torch's choice.", rich_help_panel=TARGET_PANEL)
]
Stream = Annotated[
    str | None,
    typer.Option(
        help="Which output of a layer is tapped, where a target has several: K3's prefix_sum "
        "(default) or attn_res_mixture.",
        rich_help_panel=TARGET_PANEL,
    ),
]
TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code",
        help="Run code that the checkpoint brings. Read it first.",
        rich_help_panel=TARGET_PANEL,
    ),
]


@dataclass(frozen=True, kw_only=True)
class TargetChoice:
    """The options above, as given."""

    name: str
    dtype: str = "auto"
    device: str = "cpu"
    threads: int = 0
    trust_remote_code: bool = False
    stream: str | None = None
    """Which output of a layer is tapped, where a target has several; None is its default."""


@dataclass(frozen=True, kw_only=True)
class OpenTarget:
    """A loaded target; `record` identifies it in run.json and traces."""

    target: "TransformersTarget"
    tokenizer: "PreTrainedTokenizerBase"
    record: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class OpenEnds:
    """The same for a target whose layers are not loaded."""

    target: "TargetEnds"
    tokenizer: "PreTrainedTokenizerBase"
    record: dict[str, Any]


def open_target(
    choice: TargetChoice, *, taps: "Sequence[int]" = (), identify: bool = True
) -> OpenTarget:
    """Load the target, fetching the embedded one first if it is not in the cache.

    `identify` False spares the hash of its files, where nothing is recorded.

    Raises UserError as `verify.loading.load_target` and `verify.embedded.fetch_embedded` do.
    """
    from sparksmith.verify.loading import load_target

    path = _prepare(choice)
    target, tokenizer = load_target(
        path,
        dtype=choice.dtype,
        taps=taps,
        trust_remote_code=choice.trust_remote_code,
        device=choice.device,
        stream=choice.stream,
    )
    if not identify:
        record = {"name": choice.name}
    else:
        record = _identify(choice.name, path, getattr(target.model.config, "_commit_hash", None))
    record["dtype"] = str(target.dtype).removeprefix("torch.")
    return OpenTarget(target=target, tokenizer=tokenizer, record=record)


def open_ends(choice: TargetChoice, *, taps: "Sequence[int]" = ()) -> OpenEnds:
    """The same for its embedding, final norm and head alone: the layers' files stay closed.

    Raises UserError as `verify.target_ends.load_target_ends` does.
    """
    from sparksmith.verify.target_ends import load_target_ends

    path = _prepare(choice)
    ends, tokenizer = load_target_ends(
        path,
        dtype=choice.dtype,
        taps=taps,
        stream=choice.stream,
        device=choice.device,
        trust_remote_code=choice.trust_remote_code,
    )
    print(
        f"read {ends.bytes_read / 1e6:,.1f} MB of {choice.name}: embedding, final norm and head",
        file=sys.stderr,
    )
    record = _identify(choice.name, path, getattr(ends.config, "_commit_hash", None))
    record["dtype"] = str(ends.dtype).removeprefix("torch.")
    return OpenEnds(target=ends, tokenizer=tokenizer, record=record)


def _prepare(choice: TargetChoice) -> str:
    """Set the threads, quiet the libraries, and fetch the embedded target if it is meant."""
    import torch

    from sparksmith.cli.quiet import quiet_libraries
    from sparksmith.draft.errors import UserError

    if choice.threads < 0:
        raise UserError("--threads", choice.threads, "is negative", "Use 0 for torch's choice.")
    if choice.threads:
        torch.set_num_threads(choice.threads)
    quiet_libraries()
    return resolve(choice.name)


def _identify(name: str, path: str, commit: str | None) -> dict[str, Any]:
    from sparksmith.verify.embedded import TARGET_NAME, WHEEL_SHA256
    from sparksmith.verify.run_record import fingerprint

    if Path(path).is_dir():
        record = {"name": name, **fingerprint(Path(path))}
    else:
        record = {"name": name, "commit": commit}
    if name == TARGET_NAME:
        record["wheel_sha256"] = WHEEL_SHA256
    return record


def resolve(name: str) -> str:
    """The folder of the embedded target or of k3-mini, made if need be; other names as they are."""
    from sparksmith.verify.embedded import TARGET_NAME

    if name == K3_MINI:
        from sparksmith.draft.errors import UserError

        try:
            from sparksmith.verify.k3_mini_files import k3_mini_folder
        except ImportError as error:
            raise UserError(
                "--target",
                name,
                f"needs transformers' Kimi-Linear, which is not in this version ({error})",
                "Upgrade transformers.",
            ) from None
        return str(k3_mini_folder())
    return str(fetch_with_progress().path) if name == TARGET_NAME else name


def fetch_with_progress() -> "EmbeddedModel":
    """`verify.embedded.fetch_embedded` with its stages and times on the terminal."""
    from sparksmith.cli.progress import duration, progress
    from sparksmith.verify.embedded import MODEL_NAME, RECORD, embedded_path, fetch_embedded

    if (embedded_path() / RECORD).is_file():
        return fetch_embedded()
    with progress(MODEL_NAME, total=100, unit="%") as bar:
        model = fetch_embedded(lambda stage, part: bar.at(100 * part, note=stage))
        bar.say(
            f"{MODEL_NAME}: fetched in {duration(model.fetch_seconds)}, converted in "
            f"{duration(model.convert_seconds)}, kept in {model.path}"
        )
    return model
