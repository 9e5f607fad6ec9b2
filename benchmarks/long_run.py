"""The long run behind the packaged draft: responses with their features, then training in parts.

    python benchmarks/long_run.py generate FOLDER --seed 10 --part 0 --parts 2 --minutes 30
    python benchmarks/long_run.py train FOLDER OUT --minutes 45 --block-size 3 [--start DRAFT]

Each part of a generation runs on one core; parts side by side give more tokens a second than one
process on all cores. `train` begins with the regression start, or with the weights of `--start`
(whose block size may differ) and then leaves the context projection alone: the fused features are
computed once, which saves a tenth of a step and five sixths of the memory.
"""

import json
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparksmith.cli.target import TargetChoice, open_target
from sparksmith.distill.generation import (
    BatchGenerator,
    GenerationSettings,
    Request,
    Response,
    SampleFeatures,
)
from sparksmith.distill.initial import start_by_regression
from sparksmith.distill.loss import LossWeights
from sparksmith.distill.new_draft import DraftShape, default_taps, new_draft
from sparksmith.distill.objective import Objective
from sparksmith.distill.optimizers import Optimizers, OptimizerSettings
from sparksmith.distill.prompt_sources import packaged_prompts
from sparksmith.distill.samples import TrainingSample, make_batch
from sparksmith.distill.validation import expected_acceptance
from sparksmith.draft.checkpoint import load_draft, save_draft
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.target import TransformersTarget

app = typer.Typer(pretty_exceptions_enable=False)
CHOICE = TargetChoice(name="embedded", dtype="float32")
TAPS = default_taps(30, 5)
SAMPLING = Sampling(temperature=0.7, top_p=0.95)
MIX = {
    "code": 0.45,
    "creative": 0.2,
    "chat": 0.1,
    "explanation": 0.1,
    "maths": 0.08,
    "extraction": 0.07,
}
MASK_TOKEN = 3
SHARD = 128
HELD_OUT = 96


@app.command()
def generate(
    folder: Path,
    seed: int = 0,
    part: int = 0,
    parts: int = 1,
    prompts: int = 12_000,
    minutes: float = 30.0,
) -> None:
    """Responses to every `parts`-th prompt from `part` on, 128 to a file, until the time is up."""
    torch.set_num_threads(1)
    opened = open_target(CHOICE, taps=TAPS, identify=False)
    folder.mkdir(parents=True, exist_ok=True)
    requests = []
    for prompt in packaged_prompts(prompts, seed=seed, mix=MIX)[part::parts]:
        ids = opened.tokenizer.apply_chat_template(
            list(prompt.messages), add_generation_prompt=True, return_dict=False
        )
        if len(ids) <= 224:
            requests.append(Request(request_id=prompt.prompt_id, prompt_ids=list(ids)))
    settings = GenerationSettings(sampling=SAMPLING, max_new_tokens=224, batch_size=64, seed=seed)
    generator = BatchGenerator(opened.target, settings, max_prompt_tokens=224, capture=True)
    start, tokens, finished, files = time.monotonic(), 0, [], 0
    for response in generator.run(requests):
        finished.append(response)
        tokens += len(response.token_ids)
        if len(finished) == SHARD:
            _write(folder / f"p{part}-{seed}-0-{files:05d}.safetensors", finished)
            finished, files = [], files + 1
            elapsed = time.monotonic() - start
            print(f"{files} files, {tokens} tokens, {tokens / elapsed:.0f} tokens/s", flush=True)
            if elapsed > 60 * minutes:
                return
    _write(folder / f"p{part}-{seed}-0-{files:05d}.safetensors", finished)


def _write(path: Path, responses: Sequence[Response]) -> None:
    tensors: dict[str, Tensor] = {}
    lengths = []
    for number, response in enumerate(responses):
        features = response.features
        assert features is not None
        tensors[f"{number}.taps"] = features.taps
        tensors[f"{number}.hidden"] = features.hidden
        tensors[f"{number}.ln"] = features.log_norm
        tensors[f"{number}.th"] = features.threshold
        tokens = torch.tensor(response.prompt_ids + response.token_ids, dtype=torch.int32)
        tensors[f"{number}.tokens"] = tokens
        lengths.append((response.request_id, len(response.prompt_ids), response.finish_reason))
    partial = path.with_suffix(".partial")
    save_file(tensors, partial, metadata={"meta": json.dumps(lengths)})
    partial.replace(path)


def _read(path: Path) -> Iterator[TrainingSample]:
    with safe_open(path, "pt") as file:
        for number, (_, prompt_length, _) in enumerate(json.loads(file.metadata()["meta"])):

            def tensor(name: str, number: int = number) -> Tensor:
                found: Tensor = file.get_tensor(f"{number}.{name}")
                return found

            sample = TrainingSample(
                tokens=tensor("tokens").long(),
                prompt_length=prompt_length,
                features=SampleFeatures(
                    taps=tensor("taps"),
                    hidden=tensor("hidden"),
                    log_norm=tensor("ln"),
                    threshold=tensor("th"),
                ),
            )
            if sample.num_anchors > 1:
                yield sample


