"""`sparksmith export`: a draft as an engine loads it, with the target's rows that it must ship."""

from pathlib import Path
from typing import Annotated

import typer

from sparksmith.cli.target import TargetChoice, TargetName, TrustRemoteCode, open_target
from sparksmith.draft.errors import UserError

EXAMPLE = "sparksmith export runs/draft/best runs/served"
DTYPES = ("float32", "bfloat16", "float16")


def export(
    draft: Annotated[Path, typer.Argument(help="Folder of a draft.")],
    out: Annotated[Path, typer.Argument(help="New or empty folder for the checkpoint.")],
    target: TargetName = "embedded",
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "bfloat16",
    embedding: Annotated[
        bool, typer.Option("--embedding", help="Ship the target's embedding too.")
    ] = False,
    head: Annotated[
        bool,
        typer.Option("--head", help="Ship the target's head too (a reduced vocabulary does)."),
    ] = False,
    trust_remote_code: TrustRemoteCode = False,
) -> None:
    """Write a draft for serving, in vLLM's `Qwen3DSparkModel` layout.

    An engine takes the embedding and the head from the target it serves. A draft of a reduced
    vocabulary ships its own rows of the head, so the target is read; otherwise it is not.
    """
    import torch

    from sparksmith.cli.draft_choice import check_choice, check_fit
    from sparksmith.draft.checkpoint import WEIGHTS_FILE, export_draft, load_draft, read_config
    from sparksmith.draft.manifest import for_target, read_manifest, write_manifest

    if dtype not in DTYPES:
        raise UserError("--dtype", dtype, "is not known", f"Use one of {', '.join(DTYPES)}.")
    check_empty(out)
    config = read_config(draft)
    ships_head = head or config.reduced_vocabulary
    # On a CPU in float32: every dtype of a checkpoint is exact in it.
    choice = TargetChoice(name=target, dtype="float32", trust_remote_code=trust_remote_code)
    if ships_head or embedding:
        check_choice(config, choice, str(draft))
    loaded = load_draft(draft)
    head_weight = embed_weight = None
    if ships_head or embedding:
        opened = open_target(choice, identify=False)
        check_fit(config, opened.target, str(draft))
        head_weight = opened.target.head_weight if ships_head else None
        embed_weight = opened.target.embed_weight if embedding else None
    manifest = read_manifest(draft, config, loaded.target_ids)
    if ships_head or embedding:
        # Only then has it been compared with the draft.
        manifest = for_target(manifest, target)
    export_draft(loaded, out, embed=embed_weight, head=head_weight, dtype=getattr(torch, dtype))
    write_manifest(manifest, out)
    shipped = ["embedding"] * embedding + [f"{config.draft_vocab_size} head rows"] * ships_head
    size = (out / WEIGHTS_FILE).stat().st_size / 1e6
    print(f"draft in {out}: {size:.1f} MB, {dtype}, with {' and '.join(shipped) or 'no rows'}")


def check_empty(folder: Path) -> None:
    """UserError unless `folder` is absent or empty: an export replaces nothing."""
    if folder.exists() and not folder.is_dir():
        raise UserError("OUT", str(folder), "is a file", "Give a folder.")
    if folder.is_dir() and any(folder.iterdir()):
        raise UserError("OUT", str(folder), "is not empty", "Give a new or empty folder.")
