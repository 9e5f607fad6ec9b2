"""Seeded traces that look like a real evaluation: code easy, creative writing hard."""

import math
from dataclasses import replace
from typing import Any

import numpy as np

from sparksmith.eval.trace import Trace

# workload: (mean entropy in bits, share of certain tokens, repeats itself)
WORKLOADS = {
    "code": (0.45, 0.62, 0.0),
    "creative": (1.9, 0.22, 0.0),
    "chat": (1.2, 0.35, 0.0),
    "maths": (0.7, 0.50, 0.35),
    "extraction": (0.95, 0.42, 0.0),
}
SAMPLING: dict[str, Any] = {"temperature": 0.7, "top_p": 0.95, "top_k": 0, "max_tokens": 160}
SETTINGS: dict[str, Any] = {"target": "SmolLM2-135M-Instruct", "dtype": "float32", "threads": 2}
DRAFT = {"draft": "runs/best", "num_tokens": 4, "accept_rule": "block"}


def simple_trace(**changes: Any) -> Trace:
    """A small valid speculative trace: 3 steps of 2 drafted tokens, accepting 2, 0 and 1."""
    trace = Trace(
        prompt_id="p0", workload="code", arm="speculative", engine="transformers",
        prompt_tokens=5, token_ids=[10, 11, 12, 13, 14, 15, 16], text="seven tokens",
        finish_reason="stop", drafted=[2, 2, 2], accepted=[2, 0, 1],
        draft_seconds=[0.01] * 3, verify_seconds=[0.04] * 3,
        first_token_seconds=0.1, decode_seconds=0.18,
        sampling=SAMPLING, settings=SETTINGS,
    )  # fmt: skip
    return replace(trace, **changes)


def baseline_trace(**changes: Any) -> Trace:
    """The autoregressive counterpart of `simple_trace`: 7 tokens, 0.05 s each after the first."""
    zeros = {"drafted": [0] * 6, "accepted": [0] * 6}
    times = {"draft_seconds": [0.0] * 6, "verify_seconds": [0.05] * 6, "decode_seconds": 0.3}
    return simple_trace(arm="autoregressive", **(zeros | times | changes))


def synthetic_traces(num_prompts: int = 40, num_tokens: int = 4, seed: int = 7) -> list[Trace]:
    """Both arms of `num_prompts` prompts for each of five workloads."""
    generator = np.random.default_rng(seed)
    traces = []
    for workload in WORKLOADS:
        for index in range(num_prompts):
            difficulty = float(generator.lognormal(0.0, 0.28))
            for arm in ("speculative", "autoregressive"):
                trace = _response(generator, workload, difficulty, arm, num_tokens)
                traces.append(replace(trace, prompt_id=f"{workload}-{index}"))
    return traces


def _response(
    generator: np.random.Generator, workload: str, difficulty: float, arm: str, num_tokens: int
) -> Trace:
    mean, certain, loops = WORKLOADS[workload]
    cap = int(SAMPLING["max_tokens"])
    length = min(cap, int(generator.integers(60, 220)))
    entropy = np.where(
        generator.random(length) < certain,
        generator.exponential(0.05, length),
        generator.gamma(1.6, mean * difficulty / (1 - certain) / 1.6, length),
    )
    tokens = generator.zipf(1.3, length) % 4000
    if generator.random() < loops:
        tokens[length // 3 :] = np.resize(np.array([5, 6, 7, 8, 9]), length - length // 3)
    speculative = arm == "speculative"
    drafted, accepted = [], []
    emitted = 1
    while emitted < length:
        drafted.append(num_tokens if speculative else 0)
        kept = 0
        while kept < drafted[-1] and emitted + kept < length:
            chance = 0.93 * math.exp(-0.75 * entropy[emitted + kept]) * 0.97**kept
            if generator.random() > chance:
                break
            kept += 1
        accepted.append(min(kept, length - emitted))
        emitted = min(length, emitted + accepted[-1] + 1)
    verify = generator.normal(0.045 if speculative else 0.041, 0.002, len(drafted)).tolist()
    draft = [0.0071 if speculative else 0.0] * len(drafted)
    bits = entropy.tolist()
    return simple_trace(
        workload=workload, arm=arm, settings=SETTINGS | (DRAFT if speculative else {}),
        token_ids=tokens.tolist(), drafted=drafted, accepted=accepted,
        draft_seconds=draft, verify_seconds=verify,
        decode_seconds=sum(draft) + sum(verify) + 0.0012 * len(drafted),
        finish_reason="length" if length == cap else "stop",
        first_token_seconds=float(generator.normal(0.12, 0.02)),
        entropy_lower=bits, entropy_upper=bits, prompt_tokens=int(generator.integers(20, 120)),
    )  # fmt: skip
