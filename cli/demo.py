"""`sparksmith demo`: from nothing to a report on a real model, in one command."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparksmith.cli import evaluate
from sparksmith.cli.distilling import DistilPlan, distil
from sparksmith.cli.progress import duration
from sparksmith.cli.target import (
    K3_MINI,
    OpenTarget,
    TargetChoice,
    fetch_with_progress,
    open_target,
)
from sparksmith.draft.errors import UserError
from sparksmith.verify.embedded import TARGET_NAME

if TYPE_CHECKING:
    from sparksmith.draft.sampling import Sampling
    from sparksmith.eval.prompt_sets import EvalPrompt

EXAMPLE = "sparksmith demo --budget 20"

CARD = "README.md"
DEFAULT_MINUTES = 20.0
WORKLOADS = ("code", "creative", "chat", "maths", "extraction")
MAIN_WORKLOADS = ("code", "creative")


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
        Path | None,
        typer.Option(help="Folder of the run [default: one in runs/, named by the budget]."),
    ] = None,
    target: Annotated[
        str,
        typer.Option(
            help="`embedded`, or `k3-mini`: K3's parts at toy size with random weights, for "
            "rehearsing its path; its figures say nothing of K3."
        ),
    ] = TARGET_NAME,
    budget: Annotated[
        float | None,
        typer.Option(help="Minutes for generation, features and training together [default: 20]."),
    ] = None,
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

    _check(budget, pretrained, limit, temperature)
    _check_target(target, pretrained)
    sampling = Sampling(temperature=temperature, top_p=top_p)
    minutes = DEFAULT_MINUTES if budget is None else budget
    kind = "demo" if target == TARGET_NAME else target
    name = "pretrained" if pretrained else f"{kind}-{minutes:g}min"
    folder = out or Path("runs") / name
    draft = packaged_draft() if pretrained else None
    seconds: dict[str, float] = {}
    if target == TARGET_NAME:
        model = fetch_with_progress()
        seconds = {"fetch": model.fetch_seconds, "convert": model.convert_seconds}
    else:
        print(f"{target}: random weights, so its text is noise and its figures are a rehearsal's")
    # float32: at temperature 0 the texts of both arms are compared token for token.
    choice = TargetChoice(name=target, threads=threads, dtype="float32")
    opened = open_target(choice, taps=_taps(draft, choice))
    if draft is None:
        # K3's public drafts have latent attention.
        plan = DistilPlan(minutes=minutes, sampling=sampling, seed=seed, mla=target == K3_MINI)
        draft, spent = distil(opened, folder, plan)
        seconds |= spent
    report = folder / ("report" if limit is None else f"report-{limit}")
    scale = QUICK if pretrained else FULL
    summary, seconds["evaluate"] = _evaluate(
        opened, draft, _prompts(scale, limit), (sampling, seed, scale), report
    )
    if pretrained:
        print(f"its figures on whole workloads: {draft / CARD}")
    print("time: " + ", ".join(f"{name} {duration(value)}" for name, value in seconds.items()))
    check = summary["losslessness"]
    return 1 if check and check["differences"] else 0


def _check(budget: float | None, pretrained: bool, limit: int | None, temperature: float) -> None:
    if budget is not None and not budget > 0:
        raise UserError("--budget", budget, "is not positive", "Give minutes, such as 20.")
    if budget is not None and pretrained:
        raise UserError(
            "--budget", budget, "has no use with --pretrained", "Leave one of the two out."
        )
    if limit is not None and limit < 1:
        raise UserError("--limit", limit, "is below 1", "Use 1 or more.")
    if not temperature > 0:
        raise UserError(
            "--temperature",
            temperature,
            "leaves total variation nothing to learn from",
            "Use more than 0; texts at temperature 0 are compared in any case.",
        )


def _check_target(target: str, pretrained: bool) -> None:
    if target not in (TARGET_NAME, K3_MINI):
        raise UserError(
            "--target",
            target,
            "is not one of the demo's",
            f"Use {TARGET_NAME} or {K3_MINI}; `generate`, `train` and `eval` take any.",
        )
    if pretrained and target != TARGET_NAME:
        raise UserError("--pretrained", target, "has no packaged draft", "Leave --pretrained out.")


def packaged_draft() -> Path:
    """The folder of the draft that is shipped; UserError when this copy has none."""
    from importlib.resources import files

    folder = Path(str(files("sparksmith.distill") / "pretrained" / "smollm2-135m"))
    if not (folder / "config.json").is_file():
        raise UserError(
            "--pretrained", str(folder), "is not in this installation", "Leave --pretrained out."
        )
    return folder


def _taps(draft: Path | None, choice: TargetChoice) -> tuple[int, ...]:
    if draft is not None:
        from sparksmith.draft.checkpoint import read_config

        return read_config(draft).target_layer_ids
    from sparksmith.cli.train import taps_of

    return taps_of(choice, None)


def _prompts(scale: Scale, limit: int | None) -> "list[EvalPrompt]":
    from sparksmith.eval.prompt_sets import load_workloads

    prompts = []
    for workload in WORKLOADS:
        most = scale.main if workload in MAIN_WORKLOADS else scale.others
        most = most if limit is None else limit
        if most:
            prompts += _spread(load_workloads([workload]), most)
    return prompts


def _spread(prompts: "list[EvalPrompt]", most: int) -> "list[EvalPrompt]":
    """At most `most` of them, evenly over the whole list: its beginning is not a sample."""
    count = min(most, len(prompts))
    return [prompts[number * len(prompts) // count] for number in range(count)]


def _evaluate(
    opened: OpenTarget,
    draft: Path,
    prompts: "list[EvalPrompt]",
    how: "tuple[Sampling, int, Scale]",
    out: Path,
) -> tuple[dict[str, Any], float]:
    """The report's summary and the seconds that it took."""
    import time

    from sparksmith.cli.draft_choice import DRAFT_TEMPERATURE, drafting_of
    from sparksmith.verify.decode import DecodeSettings

    started = time.perf_counter()
    sampling, seed, scale = how
    loaded = evaluate.load(str(draft))
    assert loaded is not None
    settings = DecodeSettings(
        sampling=sampling,
        max_new_tokens=scale.max_new_tokens,
        num_tokens=loaded.config.num_drafts,
        seed=seed,
    )
    drafting = drafting_of((DRAFT_TEMPERATURE, 1.0, None), loaded.config, "cpu")
    summary = evaluate.run(
        opened, (str(draft), loaded), prompts, (settings, drafting), (out, scale.lossless)
    )
    return summary, time.perf_counter() - started
