"""The demo's distillation: responses, then a draft, within one budget of minutes.

Both stages go on where an interrupted run was. Features of responses made just now are kept in
memory; those of an earlier attempt are computed again.
"""

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparksmith.cli import train
from sparksmith.cli.progress import progress
from sparksmith.cli.target import OpenTarget

if TYPE_CHECKING:
    from sparksmith.distill.generation import GenerationSettings, Response
    from sparksmith.draft.sampling import Sampling
    from sparksmith.verify.run_record import RunRecord

GENERATION_SHARE = 0.62
"""Of the budget. Responses are what a draft is short of: it overfits, and did so with 0.5 too."""
MIX = {
    "code": 0.46,
    "creative": 0.30,
    "chat": 0.08,
    "explanation": 0.06,
    "maths": 0.05,
    "extraction": 0.05,
}
NUM_LAYERS, BLOCK_SIZE = 1, 3
"""In minutes a draft learns little, and most where a block costs least: one layer reached 1.541 in
the time in which two reached 1.487. A fourth token was accepted in one step of fifty."""
MAX_PROMPT_TOKENS = 224
MAX_NEW_TOKENS = 160
HELD_OUT = 64
FEATURE_BYTES = 6 << 30
PROMPTS_PER_MINUTE = 400
"""More than a laptop answers in a minute of generation."""


@dataclass(frozen=True, kw_only=True)
class DistilPlan:
    """What of the demo's distillation can be chosen."""

    minutes: float
    sampling: "Sampling"
    seed: int
    mla: bool = False
    """Latent attention, over the whole vocabulary."""


def distil(opened: OpenTarget, folder: Path, plan: DistilPlan) -> tuple[Path, dict[str, float]]:
    """Generate, then train; the best draft's folder, and the seconds of each stage."""
    from sparksmith.distill.new_draft import DraftShape
    from sparksmith.distill.schedule import Budget
    from sparksmith.distill.training import TrainSettings
    from sparksmith.verify.run_record import RunRecord

    started = time.perf_counter()
    record = RunRecord.open(
        folder,
        "demo",
        settings={
            "budget_minutes": plan.minutes,
            "temperature": plan.sampling.temperature,
            "top_p": plan.sampling.top_p,
            "seed": plan.seed,
        },
        inputs={"target": opened.record},
    )
    with record:
        responses, generated = _generate(opened, folder / "responses", plan, (record, started))
        settings = TrainSettings(
            budget=Budget(minutes=max(0.1, plan.minutes - generated / 60)),
            temperature=plan.sampling.temperature,
            seed=plan.seed,
        )
        inputs = train.TrainingInputs(
            responses=responses,
            sampling=plan.sampling,
            record={"responses": len(responses), "sha256": _hash(responses)},
            held_out=HELD_OUT,
            cache_bytes=FEATURE_BYTES,
        )
        shape = DraftShape(num_layers=NUM_LAYERS, block_size=BLOCK_SIZE)
        if plan.mla:
            shape = replace(shape, mla=True, draft_vocab_size=0)
        results = train.run_training(opened, inputs, (shape, settings), folder / "train")
        record.finish("complete", **{k: v for k, v in results.items() if k != "history"})
    return folder / "train" / "best", {"generate": generated, "train": results["seconds"]}


def _generate(
    opened: OpenTarget, folder: Path, plan: DistilPlan, clock: "tuple[RunRecord, float]"
) -> "tuple[list[Response], float]":
    """All responses, and the seconds spent on them over all attempts."""
    from sparksmith.distill.generation import GenerationSettings
    from sparksmith.distill.prompt_sources import packaged_prompts
    from sparksmith.distill.responses import Watch, generate_responses, tokenize_prompts
    from sparksmith.distill.shards import ShardWriter

    record, started = clock
    before = float(record.content["results"].get("generation_seconds", 0.0))
    if record.content["results"].get("generated"):
        return _all_responses(folder, {}), before
    budget = 60 * plan.minutes * GENERATION_SHARE
    most = max(64, int(PROMPTS_PER_MINUTE * plan.minutes * GENERATION_SHARE))
    found = packaged_prompts(most, seed=plan.seed, mix=MIX)
    kept, _ = tokenize_prompts(opened.tokenizer, found, max_prompt_tokens=MAX_PROMPT_TOKENS)
    settings = GenerationSettings(
        sampling=plan.sampling, max_new_tokens=MAX_NEW_TOKENS, seed=plan.seed
    )
    features = _Features(FEATURE_BYTES)

    def spent() -> float:
        return before + time.perf_counter() - started

    with progress("generate", total=budget, unit="s", done=before) as bar:

        def on_progress(responses: int, tokens: int) -> None:
            bar.at(min(spent(), budget), tokens=tokens, note=f"{features.count} responses")
            if responses and features.count % 20 == 0:
                record.update(generation_seconds=round(spent(), 1))

        watch = Watch(
            on_progress=on_progress,
            on_response=features.keep,
            stop=_finish_in_time(budget - spent(), settings),
            capture=True,
        )
        try:
            writer = ShardWriter(folder)
            generate_responses(opened.target, opened.tokenizer, kept, settings, writer, watch)
        finally:
            record.update(generation_seconds=round(spent(), 1))
    record.update(generated=True)
    return _all_responses(folder, features.kept), spent()


class _Features:
    """Responses made just now, with the target's features while they fit into memory."""

    def __init__(self, room: int) -> None:
        self.kept: dict[str, Response] = {}
        self.count = 0
        self._room = room

    def keep(self, response: "Response") -> None:
        self.count += 1
        found = response.features
        if found is not None:
            tensors = (found.taps, found.hidden, found.log_norm, found.threshold)
            self._room -= sum(tensor.nbytes for tensor in tensors)
            if self._room < 0:
                response = replace(response, features=None)
        self.kept[response.request_id] = response


def _finish_in_time(seconds: float, settings: "GenerationSettings") -> Callable[[], bool]:
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


def _hash(responses: "list[Response]") -> str:
    digest = hashlib.sha256()
    for response in sorted(responses, key=lambda r: r.request_id):
        rows: list[Any] = [response.request_id, response.prompt_ids, response.token_ids]
        digest.update(repr(rows).encode())
    return digest.hexdigest()
