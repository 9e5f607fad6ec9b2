"""`sparksmith eval`: how many tokens a step accepts, and how fast one user's stream gets."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparksmith.cli.draft_choice import (
    DRAFT_TEMPERATURE,
    NOTHING,
    DraftTemperature,
    DraftTopP,
    MinSurvival,
    NumTokens,
    bind_draft,
    check_choice,
    drafting_of,
    num_tokens_of,
    read_draft_config,
    stream_of,
)
from sparksmith.cli.draft_choice import load as load
from sparksmith.cli.endpoint import SERVER_PANEL, EndpointChoice, EndpointModel, EndpointUrl
from sparksmith.cli.target import (
    Device,
    Dtype,
    OpenTarget,
    TargetChoice,
    Threads,
    TrustRemoteCode,
    open_target,
)
from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.cli.evaluating import Drafting
    from sparksmith.draft.model import DSparkDraft
    from sparksmith.eval.prompt_sets import EvalPrompt
    from sparksmith.verify.decode import DecodeSettings

EXAMPLE = "sparksmith eval --draft runs/draft/best --workload code --out runs/report"
PROMPTS, DECODING = "Prompts", "Decoding (the same in both arms)"


def evaluate(
    out: Annotated[Path, typer.Option(help="Folder for the traces and the reports.")],
    draft: Annotated[
        str | None,
        typer.Option(
            help="Folder of a draft, or `ngram` for prompt lookup; with --endpoint the one that "
            "the server drafts with, which need not be at hand."
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="A transformers folder, a name on the Hub, `embedded` or `k3-mini`; with "
            "--endpoint its configuration and tokenizer alone are read.",
            show_default="embedded",
            rich_help_panel="Target",
        ),
    ] = None,
    workload: Annotated[
        list[str] | None,
        typer.Option(
            help="Packaged workload; repeat for several (default: all).", rich_help_panel=PROMPTS
        ),
    ] = None,
    prompts: Annotated[
        list[Path] | None,
        typer.Option(
            help="JSON lines of a public set's layout, or your own.", rich_help_panel=PROMPTS
        ),
    ] = None,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each workload.", rich_help_panel=PROMPTS)
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", rich_help_panel=DECODING)
    ] = 0.7,
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=DECODING)] = 0.95,
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=DECODING)] = 0,
    max_new_tokens: Annotated[
        int, typer.Option(help="The longest response.", rich_help_panel=DECODING)
    ] = 128,
    num_tokens: NumTokens = None,
    accept_rule: Annotated[
        str, typer.Option(help="block or standard.", rich_help_panel=DECODING)
    ] = "block",
    draft_temperature: DraftTemperature = DRAFT_TEMPERATURE,
    draft_top_p: DraftTopP = 1.0,
    min_survival: MinSurvival = None,
    seed: Annotated[int, typer.Option(help="Of all requests.", rich_help_panel=DECODING)] = 0,
    lossless: Annotated[
        int, typer.Option(help="Prompts of the check at temperature 0.", rich_help_panel=DECODING)
    ] = 10,
    endpoint: EndpointUrl = None,
    model: EndpointModel = None,
    baseline_endpoint: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="The same target without speculation: the plain arm.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    baseline_run: Annotated[
        Path | None,
        typer.Option(
            help="Or the folder of an earlier run, whose plain responses are taken.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(
            help="Also measure so many users at once: 1,4,8.", rich_help_panel=SERVER_PANEL
        ),
    ] = None,
    bench: Annotated[
        list[Path] | None,
        typer.Option(
            help="Results of `vllm bench serve --save-result`, put beside the report's own.",
            rich_help_panel=SERVER_PANEL,
        ),
    ] = None,
    repeats: Annotated[
        int,
        typer.Option(
            help="Times that a server is asked every prompt.", rich_help_panel=SERVER_PANEL
        ),
    ] = 1,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Run the draft and plain decoding on the same prompts and write the report.

    They run here, or on a server (--endpoint URL), with another for the plain arm.

    Exit code 1 when the texts at temperature 0 differ (ties aside).
    """
    from sparksmith.draft.sampling import Sampling
    from sparksmith.verify.decode import DecodeSettings
    from sparksmith.verify.run_record import check_folder

    chosen = chosen_prompts(workload, prompts or [], limit)
    if endpoint is not None:
        from sparksmith.cli import evaluate_endpoint as live

        if repeats < 1:
            raise UserError("--repeats", repeats, "is below 1", "Use 1 or more.")
        baseline = None
        if baseline_endpoint is not None:
            baseline = EndpointChoice(url=baseline_endpoint, model=model)
        return live.run(
            live.LiveChoice(
                endpoint=EndpointChoice(url=endpoint, model=model),
                baseline=baseline,
                baseline_run=baseline_run,
                draft=draft,
                target=target,
                sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
                max_new_tokens=max_new_tokens,
                seed=seed,
                lossless=lossless,
                repeats=repeats,
                users=live.parse_users(concurrency),
                bench=tuple(bench or ()),
                out=out,
            ),
            chosen,
        )
    for option, value in (
        ("--baseline-endpoint", baseline_endpoint),
        ("--baseline-run", baseline_run),
        ("--concurrency", concurrency),
        ("--model", model),
    ):
        if value is not None:
            raise UserError(option, str(value), "is for a server", "Add --endpoint URL.")
    if draft is None:
        raise UserError("--draft", None, "is missing", "Give a folder of a draft, or `ngram`.")
    if draft == NOTHING:
        raise UserError(
            "--draft", draft, "leaves one arm", "Give a folder or `ngram`; the other arm is plain."
        )
    config = read_draft_config(draft)
    settings = DecodeSettings(
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        max_new_tokens=max_new_tokens,
        num_tokens=num_tokens_of(num_tokens, config),
        accept_rule=parse_rule(accept_rule),
        seed=seed,
    )
    drafting = drafting_of((draft_temperature, draft_top_p, min_survival), config, device)
    choice = TargetChoice(
        name=target or "embedded",
        dtype=dtype,
        device=device,
        threads=threads,
        trust_remote_code=trust_remote_code,
        stream=stream_of(draft),
    )
    check_folder(out, "eval")
    check_choice(config, choice, draft)
    loaded = load(draft)
    opened = open_target(choice, taps=config.target_layer_ids if config else ())
    summary = run(
        opened,
        (draft, loaded),
        chosen,
        (settings, drafting),
        (out, lossless),
    )
    check = summary["losslessness"]
    return 1 if check and check["differences"] else 0


