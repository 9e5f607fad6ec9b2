"""A tiny target, its rollouts and a tiny draft for it, shared by the tests of distillation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from draft_models import tiny_draft
from tiny_models import HIDDEN, VOCABULARY, tiny_model, words
from torch import Tensor

from sparksmith.distill.features import OnlineFeatures
from sparksmith.distill.generation import BatchGenerator, GenerationSettings, Request, Response
from sparksmith.distill.optimizers import OptimizerSettings
from sparksmith.distill.samples import TrainingSample
from sparksmith.distill.schedule import Budget
from sparksmith.distill.training import Trainer, TrainSettings
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.target import TransformersTarget

TAPS = (0, 2)
SAMPLING = Sampling(temperature=2.0, top_p=0.9)


def tiny_target(
    kind: str = "qwen3", *, sharpness: float = 1.0, **changes: Any
) -> TransformersTarget:
    """Logits are far apart (a standard deviation of about 6); `sharpness` scales them."""
    model = tiny_model(kind, **changes)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(sharpness)
    return TransformersTarget(model, TAPS)


def fitting_draft(target: TransformersTarget, **changes: Any) -> DSparkDraft:
    """A random draft of the target's width and vocabulary, bound to it."""
    sizes = {
        "hidden_size": HIDDEN,
        "target_hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": VOCABULARY,
        "target_layer_ids": TAPS,
    }
    draft = tiny_draft(bind=False, **{**sizes, **changes})
    draft.bind(target.embed_weight, target.head_weight)
    return draft


def rollouts(
    target: TransformersTarget,
    count: int,
    *,
    length: int = 20,
    sampling: Sampling = SAMPLING,
    capture: bool = False,
) -> list[Response]:
    """Sampled responses of `length` tokens to prompts of 3 to 9 tokens, sorted by request."""
    settings = GenerationSettings(sampling=sampling, max_new_tokens=length, batch_size=8)
    generator = BatchGenerator(target, settings, max_prompt_tokens=9, capture=capture)
    requests = [
        Request(request_id=f"{index:03d}", prompt_ids=words(3 + index % 7, seed=index))
        for index in range(count)
    ]
    return sorted(generator.run(requests), key=lambda response: response.request_id)


def cut(response: Response, length: int) -> Response:
    """The same response, ended after `length` tokens."""
    return Response(
        request_id=response.request_id,
        prompt_ids=response.prompt_ids,
        token_ids=response.token_ids[:length],
        finish_reason="length",
    )


def samples_of(
    target: TransformersTarget, responses: list[Response], sampling: Sampling = SAMPLING
) -> list[TrainingSample]:
    return OnlineFeatures(target, responses, sampling).take(range(len(responses)))


class InMemory:
    """Samples that are simply there."""

    def __init__(self, samples: Sequence[TrainingSample]) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def length(self, index: int) -> int:
        return len(self.samples[index].tokens)

    def take(self, indices: Sequence[int]) -> list[TrainingSample]:
        return [self.samples[index] for index in indices]


def train_settings(steps: int | None = 12, **changes: Any) -> TrainSettings:
    values: dict[str, Any] = {
        "budget": Budget(steps=steps) if steps else Budget(minutes=0.02),
        "temperature": SAMPLING.temperature,
        "batch_size": 3,
        "anchors": 6,
        "optimizer": OptimizerSettings(lr=3e-3),
        "validate_every_seconds": 1e9,
        "save_every_seconds": 1e9,
    }
    return TrainSettings(**{**values, **changes})


def tiny_trainer(
    folder: Path, samples: list[TrainingSample], wanted: TrainSettings, **draft: Any
) -> Trainer:
    """Trains a random draft for TARGET; the first three samples are also the held-out ones."""
    return Trainer(fitting_draft(TARGET, **draft), wanted, folder, (InMemory(samples), samples[:3]))


def weights(draft: DSparkDraft) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in draft.state_dict().items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(value, other[name]) for name, value in one.items())


TARGET = tiny_target()
