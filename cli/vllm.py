"""`sparksmith vllm`: the speculative config and the whole serve command for a draft."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.draft.config import DSparkConfig
    from sparksmith.verify.vllm_config import Plan, Request

EXAMPLE = "sparksmith vllm runs/served --target moonshotai/Kimi-K3 --hardware b300"
GOALS = ("latency", "throughput")


def vllm(
    draft: Annotated[Path, typer.Argument(help="Folder of a draft in a layout vLLM reads.")],
    target: Annotated[str, typer.Option(help="The target, as `vllm serve` names it.")],
    hardware: Annotated[
        str, typer.Option(help="gb300, b300, gb200, b200, h200, mi355x or cpu.")
    ] = "b300",
    goal: Annotated[
        str, typer.Option(help="latency (a few users) or throughput (many).")
    ] = "latency",
    context: Annotated[
        int | None, typer.Option(help="Longest prompt with its answer, in tokens.")
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="At which requests sample; 0 is greedy.")
    ] = 1.0,
    write: Annotated[
        bool, typer.Option("--write", help="Put serve.sh and speculative.json beside the draft.")
    ] = False,
    quiet: Annotated[
        bool, typer.Option("--quiet", help="Print the speculative config alone.")
    ] = False,
) -> int:
    """Print what to start vLLM with, and why each value is what it is.

    Only what vLLM 0.32 and 0.33 both know is written; a draft that `check` finds an error in is
    refused.
    """
    from sparksmith.draft.checkpoint import open_draft
    from sparksmith.draft.layouts import OFFSETS
    from sparksmith.draft.manifest import read_manifest
    from sparksmith.draft.vocabulary import target_ids_of
    from sparksmith.verify.inspection import findings, inspect
    from sparksmith.verify.serve_arguments import ServeArguments
    from sparksmith.verify.vllm_config import HARDWARE, Request, plan

    if hardware not in HARDWARE:
        raise UserError("--hardware", hardware, "is unknown", f"Use one of {', '.join(HARDWARE)}.")
    if goal not in GOALS:
        raise UserError("--goal", goal, "is unknown", f"Use one of {', '.join(GOALS)}.")
    opened = open_draft(draft)
    config = opened.config
    ids = None
    if OFFSETS in opened.found:
        ids = target_ids_of(opened.tensor(OFFSETS), config.vocab_size)
    request = Request(
        target=target,
        draft=str(draft),
        hardware=HARDWARE[hardware],
        goal=goal,  # type: ignore[arg-type]
        context=context,
        temperature=temperature,
        is_k3="kimi-k3" in target.lower(),
    )
    made = plan(request, config, read_manifest(draft, config, ids))
    command = made.command(target)
    wrong = [
        finding
        for finding in findings(inspect(draft, None, ServeArguments.parse(command)))
        if finding.level == "error"
    ]
    if wrong:
        raise UserError(
            "DRAFT",
            str(draft),
            f"has errors: {wrong[0].check} ({wrong[0].value}): {wrong[0].consequence}",
            f"{wrong[0].remedy} `sparksmith check` shows all.",
        )
    if quiet:
        print(json.dumps(made.speculative))
    else:
        _print(made, request, config, command)
    if write:
        _write(draft, made, command)
    return 0


def _print(made: "Plan", request: "Request", config: "DSparkConfig", command: str) -> None:
    from sparksmith.verify.vllm_config import memory

    print(f"speculative config\n{json.dumps(made.speculative, indent=2)}\n")
    print(f"command\n{command}\n")
    print("why")
    for name, reason in made.reasons.items():
        print(f"  {name}: {reason}")
    context = request.context or config.max_position_embeddings
    taken = memory(made, config, context)
    sequences = made.options["max-num-seqs"]
    print(
        f"\nthe draft takes {taken['cache'] / 1e9:.2f} GB of key/value cache for {sequences} "
        f"requests of {context:,} tokens, and {taken['logits'] / 1e9:.2f} GB for the logits of "
        "drafted tokens"
    )
    print("before booking a cluster: sparksmith check DRAFT --target TARGET")


def _write(folder: Path, made: "Plan", command: str) -> None:
    from sparksmith.draft.files import write_json, write_text

    write_json(folder / "speculative.json", made.speculative)
    script = folder / "serve.sh"
    write_text(script, f'#!/bin/sh\nset -e\n{command} \\\n  "$@"\n')
    script.chmod(0o755)
    print(f"written: {script} and {folder / 'speculative.json'}")
