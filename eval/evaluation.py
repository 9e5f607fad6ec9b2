"""Both arms on the same prompts, alternating, so that a busy machine slows them alike."""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from sparksmith.draft.errors import UserError
from sparksmith.eval.lossless import DrafterMaker
from sparksmith.eval.replay import with_entropy
from sparksmith.eval.trace import Trace
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.response import DecodeResult
from sparksmith.verify.target import TransformersTarget

Arm = Literal["speculative", "autoregressive"]


@dataclass(frozen=True, kw_only=True)
class TokenPrompt:
    """A prompt as the target sees it."""

    prompt_id: str
    workload: str
    token_ids: list[int]


@dataclass(frozen=True, kw_only=True)
class EvaluationSettings:
    """`decode` holds for both arms; `described` goes into every trace (target, draft, ...)."""

    decode: DecodeSettings
    described: dict[str, Any] = field(default_factory=dict)
    warm_up: int = 1


def prompt_seed(seed: int, prompt: TokenPrompt) -> int:
    """A request's own seed, the same whichever other prompts are in the run."""
    name = f"{seed}:{prompt.workload}:{prompt.prompt_id}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:6])


def check_prompts(
    target: TransformersTarget, prompts: Sequence[TokenPrompt], max_new_tokens: int
) -> None:
    """Every prompt must leave room for its response; UserError names the first that does not."""
    if not prompts:
        raise UserError("prompts", 0, "leave nothing to evaluate", "Give at least one prompt.")
    for prompt in prompts:
        if len(prompt.token_ids) + max_new_tokens > target.max_length:
            raise UserError(
                "max_new_tokens",
                max_new_tokens,
                f"after prompt {prompt.prompt_id} of {len(prompt.token_ids)} tokens is beyond the "
                f"target's {target.max_length} positions",
                "Generate fewer tokens or leave the prompt out.",
            )


def evaluate(
    target: TransformersTarget,
    make_drafter: DrafterMaker,
    prompts: Sequence[TokenPrompt],
    settings: EvaluationSettings,
    detokenise: Callable[[list[int]], str],
) -> Iterator[Trace]:
    """Yield the traces of both arms, prompt by prompt; which arm goes first alternates.

    Warm-up requests come first and are not reported. Entropies are computed between the timed
    requests, by replay.
    """
    check_prompts(target, prompts, settings.decode.max_new_tokens)
    for prompt in prompts[: settings.warm_up]:
        short = replace(settings.decode, max_new_tokens=min(16, settings.decode.max_new_tokens))
        for arm in ("speculative", "autoregressive"):
            _decode(target, make_drafter, prompt, short, arm)
    for number, prompt in enumerate(prompts):
        arms: tuple[Arm, Arm] = ("speculative", "autoregressive")
        for arm in arms if number % 2 else arms[::-1]:
            result = _decode(target, make_drafter, prompt, settings.decode, arm)
            trace = _trace(prompt, arm, result, settings, detokenise)
            yield with_entropy(target, trace, prompt.token_ids)


def _decode(
    target: TransformersTarget,
    make_drafter: DrafterMaker,
    prompt: TokenPrompt,
    settings: DecodeSettings,
    arm: Arm,
) -> DecodeResult:
    seed = prompt_seed(settings.seed, prompt)
    drafter = make_drafter(settings.sampling, seed) if arm == "speculative" else None
    return decode(target, drafter, prompt.token_ids, replace(settings, seed=seed))


def _trace(
    prompt: TokenPrompt,
    arm: Arm,
    result: DecodeResult,
    settings: EvaluationSettings,
    detokenise: Callable[[list[int]], str],
) -> Trace:
    sampling = settings.decode.sampling
    assert result.finish_reason != "interrupted"
    return Trace(
        prompt_id=prompt.prompt_id,
        workload=prompt.workload,
        arm=arm,
        engine="sparksmith",
        prompt_tokens=len(prompt.token_ids),
        token_ids=result.token_ids,
        text=detokenise(result.token_ids),
        finish_reason=result.finish_reason,
        drafted=result.drafted,
        accepted=result.accepted,
        draft_seconds=result.draft_seconds,
        verify_seconds=result.verify_seconds,
        first_token_seconds=result.first_token_seconds,
        decode_seconds=result.decode_seconds,
        sampling={
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "seed": prompt_seed(settings.decode.seed, prompt),
            "max_tokens": settings.decode.max_new_tokens,
        },
        settings={
            **settings.described,
            "num_tokens": settings.decode.num_tokens,
            "accept_rule": settings.decode.accept_rule,
            "threads": torch.get_num_threads(),
        },
    )
