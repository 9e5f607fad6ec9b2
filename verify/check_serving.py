"""Checks of a `vllm serve` command line against the draft that it names.

The facts are those of vLLM 0.32 and 0.33; only what both know counts as known.
"""

import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from sparksmith.verify.findings import Checks, Seen, Subject

SERVING_CHECKS = Checks()
check = SERVING_CHECKS

KNOWN_KEYS = frozenset(
    (
        "enforce_eager",
        "num_speculative_tokens",
        "model",
        "method",
        "draft_tensor_parallel_size",
        "tensor_parallel_size",
        "quantization",
        "moe_backend",
        "attention_backend",
        "kv_cache_dtype",
        "max_model_len",
        "revision",
        "code_revision",
        "index_share_for_mtp_iteration",
        "disable_padded_drafter_batch",
        "disable_eagle_block_drop",
        "use_local_argmax_reduction",
        "use_heterogeneous_vocab",
        "prompt_lookup_max",
        "prompt_lookup_min",
        "parallel_drafting",
        "num_speculative_tokens_per_batch_size",
        "suffix_decoding_max_tree_depth",
        "suffix_decoding_max_cached_requests",
        "suffix_decoding_max_spec_factor",
        "suffix_decoding_min_token_prob",
        "draft_load_config",
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
        "enable_adaptive_verification",
        "draft_sample_method",
        "dspark_draft_topk",
    )
)
"""Keys of SpeculativeConfig in both versions."""
NEVER = {
    "tensor_parallel_size": "is an error in every case",
    "parallel_drafting": "is set by vLLM itself, whatever is written",
    "use_local_argmax_reduction": "is an error for K3 drafts and with probabilistic drafting",
    "draft_lm_head_quantization": "is an error for DSpark, and unknown to vLLM 0.32",
}
# Attention backends of the target whose graphs take requests of unequal lengths.
_UNEQUAL = ("FLASHINFER_MLA", "FLASH_ATTN", "TRITON_ATTN", "FLASHINFER")
_CAUSAL_ONLY = ("FLASH_ATTN_MLA", "FLASHMLA")
_DEFAULT_SEQUENCES = 256
_HUB_NAME = re.compile(r"^[\w.-]+/[\w.-]+$")


@check("spec-method", "error", "the speculative method is said: dspark")
def spec_method(subject: Subject) -> Iterator[Seen]:
    """Without a method vLLM guesses from the path: `eagle-`, `eagle3` and `dflash` anywhere in it
    win over `dspark`, and a K3 draft in a folder without "dspark" silently becomes an ordinary
    draft model.
    """
    speculative = _speculative(subject)
    if speculative is None:
        # A speculators draft is served by its own name, with what its config.json says.
        if subject.serve is not None and subject.layout != "speculators":
            yield Seen(
                value="no --speculative-config",
                consequence="no draft is served",
                remedy="Add the one that `sparksmith vllm` prints.",
                level="warning",
            )
        return
    if speculative.get("method") != "dspark":
        yield Seen(
            value=speculative.get("method", "no method"),
            consequence="vLLM guesses from the path, and may run the draft as another kind",
            remedy='Write "method": "dspark".',
        )


@check("known-keys", "error", "the speculative config has only keys that vLLM 0.32 and 0.33 know")
def known_keys(subject: Subject) -> Iterator[Seen]:
    """SpeculativeConfig refuses keys that it does not know, and the whole server stops for it. Some
    keys exist and are errors, or mean nothing, for DSpark.
    """
    for key, value in (_speculative(subject) or {}).items():
        if key in NEVER:
            yield Seen(
                value=f"{key} {value}",
                consequence=f"it {NEVER[key]}",
                remedy="Leave it out.",
            )
        elif key not in KNOWN_KEYS:
            yield Seen(
                value=f"{key} {value}",
                consequence="the server stops: Unexpected keyword argument",
                remedy="Leave it out.",
            )
    if subject.latent and (_speculative(subject) or {}).get("dspark_draft_topk") is not None:
        yield Seen(
            value="dspark_draft_topk with a K3 draft",
            consequence="vLLM refuses it",
            remedy="Leave it out.",
        )


