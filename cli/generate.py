"""`sparksmith generate`: prompts in, the target's responses out, as shards that resume."""

import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from sparksmith.cli.endpoint import EndpointChoice, EndpointModel, EndpointUrl
from sparksmith.cli.prompt_source import DEFAULT_COUNT, PromptSource
from sparksmith.cli.target import (
    Device,
    Dtype,
    TargetChoice,
    Threads,
    TrustRemoteCode,
)
from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.cli.target import OpenTarget
    from sparksmith.distill.generation import GenerationSettings
    from sparksmith.distill.responses import TokenizedPrompt
    from sparksmith.distill.shards import ShardWriter
    from sparksmith.verify.run_record import RunRecord

EXAMPLE = "sparksmith generate --count 2000 --out runs/responses"
PROMPTS, SAMPLING, OUTPUT = "Prompts (the packaged ones by default)", "Sampling", "Output"
SERVER = "Server"


def generate(
    out: Annotated[
        Path, typer.Option(help="Folder for the shards and run.json.", rich_help_panel=OUTPUT)
    ],
    target: Annotated[
        str | None,
        typer.Option(
            help="A transformers folder, a name on the Hub, `embedded` or `k3-mini`; with "
            "--endpoint only its tokenizer is used, and only where the server tells no token ids.",
            show_default="embedded",
            rich_help_panel="Target",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            help="JSON lines with messages, conversations, turns or prompt.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    dataset: Annotated[
        str | None,
        typer.Option(help="A data set: NAME[:SPLIT[:COLUMN]].", rich_help_panel=PROMPTS),
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            help=f"Prompts to answer (default: all of a file, else {DEFAULT_COUNT}).",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    mix: Annotated[
        str | None,
        typer.Option(
            help="Kinds of packaged prompts with weights, such as code=0.5,creative=0.5.",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    max_prompt_tokens: Annotated[
        int | None,
        typer.Option(
            help="Longer prompts are skipped (default: 512, or what the context leaves).",
            rich_help_panel=PROMPTS,
        ),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="0 is greedy.", rich_help_panel=SAMPLING)
    ] = 0.7,
    top_p: Annotated[float, typer.Option(help="1 is off.", rich_help_panel=SAMPLING)] = 0.95,
    top_k: Annotated[int, typer.Option(help="0 is off.", rich_help_panel=SAMPLING)] = 0,
    max_new_tokens: Annotated[
        int, typer.Option(help="The longest response.", rich_help_panel=SAMPLING)
    ] = 256,
    seed: Annotated[
        int,
        typer.Option(help="Of the prompts drawn and of the sampling.", rich_help_panel=SAMPLING),
    ] = 0,
    shard_format: Annotated[
        str, typer.Option("--format", help="jsonl or parquet.", rich_help_panel=OUTPUT)
    ] = "jsonl",
    rows_per_shard: Annotated[
        int, typer.Option(help="Responses in a shard.", rich_help_panel=OUTPUT)
    ] = 2000,
    batch_size: Annotated[
        int | None,
        typer.Option(
            help="Responses under way at once (default: 64; 16 with --endpoint).",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    endpoint: EndpointUrl = None,
    model: EndpointModel = None,
    stream: Annotated[
        bool, typer.Option(help="Ask for streamed answers.", rich_help_panel=SERVER)
    ] = False,
    thinking: Annotated[
        str | None,
        typer.Option(help="K3's thinking mode: off, on, low, high or max.", rich_help_panel=SERVER),
    ] = None,
    extra_body: Annotated[
        str | None,
        typer.Option(help="A JSON object put into every request.", rich_help_panel=SERVER),
    ] = None,
    budget_tokens: Annotated[
        int | None,
        typer.Option(help="Stop before more tokens than this.", rich_help_panel=SERVER),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Stop before it costs more dollars.", rich_help_panel=SERVER),
    ] = None,
    price_prompt: Annotated[
        float,
        typer.Option(help="Dollars for a million prompt tokens.", rich_help_panel=SERVER),
    ] = 0.0,
    price_answer: Annotated[
        float,
        typer.Option(help="Dollars for a million answer tokens.", rich_help_panel=SERVER),
    ] = 0.0,
    timeout: Annotated[
        float, typer.Option(help="Seconds without a byte.", rich_help_panel=SERVER)
    ] = 600.0,
    dtype: Dtype = "auto",
    device: Device = "cpu",
    threads: Threads = 0,
    trust_remote_code: TrustRemoteCode = False,
) -> int:
    """Let the target answer prompts; a draft learns from the answers.

    The target runs here, or on a server (--endpoint URL) that speaks OpenAI's API; the server's
    key is taken from SPARKSMITH_API_KEY.

    Stop it at any moment: the same command goes on where it was.

    A larger --count adds to what is there.

    Exit code 1 when a server kept failing some requests.
    """
    from sparksmith.distill.generation import GenerationSettings
    from sparksmith.draft.sampling import Sampling

    check_at_least_one(count=count, max_new_tokens=max_new_tokens, batch_size=batch_size)
    check_at_least_one(rows_per_shard=rows_per_shard, max_prompt_tokens=max_prompt_tokens)
    check_at_least_one(budget_tokens=budget_tokens)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    source = PromptSource(prompts=prompts, dataset=dataset, count=count, mix=mix, seed=seed)
    shards = ShardChoice(
        folder=out, shard_format=parse_format(shard_format), rows_per_shard=rows_per_shard
    )
    if endpoint is not None:
        from sparksmith.cli import generate_endpoint as server

        return server.run(
            EndpointChoice(url=endpoint, model=model, timeout=timeout),
            source,
            server.Asking(
                sampling=sampling,
                max_new_tokens=max_new_tokens,
                concurrency=batch_size or 16,
                seed=seed,
                stream=stream,
                extra=server.parse_extra(extra_body, thinking),
                budget=server.parse_budget(budget_tokens, budget, price_prompt, price_answer),
            ),
            shards,
            tokenizer_of=target,
        )
    given: dict[str, object] = {"--model": model, "--thinking": thinking}
    given["--extra-body"] = extra_body
    given |= {"--budget": budget, "--budget-tokens": budget_tokens}
    for option, value in given.items():
        if value is not None:
            raise UserError(option, value, "is for a server", "Add --endpoint URL.")
    run(
        TargetChoice(
            name=target or "embedded",
            dtype=dtype,
            device=device,
            threads=threads,
            trust_remote_code=trust_remote_code,
        ),
        source,
        GenerationSettings(
            sampling=sampling,
            max_new_tokens=max_new_tokens,
            batch_size=batch_size or 64,
            seed=seed,
        ),
        shards,
        max_prompt_tokens=max_prompt_tokens,
    )
    return 0


@dataclass(frozen=True, kw_only=True)
class ShardChoice:
    """Where responses go, and in which form."""

    folder: Path
    shard_format: Literal["jsonl", "parquet"]
    rows_per_shard: int


def run(
    choice: TargetChoice,
    source: PromptSource,
    settings: "GenerationSettings",
    shards: ShardChoice,
    *,
    max_prompt_tokens: int | None,
) -> None:
    """Everything after the options: all checks come before the first token."""
    from sparksmith.cli.target import open_target
    from sparksmith.distill.prompt_sources import prompts_digest
    from sparksmith.distill.responses import prompt_limit, tokenize_prompts
    from sparksmith.distill.shards import ShardWriter
    from sparksmith.verify.run_record import RunRecord, check_folder

    check_folder(shards.folder, "generate")
    found = source.read()
    opened = open_target(choice)
    limit = prompt_limit(opened.target, max_prompt_tokens, max_new_tokens=settings.max_new_tokens)
    kept, skipped = tokenize_prompts(opened.tokenizer, found, max_prompt_tokens=limit)
    record = RunRecord.open(
        shards.folder,
        "generate",
        settings={
            **asdict(settings.sampling),
            "max_new_tokens": settings.max_new_tokens,
            "max_prompt_tokens": limit,
            "seed": settings.seed,
        },
        inputs={"target": opened.record, "prompts": source.record()},
        conditions={
            "count": len(found),
            "prompts_sha256": prompts_digest(found),
            "batch_size": settings.batch_size,
            "format": shards.shard_format,
        },
    )
    with record:
        writer = ShardWriter(
            shards.folder, shards.shard_format, rows_per_shard=shards.rows_per_shard
        )
        _say(f"{len(kept)} prompts, {len(writer.written)} answered already")
        if skipped:
            _say(f"{skipped} skipped: longer than {limit} tokens")
        try:
            seconds = _generate(opened, kept, settings, writer)
        except KeyboardInterrupt:
            _say(f"stopped with {len(writer.written)} answered; the same command goes on from here")
            raise
        _finish(record, shards.folder, skipped, seconds)


def _generate(
    opened: "OpenTarget",
    kept: "list[TokenizedPrompt]",
    settings: "GenerationSettings",
    writer: "ShardWriter",
) -> float:
    from sparksmith.cli.progress import progress
    from sparksmith.distill.responses import Watch, generate_responses

    done = sum(prompt.prompt.prompt_id in writer.written for prompt in kept)
    with progress("generate", total=len(kept), unit="responses", done=done) as bar:
        generate_responses(
            opened.target,
            opened.tokenizer,
            kept,
            settings,
            writer,
            Watch(on_progress=lambda responses, tokens: bar.advance(responses, tokens=tokens)),
        )
        return bar.meter.seconds


def _finish(record: "RunRecord", folder: Path, skipped: int, seconds: float) -> None:
    """Count what lies in the folder, of this attempt and of those before it."""
    from sparksmith.distill.responses import count_responses
    from sparksmith.distill.shards import read_responses, shard_paths
    from sparksmith.draft.files import sha256_of

    counts = count_responses(read_responses(folder))
    hashes = {path.name: sha256_of(path) for path in shard_paths(folder)}
    record.finish(
        "complete",
        **asdict(counts),
        skipped_prompts=skipped,
        seconds_of_last_attempt=round(seconds, 1),
        shards=hashes,
    )
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.finish_reasons.items())
    print(
        f"{counts.responses} responses ({reasons}), {counts.tokens} tokens, "
        f"{len(hashes)} shards in {folder}"
    )


def check_at_least_one(**options: int | None) -> None:
    """UserError for the first option below 1; None is not given."""
    for name, value in options.items():
        if value is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')}", value, "is below 1", "Use 1 or more.")


def parse_format(text: str) -> Literal["jsonl", "parquet"]:
    if text == "jsonl":
        return "jsonl"
    if text == "parquet":
        return "parquet"
    raise UserError("--format", text, "is not known", "Use jsonl or parquet.")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
