"""`sparksmith convert`: a draft from any public layout to any other."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.draft.config import DSparkConfig
    from sparksmith.draft.convert import TargetRows

EXAMPLE = "sparksmith convert runs/draft/best runs/served --to speculators"


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="Folder of a draft, any layout.")],
    out: Annotated[Path, typer.Argument(metavar="DST", help="New or empty folder.")],
    to: Annotated[str, typer.Option("--to", help="vllm, k3, speculators, deepspec or specforge.")],
    target: Annotated[
        str | None,
        typer.Option(
            help="The target, where a layout ships its embedding or head, or names it. Only these "
            "tensors are read of it."
        ),
    ] = None,
    parity: Annotated[
        bool,
        typer.Option(
            "--parity",
            help="Run the draft beside the target (--target) and write parity/parity.safetensors "
            "into DST, for `sparksmith check --parity`. A source's own is copied without this.",
        ),
    ] = False,
) -> None:
    """Write a draft in another layout: the same tensors, bit for bit, under its names and keys.

    What the layout cannot express is refused, and then nothing is written.
    """
    if parity and target is None:
        raise UserError("--target", None, "is needed for --parity", "Name the draft's target.")
    from sparksmith.cli.export import check_empty
    from sparksmith.draft.checkpoint import open_draft
    from sparksmith.draft.convert import convert_draft, needed_rows
    from sparksmith.draft.layouts import LAYOUTS, check_layout

    if to not in LAYOUTS:
        raise UserError("--to", to, "is no layout", f"Use one of {', '.join(LAYOUTS)}.")
    check_empty(out)
    opened = open_draft(source)
    check_layout(opened.config, to)
    rows = None
    if target is not None and needed_rows(opened, to):
        rows = _rows(target, opened.config)
    done = convert_draft(source, out, to, rows=rows, target=target)
    for assumption in done.assumed:
        print(f"assumed: {assumption}")
    if done.manifest.assumed:
        print(f"nobody states (marked in sparksmith.json): {', '.join(done.manifest.assumed)}")
    taps = ",".join(map(str, opened.config.target_layer_ids))
    form = "" if opened.config.sample_from_anchor else ", fill-in"
    print(
        f"{done.source} -> {done.layout}: {out}, {opened.config.num_hidden_layers} layers, taps "
        f"{taps}, drafts {opened.config.num_drafts}{form}"
        + (f", with {' and '.join(done.shipped)}" if done.shipped else "")
    )
    if parity and target is not None:
        _record(out, target)
    if to == "speculators" and not (target or done.manifest.target.name):
        print("no target is named: `vllm serve DST` needs one; give --target ORG/NAME")


def _record(draft: Path, target: str) -> None:
    """The record of parity of the converted draft, on two of the packaged prompts."""
    from sparksmith.cli.draft_choice import bind_draft, load, stream_of
    from sparksmith.cli.progress import progress
    from sparksmith.cli.target import TargetChoice, open_target
    from sparksmith.eval.prompt_sets import load_workloads
    from sparksmith.verify.loading import render_prompt
    from sparksmith.verify.parity import record_parity, texts_of, write_parity

    loaded = load(str(draft))
    assert loaded is not None
    choice = TargetChoice(name=target, dtype="float32", stream=stream_of(str(draft)))
    opened = open_target(choice, taps=loaded.config.target_layer_ids, identify=False)
    bind_draft(loaded, opened.target, str(draft))
    prompts = [
        render_prompt(opened.tokenizer, prompt.messages)
        for prompt in load_workloads(["code", "creative"], limit=1)
    ]
    with progress("run the draft beside the target"):
        texts, accepted = texts_of(opened.target, loaded, prompts)
        path = write_parity(record_parity(loaded, texts, accepted), draft)
    print(f"written: {path}")


def _rows(target: str, config: "DSparkConfig") -> "TargetRows":
    from sparksmith.cli.target import resolve
    from sparksmith.draft.convert import TargetRows
    from sparksmith.verify.head_tensors import read_head_tensors

    found = read_head_tensors(resolve(target))
    shape = (config.vocab_size, config.hidden_size)
    for name, tensor in (("embedding", found.embed), ("head", found.head)):
        if tuple(tensor.shape) != shape:
            raise UserError(
                "--target",
                target,
                f"has an {name} of {list(tensor.shape)}, and the draft needs {list(shape)}",
                "Name the target that the draft was trained for.",
            )
    print(f"read {found.bytes_read / 1e6:,.1f} MB of {target}: {', '.join(found.names)}")
    return TargetRows(embed=found.embed, head=found.head)