@check("key-values", "error", "values in the speculative config are of their keys' kinds")
def key_values(subject: Subject) -> Iterator[Seen]:
    """SpeculativeConfig is strict about values: a word where a number belongs, no drafted tokens at
    all, or a sampling method with a letter missing is a ValidationError, and the server stops.
    """
    for key, value in (_speculative(subject) or {}).items():
        if value is None or key not in _KINDS:
            continue
        fits, kind = _KINDS[key]
        if not fits(value):
            yield Seen(
                value=f"{key} {value!r}",
                consequence="the server stops: a validation error",
                remedy=f"Write {kind}.",
            )


@check("draft-model", "error", "the draft that is served is the one that is checked")
def draft_model(subject: Subject) -> Iterator[Seen]:
    """`model` in the speculative config is the draft. Without it vLLM looks for a draft inside the
    target; with another folder, or a copy from before, nothing that was checked here holds.
    """
    speculative = _speculative(subject)
    if speculative is None or subject.folder is None:
        return
    model, folder = speculative.get("model"), subject.folder.resolve()
    if model is None or model == "":
        yield Seen(
            value="model is missing",
            consequence="vLLM takes the target for its own draft",
            remedy=f'Write "model": "{folder}".',
        )
    elif isinstance(model, str):
        path = Path(model)
        if _exists(path):
            if path.resolve() != folder:
                yield Seen(
                    value=f"model {model}, and {folder} is checked",
                    consequence="another draft is served than the one that was checked",
                    remedy=f"Check {model}, or serve {folder}.",
                )
        elif path.name != folder.name:
            yield Seen(
                value=f"model {model} is not here to compare",
                consequence="it may be another draft than the one that was checked",
                remedy="Make sure that it is the same one.",
                level="warning",
            )


@check("draft-tokens", "error", "no more tokens are drafted than a block was trained for")
def draft_tokens(subject: Subject) -> Iterator[Seen]:
    """vLLM compares num_speculative_tokens with nothing. A bidirectional block of five, drafted
    seven long, fell from 2.74 to 1.31 tokens a step in all its positions. A fill-in block drafts
    one less than its size; without the key vLLM takes the size.
    """
    speculative, most = _speculative(subject), subject.num_drafts
    if speculative is None:
        return
    number = speculative.get("num_speculative_tokens")
    if number is None:
        size = subject.number("block_size")
        if size is None or (most is not None and size > most):
            yield Seen(
                value="num_speculative_tokens is missing",
                consequence=f"vLLM drafts block_size {size}, and the draft was trained for {most}",
                remedy=f"Write {most}." if most else "Write the trained number.",
            )
    elif _is_count(number) and most is not None and number > most:
        yield Seen(
            value=f"{number} of a block that drafts {most}",
            consequence="every position's acceptance falls, not only the last ones'",
            remedy=f"Write {most} or less.",
        )


@check("sampling-methods", "warning", "block verification comes with probabilistic drafting")
def sampling_methods(subject: Subject) -> Iterator[Seen]:
    """With greedy drafting the draft's distribution is one word, and block verification accepts no
    more than the standard rule. Above temperature 0 a greedy draft is accepted less often than a
    sampled one.
    """
    speculative = _speculative(subject)
    if speculative is None:
        return
    rule = speculative.get("rejection_sample_method", "standard")
    drafts = speculative.get("draft_sample_method", "greedy")
    if rule == "block" and drafts != "probabilistic":
        yield Seen(
            value="block verification with greedy drafting",
            consequence="it accepts what the standard rule accepts",
            remedy='Add "draft_sample_method": "probabilistic".',
        )
    if rule == "fly":
        yield Seen(
            value="rejection_sample_method fly",
            consequence="the text is no longer the target's, and vLLM 0.32 does not know it",
            remedy='Write "block" or "standard".',
            level="error",
        )


