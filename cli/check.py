"""`sparksmith check`: what is wrong with a draft, before a cluster is booked."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.cli.target import OpenTarget, TargetChoice
    from sparksmith.verify.findings import Finding, TargetFacts
    from sparksmith.verify.probes import ProbeResult

EXAMPLE = "sparksmith check runs/draft/best --target embedded"
PROBE_PROMPTS = 4
PARITY = "parity"
ALONE_BYTES = 1 << 30
"""Of weights: a larger draft is not loaded only to try it without its target."""


def check(
    draft: Annotated[
        Path | None, typer.Argument(help="Folder of a draft, in any layout.", show_default=False)
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(help="The target: compares sizes and text, and runs the draft beside it."),
    ] = None,
    probe: Annotated[
        bool, typer.Option(help="Run the draft: beside the target, or a small one alone.")
    ] = True,
    serve_args: Annotated[
        str | None, typer.Option(help="A `vllm serve` command line, quoted, to check against.")
    ] = None,
    parity: Annotated[
        bool,
        typer.Option(
            "--parity",
            help="Replay the draft's parity/parity.safetensors (with --target) and compare.",
        ),
    ] = False,
    endpoint: Annotated[
        str | None,
        typer.Option(help="With --parity: a running vLLM that serves the draft, http://HOST:PORT."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The server's name of the target, if it serves several.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    explain: Annotated[
        str | None, typer.Option(help="Tell the story behind a check; `all` lists them.")
    ] = None,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run the target's own code.")
    ] = False,
) -> int:
    """Find what makes a draft fail to load, or load and then accept nothing.

    Exit code 1 if there is an error among the findings, 0 if not.
    """
    if explain is not None:
        return _explain(explain)
    if draft is None:
        raise UserError(
            "DRAFT", None, "is missing", "Give the folder of a draft, or --explain all."
        )
    from sparksmith.cli.draft_choice import stream_of
    from sparksmith.cli.target import TargetChoice
    from sparksmith.draft.checkpoint import read_config
    from sparksmith.verify.findings import worst_first
    from sparksmith.verify.inspection import findings, inspect
    from sparksmith.verify.serve_arguments import ServeArguments

    serve = None if serve_args is None else ServeArguments.parse(serve_args)
    if parity and target is None and endpoint is None:
        raise UserError(
            "--target",
            None,
            "is needed for --parity",
            "Name the draft's target, or an engine with --endpoint.",
        )
    if endpoint is not None and not parity:
        raise UserError("--endpoint", endpoint, "is for --parity", "Add --parity, or leave it out.")
    facts, opened = None, None
    if target is not None:
        taps = read_config(draft).target_layer_ids if parity else ()
        choice = TargetChoice(
            name=target,
            dtype="float32",
            trust_remote_code=trust_remote_code,
            stream=stream_of(str(draft)),
        )
        facts, opened = _facts(choice, taps if probe or parity else None)
    found = findings(inspect(draft, facts, serve))
    if opened is None and probe:
        found = worst_first([*found, *_alone(draft)])
    if parity and opened is not None:
        found = [*_replay(draft, opened), *found]
    if endpoint is not None:
        found = [*_replay_engine(draft, opened, endpoint, model), *found]
    result = _probe(draft, opened) if opened is not None and probe else None
    if result is not None:
        found = worst_first([*found, *result.findings])
    skipped = opened is not None and probe and result is None
    if as_json:
        report = {
            **_as_json(draft, found, result),
            "probes_skipped": skipped,
            "parity": _parity_json(found, opened is not None, endpoint) if parity else None,
        }
        print(json.dumps(report, indent=2, ensure_ascii=False))
    else:
        if parity and not any(one.check == PARITY for one in found):
            print(f"parity: {_agreement(opened is not None, endpoint)}")
        _print(found, result, skipped=skipped)
    return 1 if any(finding.level == "error" for finding in found) else 0


def _explain(identifier: str) -> int:
    from sparksmith.verify.inspection import CHECKS
    from sparksmith.verify.probes import STORIES

    if identifier == "all":
        for check in CHECKS.values():
            print(f"{check.id:20} {check.level:8} {check.title}")
        for name in STORIES:
            print(f"{name:20} {'probe':8} runs the draft beside its target")
        return 0
    if identifier in STORIES:
        print(STORIES[identifier])
        return 0
    if identifier not in CHECKS:
        raise UserError("--explain", identifier, "is no check", "`--explain all` lists them.")
    check = CHECKS[identifier]
    print(f"{check.id} ({check.level}): {check.title}\n\n{check.story}")
    return 0


def _facts(
    choice: "TargetChoice", taps: tuple[int, ...] | None
) -> "tuple[TargetFacts, OpenTarget | None]":
    """What the checks compare with, from configuration and tokenizer; the target itself, with
    these taps, only if the draft is to run beside it (None: it is not)."""
    from transformers import AutoTokenizer

    from sparksmith.cli.target import open_target, resolve
    from sparksmith.verify.loading import text_facts

    path = resolve(choice.name)
    opened = None
    if taps is not None:
        opened = open_target(choice, taps=taps, identify=False)
        tokenizer = opened.tokenizer
    else:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=choice.trust_remote_code)
    return text_facts(path, choice.name, tokenizer, choice.trust_remote_code), opened


def _probe(draft: Path, opened: "OpenTarget") -> "ProbeResult | None":
    """The probes' result; None for a draft that cannot be loaded, or not beside this target."""
    from sparksmith.cli.draft_choice import bind_draft, load
    from sparksmith.cli.progress import progress
    from sparksmith.eval.prompt_sets import load_workloads
    from sparksmith.verify.loading import render_prompt
    from sparksmith.verify.probes import probe

    try:
        loaded = load(str(draft))
        assert loaded is not None
        bind_draft(loaded, opened.target, str(draft))
    except UserError:
        return None
    prompts = [
        render_prompt(opened.tokenizer, prompt.messages)
        for prompt in load_workloads(["code", "creative"], limit=PROBE_PROMPTS // 2)
    ]
    with progress("run the draft beside the target"):
        return probe(opened.target, loaded, prompts)


def _alone(draft: Path) -> "list[Finding]":
    """What a small draft shows without its target; nothing if it cannot be loaded."""
    from sparksmith.cli.draft_choice import load
    from sparksmith.verify.probes import probe_alone

    if sum(path.stat().st_size for path in draft.glob("*.safetensors")) > ALONE_BYTES:
        return []
    try:
        loaded = load(str(draft))
    except UserError:
        return []
    assert loaded is not None
    return probe_alone(loaded)


def _replay(draft: Path, opened: "OpenTarget") -> "list[Finding]":
    """What differs from the draft's record of parity, as errors."""
    from sparksmith.cli.draft_choice import bind_draft, load
    from sparksmith.verify.findings import Finding
    from sparksmith.verify.parity import read_parity, replay_parity

    stored = read_parity(draft)
    loaded = load(str(draft))
    assert loaded is not None
    bind_draft(loaded, opened.target, str(draft))
    return [
        Finding(
            check=PARITY,
            level="error",
            value=f"text {one.text} first differs in its {one.stage}, by {one.size:.1e}",
            consequence="this installation computes another draft than the one that was recorded",
            remedy=f"Look at {one.meaning}.",
        )
        for one in replay_parity(loaded, stored, opened.target)
    ]


def _replay_engine(
    draft: Path, opened: "OpenTarget | None", url: str, model: str | None
) -> "list[Finding]":
    """Where an engine's answers to the recorded prompts differ, as errors."""
    from sparksmith.cli.draft_choice import bind_draft, load
    from sparksmith.cli.progress import progress
    from sparksmith.draft.checkpoint import read_config
    from sparksmith.verify.endpoint import Endpoint, RequestError
    from sparksmith.verify.engine_parity import compare_engine, serve_parity
    from sparksmith.verify.findings import Finding
    from sparksmith.verify.parity import check_fits, read_parity

    stored = read_parity(draft)
    check_fits(read_config(draft), stored)
    server = Endpoint(url, model=model)
    try:
        facts = server.describe()
        with progress(f"ask {facts.engine} at {facts.url}"):
            served = serve_parity(server, stored)
    except RequestError as error:
        raise UserError(
            "--endpoint", facts.url, f"fails: {error}", "Look at the server's log."
        ) from None
    finally:
        server.close()
    loaded, target = None, None
    if opened is not None:
        loaded, target = load(str(draft)), opened.target
        assert loaded is not None
        bind_draft(loaded, target, str(draft))
    hint = "" if opened is not None else " With --target, the fault that fits is looked for."
    return [
        Finding(
            check=PARITY,
            level="error",
            value=f"text {one.text} first differs in its {one.stage}",
            consequence=f"{facts.engine} at {facts.url} serves another draft than was recorded",
            remedy=f"Look at {one.meaning}.{hint}",
        )
        for one in compare_engine(stored, served, loaded, target)
    ]


def _agreement(here: bool, endpoint: str | None) -> str:
    parts = ["every stage agrees with parity/parity.safetensors"] if here else []
    if endpoint is not None:
        parts.append(f"{endpoint} gives its text and accepts in every step what it says")
    return "; ".join(parts)


def _parity_json(found: "list[Finding]", here: bool, endpoint: str | None) -> dict[str, Any]:
    """Where the record was replayed, and how many of its texts differ."""
    differences = sum(one.check == PARITY for one in found)
    return {"here": here, "endpoint": endpoint, "differences": differences}


def _as_json(draft: Path, found: "list[Finding]", result: "ProbeResult | None") -> dict[str, Any]:
    measured = None
    if result is not None:
        measured = {k: v for k, v in asdict(result).items() if k != "findings"}
    return {
        "draft": str(draft),
        "errors": sum(finding.level == "error" for finding in found),
        "findings": [asdict(finding) for finding in found],
        "probes": measured,
    }


def _print(found: "list[Finding]", result: "ProbeResult | None", *, skipped: bool) -> None:
    from rich.console import Console
    from rich.text import Text

    from sparksmith.verify.findings import LEVELS

    console = Console(highlight=False)
    colours = {"error": "bold red", "warning": "yellow", "note": "cyan"}
    for finding in found:
        head = Text(f"{finding.level} ", style=colours[finding.level])
        head.append(f"{finding.check}: ", style="bold")
        head.append(finding.value)
        console.print(head)
        console.print(Text(f"  {finding.consequence}."))
        console.print(Text(f"  -> {finding.remedy}"))
    if result is not None:
        console.print(
            Text(
                f"beside the target, {result.positions} positions: its greedy word has probability "
                f"{result.accepted:.2f} at the first slot ({result.accepted_elsewhere:.2f} with "
                "the features of another text)"
            )
        )
    if skipped:
        console.print(Text("the draft could not be run beside the target: first the errors above"))
    counts = {level: sum(finding.level == level for finding in found) for level in LEVELS}
    if not found:
        console.print(Text("no findings", style="green"))
    else:
        said = (f"{n} {level}{'s' * (n > 1)}" for level, n in counts.items() if n)
        console.print(Text(", ".join(said)))
        console.print(Text(f"`sparksmith check --explain {found[0].check}` tells more."))
