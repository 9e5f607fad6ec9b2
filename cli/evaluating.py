"""An evaluation with its progress on the screen, for the commands that evaluate.

Every finished trace is appended to a file, so a run that is stopped goes on where it was.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from sparksmith.cli.progress import progress
from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.ngram import NgramDrafter
from sparksmith.draft.proposal import Drafter
from sparksmith.draft.sampling import Sampling
from sparksmith.eval.evaluation import EvaluationSettings, TokenPrompt, evaluate
from sparksmith.eval.lossless import DrafterMaker, check_lossless
from sparksmith.eval.prompt_sets import EvalPrompt
from sparksmith.eval.report import ReportPaths, write_reports
from sparksmith.eval.summary import summarise
from sparksmith.eval.terminal import terminal_report
from sparksmith.eval.trace import Trace, read_traces, write_traces
from sparksmith.verify.loading import render_prompt
from sparksmith.verify.target import TransformersTarget

TRACES_FILE = "traces.jsonl"
PARTIAL_FILE = "traces.partial.jsonl"
LOSSLESS_FILE = "lossless.json"


@dataclass(frozen=True, kw_only=True)
class Drafting:
    """How a draft is used: its temperature as a multiple of the request's, its own nucleus, and
    the least survival it still drafts for."""

    temperature: float = 1.0
    top_p: float = 1.0
    min_survival: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What is evaluated: a target, a way to make drafters, prompts and settings."""

    target: TransformersTarget
    tokenizer: PreTrainedTokenizerBase
    make_drafter: DrafterMaker
    prompts: Sequence[TokenPrompt]
    settings: EvaluationSettings
    lossless_prompts: int
    lossless_tokens: int = 64


def drafter_maker(
    target: TransformersTarget, draft: DSparkDraft | None, drafting: Drafting
) -> DrafterMaker:
    """Makes drafters of a bound DSpark draft, or n-gram drafters when there is none."""
    import torch

    def make(sampling: Sampling, seed: int) -> Drafter:
        if draft is None:
            return NgramDrafter(target.vocab_size)
        temperature = drafting.temperature * sampling.temperature
        own = Sampling(temperature=temperature, top_p=drafting.top_p)
        # Another stream than the target's: the uniforms that judge a draft must not be those that
        # drew it.
        generator = torch.Generator(draft.fc.weight.device).manual_seed(seed ^ 0x5DEECE66D)
        return DSparkDrafter(draft, own, generator, min_survival=drafting.min_survival)

    return make


def tokenised(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[EvalPrompt]
) -> list[TokenPrompt]:
    """The prompts in the target's chat template."""
    return [
        TokenPrompt(
            prompt_id=prompt.prompt_id,
            workload=prompt.workload,
            token_ids=render_prompt(tokenizer, prompt.messages),
        )
        for prompt in prompts
    ]


def evaluate_and_report(
    evaluation: Evaluation, folder: Path, described: dict[str, Any], console: Console
) -> tuple[dict[str, Any], ReportPaths]:
    """Check losslessness, run both arms, print the tables and write the reports to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    lossless = _lossless(evaluation, folder)
    traces = _traces(evaluation, folder)
    write_traces(folder / TRACES_FILE, traces)
    with progress("report") as bar:
        summary = summarise(traces, described, lossless)
        paths = write_reports(summary, folder)
        bar.say(f"  {len(traces)} responses measured")
    (folder / PARTIAL_FILE).unlink(missing_ok=True)
    console.print(terminal_report(summary))
    return summary, paths


def _lossless(evaluation: Evaluation, folder: Path) -> dict[str, Any] | None:
    chosen = spread(evaluation.prompts, evaluation.lossless_prompts)
    if not chosen:
        return None
    path = folder / LOSSLESS_FILE
    if path.is_file():
        kept: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return kept
    from dataclasses import replace

    from sparksmith.draft.files import write_json

    settings = replace(
        evaluation.settings.decode,
        max_new_tokens=min(evaluation.lossless_tokens, evaluation.settings.decode.max_new_tokens),
    )
    with progress("lossless check at temperature 0", total=len(chosen), unit="prompts") as bar:
        result = check_lossless(
            evaluation.target,
            evaluation.make_drafter,
            [(prompt.prompt_id, prompt.token_ids) for prompt in chosen],
            settings,
            on_prompt=lambda: bar.advance(1),
        )
        bar.say(
            f"  {result['equal']} of {result['prompts']} texts equal token for token, "
            f"{result['ties']} parted at a tie, {result['differences']} differ"
        )
    write_json(path, result)
    return result


class OfWorkload(Protocol):
    """A prompt of a workload, tokenised or not."""

    @property
    def workload(self) -> str: ...


P = TypeVar("P", bound=OfWorkload)


def spread(prompts: Sequence[P], count: int) -> list[P]:
    """`count` prompts taken from all workloads in turn."""
    by_workload: dict[str, list[P]] = {}
    for prompt in prompts:
        by_workload.setdefault(prompt.workload, []).append(prompt)
    chosen: list[P] = []
    for row in range(max((len(group) for group in by_workload.values()), default=0)):
        for group in by_workload.values():
            if row < len(group) and len(chosen) < count:
                chosen.append(group[row])
    return chosen


def _traces(evaluation: Evaluation, folder: Path) -> list[Trace]:
    path = folder / PARTIAL_FILE
    traces = _recover(path)
    done = {(trace.workload, trace.prompt_id) for trace in traces}
    waiting = [p for p in evaluation.prompts if (p.workload, p.prompt_id) not in done]
    if not waiting:
        return traces

    def text_of(token_ids: list[int]) -> str:
        text: str = evaluation.tokenizer.decode(token_ids, skip_special_tokens=True)
        return text

    total, before = len(evaluation.prompts), len(done)
    with (
        progress("evaluate", total=total, unit="prompts", done=before) as bar,
        path.open("a", encoding="utf-8") as file,
    ):
        target, settings = evaluation.target, evaluation.settings
        for trace in evaluate(target, evaluation.make_drafter, waiting, settings, text_of):
            traces.append(trace)
            file.write(json.dumps(asdict(trace)) + "\n")
            file.flush()
            os.fsync(file.fileno())
            bar.advance(0.5, tokens=len(trace.token_ids), note=trace.workload)
    return traces


def _recover(path: Path) -> list[Trace]:
    """Traces of prompts of which both arms are there; a line cut short is dropped."""
    if not path.is_file():
        return []
    whole = [line for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    path.write_bytes(b"".join(whole))
    traces = list(read_traces(path))
    arms: dict[tuple[str, str], int] = {}
    for trace in traces:
        key = (trace.workload, trace.prompt_id)
        arms[key] = arms.get(key, 0) + 1
    kept = [trace for trace in traces if arms[trace.workload, trace.prompt_id] == 2]
    write_traces(path, kept)
    return kept