@check("synthetic", "error", "synthetic acceptance is complete, and meant")
def synthetic(subject: Subject) -> Iterator[Seen]:
    """Synthetic acceptance is for benchmarks: tokens are accepted by a die, and the text is not the
    target's. It needs exactly one of rates and length, rates as many as drafted tokens, none
    larger than the one before.
    """
    speculative = _speculative(subject) or {}
    if speculative.get("rejection_sample_method") != "synthetic":
        return
    yield Seen(
        value="rejection_sample_method synthetic",
        consequence="the text is not the target's",
        remedy="Use it for speed measurements alone.",
        level="warning",
    )
    rates = speculative.get("synthetic_acceptance_rates")
    length = speculative.get("synthetic_acceptance_length")
    number = speculative.get("num_speculative_tokens")
    if (rates is None) == (length is None):
        yield Seen(
            value=f"rates {rates}, length {length}",
            consequence="vLLM refuses it",
            remedy="Give one of the two.",
        )
    elif rates is not None and (
        not _are_rates(rates)
        or (_is_count(number) and len(rates) != number)
        or any(b > a for a, b in itertools.pairwise(rates))
    ):
        yield Seen(
            value=f"rates {rates} for {number} tokens",
            consequence="vLLM refuses it",
            remedy="Give as many rates as tokens, in [0, 1], none above the one before.",
        )
    elif (
        _is_number(length)
        and _is_count(number)
        and (not math.isfinite(length) or not 1 <= length <= number + 1)
    ):
        yield Seen(
            value=f"length {length} for {number} tokens",
            consequence="vLLM refuses it",
            remedy=f"Give 1 to {number + 1}.",
        )


@check("dynamic-tokens", "error", "numbers of tokens by batch size are ordered ranges from 1 on")
def dynamic_tokens(subject: Subject) -> Iterator[Seen]:
    """`num_speculative_tokens_per_batch_size` is read when the scheduler is built, after the model
    is loaded. Ranges must start at 1, be sorted and not overlap; larger numbers are clamped; with
    data parallelism it is switched off with a warning.
    """
    speculative = _speculative(subject) or {}
    ranges = speculative.get("num_speculative_tokens_per_batch_size")
    if ranges is None:
        return
    most = speculative.get("num_speculative_tokens")
    problem = _range_problem(ranges, most)
    if problem:
        yield Seen(
            value=ranges,
            consequence=f"{problem}; the server stops late, or clamps it",
            remedy="Write [[1, 8, 7], [9, 64, 3], ...], sorted, from 1 on.",
        )
    assert subject.serve is not None
    if (subject.serve.number("data-parallel-size") or 1) > 1:
        yield Seen(
            value="with data parallelism",
            consequence="vLLM switches it off with one warning",
            remedy="Use one number of tokens.",
            level="warning",
        )


def _range_problem(ranges: Any, most: Any) -> str | None:
    if not isinstance(ranges, list) or not all(
        isinstance(part, list) and len(part) == 3 and all(map(_is_count, part)) for part in ranges
    ):
        return "it is no list of [start, end, tokens]"
    if not ranges or ranges[0][0] != 1:
        return "it does not start at 1"
    end = 0
    for first, last, tokens in ranges:
        if first <= end or last < first:
            return "its ranges overlap or are not sorted"
        if tokens < 0 or (_is_count(most) and tokens > most):
            return f"{tokens} tokens are not between 0 and num_speculative_tokens"
        end = last
    return None


