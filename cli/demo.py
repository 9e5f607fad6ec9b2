"""`sparksmith demo`: from nothing to a report on a real model, in one command."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparksmith.cli import evaluate, train
from sparksmith.cli.progress import duration, progress
from sparksmith.cli.target import OpenTarget, TargetChoice, fetch_with_progress, open_target
from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable

    from sparksmith.distill.generation import GenerationSettings, Response
    from sparksmith.verify.run_record import RunRecord

EXAMPLE = "sparksmith demo --budget 20"

GENERATION_SHARE = 0.5
"""Of the budget; at this size a draft is short of data before it is short of steps."""
MIX = {
    "code": 0.40,
    "creative": 0.30,
    "chat": 0.10,
    "explanation": 0.08,
    "maths": 0.06,
    "extraction": 0.06,
}
TAPS = (3, 9, 15, 21, 27)
MAX_PROMPT_TOKENS = 224
MOST_PROMPTS = 20_000
WORKLOADS = ("code", "creative", "chat", "maths", "extraction")


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How many prompts the report takes of code and creative writing, and of the others, how long
    the responses are, and how many texts are compared at temperature 0."""

    main: int
    others: int
    max_new_tokens: int
    lossless: int


FULL = Scale(main=24, others=6, max_new_tokens=128, lossless=10)
QUICK = Scale(main=6, others=0, max_new_tokens=96, lossless=4)


