"""`sparksmith generate --endpoint`: the same folder of responses, from a running server."""

import json
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparksmith.cli.endpoint import EndpointChoice, open_endpoint
from sparksmith.cli.prompt_source import PromptSource
from sparksmith.draft.errors import UserError
from sparksmith.draft.files import replacing
from sparksmith.draft.sampling import Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from sparksmith.cli.generate import ShardChoice
    from sparksmith.distill.ledger import Budget, Ledger
    from sparksmith.distill.server_responses import ServerOutcome, ServerResponses
    from sparksmith.verify.prompts import Prompt
    from sparksmith.verify.run_record import RunRecord

FAILED_FILE = "failed.jsonl"
THINKING: Mapping[str, Mapping[str, Any]] = {
    "off": {"thinking": False},
    "on": {"thinking": True},
    **{effort: {"thinking": True, "thinking_effort": effort} for effort in ("low", "high", "max")},
}


@dataclass(frozen=True, kw_only=True)
class Asking:
    """How the server is asked, and what it may cost."""

    sampling: Sampling
    max_new_tokens: int
    concurrency: int
    seed: int
    stream: bool
    budget: "Budget"
    extra: Mapping[str, Any] = field(default_factory=dict)


def parse_extra(text: str | None, thinking: str | None) -> dict[str, Any]:
    """What goes into every request besides sampling; UserError for what cannot."""
    extra: dict[str, Any] = {}
    if text is not None:
        try:
            extra = json.loads(text)
        except ValueError as error:
            raise UserError("--extra-body", text, f"is not JSON ({error})", "Quote it.") from None
        if not isinstance(extra, dict):
            raise UserError("--extra-body", text, "is no JSON object", 'Write {"key": value}.')
    if own := sorted(extra.keys() & {"messages", "prompt", "model", "stream", "n", "max_tokens"}):
        raise UserError("--extra-body", own[0], "is set by this command", "Leave it out.")
    if thinking is not None:
        if thinking not in THINKING:
            raise UserError("--thinking", thinking, "is no mode", f"Use {', '.join(THINKING)}.")
        mode = {**extra.get("chat_template_kwargs", {}), **THINKING[thinking]}
        extra["chat_template_kwargs"] = mode
    return extra


def parse_budget(
    tokens: int | None, dollars: float | None, price_prompt: float, price_answer: float
) -> "Budget":
    from sparksmith.distill.ledger import Budget, Prices

    for option, price in (("--price-prompt", price_prompt), ("--price-answer", price_answer)):
        if not 0 <= price < 1e6:
            raise UserError(option, price, "is no price", "Give dollars for a million tokens.")
    if dollars is not None:
        if not dollars > 0:
            raise UserError("--budget", dollars, "is not above 0", "Give dollars, or leave it out.")
        if not price_prompt and not price_answer:
            raise UserError(
                "--budget",
                dollars,
                "needs prices to be held",
                "Add --price-prompt and --price-answer, or use --budget-tokens.",
            )
    prices = Prices(prompt=price_prompt, answer=price_answer)
    return Budget(tokens=tokens, dollars=dollars, prices=prices)


def run(
    choice: EndpointChoice,
    source: PromptSource,
    asking: Asking,
    shards: "ShardChoice",
    *,
    tokenizer_of: str | None,
) -> int:
    """Everything after the options: all checks come before the first request. 1 if some requests
    were set aside."""
    with ExitStack() as stack:
        return _run(choice, source, asking, shards, tokenizer_of, stack)


def _run(
    choice: EndpointChoice,
    source: PromptSource,
    asking: Asking,
    shards: "ShardChoice",
    tokenizer_of: str | None,
    stack: ExitStack,
) -> int:
    from sparksmith.distill.ledger import Ledger
    from sparksmith.distill.prompt_sources import prompts_digest
    from sparksmith.distill.server_responses import ServerResponses, ServerSettings, turn_id
    from sparksmith.distill.shards import ShardWriter, read_responses
    from sparksmith.verify.run_record import RunRecord, check_folder

    check_folder(shards.folder, "generate")
    prompts = source.read(whole=True)
    tokenizer = _tokenizer(tokenizer_of)
    endpoint, facts = open_endpoint(choice, stack)
    record = RunRecord.open(
        shards.folder,
        "generate",
        settings={
            **asdict(asking.sampling),
            "max_new_tokens": asking.max_new_tokens,
            "seed": asking.seed,
            "extra": dict(asking.extra),
        },
        inputs={"target": {"model": facts.model}, "prompts": source.record()},
        conditions={
            "server": asdict(facts),
            "count": len(prompts),
            "prompts_sha256": prompts_digest(prompts),
            "concurrency": asking.concurrency,
            "stream": asking.stream,
            "format": shards.shard_format,
            "budget": asdict(asking.budget),
        },
    )
    with record:
        writer = ShardWriter(
            shards.folder, shards.shard_format, rows_per_shard=shards.rows_per_shard
        )
        known = {}
        if writer.written:
            known = {row.request_id: row for row in read_responses(shards.folder)}
        ledger = Ledger(shards.folder, asking.budget)
        left = [p for p in prompts if turn_id(p, _turns(p)) not in known]
        _announce(len(prompts), left, asking, ledger, tokenizer, f"{facts.model} at {facts.url}")
        try:
            outcome = _ask(
                ServerResponses(
                    endpoint,
                    ServerSettings(
                        sampling=asking.sampling,
                        max_new_tokens=asking.max_new_tokens,
                        concurrency=asking.concurrency,
                        seed=asking.seed,
                        stream=asking.stream,
                        extra=asking.extra,
                    ),
                    writer,
                    ledger,
                    known,
                    tokenizer,
                ),
                prompts,
                sum(map(_turns, prompts)),
                len(known),
            )
        except KeyboardInterrupt:
            _say(f"stopped with {len(writer.written)} answered; the same command goes on from here")
            raise
        _finish(record, shards.folder, outcome, ledger)
    return 1 if outcome.failed else 0