@check("adaptive", "error", "adaptive verification has what it needs")
def adaptive(subject: Subject) -> Iterator[Seen]:
    """Adaptive verification gives requests unequal lengths in one CUDA graph. It needs full
    graphs, no LoRA, no pipeline stages, and a target attention backend that takes such graphs: not
    those of K3 on Hopper. Without a confidence head it guesses from the draft's probabilities.
    """
    speculative = _speculative(subject) or {}
    if not speculative.get("enable_adaptive_verification"):
        return
    serve = subject.serve
    assert serve is not None
    for option, problem in (
        ("enforce-eager", "it needs CUDA graphs"),
        ("enable-lora", "it does not work with LoRA"),
    ):
        if serve.has(option):
            yield Seen(
                value=f"--{option}",
                consequence=f"{problem}: the server stops after the model is loaded",
                remedy=f"Leave --{option} or adaptive verification out.",
            )
    if speculative.get("enforce_eager"):
        yield Seen(
            value="enforce_eager in the speculative config",
            consequence="it needs CUDA graphs: the server stops",
            remedy="Leave one of the two out.",
        )
    if (serve.number("pipeline-parallel-size") or 1) > 1:
        yield Seen(
            value="pipeline stages",
            consequence="it works on one stage alone: the server stops",
            remedy="Leave adaptive verification out.",
        )
    backend = serve.options.get("attention-backend")
    if isinstance(backend, str) and backend.upper() not in _UNEQUAL:
        yield Seen(
            value=f"--attention-backend {backend}",
            consequence="ValueError when the KV cache is made, after the whole model is loaded",
            remedy="Leave adaptive verification out on this hardware.",
        )
    if not subject.flat.get("enable_confidence_head"):
        yield Seen(
            value="no confidence head",
            consequence="chances are estimated online, from the draft's largest probability",
            remedy="Train the draft with its confidence head.",
            level="warning",
        )


@check("draft-backend", "error", "the draft's attention backend takes bidirectional blocks")
def draft_backend(subject: Subject) -> Iterator[Seen]:
    """A draft's block is bidirectional unless its config says causal. A backend that is causal only
    refuses it when the draft is loaded, or, in a plug-in, drafts causally: the last positions of
    a block then contribute almost nothing.
    """
    backend = (_speculative(subject) or {}).get("attention_backend")
    if backend is None or subject.flat.get("is_causal"):
        return
    if str(backend).upper() in _CAUSAL_ONLY:
        yield Seen(
            value=f"{backend} for a bidirectional block",
            consequence="the server stops when the draft is loaded",
            remedy="Leave attention_backend out.",
        )


@check("draft-parallel", "error", "the draft is split as the target is")
def draft_parallel(subject: Subject) -> Iterator[Seen]:
    """A draft runs on one device or on as many as the target. A draft with fewer key/value heads
    than devices, replicated and then read as if split, fell from 20.7% to 0.84% acceptance.
    """
    size = (_speculative(subject) or {}).get("draft_tensor_parallel_size")
    if not _is_count(size):
        return
    assert subject.serve is not None
    target = subject.serve.number("tensor-parallel-size") or 1
    if size not in (1, target):
        yield Seen(
            value=f"{size} beside the target's {target}",
            consequence="vLLM refuses it",
            remedy="Leave draft_tensor_parallel_size out.",
        )


@check("attention-split", "error", "the draft's heads divide over its devices")
def attention_split(subject: Subject) -> Iterator[Seen]:
    """The draft's heads are shared out over the devices of its tensor parallelism, the target's
    unless draft_tensor_parallel_size says otherwise: ten heads on eight devices is an assertion in
    the worker, after the target has been loaded. Key/value heads must divide, or repeat evenly.
    """
    serve = subject.serve
    if serve is None or not serve.speculative:
        return
    own = serve.speculative.get("draft_tensor_parallel_size")
    size = own if _is_count(own) else serve.number("tensor-parallel-size") or 1
    heads, pairs = subject.number("num_attention_heads"), subject.number("num_key_value_heads")
    if size <= 1 or heads is None or heads < 1:
        return
    if heads % size:
        yield Seen(
            value=f"{heads} heads on {size} devices",
            consequence="the workers stop while they build the draft",
            remedy=f"Use a tensor-parallel size that divides {heads}.",
        )
    elif not subject.latent and pairs and pairs % size and size % pairs:
        yield Seen(
            value=f"{pairs} key/value heads on {size} devices",
            consequence="the workers stop while they build the draft",
            remedy=f"Use a tensor-parallel size that divides {pairs}, or is a multiple of it.",
        )