def chosen_prompts(
    workloads: list[str] | None, files: list[Path], limit: int | None
) -> "list[EvalPrompt]":
    """Packaged workloads and files together; all packaged ones when nothing is named."""
    from sparksmith.eval.prompt_sets import load_file, load_workloads

    prompts = []
    if workloads or not files:
        prompts += load_workloads(workloads, limit=limit)
    for file in files:
        prompts += load_file(file, limit=limit)
    return prompts


def parse_rule(name: str) -> Literal["block", "standard"]:
    if name == "block":
        return "block"
    if name == "standard":
        return "standard"
    raise UserError("--accept-rule", name, "is not known", "Use block or standard.")


def run(
    opened: OpenTarget,
    draft: "tuple[str, DSparkDraft | None]",
    prompts: "list[EvalPrompt]",
    how: "tuple[DecodeSettings, Drafting]",
    place: tuple[Path, int],
) -> dict[str, Any]:
    """Everything after the options; returns the report's summary."""
    from rich.console import Console

    from sparksmith.cli import evaluating
    from sparksmith.eval.evaluation import EvaluationSettings, check_prompts
    from sparksmith.verify.run_record import RunRecord, fingerprint

    (name, loaded), (settings, drafting), (out, lossless) = draft, how, place
    if loaded is not None:
        bind_draft(loaded, opened.target, name)
    tokens = evaluating.tokenised(opened.tokenizer, prompts)
    check_prompts(opened.target, tokens, settings.max_new_tokens)
    draft_record = {"name": name} if loaded is None else {"name": name, **fingerprint(Path(name))}
    described = {
        "target": opened.record["name"],
        "draft": name,
        "dtype": opened.record["dtype"],
        "device": str(opened.target.device),
    }
    if loaded is not None:  # prompt lookup has no use for them
        described |= {
            "draft_temperature": drafting.temperature,
            "draft_top_p": drafting.top_p,
            "min_survival": drafting.min_survival,
        }
    record = RunRecord.open(
        out,
        "eval",
        settings=json.loads(json.dumps({**_plain(settings), **described, "lossless": lossless})),
        inputs={
            "target": opened.record,
            "draft": draft_record,
            "prompts": {"sha256": _prompts_hash(tokens), "count": len(tokens)},
        },
    )
    with record:
        evaluation = evaluating.Evaluation(
            target=opened.target,
            tokenizer=opened.tokenizer,
            make_drafter=evaluating.drafter_maker(opened.target, loaded, drafting),
            prompts=tokens,
            settings=EvaluationSettings(decode=settings, described=described),
            lossless_prompts=lossless,
        )
        run_record = record.content["attempts"][-1]
        about = {**described, "machine": run_record["machine"], "versions": run_record["versions"]}
        summary, paths = evaluating.evaluate_and_report(evaluation, out, about, Console())
        record.finish("complete", title=summary["title"], report=paths.html.name)
    print(f"report: {paths.html}")
    return summary


def _plain(settings: Any) -> dict[str, Any]:
    values = asdict(settings)
    stop = values.pop("stop_token_ids")
    return {**values, "stop_token_ids": None if stop is None else sorted(stop)}


def _prompts_hash(prompts: Any) -> str:
    import hashlib

    text = json.dumps([[p.workload, p.prompt_id, p.token_ids] for p in prompts])
    return hashlib.sha256(text.encode()).hexdigest()
