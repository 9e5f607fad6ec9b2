"""`sparksmith vllm`: the speculative config and the whole serve command for a draft."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Collection

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
    head_node: Annotated[
        str,
        typer.Option(help="Address of the first node, for K3 on hardware of several nodes."),
    ] = "head-node",
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
    from sparksmith.cli.target import K3_MINI, resolve
    from sparksmith.draft.checkpoint import open_draft
    from sparksmith.draft.layouts import OFFSETS
    from sparksmith.draft.manifest import read_manifest
    from sparksmith.draft.vocabulary import target_ids_of
    from sparksmith.verify.embedded import TARGET_NAME
    from sparksmith.verify.inspection import findings, inspect
    from sparksmith.verify.serve_arguments import ServeArguments
    from sparksmith.verify.target_facts import known_facts
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
    # An engine knows no names but folders and those of the Hub.
    name = resolve(target) if target in (TARGET_NAME, K3_MINI) else target
    facts = known_facts(name)
    if Path(name).is_dir():
        name = str(Path(name).resolve())
    request = Request(
        target=name,
        draft=str(draft.resolve()),
        hardware=HARDWARE[hardware],
        goal=goal,  # type: ignore[arg-type]
        context=context,
        temperature=temperature,
        is_k3=facts.is_k3 if facts is not None else False,
        facts=facts,
        head_node=head_node,
    )
    made = plan(request, config, read_manifest(draft, config, ids))
    command = made.command(name)
    wrong = [
        finding
        for finding in findings(inspect(draft, facts, ServeArguments.parse(command)))
        if finding.level == "error"
    ]
    if wrong:
        raise UserError(
            "DRAFT",
            str(draft),
            f"has errors: {wrong[0].check} ({wrong[0].value}): {wrong[0].consequence}",
            f"{wrong[0].remedy} `sparksmith check` shows all.",
        )
    if write:
        _write(draft, made, command)
    if quiet:
        print(json.dumps(made.speculative))
    else:
        _print(made, request, config, command, opened.found)
    return 0


def _print(
    made: "Plan",
    request: "Request",
    config: "DSparkConfig",
    command: str,
    shipped: "Collection[str]",
) -> None:
    from sparksmith.verify.vllm_config import memory

    print(f"speculative config\n{json.dumps(made.speculative, indent=2)}\n")
    print(f"command\n{command}\n")
    print("why")
    for name, reason in made.reasons.items():
        print(f"  {name}: {reason}")
    taken = memory(made, config, shipped)
    sequences = made.options["max-num-seqs"]
    print(
        f"\nthe draft takes {_bytes(taken['weights'])} of weights, {_bytes(taken['cache'])} of "
        f"key/value cache for {sequences} requests of {made.context:,} tokens, and "
        f"{_bytes(taken['logits'])} for the logits of drafted tokens"
    )
    if request.facts is None:
        print(f"{request.target} is not at hand: whether the draft fits it was not compared")
    print("before booking a cluster: sparksmith check DRAFT --target TARGET")


def _bytes(number: int) -> str:
    if number >= 10**9:
        return f"{number / 1e9:.2f} GB"
    return f"{number / 1e6:.1f} MB" if number else "nothing"


def _write(folder: Path, made: "Plan", command: str) -> None:
    """Say on stderr what was written: stdout may be another program's input."""
    from sparksmith.draft.files import write_json, write_text

    script = folder / "serve.sh"
    try:
        write_json(folder / "speculative.json", made.speculative)
        write_text(script, f'#!/bin/sh\nset -e\n{command} \\\n  "$@"\n')
        script.chmod(0o755)
    except OSError as error:
        raise UserError(
            "--write",
            str(folder),
            f"cannot be written to ({error.strerror})",
            "Make the folder writable, or leave --write out and keep what is printed.",
        ) from None
    print(f"written: {script} and {folder / 'speculative.json'}", file=sys.stderr)