def demo(
    out: Annotated[
        Path | None, typer.Option(help="Folder of the run [default: runs/demo or runs/pretrained].")
    ] = None,
    budget: Annotated[
        float, typer.Option(help="Minutes for generation, features and training together.")
    ] = 20.0,
    pretrained: Annotated[
        bool, typer.Option("--pretrained", help="Take the packaged draft; about three minutes.")
    ] = False,
    limit: Annotated[
        int | None, typer.Option(help="Prompts of each workload in the report.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="Of the target, in both arms.")] = 0.7,
    top_p: Annotated[float, typer.Option(help="Of the target, in both arms.")] = 0.95,
    seed: Annotated[int, typer.Option(help="Of prompts, sampling and training.")] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads; 0 leaves torch's choice.")] = 0,
) -> int:
    """Distil a draft for a small real model on this machine, and report what it gains.

    SmolLM2-135M-Instruct is fetched once (about 90 MB), answers composed prompts, teaches a draft
    its answers, and is then decoded with and without it on prompts that neither has seen.
    """
    from sparksmith.draft.sampling import Sampling

    if not budget > 0:
        raise UserError("--budget", budget, "is not positive", "Give minutes, such as 20.")
    if limit is not None and limit < 1:
        raise UserError("--limit", limit, "is below 1", "Use 1 or more.")
    sampling = Sampling(temperature=temperature, top_p=top_p)
    folder = out or Path("runs") / ("pretrained" if pretrained else "demo")
    clock = _Stages()
    model = fetch_with_progress()
    clock.add("fetch", model.fetch_seconds)
    clock.add("convert", model.convert_seconds)
    choice = TargetChoice(name="embedded", threads=threads)
    opened = open_target(choice, taps=_taps(pretrained))
    if pretrained:
        draft = packaged_draft()
        scale = QUICK
    else:
        draft = _distil(
            opened, folder, DistilPlan(budget=budget, sampling=sampling, seed=seed), clock
        )
        scale = FULL
    prompts = _prompts(scale, limit)
    started = time.perf_counter()
    summary = _evaluate(opened, draft, prompts, (sampling, seed, scale), folder / "report")
    clock.add("evaluate", time.perf_counter() - started)
    print(clock.line())
    check = summary["losslessness"]
    return 1 if check and check["differences"] else 0


@dataclass(frozen=True, kw_only=True)
class DistilPlan:
    """What of the demo's distillation can be chosen."""

    budget: float
    sampling: Any
    seed: int


class _Stages:
    """Seconds of each stage, printed at the end."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    def add(self, name: str, seconds: float) -> None:
        self._seconds[name] = self._seconds.get(name, 0.0) + seconds

    def line(self) -> str:
        parts = [f"{name} {duration(value)}" for name, value in self._seconds.items()]
        return "time: " + ", ".join(parts)


def packaged_draft() -> Path:
    """The folder of the draft that is shipped; UserError when this copy has none."""
    from importlib.resources import files

    folder = Path(str(files("sparksmith.distill") / "pretrained" / "smollm2-135m"))
    if not (folder / "config.json").is_file():
        raise UserError(
            "--pretrained", str(folder), "is not in this installation", "Leave --pretrained out."
        )
    return folder


def _taps(pretrained: bool) -> tuple[int, ...]:
    if not pretrained:
        return TAPS
    from sparksmith.draft.checkpoint import read_config

    return read_config(packaged_draft()).target_layer_ids


def _distil(opened: OpenTarget, folder: Path, plan: DistilPlan, clock: _Stages) -> Path:
    """Generate, then train; both go on where an interrupted demo was. Returns the best draft."""
    from sparksmith.distill.new_draft import DraftShape
    from sparksmith.distill.schedule import Budget
    from sparksmith.distill.training import TrainSettings
    from sparksmith.verify.run_record import RunRecord

    best = folder / "train" / "best"
    record = RunRecord.open(
        folder,
        "demo",
        settings={
            "budget_minutes": plan.budget,
            "temperature": plan.sampling.temperature,
            "top_p": plan.sampling.top_p,
            "seed": plan.seed,
        },
        inputs={"target": opened.record},
    )
    with record:
        responses, generated = _generate(opened, folder / "responses", plan, record)
        clock.add("generate", generated)
        minutes = max(0.1, plan.budget - generated / 60)
        settings = TrainSettings(
            budget=Budget(minutes=minutes), temperature=plan.sampling.temperature, seed=plan.seed
        )
        inputs = train.TrainingInputs(
            responses=responses,
            sampling=plan.sampling,
            record={"responses": len(responses)},
            held_out=64,
            cache_bytes=6 << 30,
        )
        results = train.run_training(opened, inputs, (DraftShape(), settings), folder / "train")
        clock.add("train", results["seconds"])
        record.finish("complete", **{k: v for k, v in results.items() if k != "history"})
    return best


def _generate(
    opened: OpenTarget, folder: Path, plan: DistilPlan, record: "RunRecord"
) -> "tuple[list[Response], float]":
    """Responses, with features where they were made just now, and the seconds spent in all."""
    from sparksmith.distill.generation import GenerationSettings
    from sparksmith.distill.responses import Watch, generate_responses, tokenize_prompts
    from sparksmith.distill.shards import ShardWriter

    found = _training_prompts(plan.seed)
    kept, _ = tokenize_prompts(opened.tokenizer, found, max_prompt_tokens=MAX_PROMPT_TOKENS)
    settings = GenerationSettings(sampling=plan.sampling, max_new_tokens=160, seed=plan.seed)
    before = float(record.content["results"].get("generation_seconds", 0.0))
    budget = 60 * plan.budget * GENERATION_SHARE
    made: dict[str, Response] = {}
    writer = ShardWriter(folder)
    total, started = before, time.perf_counter()
    if before < budget and not record.content["results"].get("generated"):
        with progress("generate", total=budget, unit="s", done=before) as bar:

            def on_progress(responses: int, tokens: int) -> None:
                nonlocal total
                total = before + time.perf_counter() - started
                bar.at(min(total, budget), tokens=tokens, note=f"{len(made)} responses")
                if responses and len(made) % 50 == 0:
                    record.update(generation_seconds=round(total, 1))

            # The rows under way when time is up are finished: they take about their length again.
            stop = _finish_in_time(budget - before, settings)
            watch = Watch(
                on_progress=on_progress,
                on_response=lambda response: made.update({response.request_id: response}),
                stop=stop,
                capture=True,
            )
            generate_responses(opened.target, opened.tokenizer, kept, settings, writer, watch)
        total = before + time.perf_counter() - started
        record.update(generation_seconds=round(total, 1), generated=True)
    return _all_responses(folder, made), total


def _finish_in_time(seconds: float, settings: "GenerationSettings") -> "Callable[[], bool]":
    """True once the rows under way need the rest of the time, judged by the steps so far.

    The tail runs ever smaller batches, so it takes about half of a full batch's time per token.
    """
    started = time.perf_counter()
    calls = 0

    def stop() -> bool:
        nonlocal calls
        calls += 1
        spent = time.perf_counter() - started
        tail = 0.5 * settings.max_new_tokens * spent / calls
        return spent + (tail if calls > 20 else 0.0) >= seconds

    return stop


def _training_prompts(seed: int) -> "list[Any]":
    from sparksmith.distill.prompt_sources import packaged_prompts

    return packaged_prompts(MOST_PROMPTS, seed=seed, mix=MIX)


def _all_responses(folder: Path, made: "dict[str, Response]") -> "list[Response]":
    """Those on disk; the ones made just now carry their features."""
    from sparksmith.distill.generation import Response
    from sparksmith.distill.shards import read_responses

    return [
        made.get(row.request_id)
        or Response(
            request_id=row.request_id,
            prompt_ids=row.prompt_ids,
            token_ids=row.token_ids,
            finish_reason=row.finish_reason,
        )
        for row in read_responses(folder)
    ]


def _prompts(scale: Scale, limit: int | None) -> "list[Any]":
    from sparksmith.eval.prompt_sets import load_workloads

    prompts = []
    for workload in WORKLOADS:
        most = scale.main if workload in ("code", "creative") else scale.others
        most = most if limit is None else limit
        if most:
            prompts += load_workloads([workload], limit=most)
    return prompts


def _evaluate(
    opened: OpenTarget, draft: Path, prompts: "list[Any]", how: tuple[Any, int, Scale], out: Path
) -> dict[str, Any]:
    from sparksmith.draft.sampling import Sampling
    from sparksmith.verify.decode import DecodeSettings

    sampling, seed, scale = how
    loaded = evaluate.load(str(draft))
    assert loaded is not None
    settings = DecodeSettings(
        sampling=sampling,
        max_new_tokens=scale.max_new_tokens,
        num_tokens=loaded.config.block_size,
        seed=seed,
    )
    own = Sampling(temperature=sampling.temperature)
    return evaluate.run(
        opened, (str(draft), loaded), prompts, (settings, own), (out, scale.lossless)
    )
