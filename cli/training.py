"""What `train` does once its options are read: a draft from responses, progress on the screen."""

import hashlib
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparksmith.cli.progress import Bar, duration, progress
from sparksmith.cli.target import OpenEnds, OpenTarget

if TYPE_CHECKING:
    from sparksmith.distill.feature_store import FeatureStore
    from sparksmith.distill.generation import Response
    from sparksmith.distill.new_draft import DraftShape
    from sparksmith.distill.training import SampleSource, Trainer, TrainEvent, TrainSettings
    from sparksmith.draft.model import DSparkDraft
    from sparksmith.draft.sampling import Sampling


@dataclass(frozen=True, kw_only=True)
class TrainingInputs:
    """What a draft learns from; `record` identifies it in run.json.

    `sampling` is that of the target whose distribution the draft learns. It must be the one that
    the responses were sampled with, unless they are greedy or none is held out. Without a `store`
    the target computes the features.
    """

    responses: "list[Response]"
    sampling: "Sampling"
    record: dict[str, Any]
    held_out: int
    cache_bytes: int
    from_regression: bool = True
    store: "FeatureStore | None" = None


def run_training(
    opened: OpenTarget | OpenEnds,
    inputs: TrainingInputs,
    plan: "tuple[DraftShape, TrainSettings]",
    out: Path,
) -> dict[str, Any]:
    """Train in the folder `out`, and return what its run.json keeps of it.

    All checks come before the first step. Ctrl-C leaves a state from which the same call goes on.
    """
    from sparksmith.distill.training import BEST, Trainer
    from sparksmith.verify.run_record import RunRecord, fingerprint

    started = time.perf_counter()
    shape, settings = plan
    training, held_out = split(inputs.responses, inputs.held_out)
    source = _source(opened, inputs, training, inputs.cache_bytes)
    held = _source(opened, inputs, held_out, 1 << 30)
    draft = _make_draft(opened, shape, inputs, settings.seed)
    record = RunRecord.open(
        out,
        "train",
        settings={
            **settings.comparable(),
            **asdict(inputs.sampling),
            "shape": asdict(shape),
            "taps": list(opened.target.taps),
            "stream": opened.target.stream,
            "from_regression": inputs.from_regression,
            "held_out": len(held_out),
        },
        inputs={"target": opened.record, "responses": inputs.record},
        conditions={"budget": asdict(settings.budget)},
    )
    with record:
        trainer = Trainer(draft, settings, out, (source, held.take(range(len(held)))))
        resumed = trainer.resume()
        if not resumed:
            if inputs.from_regression:
                _start(trainer)
            # Making the draft and the held-out features is part of the budget of minutes.
            trainer.progress.seconds = time.perf_counter() - started
        _describe(draft, trainer, len(training), resumed)
        results = _train(trainer)
        _write_manifests(opened, trainer, inputs, out)
        if isinstance(opened, OpenTarget) and (out / BEST).is_dir():
            _write_parity(opened, trainer, held_out or training, out / BEST)
        results["best"] = fingerprint(out / BEST)
        record.finish("complete", **results)
    _conclude(results, trainer, out / BEST)
    return results


def _source(
    opened: OpenTarget | OpenEnds,
    inputs: TrainingInputs,
    responses: "list[Response]",
    cache_bytes: int,
) -> "SampleSource":
    """The samples of some responses, from the store or by passes of the target.

    Raises UserError for a target whose logits are not its head's product.
    """
    from sparksmith.distill.feature_store import StoredFeatures
    from sparksmith.distill.features import OnlineFeatures

    if inputs.store is not None:
        return StoredFeatures.of(inputs.store, responses)
    assert isinstance(opened, OpenTarget), "without stored features the target must be loaded"
    return OnlineFeatures(opened.target, responses, inputs.sampling, cache_bytes=cache_bytes)


