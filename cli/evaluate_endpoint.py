"""`sparksmith eval --endpoint`: the same report, from running servers."""

import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparksmith.cli.endpoint import EndpointChoice, open_endpoint
from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from sparksmith.draft.sampling import Sampling
    from sparksmith.eval.live import Account, LiveSettings, Server
    from sparksmith.eval.prompt_sets import EvalPrompt
    from sparksmith.eval.trace import Trace
    from sparksmith.verify.endpoint import ServerFacts


@dataclass(frozen=True, kw_only=True)
class LiveChoice:
    """The options of a live evaluation, as given."""

    endpoint: EndpointChoice
    baseline: EndpointChoice | None
    baseline_run: Path | None
    draft: str | None
    target: str | None
    sampling: "Sampling"
    max_new_tokens: int
    seed: int
    lossless: int
    repeats: int
    users: tuple[int, ...]
    bench: tuple[Path, ...]
    out: Path


def parse_users(text: str | None) -> tuple[int, ...]:
    """1,4,8 as numbers; UserError for what is none."""
    if text is None:
        return ()
    try:
        users = tuple(int(part) for part in text.split(","))
    except ValueError:
        users = (0,)
    if min(users) < 1:
        raise UserError("--concurrency", text, "is no list of users", "Write 1,4,8.")
    return users


def run(choice: LiveChoice, prompts: "list[EvalPrompt]") -> int:
    """Everything after the options; 1 when the texts at temperature 0 differ."""
    with ExitStack() as stack:
        return _run(choice, prompts, stack)


def _run(choice: LiveChoice, prompts: "list[EvalPrompt]", stack: ExitStack) -> int:
    from rich.console import Console

    from sparksmith.eval.bench_serve import read_bench
    from sparksmith.eval.live import LiveSettings, check_speculation, speculates
    from sparksmith.verify.run_record import RunRecord, check_folder

    check_folder(choice.out, "eval")
    benched = [read_bench(path) for path in choice.bench]
    earlier = _earlier(choice.baseline_run)
    first, facts = open_endpoint(choice.endpoint, stack)
    vocabulary, identity = _target(choice)
    settings = LiveSettings(
        sampling=choice.sampling,
        max_new_tokens=choice.max_new_tokens,
        seed=choice.seed,
        vocab_size=vocabulary,
        described={
            "target": choice.target or facts.model,
            **({"draft": choice.draft} if choice.draft else {}),
        },
    )
    servers = [_server("speculative", first, facts)]
    if choice.baseline is not None:
        servers.append(_server("autoregressive", *open_endpoint(choice.baseline, stack)))
    elif not speculates(first, prompts[0], settings):
        print("this server drafts nothing: its responses are the plain arm of a later run")
        servers = [_server("autoregressive", first, facts)]
    if len(servers) == 2:
        check_speculation(servers[1:], prompts[0], settings)
        if not speculates(first, prompts[0], settings):
            raise UserError(
                "--endpoint",
                first.url,
                "drafts nothing, as the baseline does",
                "Start it with --speculative-config; `sparksmith vllm DRAFT` prints the command.",
            )
    described: dict[str, Any] = {
        **settings.described,
        "servers": {server.arm: server.engine for server in servers},
        "num_prompts": len(prompts),
        **identity,
        **_speculative(choice.draft),
    }
    record = RunRecord.open(
        choice.out,
        "eval",
        settings={
            **asdict(choice.sampling),
            "max_new_tokens": choice.max_new_tokens,
            "seed": choice.seed,
            "repeats": choice.repeats,
            "lossless": choice.lossless,
            **json.loads(json.dumps(described)),
        },
        inputs={"prompts": {"sha256": _prompts_hash(prompts), "count": len(prompts)}},
        conditions={"servers": {server.arm: server.endpoint.url for server in servers}},
    )
    with record:
        beside = (earlier, benched)
        summary, path = _measure(choice, servers, prompts, settings, described, beside, Console())
        record.finish("complete", title=summary["title"], report=path.name)
    print(f"report: {path}")
    check = summary["losslessness"]
    return 1 if check and check["differences"] else 0