@check("batched-tokens", "error", "a step has room for the drafted tokens of its sequences")
def batched_tokens(subject: Subject) -> Iterator[Seen]:
    """Each sequence takes its drafted tokens, and one more in the fill-in form, from --max-num-
    batched-tokens. Fewer sequences than --max-num-seqs then run at once, and one warning at the
    start says so.
    """
    speculative, serve = _speculative(subject), subject.serve
    number = None if speculative is None else speculative.get("num_speculative_tokens")
    if serve is None or not _is_count(number):
        return
    tokens = serve.number("max-num-batched-tokens")
    if tokens is None:
        return
    ahead = number if subject.flat.get("sample_from_anchor", True) else number + 1
    if tokens <= ahead:
        yield Seen(
            value=f"--max-num-batched-tokens {tokens} for {ahead} tokens ahead",
            consequence="the server stops",
            remedy=f"Use more than {ahead}.",
        )
        return
    sequences = serve.number("max-num-seqs") or _DEFAULT_SEQUENCES
    if tokens < sequences * ahead:
        yield Seen(
            value=f"{tokens} tokens for {sequences} sequences of {ahead} ahead",
            consequence=f"at most {tokens // ahead} sequences run at once, with one warning",
            remedy=f"Use --max-num-batched-tokens {sequences * ahead} or fewer sequences.",
            level="warning",
        )


@check("draft-logits", "note", "memory of the draft's kept logits")
def draft_logits(subject: Subject) -> Iterator[Seen]:
    """Probabilistic drafting keeps the logits of every drafted token over the whole vocabulary, for
    as many sequences as may run: 1.17 GB for 512 sequences of 7 over 163,840 words. It is taken
    after the model is loaded.
    """
    speculative, serve = _speculative(subject), subject.serve
    size = subject.number("vocab_size")
    if serve is None or speculative is None or size is None:
        return
    number = speculative.get("num_speculative_tokens")
    if speculative.get("draft_sample_method") != "probabilistic" or not _is_count(number):
        return
    sequences = serve.number("max-num-seqs") or _DEFAULT_SEQUENCES
    taken = sequences * number * size * 2
    if taken >= 1 << 29:
        yield Seen(
            value=f"{taken / 1e9:.2f} GB for {sequences} sequences",
            consequence="it is taken after the model is loaded",
            remedy="Lower --max-num-seqs if memory is short.",
        )


@check("v2-runner", "error", "vLLM's second model runner is not switched off")
def v2_runner(subject: Subject) -> Iterator[Seen]:
    """DSpark exists only in vLLM's second model runner."""
    if subject.serve and subject.serve.environment.get("VLLM_USE_V2_MODEL_RUNNER") == "0":
        yield Seen(
            value="VLLM_USE_V2_MODEL_RUNNER=0",
            consequence="the server stops: Model Runner V1 does not support dspark",
            remedy="Remove it.",
        )


@check("verifier-name", "error", "a speculators draft names its target as the hub does")
def verifier_name(subject: Subject) -> Iterator[Seen]:
    """`vllm serve DRAFT` with a speculators draft loads the target that its config names. A local
    path, or no name, is a ValueError.
    """
    if subject.layout != "speculators":
        return
    name = subject.nested("speculators_config", "verifier").get("name_or_path")
    if not isinstance(name, str) or not _HUB_NAME.match(name):
        yield Seen(
            value=name,
            consequence="`vllm serve DRAFT` stops; with --speculative-config it works",
            remedy="Write the target's name on the Hub.",
            level="warning",
        )
    proposals = subject.nested("speculators_config").get("proposal_methods")
    first = proposals[0] if isinstance(proposals, list) and proposals else None
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    if not _is_positive(tokens) or (subject.num_drafts is not None and tokens > subject.num_drafts):
        yield Seen(
            value=f"speculative_tokens {tokens} of a block that drafts {subject.num_drafts}",
            consequence="`vllm serve DRAFT` drafts more than was trained",
            remedy=f"Write {subject.num_drafts}.",
        )


