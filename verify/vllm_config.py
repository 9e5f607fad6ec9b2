"""What to start vLLM with, so that a draft works the first time, and why each value is what it is.

Only keys that vLLM 0.32 and 0.33 both know are written. The flags for K3 are those of vLLM's own
recipe (2026-08), the rest follows from the draft and the hardware.
"""

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.errors import UserError
from sparksmith.draft.manifest import Manifest

Goal = Literal["latency", "throughput"]

SEQUENCES: Mapping[str, int] = {"latency": 8, "throughput": 64}
"""Requests at a time that each goal plans for."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What of a machine decides flags: the GPUs' family, and how many a K3 replica takes."""

    name: str
    family: Literal["blackwell", "hopper", "rocm", "cpu"]
    devices: int


HARDWARE: Mapping[str, Hardware] = {
    h.name: h
    for h in (
        Hardware(name="gb300", family="blackwell", devices=8),
        Hardware(name="b300", family="blackwell", devices=8),
        Hardware(name="gb200", family="blackwell", devices=16),
        Hardware(name="b200", family="blackwell", devices=16),
        Hardware(name="h200", family="hopper", devices=16),
        Hardware(name="mi355x", family="rocm", devices=8),
        Hardware(name="cpu", family="cpu", devices=1),
    )
}


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the server is for. `context` None is what the draft and the target were made for."""

    target: str
    draft: str
    hardware: Hardware
    goal: Goal = "latency"
    context: int | None = None
    temperature: float = 1.0
    is_k3: bool = False


@dataclass(kw_only=True)
class Plan:
    """The speculative config, the command's other options and environment, and the reasons."""

    speculative: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str | None] = field(default_factory=dict)
    """None is a flag without a value."""
    environment: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)

    def command(self, target: str) -> str:
        """The whole `vllm serve` command, one option a line, ready for a shell."""
        words = [f"{name}={shlex.quote(value)}" for name, value in self.environment.items()]
        lines = [" ".join([*words, "vllm", "serve", shlex.quote(target)])]
        for name, value in self.options.items():
            lines.append(f"--{name}" if value is None else f"--{name} {shlex.quote(value)}")
        lines.append(f"--speculative-config {shlex.quote(json.dumps(self.speculative))}")
        return " \\\n  ".join(lines)


def plan(request: Request, config: DSparkConfig, manifest: Manifest) -> Plan:
    """Choose every value for serving a draft of `config`.

    Raises UserError for what cannot be served: a fill-in block of one slot, a Markov head that
    vLLM does not have, a context beyond the draft's.
    """
    _check(request, config)
    made = Plan()
    _speculative(made, request, config)
    _lengths(made, request, config)
    if request.hardware.family == "cpu":
        _cpu(made)
    elif request.is_k3:
        _k3(made, request, manifest)
    else:
        made.options["gpu-memory-utilization"] = "0.9"
    _batch(made, request, config)
    return made


def _check(request: Request, config: DSparkConfig) -> None:
    if config.markov_rank and config.markov_head_type != "vanilla":
        raise UserError(
            "markov_head_type",
            config.markov_head_type,
            "is not served by vLLM, which has the vanilla head alone",
            "Train a draft with --markov-head vanilla.",
        )
    if not config.markov_rank:
        raise UserError(
            "markov_rank",
            0,
            "is a draft without a Markov head, which vLLM does not load as DSpark",
            "Train a draft with --markov-rank 128.",
        )
    if request.context is not None and request.context < 1:
        raise UserError("--context", request.context, "is below 1", "Give a number of tokens.")
    if config.yarn is not None and request.context is not None:
        covered = int(config.yarn.factor * config.yarn.original_max_position_embeddings)
        if request.context > covered:
            raise UserError(
                "--context",
                request.context,
                f"is beyond the {covered} positions that the draft's YaRN covers",
                f"Use {covered} or less.",
            )


def _speculative(made: Plan, request: Request, config: DSparkConfig) -> None:
    tokens = config.num_drafts
    if request.goal == "throughput":
        tokens = min(tokens, 3)
        made.reasons["num_speculative_tokens"] = (
            f"{tokens}: with many requests at once a verified token costs as much as any other; "
            "three drafted tokens keep about nine tenths of a block's acceptance"
        )
    else:
        made.reasons["num_speculative_tokens"] = (
            f"{tokens}, the draft's block: more were never trained, and spoil all positions"
        )
    made.speculative = {
        "method": "dspark",
        "model": request.draft,
        "num_speculative_tokens": tokens,
    }
    made.reasons["method"] = "said, because vLLM otherwise guesses it from the path"
    if request.temperature > 0:
        made.speculative["draft_sample_method"] = "probabilistic"
        made.speculative["rejection_sample_method"] = "block"
        made.reasons["draft_sample_method"] = (
            "above temperature 0 a sampled draft is accepted more often than a greedy one"
        )
        made.reasons["rejection_sample_method"] = (
            "block verification accepts at least as much as the standard rule, and is as exact"
        )
    else:
        made.reasons["draft_sample_method"] = "greedy, the default: the target decodes greedily"


