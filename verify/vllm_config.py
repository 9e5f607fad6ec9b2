"""What to start vLLM with, so that a draft works the first time, and why each value is what it is.

Only keys that vLLM 0.32 and 0.33 both know are written. The flags for K3 are those of vLLM's own
recipe (2026-08), the rest follows from the draft and the hardware. Every value has its reason.
"""

import json
import math
import shlex
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from sparksmith.draft.checkpoint import own_shapes
from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.errors import UserError
from sparksmith.draft.layouts import EMBED, HEAD
from sparksmith.draft.manifest import Manifest
from sparksmith.verify.findings import TargetFacts

Goal = Literal["latency", "throughput"]

SEQUENCES: Mapping[str, int] = {"latency": 8, "throughput": 64}
"""Requests at a time that each goal plans for."""
LONGEST = 1 << 31
"""No context is longer: vLLM counts positions in 32 bits."""
HEAD_NODE = "head-node"
"""Stands for the first node's address where nobody has said it."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What of a machine decides flags: the GPUs' family, how many a K3 replica takes, and how many
    of them one node has."""

    name: str
    family: Literal["blackwell", "hopper", "rocm", "cpu"]
    devices: int
    per_node: int = 8

    @property
    def nodes(self) -> int:
        return -(-self.devices // self.per_node)


# K3's weights need 1,680 GB: one node of B300s or MI355Xs, two of B200s or H200s, and as many
# four-GPU trays as there are powers of two for.
HARDWARE: Mapping[str, Hardware] = {
    h.name: h
    for h in (
        Hardware(name="gb300", family="blackwell", devices=8, per_node=4),
        Hardware(name="b300", family="blackwell", devices=8),
        Hardware(name="gb200", family="blackwell", devices=16, per_node=4),
        Hardware(name="b200", family="blackwell", devices=16),
        Hardware(name="h200", family="hopper", devices=16),
        Hardware(name="mi355x", family="rocm", devices=8),
        Hardware(name="cpu", family="cpu", devices=1),
    )
}

_RECIPE = "vLLM's recipe for K3 has it"


@dataclass(frozen=True, kw_only=True)
class Request:
    """What the server is for. `context` None is what the draft and the target were made for;
    `facts` are the target's sizes, where they are known; `head_node` is the first node's address,
    for hardware of several."""

    target: str
    draft: str
    hardware: Hardware
    goal: Goal = "latency"
    context: int | None = None
    temperature: float = 1.0
    is_k3: bool = False
    facts: TargetFacts | None = None
    head_node: str = HEAD_NODE


@dataclass(kw_only=True)
class Plan:
    """The speculative config, the command's other options and environment, and a reason for each
    of them; `context` is the length that requests may have under this command."""

    speculative: dict[str, Any] = field(default_factory=dict)
    options: dict[str, str | None] = field(default_factory=dict)
    """None is a flag without a value."""
    environment: dict[str, str] = field(default_factory=dict)
    reasons: dict[str, str] = field(default_factory=dict)
    context: int = 0

    def speculate(self, name: str, value: object, why: str) -> None:
        self.speculative[name], self.reasons[name] = value, why

    def option(self, name: str, value: object, why: str) -> None:
        self.options[name] = None if value is None else str(value)
        self.reasons[name] = why

    def variable(self, name: str, value: object, why: str) -> None:
        self.environment[name], self.reasons[name] = str(value), why

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
    vLLM does not have, a context beyond the draft's, heads that do not divide over the devices.
    """
    _check(request, config)
    made = Plan()
    _speculative(made, request, config)
    if request.hardware.family == "cpu":
        _cpu(made)
    elif request.is_k3:
        _k3(made, request, config)
    else:
        made.option(
            "gpu-memory-utilization", "0.9", "leaves a tenth to the draft's graphs and others"
        )
    _length(made, request, config)
    made.option(
        "no-enable-prefix-caching",
        None,
        "tokens from the prefix cache do not pass the target, so the draft knows nothing of them: "
        "acceptance has fallen to 1.0 on repeated prompts. It speeds prompts up: compare",
    )
    made.variable("VLLM_USE_V2_MODEL_RUNNER", 1, "DSpark exists in vLLM's second runner alone")
    if request.is_k3:
        _stream(made, manifest)
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
    temperature = request.temperature
    if not math.isfinite(temperature) or temperature < 0:
        raise UserError(
            "--temperature",
            temperature,
            "is no temperature",
            "Give 0 for greedy requests, or a number above it.",
        )
    context = request.context
    if context is None:
        return
    if context < 1:
        raise UserError("--context", context, "is below 1", "Give a number of tokens.")
    most, whose = LONGEST, "what vLLM counts in"
    if request.facts is not None and request.facts.max_length < most:
        most, whose = request.facts.max_length, "the target's length"
    if config.yarn is not None:
        covered = int(config.yarn.factor * config.yarn.original_max_position_embeddings)
        for length, name in (
            (covered, "what the draft's YaRN covers"),
            (
                config.max_position_embeddings,
                "the draft's max_position_embeddings, to which vLLM would lower the target's",
            ),
        ):
            if length < most:
                most, whose = length, name
    if context > most:
        raise UserError(
            "--context",
            context,
            f"is beyond {most} positions, {whose}",
            f"Use {most} or less.",
        )


def _speculative(made: Plan, request: Request, config: DSparkConfig) -> None:
    made.speculate("method", "dspark", "said, because vLLM otherwise guesses it from the path")
    made.speculate("model", request.draft, "the draft's folder, from wherever it is started")
    if request.goal == "throughput" and config.num_drafts > 3:
        made.speculate(
            "num_speculative_tokens",
            3,
            "3: with many requests at once a verified token costs as much as any other; three "
            "drafted tokens keep about nine tenths of a block's acceptance",
        )
    else:
        tokens = config.num_drafts
        made.speculate(
            "num_speculative_tokens",
            tokens,
            f"{tokens}, the draft's block: more were never trained, and spoil all positions",
        )
    if request.hardware.family == "cpu":
        made.reasons["draft_sample_method"] = (
            "greedy: without a GPU vLLM's DSpark runs in Triton's interpreter, where probabilistic "
            "drafting fails"
        )
    elif request.temperature > 0:
        made.speculate(
            "draft_sample_method",
            "probabilistic",
            "above temperature 0 a sampled draft is accepted more often than a greedy one",
        )
        made.speculate(
            "rejection_sample_method",
            "block",
            "block verification accepts at least as much as the standard rule, and is as exact",
        )
    else:
        made.reasons["draft_sample_method"] = "greedy, the default: the target decodes greedily"


def _length(made: Plan, request: Request, config: DSparkConfig) -> None:
    """--max-model-len: what was asked for, else what the machine's recipe or the draft allows."""
    own = config.max_position_embeddings
    known = request.facts.max_length if request.facts is not None else None
    if request.context is not None:
        made.option("max-model-len", request.context, "as asked for")
    else:
        recipe = made.options.get("max-model-len")
        length = min((n for n in (known, recipe and int(recipe)) if n), default=own)
        if config.yarn is not None and (known is None or own < length):
            made.option(
                "max-model-len",
                own,
                "the draft's positions: vLLM would lower the target's length to them",
            )
        elif recipe is not None and length < int(recipe):
            made.option("max-model-len", length, "the target's own length")
    made.context = int(made.options.get("max-model-len") or known or own)


def _cpu(made: Plan) -> None:
    made.option(
        "dtype", "float32", "in bfloat16 a verified block may round otherwise than single tokens"
    )
    made.option("enforce-eager", None, "a CPU gains nothing from graphs, and starts sooner")
    made.variable("OMP_NUM_THREADS", 1, "a small target's steps are slower on several threads")
    made.variable("VLLM_CPU_KVCACHE_SPACE", 1, "GB of memory for keys and values; raise as needed")


def _k3(made: Plan, request: Request, config: DSparkConfig) -> None:
    hardware = request.hardware
    _split(made, request, config)
    made.option("trust-remote-code", None, "K3's tokenizer is its own code")
    made.option("reasoning-parser", "kimi_k3", "answers come apart from what K3 thinks")
    made.option("enable-auto-tool-choice", None, "K3 calls tools by itself")
    made.option("tool-call-parser", "kimi_k3", "K3's form of tool calls")
    {"blackwell": _blackwell, "hopper": _hopper, "rocm": _rocm}[hardware.family](made)
    if hardware.nodes > 1:
        made.option("nnodes", hardware.nodes, f"{hardware.per_node} GPUs a node")
        made.option(
            "node-rank",
            0,
            "of the first node. On the others append --node-rank 1 (and so on) --headless",
        )
        made.option("master-addr", request.head_node, "the first node's address: --head-node")
        made.option(
            "compilation-config",
            '{"pass_config":{"fuse_allreduce_rms":false}}',
            f"no fused all-reduce between nodes; {_RECIPE} for several nodes",
        )
        made.variable("VLLM_USE_NCCL_SYMM_MEM", 0, f"{_RECIPE} for several nodes")


def _split(made: Plan, request: Request, config: DSparkConfig) -> None:
    hardware = request.hardware
    size, heads = hardware.devices, config.num_attention_heads
    if heads % size:
        others = [h.name for h in HARDWARE.values() if h.family != "cpu" and heads % h.devices == 0]
        raise UserError(
            "num_attention_heads",
            heads,
            f"do not divide over the {size} devices that K3 takes of {hardware.name}",
            (f"Use {' or '.join(others)}, or train" if others else "Train")
            + f" a draft whose number of heads is a multiple of {size}.",
        )
    if (
        config.mla is None
        and config.num_key_value_heads % size
        and size % (config.num_key_value_heads)
    ):
        raise UserError(
            "num_key_value_heads",
            config.num_key_value_heads,
            f"can be neither divided over {size} devices nor repeated on them",
            "Train a draft whose key/value heads are a power of two.",
        )
    where = "a node" if hardware.nodes == 1 else f"{hardware.nodes} nodes, not in pipeline stages"
    made.option(
        "tensor-parallel-size",
        size,
        f"K3's weights on all GPUs of {where}"
        + (", which vLLM's recipe does not serve a draft with" if hardware.nodes > 1 else ""),
    )


def _blackwell(made: Plan) -> None:
    made.option("gpu-memory-utilization", "0.95", _RECIPE)
    made.option("load-format", "fastsafetensors", "loads the weights several times faster")
    made.option("no-enable-flashinfer-autotune", None, f"{_RECIPE}: tuning takes long")
    made.option("max-model-len", 1_048_576, f"{_RECIPE}: all of K3's context")
    made.option("kv-cache-dtype", "fp8", f"{_RECIPE}: half the memory a position")
    made.option(
        "attention-config",
        '{"use_prefill_query_quantization":true,"mla_prefill_backend":"flashinfer"}',
        "K3's attention needs it with an 8-bit KV cache",
    )
    made.variable("VLLM_ALLREDUCE_USE_FLASHINFER", 1, _RECIPE)
    _ready(made)


def _hopper(made: Plan) -> None:
    made.option("gpu-memory-utilization", "0.97", "the weights leave little of H200s")
    made.option("max-model-len", 32_768, "what is left beside the weights on H200s")
    made.option("moe-backend", "marlin", "H200s have no arithmetic for the experts' 4-bit weights")
    made.option(
        "attention-backend",
        "FLASHMLA",
        "FLASHMLA for K3 on Hopper; the draft's own is left to vLLM, for FLASHMLA is causal",
    )
    made.option("disable-custom-all-reduce", None, _RECIPE)
    made.option("no-enable-flashinfer-autotune", None, f"{_RECIPE}: tuning takes long")
    made.variable("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", "wastes less memory")
    _ready(made)


def _rocm(made: Plan) -> None:
    made.option("gpu-memory-utilization", "0.95", _RECIPE)
    made.option("load-format", "auto", _RECIPE)
    made.option("mm-encoder-tp-mode", "data", "each GPU encodes images of its own")
    made.option(
        "compilation-config",
        '{"cudagraph_mode":"FULL_DECODE_ONLY","custom_ops":["+fused_rms_norm_gated"]}',
        f"{_RECIPE} on ROCm",
    )
    made.variable("VLLM_ROCM_USE_AITER", 1, "AMD's own kernels")
    made.variable("SAFETENSORS_FAST_GPU", 1, "loads weights faster")
    made.variable("VLLM_ROCM_USE_AITER_MOE_SITUV2_A8W4", 1, "K3's experts in AMD's kernels")
    made.variable("AITER_BF16_FP8_MOE_BOUND", 0, f"{_RECIPE} on ROCm")
    made.variable("VLLM_USE_BREAKABLE_CUDAGRAPH", 0, "vLLM's recipe requires it on ROCm")


def _ready(made: Plan) -> None:
    made.variable("VLLM_ENGINE_READY_TIMEOUT_S", 3_600, "1.6 TB of weights take long to load")
    made.variable("VLLM_USE_RUST_FRONTEND", 1, _RECIPE)


def _stream(made: Plan, manifest: Manifest) -> None:
    mixture = manifest.stream == "attn_res_mixture"
    stated = "taps.stream" not in manifest.assumed and manifest.stream != "residual"
    made.variable(
        "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM",
        int(mixture),
        f"the draft was trained on the {'mixture' if mixture else 'prefix sum'}"
        if stated
        else "the draft does not say which stream it was trained on: this is vLLM's default",
    )


def _batch(made: Plan, request: Request, config: DSparkConfig) -> None:
    sequences, why = SEQUENCES[request.goal], f"what {request.goal} plans for"
    family = request.hardware.family
    if family == "hopper" and request.is_k3:
        sequences, why = 5, f"{_RECIPE}: H200s have memory for no more"
    elif family == "rocm" and request.is_k3 and request.goal == "throughput":
        sequences, why = 128, f"{_RECIPE} with a draft on ROCm"
    elif family == "cpu":
        sequences, why = 2, "what a CPU computes side by side"
    made.option("max-num-seqs", sequences, why)
    tokens = made.speculative["num_speculative_tokens"]
    ahead = tokens if config.sample_from_anchor else tokens + 1
    least = 1024 if family == "cpu" else 4096
    made.option(
        "max-num-batched-tokens",
        max(least, 2 * sequences * (ahead + 1)),
        f"room for {sequences} requests of {ahead} tokens ahead; with less, fewer run at once",
    )


def memory(made: Plan, config: DSparkConfig, shipped: Collection[str] = ()) -> dict[str, int]:
    """Bytes that the draft takes beside the target under a plan, one copy of each on however many
    devices: its weights, with those of `shipped` embedding and head; its keys and values at
    `made.context` positions of every request, in the cache's type; and the logits that
    probabilistic drafting keeps, in the weights'."""
    wide = 4 if made.options.get("dtype") == "float32" else 2
    narrow = 1 if (made.options.get("kv-cache-dtype") or "").startswith("fp8") else wide
    sequences = int(made.options["max-num-seqs"] or 1)
    tokens = made.speculative["num_speculative_tokens"]
    numbers = sum(math.prod(shape) for shape in own_shapes(config).values())
    numbers += config.vocab_size * config.hidden_size * (EMBED in shipped)
    numbers += config.draft_vocab_size * config.hidden_size * (HEAD in shipped)
    if config.mla is None:
        per_position = 2 * config.num_key_value_heads * config.head_dim
    else:
        per_position = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
    seen = min(made.context, config.sliding_window or made.context)
    logits = 0
    if made.speculative.get("draft_sample_method") == "probabilistic":
        logits = wide * sequences * tokens * config.vocab_size
    return {
        "weights": wide * numbers,
        "cache": narrow * sequences * seen * per_position * config.num_hidden_layers,
        "logits": logits,
    }