def _write_manifests(
    opened: OpenTarget | OpenEnds, trainer: "Trainer", inputs: TrainingInputs, out: Path
) -> None:
    """sparksmith.json beside both drafts: what they were made for, and what the best reached."""
    from sparksmith.distill.training import BEST, LAST
    from sparksmith.draft.manifest import Figure, Manifest, TargetIdentity, write_manifest
    from sparksmith.verify.loading import text_identity

    target = TargetIdentity(
        name=opened.record["name"],
        revision=opened.record.get("commit"),
        **text_identity(opened.tokenizer),
    )
    longest = max(len(row.prompt_ids) + len(row.token_ids) for row in inputs.responses)
    draft, reached = trainer.draft, trainer.progress.best_acceptance_length
    sampling = inputs.sampling
    on = f"held-out responses, temperature {sampling.temperature:g}, top-p {sampling.top_p:g}"
    figures = (Figure(what="expected acceptance length", value=round(reached, 4), on=on),)
    for name in (BEST, LAST):
        manifest = Manifest.of(
            draft.config,
            draft.target_ids,
            target=target,
            stream=opened.target.stream,
            trained_length=longest,
            thinking_modes=tuple(inputs.record.get("thinking", ())),
            figures=figures if name == BEST and reached else (),
        )
        if (out / name).is_dir():
            write_manifest(manifest, out / name)


def _write_parity(
    opened: OpenTarget, trainer: "Trainer", responses: "list[Response]", best: Path
) -> None:
    """parity.safetensors beside the best draft, on two of the prompts."""
    from sparksmith.draft.checkpoint import load_draft
    from sparksmith.verify.parity import record_parity, texts_of, write_parity

    target = opened.target
    draft = load_draft(best, dtype=trainer.draft.fc.weight.dtype).to(target.device)
    draft.bind(target.embed_weight, target.head_weight)
    prompts = [response.prompt_ids for response in responses[:2]]
    texts, accepted = texts_of(target, draft, prompts)
    write_parity(record_parity(draft, texts, accepted), best)