def _server(arm: Any, endpoint: Any, facts: "ServerFacts") -> "Server":
    from sparksmith.eval.live import Server

    name = f"{facts.engine} {facts.version}" if facts.version else facts.engine
    return Server(arm=arm, endpoint=endpoint, engine=name)


def _target(choice: LiveChoice) -> tuple[int | None, dict[str, Any]]:
    """Vocabulary and text of the target, where its files, or the draft's, are at hand."""
    if choice.target is None:
        if choice.draft is None:
            return None, {}
        from sparksmith.draft.checkpoint import read_config

        return read_config(Path(choice.draft)).vocab_size, {}
    from transformers import AutoTokenizer

    from sparksmith.cli.target import resolve
    from sparksmith.verify.loading import target_sizes, text_identity

    path = resolve(choice.target)
    tokenizer = AutoTokenizer.from_pretrained(path)
    return target_sizes(path).vocab_size, text_identity(tokenizer)


def _speculative(draft: str | None) -> dict[str, Any]:
    """What `sparksmith vllm --write` left beside the draft: the server's config, if it was used."""
    path = Path(draft or "") / "speculative.json"
    if draft is None or not path.is_file():
        return {}
    config = json.loads(path.read_text(encoding="utf-8"))
    config.pop("model", None)
    # vLLM's default is part of what was measured.
    return {"speculative_config": {"draft_sample_method": "greedy", **config}}


def _earlier(folder: Path | None) -> "list[Trace]":
    """Plain traces of an earlier run."""
    if folder is None:
        return []
    from sparksmith.cli.evaluating import TRACES_FILE
    from sparksmith.eval.trace import read_traces

    path = folder / TRACES_FILE
    if not path.is_file():
        raise UserError(
            "--baseline-run", str(folder), f"has no {TRACES_FILE}", "Give a folder of `eval`."
        )
    plain = [trace for trace in read_traces(path) if trace.arm == "autoregressive"]
    if not plain:
        raise UserError(
            "--baseline-run",
            str(folder),
            "holds no plain responses",
            "Evaluate the server without --speculative-config first.",
        )
    return plain


def _measure(
    choice: LiveChoice,
    servers: "Sequence[Server]",
    prompts: "list[EvalPrompt]",
    settings: "LiveSettings",
    described: dict[str, Any],
    beside: "tuple[list[Trace], list[tuple[dict[str, Any], str]]]",
    console: "Console",
) -> tuple[dict[str, Any], Path]:
    from sparksmith.cli.evaluating import PARTIAL_FILE, TRACES_FILE
    from sparksmith.cli.progress import progress
    from sparksmith.eval.live import surface
    from sparksmith.eval.live_findings import live_notes, live_warnings
    from sparksmith.eval.report import write_reports
    from sparksmith.eval.summary import summarise
    from sparksmith.eval.terminal import terminal_report
    from sparksmith.eval.trace import write_traces

    lossless = _lossless(choice, servers, prompts, settings)
    traces, account = _traces(choice, servers, prompts, settings)
    if not traces:
        raise UserError(
            "--endpoint",
            servers[0].endpoint.url,
            f"answered no request ({account.failed[0] if account.failed else 'none was sent'})",
            "Look at the server's log.",
        )
    rows: list[dict[str, Any]] = []
    if choice.users:
        total = len(choice.users) * len(prompts)
        with progress("several users at once", total=total, unit="requests") as bar:
            rows = surface(
                servers[0].endpoint,
                prompts,
                settings,
                choice.users,
                lambda tokens: bar.advance(1, tokens=tokens),
            )
    write_traces(choice.out / TRACES_FILE, traces)
    if account.first_prompt is not None:
        first = account.first_prompt
        described = {**described, "first_prompt_token_ids": first[:64]}
        if (text := servers[0].endpoint.text_of(first)) is not None:
            described["first_prompt"] = text
    earlier, benched = beside
    rows += [row for row, _ in benched]
    notes = [*live_notes(account), *(note for _, note in benched)]
    if (said := servers[0].endpoint.sglang_acceptance_length()) is not None:
        notes.append(
            f"SGLang's own acceptance length: {said:.2f}. Its metrics are read as documented; this "
            "was not tested against a live SGLang."
        )
    if "speculative_config" in described:
        how = described["speculative_config"]["draft_sample_method"]
        notes.append(f"The server drafts by the {how} method, as its speculative config says.")
    live = {
        "notes": notes,
        "warnings": live_warnings(traces, account),
        "surface": rows,
    }
    asked = {(prompt.workload, prompt.prompt_id) for prompt in prompts}
    joined = [*traces, *(t for t in earlier if (t.workload, t.prompt_id) in asked)]
    summary = summarise(joined, described, lossless, live)
    paths = write_reports(summary, choice.out)
    console.print(terminal_report(summary))
    if account.failed:
        console.print("the same command asks again for what failed")
    else:
        (choice.out / PARTIAL_FILE).unlink(missing_ok=True)
    return summary, paths.html