def _lengths(made: Plan, request: Request, config: DSparkConfig) -> None:
    if request.context is None:
        return
    made.options["max-model-len"] = str(request.context)
    made.reasons["max-model-len"] = "as asked for"
    if config.yarn is not None and config.max_position_embeddings < request.context:
        raise UserError(
            "--context",
            request.context,
            f"is beyond the draft's max_position_embeddings, {config.max_position_embeddings}, to "
            "which vLLM would lower the target's length",
            f"Use {config.max_position_embeddings} or less.",
        )


def _cpu(made: Plan) -> None:
    made.options |= {"dtype": "float32", "enforce-eager": None}
    made.reasons["dtype"] = "in bfloat16 a verified block may round otherwise than single tokens"
    made.environment |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    made.environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    made.reasons["VLLM_USE_V2_MODEL_RUNNER"] = "DSpark exists in vLLM's second runner alone"


def _k3(made: Plan, request: Request, manifest: Manifest) -> None:
    hardware = request.hardware
    made.options |= {
        "trust-remote-code": None,
        "tensor-parallel-size": str(min(8, hardware.devices)),
        "reasoning-parser": "kimi_k3",
        "enable-auto-tool-choice": None,
        "tool-call-parser": "kimi_k3",
    }
    if hardware.devices > 8:
        made.options["pipeline-parallel-size"] = str(hardware.devices // 8)
    if hardware.family == "blackwell":
        made.options |= {
            "gpu-memory-utilization": "0.95",
            "load-format": "fastsafetensors",
            "no-enable-flashinfer-autotune": None,
            "kv-cache-dtype": "fp8",
            "attention-config": '{"use_prefill_query_quantization":true,'
            '"mla_prefill_backend":"flashinfer"}',
        }
        made.environment["VLLM_ALLREDUCE_USE_FLASHINFER"] = "1"
        made.reasons["attention-config"] = "K3's attention needs it with an 8-bit KV cache"
    elif hardware.family == "hopper":
        made.options |= {
            "gpu-memory-utilization": "0.97",
            "moe-backend": "marlin",
            "attention-backend": "FLASHMLA",
            "disable-custom-all-reduce": None,
            "no-enable-flashinfer-autotune": None,
        }
        made.reasons["attention-backend"] = (
            "FLASHMLA for K3 on Hopper; the draft's own is left to vLLM, for FLASHMLA is causal"
        )
        if "max-model-len" not in made.options:
            made.options["max-model-len"] = "32768"
            made.reasons["max-model-len"] = "what is left beside the weights on H200s"
    else:
        made.options |= {
            "gpu-memory-utilization": "0.95",
            "load-format": "auto",
            "mm-encoder-tp-mode": "data",
        }
        made.environment |= {"VLLM_ROCM_USE_AITER": "1", "VLLM_USE_BREAKABLE_CUDAGRAPH": "0"}
        made.reasons["VLLM_USE_BREAKABLE_CUDAGRAPH"] = "vLLM's recipe requires it on ROCm"
    made.options["no-enable-prefix-caching"] = None
    made.reasons["no-enable-prefix-caching"] = (
        "tokens from the prefix cache do not pass the target, and the draft knows nothing of them"
    )
    made.environment["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    mixture = manifest.stream == "attn_res_mixture"
    made.environment["VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"] = "1" if mixture else "0"
    stated = "taps.stream" not in manifest.assumed and manifest.stream != "residual"
    made.reasons["VLLM_KIMI_K3_AUX_ATTN_RES_STREAM"] = (
        f"the draft was trained on the {'mixture' if mixture else 'prefix sum'}"
        if stated
        else "the draft does not say which stream it was trained on: this is vLLM's default"
    )


def _batch(made: Plan, request: Request, config: DSparkConfig) -> None:
    sequences = SEQUENCES[request.goal]
    if request.hardware.family == "hopper" and request.is_k3:
        sequences = min(sequences, 5)
    elif request.hardware.family == "cpu":
        sequences = 2
    made.options["max-num-seqs"] = str(sequences)
    tokens = made.speculative["num_speculative_tokens"]
    ahead = tokens if config.sample_from_anchor else tokens + 1
    least = 1024 if request.hardware.family == "cpu" else 4096
    batched = max(least, 2 * sequences * (ahead + 1))
    made.options["max-num-batched-tokens"] = str(batched)
    made.reasons["max-num-batched-tokens"] = (
        f"room for {sequences} requests of {ahead} tokens ahead; with less, fewer run at once"
    )


def memory(made: Plan, config: DSparkConfig, context: int) -> dict[str, int]:
    """Bytes that the draft takes on top of the target, at two bytes a number: its weights, its
    key/value cache at `context` positions of every request, and the logits that probabilistic
    drafting keeps."""
    sequences = int(made.options["max-num-seqs"] or 1)
    tokens = made.speculative["num_speculative_tokens"]
    if config.mla is None:
        per_position = 2 * config.num_key_value_heads * config.head_dim
    else:
        per_position = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    seen = min(context, config.sliding_window or context)
    logits = 0
    if made.speculative.get("draft_sample_method") == "probabilistic":
        logits = 2 * sequences * tokens * config.vocab_size
    return {
        "cache": 2 * sequences * seen * per_position * config.num_hidden_layers,
        "logits": logits,
    }