@app.command()
def train(
    folders: Annotated[str, typer.Argument(help="Comma between folders; held out: of the first.")],
    out: Path,
    minutes: float = 60.0,
    block_size: int = 5,
    start: Annotated[Path | None, typer.Option(help="A draft to go on from.")] = None,
    lr: float = 5e-4,
    end: Annotated[float, typer.Option(help="The learning rate's last share of `lr`.")] = 0.0,
    gamma: float = 2.0,
    anchors: int = 128,
    drop: Annotated[
        float, typer.Option(help="Share of the responses without code left out of an epoch.")
    ] = 0.0,
    threads: int = 2,
    seed: int = 1,
) -> None:
    """Train for `minutes` of the processor's time on `threads` cores, so that a run that is stopped
    and continued (Ctrl-Z, fg) loses nothing; two responses a step, saved every ten minutes."""
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    opened = open_target(CHOICE, taps=TAPS, identify=False)
    draft = None if start is None else _continued(start, block_size, opened.target)
    samples, held_out = [], []
    for number, folder in enumerate(folders.split(",")):
        found = []
        for path in sorted(Path(folder).glob("*.safetensors")):
            found += [_fused(s, draft) for s in _read(path)]
        if number == 0:
            random.Random(0).shuffle(found)
            held_out, found = found[:HELD_OUT], found[HELD_OUT:]
        samples += found
    if draft is None:
        draft = _started(opened.target, samples, block_size)
    else:
        draft.fuse = lambda fused: fused  # type: ignore[method-assign]
        draft.fc.requires_grad_(False)
        draft.hidden_norm.requires_grad_(False)
    fences = torch.tensor(
        [
            token
            for token in range(opened.target.vocab_size)
            if "```" in opened.tokenizer.decode(token)
        ]
    )
    code = [bool(torch.isin(s.tokens[s.prompt_length :], fences).any()) for s in samples]
    tokens = sum(len(s.tokens) - s.prompt_length for s in samples)
    print(f"{len(samples)} responses ({sum(code)} with code), {tokens} tokens", flush=True)
    objective = Objective(draft, LossWeights(gamma=gamma), SAMPLING.temperature)
    held_code = [bool(torch.isin(s.tokens[s.prompt_length :], fences).any()) for s in held_out]
    groups = [
        [s for s, c in zip(held_out, held_code, strict=True) if c == w] for w in (True, False)
    ]

    def validate(label: str) -> None:
        coded, other = (expected_acceptance(objective, group) for group in groups)
        joint = [[round(x, 3) for x in e.joint] for e in (coded, other)]
        lengths = f"{coded.acceptance_length:.4f}, other {other.acceptance_length:.4f}"
        print(f"{label}: held out, code {lengths}; by position {joint}", flush=True)
        save_draft(draft, out)

    validate("start")
    optimizers = Optimizers(draft, OptimizerSettings(lr=lr, markov_lr_scale=0.01 / lr))
    generator = torch.Generator().manual_seed(seed)
    order: list[int] = []
    shuffle = random.Random(seed)
    began, aside, step, blocks, overlap, saved = time.process_time(), 0.0, 0, 0, 0.0, 0
    while (done := (time.process_time() - began - aside) / (60 * minutes * threads)) < 1:
        if len(order) < 2:
            order = [i for i in range(len(samples)) if code[i] or shuffle.random() >= drop]
            shuffle.shuffle(order)
        batch = make_batch([samples[order.pop()] for _ in range(2)], block_size, anchors, generator)
        loss, statistics = objective(batch)
        loss.backward()
        optimizers.step(
            min(1.0, (step + 1) / 40) * (end + (1 - end) * (1 + math.cos(math.pi * done)) / 2)
        )
        step, blocks = step + 1, blocks + statistics.num_blocks
        overlap += (statistics.overlap[0] - overlap) * max(0.02, 1 / step)
        if done * minutes >= 10 * (saved + 1):
            saved += 1
            paused = time.process_time()
            rate = blocks / (60 * done * minutes)
            validate(
                f"{done * minutes:.0f} min, {blocks} blocks, {rate:.0f}/s, train {overlap:.3f}"
            )
            aside += time.process_time() - paused
    validate(f"end, {step} steps, {blocks} blocks, train {overlap:.3f}")


def _continued(folder: Path, block_size: int, target: TransformersTarget) -> DSparkDraft:
    saved = load_draft(folder, dtype=torch.float32)
    draft = DSparkDraft(replace(saved.config, block_size=block_size), saved.target_ids)
    draft.load_state_dict(saved.state_dict())
    draft.bind(target.embed_weight, target.head_weight)
    return draft


@torch.no_grad()
def _fused(sample: TrainingSample, draft: DSparkDraft | None) -> TrainingSample:
    if draft is None:
        return sample
    taps = draft.fuse(sample.features.taps.float())
    return replace(sample, features=replace(sample.features, taps=taps))


def _started(
    target: TransformersTarget, samples: Sequence[TrainingSample], block_size: int
) -> DSparkDraft:
    counts = torch.zeros(target.vocab_size, dtype=torch.long)
    for sample in samples:
        counts += torch.bincount(sample.tokens[sample.prompt_length :], minlength=len(counts))
    draft = new_draft(target, DraftShape(num_layers=2, block_size=block_size), MASK_TOKEN, counts)
    start_by_regression(draft, samples[:1200])
    return draft


@app.command()
def export(source: Path, out: Path) -> None:
    """The draft in bfloat16."""
    save_draft(load_draft(source), out, dtype=torch.bfloat16)


if __name__ == "__main__":
    app()