def _lossless(
    choice: LiveChoice,
    servers: "Sequence[Server]",
    prompts: "list[EvalPrompt]",
    settings: "LiveSettings",
) -> dict[str, Any] | None:
    from sparksmith.cli.evaluating import LOSSLESS_FILE, spread
    from sparksmith.cli.progress import progress
    from sparksmith.draft.files import write_json
    from sparksmith.eval.live import lossless_live

    if len(servers) < 2 or not choice.lossless:
        return None
    path = choice.out / LOSSLESS_FILE
    if path.is_file():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    chosen = spread(prompts, choice.lossless)
    one, other = (server.endpoint for server in servers)
    with progress("lossless check at temperature 0", total=len(chosen), unit="prompts") as bar:
        result = lossless_live(one, other, chosen, settings, lambda: bar.advance(1))
    write_json(path, result)
    return result


def _traces(
    choice: LiveChoice,
    servers: "Sequence[Server]",
    prompts: "list[EvalPrompt]",
    settings: "LiveSettings",
) -> "tuple[list[Trace], Account]":
    """All traces, and what was counted beside them. A finished prompt is a line of the partial
    file, so a run that is stopped goes on with the next; one that failed is asked again."""
    from sparksmith.cli.evaluating import PARTIAL_FILE
    from sparksmith.cli.progress import progress
    from sparksmith.eval.live import measure, warm_up

    path = choice.out / PARTIAL_FILE
    traces, account, done = _recover(path)
    asked = [prompt for _ in range(choice.repeats) for prompt in prompts]
    with (
        progress("evaluate", total=len(asked), unit="prompts", done=len(done)) as bar,
        path.open("a", encoding="utf-8") as file,
    ):
        waiting = [number for number in range(len(asked)) if number not in done]
        warm_up(servers, [asked[number] for number in waiting[:1]], settings)
        for number in waiting:
            order = servers if number % 2 else servers[::-1]
            made, seen = measure(order, asked[number], settings)
            if not seen.failed:
                rows = [asdict(trace) for trace in made]
                line = {"number": number, "traces": rows, "account": asdict(seen)}
                file.write(json.dumps(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            traces += made
            account.add(seen)
            tokens = sum(len(trace.token_ids) for trace in made)
            bar.advance(1, tokens=tokens, note=asked[number].workload)
    return traces, account


def _recover(path: Path) -> "tuple[list[Trace], Account, set[int]]":
    """What an interrupted run measured, and of which prompts; a line cut short is dropped."""
    from sparksmith.eval.live import Account
    from sparksmith.eval.trace import Trace

    traces, account = [], Account()
    data = path.read_bytes() if path.is_file() else b""
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        os.truncate(path, len(whole))
    done = set()
    for line in whole.splitlines():
        values = json.loads(line)
        done.add(values["number"])
        traces += [Trace(**row) for row in values["traces"]]
        account.add(Account.of(values["account"]))
    return traces, account, done


def _prompts_hash(prompts: "Sequence[EvalPrompt]") -> str:
    import hashlib

    text = json.dumps([[p.workload, p.prompt_id, [dict(m) for m in p.messages]] for p in prompts])
    return hashlib.sha256(text.encode()).hexdigest()