def _turns(prompt: "Prompt") -> int:
    return sum(message["role"] == "user" for message in prompt.messages)


def _tokenizer(name: str | None) -> "PreTrainedTokenizerBase | None":
    if name is None:
        return None
    from transformers import AutoTokenizer

    from sparksmith.cli.target import resolve

    found: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(resolve(name))
    return found


def _announce(
    count: int,
    left: "list[Prompt]",
    asking: Asking,
    ledger: "Ledger",
    tokenizer: "PreTrainedTokenizerBase | None",
    server: str,
) -> None:
    """What is to be done, and what it may cost at most."""
    from sparksmith.distill.server_responses import estimated_tokens

    spent = ledger.spent()
    _say(f"{server}: {count} conversations, {count - len(left)} answered already")
    prompt, answer = estimated_tokens(left, tokenizer, asking.max_new_tokens)
    prices = asking.budget.prices
    cost = f", ${prices.of(prompt, answer):,.2f}" if prices.prompt or prices.answer else ""
    _say(
        f"to ask: about {prompt:,} prompt tokens, at most {answer:,} answer tokens{cost}"
        + (f"; spent so far: {spent.tokens:,} tokens" if spent.tokens else "")
    )
    if spent.lost_requests:
        _say(
            f"{spent.lost_requests} requests were in flight when an earlier attempt died: they are "
            f"sent again, and counted with all they may have cost "
            f"({spent.lost_prompt + spent.lost_answer:,} tokens)"
        )


def _ask(
    responses: "ServerResponses", prompts: "list[Prompt]", total: int, done: int
) -> "ServerOutcome":
    from sparksmith.cli.progress import progress

    with progress("generate", total=total, unit="responses", done=done) as bar:
        responses.on_turn = lambda row: bar.advance(1, tokens=len(row.token_ids))
        outcome: ServerOutcome = responses.run(prompts)
    return outcome


def _finish(record: "RunRecord", folder: Path, outcome: "ServerOutcome", ledger: "Ledger") -> None:
    """Count what lies in the folder, say what is missing and why, and what it cost."""
    from sparksmith.distill.responses import ResponseCounts, count_responses
    from sparksmith.distill.shards import read_responses, shard_paths
    from sparksmith.draft.files import sha256_of

    paths = shard_paths(folder)
    counts = count_responses(read_responses(folder)) if paths else ResponseCounts()
    _write_failed(folder, outcome.failed)
    spent = ledger.spent()
    dollars = spent.dollars(ledger.budget.prices)
    record.finish(
        "complete",
        **asdict(counts),
        failed=len(outcome.failed),
        over_budget=outcome.over_budget,
        retokenised=outcome.retokenised,
        spent={**asdict(spent), "dollars": round(dollars, 4)},
        shards={path.name: sha256_of(path) for path in paths},
    )
    if outcome.retokenised:
        _say(
            f"warning: {outcome.retokenised} answers came without token ids and were tokenised "
            "here; where the target had chosen other tokens for the same text, the draft learns "
            "from what it did not do"
        )
    if outcome.failed:
        name, reason = next(iter(outcome.failed.items()))
        _say(
            f"{len(outcome.failed)} set aside in {folder / FAILED_FILE} (first: {name}: {reason}); "
            "the same command tries them again"
        )
    if outcome.over_budget:
        _say(f"budget reached: {outcome.over_budget} conversations are left; raise it to go on")
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.finish_reasons.items())
    cost = f", ${dollars:,.2f}" if dollars else ""
    print(
        f"{counts.responses} responses ({reasons or 'none'}), {counts.tokens} tokens, "
        f"{len(paths)} shards in {folder}; {outcome.retries} requests repeated; "
        f"{spent.tokens:,} tokens spent{cost}"
    )


def _write_failed(folder: Path, failed: Mapping[str, str]) -> None:
    path = folder / FAILED_FILE
    if not failed:
        path.unlink(missing_ok=True)
        return
    lines = [json.dumps({"request_id": name, "reason": why}) + "\n" for name, why in failed.items()]
    with replacing(path) as temporary:
        temporary.write_text("".join(lines), encoding="utf-8")


def _say(text: str) -> None:
    print(text, file=sys.stderr)