def split(responses: "list[Response]", held_out: int) -> "tuple[list[Response], list[Response]]":
    """Training and held-out responses; which ones depends on their ids alone."""
    ordered = sorted(
        responses, key=lambda response: hashlib.sha256(response.request_id.encode()).digest()
    )
    count = min(held_out, len(ordered) // 10 or min(1, len(ordered) - 1))
    return ordered[count:], ordered[:count]


def _make_draft(
    opened: OpenTarget | OpenEnds, shape: "DraftShape", inputs: TrainingInputs, seed: int
) -> "DSparkDraft":
    import torch

    from sparksmith.distill.new_draft import new_draft, reserved_token, word_counts

    torch.manual_seed(seed)
    target = opened.target
    mask = shape.mask_token_id
    if mask is None and shape.preset is None:
        mask = reserved_token(opened.tokenizer, target.vocab_size, inputs.responses)
    training, _ = split(inputs.responses, inputs.held_out)
    return new_draft(target, shape, mask or 0, word_counts(training, target.vocab_size))


def _start(trainer: "Trainer") -> None:
    """The start of a fresh run by regression, with a bar for each of its parts."""
    from sparksmith.distill.initial import LARGEST_WIDTH

    bars: dict[str, Bar] = {}
    with ExitStack() as stack:

        def tick(what: str, done: int, total: int) -> None:
            if what not in bars:
                stack.close()  # the part before: one bar at a time
                bars[what] = stack.enter_context(progress(what, total=total))
            bars[what].at(done)

        started = trainer.start(tick)
    if not started:
        say(
            f"starting from random weights: a regression needs features of at most {LARGEST_WIDTH} "
            f"(they are {trainer.draft.fc.in_features} wide) and a response of a whole block"
        )


def _describe(draft: "DSparkDraft", trainer: "Trainer", num_training: int, resumed: bool) -> None:
    from sparksmith.distill.validation import draft_vocabulary_coverage

    settings, config = trainer.settings, draft.config
    loss, optimizer = settings.loss, settings.optimizer
    size = sum(parameter.numel() for parameter in draft.parameters())
    coverage = ""
    if trainer.held_out:
        share = draft_vocabulary_coverage(draft, trainer.held_out)
        coverage = f" ({share:.1%} of held-out tokens)"
    say(
        f"draft: {config.num_hidden_layers} layers, block {config.block_size}, taps "
        f"{','.join(map(str, config.target_layer_ids))}, {size / 1e6:.1f} M parameters, "
        f"vocabulary {config.draft_vocab_size} of {config.vocab_size}{coverage}"
    )
    say(
        f"loss: {loss.ce:g} CE + {loss.tv:g} TV + {loss.confidence:g} confidence, slot weights "
        f"{' '.join(f'{w:.2f}' for w in loss.slot_weights(config.block_size).tolist())}, "
        f"temperature {settings.temperature:g}"
    )
    rates = (
        f"lr {optimizer.lr:g}, Markov tables {optimizer.lr * optimizer.markov_lr_scale:g}, "
        f"context projection {optimizer.lr * optimizer.context_lr_scale:g}"
    )
    if optimizer.name == "muon":
        rates += f", matrices {optimizer.muon_lr:g}"
    say(
        f"{optimizer.name}, {rates}, {num_training} training responses, "
        f"{len(trainer.held_out)} held out"
        + (f"; going on at step {trainer.progress.step}" if resumed else "")
    )


def _train(trainer: "Trainer") -> dict[str, Any]:
    """Run `trainer` to the end of its budget; returns its counters and its history."""
    budget = trainer.settings.budget
    by_steps = budget.steps is not None
    total = float(budget.steps) if budget.steps is not None else 60.0 * (budget.minutes or 0.0)
    done = float(trainer.progress.step) if by_steps else trainer.progress.seconds
    waited = 0.0
    with progress("train", total=total, unit="steps" if by_steps else "s", done=done) as bar:
        for event in trainer.run():
            waited += event.waited_seconds
            at = float(event.progress.step) if by_steps else min(event.progress.seconds, total)
            bar.at(at, tokens=0, note=_note(event, waited))
            if event.expectation is not None and event.expectation.num_blocks:
                _say_validation(bar, event, trainer.progress.best_acceptance_length)
    state = trainer.progress
    return {
        "steps": state.step,
        "seconds": round(state.seconds, 1),
        "blocks": state.blocks,
        # 0 is no length that a draft can have: nothing was measured.
        "expected_acceptance_length": round(state.best_acceptance_length, 4) or None,
        "history": state.history,
    }


def _note(event: "TrainEvent", waited: float) -> str:
    state, statistics = event.progress, event.statistics
    speed = state.blocks / max(state.seconds, 1e-9)
    share = waited / max(state.seconds, 1e-9)
    overlap = " ".join(f"{value:.2f}" for value in statistics.overlap)
    return (
        f"step {state.step}, {speed:,.0f} blocks/s, waiting {share:.0%}, "
        f"loss {statistics.loss:.3f}, overlap {overlap}"
    )


def _say_validation(bar: Bar, event: "TrainEvent", best: float) -> None:
    assert event.expectation is not None
    length = event.expectation.acceptance_length
    joint = " ".join(f"{value:.2f}" for value in event.expectation.joint)
    mark = "  (best so far)" if length >= best else ""
    bar.say(
        f"  {duration(event.progress.seconds)}: expected acceptance length {length:.3f} on "
        f"held-out responses, P(at least k accepted) {joint}{mark}"
    )


def _conclude(results: dict[str, Any], trainer: "Trainer", best: Path) -> None:
    length = results["expected_acceptance_length"]
    if length is None:
        print(f"the last draft is in {best}; no held-out response says how good it is")
        return
    kind = "greedy " if trainer.settings.greedy_rollouts else ""
    print(
        f"expected acceptance length {length:.3f} (bonus counted) on {len(trainer.held_out)} "
        f"held-out {kind}responses; draft in {best}"
    )


def say(text: str) -> None:
    print(text, file=sys.stderr)