@check("prefix-caching", "warning", "prefix caching leaves a draft without its context")
def prefix_caching(subject: Subject) -> Iterator[Seen]:
    """Tokens that come from the prefix cache do not pass through the target, so the draft has no
    features of them: its context is uninitialised there, and acceptance has fallen to about 1.0
    on repeated prompts (vLLM issues 47926 and 47930).
    """
    serve = subject.serve
    if serve is not None and serve.speculative and serve.options.get("enable-prefix-caching", True):
        yield Seen(
            value="prefix caching is on"
            + ("" if "enable-prefix-caching" in serve.options else " (the default)"),
            consequence="acceptance may fall to 1.0 where prompts share a beginning",
            remedy="Compare acceptance with --no-enable-prefix-caching before relying on it.",
        )


@check("fp8-cache", "error", "K3 with an 8-bit KV cache quantises prefill queries")
def fp8_cache(subject: Subject) -> Iterator[Seen]:
    """K3's attention with an fp8 KV cache needs use_prefill_query_quantization in --attention-
    config; without it the server stops at the first prefill.
    """
    serve = subject.serve
    if serve is None or subject.target is None or not subject.target.is_k3:
        return
    cache = str(serve.options.get("kv-cache-dtype", ""))
    config = serve.json_object("attention-config")
    if cache.startswith("fp8") and config.get("use_prefill_query_quantization") is not True:
        yield Seen(
            value=f"--kv-cache-dtype {cache}",
            consequence="the server stops late",
            remedy="Add --attention-config '{\"use_prefill_query_quantization\": true}'.",
        )


@check("refused-requests", "note", "requests that speculative decoding refuses")
def refused_requests(subject: Subject) -> Iterator[Seen]:
    """Requests with min_p or logit_bias are refused under speculative decoding, and images reach
    the draft as placeholder words only, so that acceptance is lower behind them.
    """
    if subject.serve is not None and subject.serve.speculative:
        yield Seen(
            value="min_p, logit_bias, images",
            consequence="requests with the first two are refused; behind an image the draft sees "
            "placeholder words alone, and fewer tokens are accepted",
            remedy="Tell the clients.",
        )


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> TypeGuard[int | float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _are_rates(value: object) -> TypeGuard[list[float]]:
    return isinstance(value, list) and all(_is_number(rate) and 0 <= rate <= 1 for rate in value)


def _is_positive(value: object) -> TypeGuard[int]:
    return _is_count(value) and value >= 1


def _one_of(*names: str) -> tuple[Callable[[object], bool], str]:
    return lambda value: value in names, f"one of {', '.join(names)}"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


_COUNT: tuple[Callable[[object], bool], str] = (_is_positive, "a whole number above 0")
_WORD: tuple[Callable[[object], bool], str] = (lambda value: isinstance(value, str), "a string")
_SWITCH: tuple[Callable[[object], bool], str] = (
    lambda value: isinstance(value, bool),
    "true or false",
)
# What a value must be, and how that is said. `fly` is known to vLLM 0.33: another check refuses it.
_KINDS: Mapping[str, tuple[Callable[[object], bool], str]] = {
    **dict.fromkeys(
        (
            "num_speculative_tokens",
            "draft_tensor_parallel_size",
            "max_model_len",
            "dspark_draft_topk",
        ),
        _COUNT,
    ),
    **dict.fromkeys(
        (
            "method",
            "model",
            "quantization",
            "moe_backend",
            "attention_backend",
            "kv_cache_dtype",
            "revision",
            "code_revision",
        ),
        _WORD,
    ),
    **dict.fromkeys(("enforce_eager", "enable_adaptive_verification"), _SWITCH),
    "draft_sample_method": _one_of("greedy", "probabilistic"),
    "rejection_sample_method": _one_of("standard", "block", "synthetic", "fly"),
    "synthetic_acceptance_length": (_is_number, "a number"),
    "synthetic_acceptance_rates": (_are_rates, "a list of numbers from 0 to 1"),
}


def _speculative(subject: Subject) -> dict[str, Any] | None:
    """The speculative config of the command line, if there is one."""
    if subject.serve is None or not subject.serve.speculative:
        return None
    return dict(subject.serve.speculative)
