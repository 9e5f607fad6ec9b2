"""What `check` calls an error, tried in vLLM itself: each broken draft or command is refused
there, read as something else, or loads and accepts something else."""

import json
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from vllm_drafts import (
    GQA,
    MLA,
    edit,
    edit_tensors,
    save_random_draft,
    save_target,
    speculative,
)
from vllm_engine import (
    Configured,
    RefusedError,
    answers,
    attempts,
    configured,
    configured_by,
    in_vllm,
    served_alone,
)
from vllm_k3_draft import attempted_loads, loaded

from sparksmith.draft.convert import convert_draft
from sparksmith.draft.rotary import Yarn
from sparksmith.verify.findings import TargetFacts
from sparksmith.verify.inspection import CHECKS, findings, inspect
from sparksmith.verify.serve_arguments import ServeArguments

pytestmark = pytest.mark.vllm

FACTS = TargetFacts(name="org/target", num_layers=4, hidden_size=64, vocab_size=12, max_length=512)
Change = Callable[[dict[str, Any]], object]


def put(**keys: Any) -> Change:
    return lambda values: values.update(keys)


def drop(*keys: str) -> Change:
    return lambda values: [values.pop(key) for key in keys]


def errors(folder: Path, config: Mapping[str, Any], options: str = "") -> set[str]:
    """The ids of the errors that `check` finds."""
    line = f"vllm serve org/target {options} --speculative-config "
    serve = ServeArguments.parse(line + shlex.quote(json.dumps(dict(config))))
    found = findings(inspect(folder, FACTS, serve))
    return {finding.check for finding in found if finding.level == "error"}


# ---------------------------------------------------------------------------------------------
# Drafts that vLLM's configuration classes read as something else, or refuse.
# (check, sizes, what is done to config.json, what vLLM then makes of it)
Seen = Callable[[Configured], bool]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: list[tuple[str, Mapping[str, Any], Change, Seen | str]] = [
    (
        "architecture",
        MLA,
        put(architectures=["K3DSparkForCausalLM"]),
        "not supported for now",
    ),
    ("taps", GQA, put(target_layer_ids=[2, 0]), lambda made: made.captured == [3, 1]),
    (
        "tap-override",
        GQA,
        put(eagle_aux_hidden_state_layer_ids=[1, 2]),
        lambda made: made.captured == [1, 2],
    ),
    (
        "tap-override",
        GQA,
        put(dflash_config={"target_layer_ids": [1, 2]}),
        lambda made: made.captured == [2, 3],
    ),
    (
        "tap-override",
        MLA,
        put(dspark_target_layer_ids=[1, 2]),
        lambda made: made.captured == [2, 3],
    ),
    ("mask-token", GQA, drop("mask_token_id"), "mask_token_id"),
    (
        "mask-token",
        GQA,
        put(dflash_config={"mask_token_id": 3}),
        lambda made: made.mask_token == 3,
    ),
    (
        "rope-keys",
        MLA,
        lambda values: values.update(
            rope_scaling=YARN, rope_theta=values.pop("rope_parameters")["rope_theta"]
        ),
        lambda made: made.theta == 10_000,
    ),
    ("rope-keys", MLA, drop("rope_parameters"), lambda made: made.theta != 20_000),
    ("sizes", GQA, put(rms_norm_eps=1), "rms_norm_eps"),
    ("sizes", MLA, put(rms_norm_eps="1e-5"), "rms_norm_eps"),
]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def broken(folder: Path, sizes: Mapping[str, Any], change: Change) -> Path:
    save_random_draft(folder, sizes)
    edit(folder, change)
    return folder


@pytest.fixture(scope="module")
def configured_drafts(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Path, Configured | str]]:
    folder = tmp_path_factory.mktemp("drafts")
    drafts = [
        broken(folder / f"d{number}", sizes, change)
        for number, (_, sizes, change, _) in enumerate(CONFIGS)
    ]
    made = in_vllm(attempts, target, [(speculative(draft), {}) for draft in drafts])
    return list(zip(drafts, made, strict=True))


@pytest.mark.parametrize("case", range(len(CONFIGS)), ids=lambda n: f"{n}-{CONFIGS[n][0]}")
def test_a_broken_config(case: int, configured_drafts: list[tuple[Path, Configured | str]]) -> None:
    check, _, _, seen = CONFIGS[case]
    draft, made = configured_drafts[case]
    assert check in errors(draft, speculative(draft))
    if isinstance(seen, str):
        assert isinstance(made, str), made
        assert seen in made
    else:
        assert isinstance(made, Configured), made
        assert seen(made), made


# ---------------------------------------------------------------------------------------------
# Commands: (check, sizes, speculative config, vLLM's arguments, ours, what vLLM makes of it)
LINES: list[tuple[str, Mapping[str, Any], dict[str, Any], dict[str, Any], str, Seen | str]] = [
    ("spec-method", MLA, {"method": None}, {}, "", lambda made: made.method == "draft_model"),
    ("known-keys", GQA, {"block_len": 4}, {}, "", "block_len"),
    ("known-keys", GQA, {"tensor_parallel_size": 1}, {}, "", "tensor_parallel_size"),
    ("known-keys", MLA, {"dspark_draft_topk": 4}, {}, "", "dspark_draft_topk"),
    ("key-values", GQA, {"num_speculative_tokens": 0}, {}, "", "num_speculative_tokens"),
    ("key-values", GQA, {"num_speculative_tokens": "x"}, {}, "", "num_speculative_tokens"),
    ("key-values", GQA, {"draft_sample_method": "sampled"}, {}, "", "draft_sample_method"),
    ("key-values", GQA, {"rejection_sample_method": "blocks"}, {}, "", "rejection_sample_method"),
    ("draft-model", GQA, {"model": None}, {}, "", ""),
    (
        "draft-tokens",
        GQA,
        {"num_speculative_tokens": 5},
        {},
        "",
        lambda made: made.num_tokens == 5,
    ),
    ("synthetic", GQA, {"rejection_sample_method": "synthetic"}, {}, "", "synthetic"),
    (
        "synthetic",
        GQA,
        {
            "rejection_sample_method": "synthetic",
            "synthetic_acceptance_rates": [0.5, 0.6, 0.1, 0.0],
        },
        {},
        "",
        "non-increasing",
    ),
    (
        "synthetic",
        GQA,
        {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 6.0},
        {},
        "",
        "synthetic_acceptance_length",
    ),
    (
        "adaptive",
        GQA,
        {"enable_adaptive_verification": True},
        {"enforce_eager": True},
        "--enforce-eager",
        "adaptive verification",
    ),
    (
        "draft-parallel",
        GQA,
        {"draft_tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
        "-tp 4",
        "draft_tensor_parallel_size",
    ),
    (
        "draft-tokens",
        {**GQA, "sample_from_anchor": False, "block_size": 5},
        {"num_speculative_tokens": None},
        {},
        "",
        # One slot more than the draft has tokens.
        lambda made: made.num_tokens == 5,
    ),
    (
        "sampling-methods",
        GQA,
        {"rejection_sample_method": "fly"},
        {},
        "",
        "rejection_sample_method",
    ),
]


@pytest.fixture(scope="module")
def configured_lines(
    target: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[tuple[Path, dict[str, Any], Configured | str]]:
    folder = tmp_path_factory.mktemp("lines")
    drafts, configs = [], []
    for number, (_, sizes, changes, _, _, _) in enumerate(LINES):
        drafts.append(folder / f"d{number}")
        save_random_draft(drafts[-1], sizes)
        config = {**speculative(drafts[-1]), **changes}
        configs.append({key: value for key, value in config.items() if value is not None})
    options = [line[3] for line in LINES]
    made = in_vllm(attempts, target, list(zip(configs, options, strict=True)))
    return list(zip(drafts, configs, made, strict=True))


@pytest.mark.parametrize("case", range(len(LINES)), ids=lambda n: f"{n}-{LINES[n][0]}")
def test_a_broken_command(
    case: int, configured_lines: list[tuple[Path, dict[str, Any], Configured | str]]
) -> None:
    check, _, _, _, options, seen = LINES[case]
    draft, config, made = configured_lines[case]
    assert check in errors(draft, config, options)
    if isinstance(seen, str):
        assert isinstance(made, str), made
        assert seen in made
    else:
        assert isinstance(made, Configured), made
        assert seen(made), made


# ---------------------------------------------------------------------------------------------
# Drafts that vLLM's loader refuses, or loads with something else in the place of what is missing:
# (check, sizes, changes of the sound draft, config.json, tensors, what it says or None)
Tensors = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def without(name: str) -> Tensors:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def added(name: str, tensor: Tensor) -> Tensors:
    return lambda tensors: {**tensors, name: tensor}


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    gate, up = (tensors.pop(f"layers.0.mlp.{part}_proj.weight") for part in ("gate", "up"))
    return {**tensors, "layers.0.mlp.gate_up_proj.weight": torch.cat((gate, up))}


def prefixed(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


NOTHING: Change = lambda values: None  # noqa: E731
SAME: Tensors = lambda tensors: tensors  # noqa: E731
REDUCED = {"draft_vocab_size": 6}


def test_another_file_of_tensors_is_loaded_as_weights(target: Path, tmp_path: Path) -> None:
    save_random_draft(tmp_path / "draft")
    save_file({"step": torch.ones(1)}, tmp_path / "draft" / "optimizer.safetensors")
    assert errors(tmp_path / "draft", speculative(tmp_path / "draft")) == {"weight-files"}
    with pytest.raises(RefusedError, match="step"):
        in_vllm(loaded, target, speculative(tmp_path / "draft"))


LOADS: list[tuple[str, Mapping[str, Any], dict[str, Any], Change, Tensors, str | None]] = [
    ("num-target-layers", MLA, {}, put(num_target_layers=93), SAME, "num_target_layers"),
    ("num-target-layers", MLA, {}, drop("num_target_layers"), SAME, "num_target_layers"),
    ("fusion-width", GQA, {}, put(target_layer_ids=[0, 1, 2]), SAME, "size"),
    ("required-keys", GQA, {}, drop("markov_rank"), SAME, "markov_rank"),
    ("required-keys", MLA, {}, drop("target_hidden_size"), SAME, "target_hidden_size"),
    ("sizes", GQA, {}, drop("head_dim"), SAME, "load weight"),
    ("sizes", MLA, {}, drop("intermediate_size"), SAME, "size"),
    ("tensors", GQA, {}, NOTHING, without("fc.weight"), None),
    ("tensors", GQA, {}, NOTHING, without("markov_head.markov_w2.weight"), None),
    ("tensors", GQA, {}, NOTHING, without("layers.1.self_attn.k_proj.weight"), None),
    ("tensors", MLA, {}, NOTHING, without("layers.1.mlp.up_proj.weight"), None),
    ("tensors", MLA, {}, NOTHING, without("context_proj.weight"), None),
    ("tensors", MLA, {}, NOTHING, added("context_norm.weight", torch.ones(63)), "load weight"),
    ("tensor-names", GQA, {}, NOTHING, prefixed, "no module or parameter named"),
    ("tensor-names", MLA, {}, NOTHING, prefixed, "model.model"),
    ("tensor-names", GQA, {}, NOTHING, added("layers.0.self_attn.sinks", torch.ones(2)), "sinks"),
    ("confidence-head", MLA, {}, put(enable_confidence_head=False), SAME, None),
    ("confidence-head", GQA, {}, NOTHING, without("confidence_head.proj.weight"), None),
    ("confidence-head", GQA, {}, put(confidence_head_with_markov=False), SAME, "size"),
    ("latent-options", MLA, {}, put(mla_use_nope=True), SAME, "mla_use_nope"),
    ("latent-options", MLA, {}, put(mla_use_output_gate=True), SAME, "mla_use_output_gate"),
    ("latent-options", MLA, {}, put(dspark_bonus_anchor=True), SAME, "dspark_bonus_anchor"),
    ("latent-options", MLA, {}, drop("q_lora_rank"), SAME, "load weight"),
    (
        "window",
        GQA,
        {"sliding_window": 6},
        drop("use_sliding_window"),
        SAME,
        "sliding",
    ),
    ("reduced-vocabulary", MLA, {}, put(draft_vocab_size=6), SAME, "draft_vocab_size"),
    ("reduced-vocabulary", GQA, REDUCED, NOTHING, without("d2t"), "d2t"),
    ("reduced-vocabulary", GQA, REDUCED, NOTHING, without("lm_head.weight"), "lm_head"),
    (
        "rope-keys",
        MLA,
        {"yarn": Yarn(factor=4.0, original_max_position_embeddings=64)},
        lambda v: v["rope_parameters"].pop("original_max_position_embeddings"),
        SAME,
        # The draft's whole length is taken for it.
        None,
    ),
    ("activation", GQA, {}, put(hidden_act="situ"), SAME, "activation"),
]


@pytest.fixture(scope="module")
def loads(target: Path, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Path, bool | str]]:
    """For each case the draft, and what vLLM says of it or whether it loaded what is in it."""
    folder = tmp_path_factory.mktemp("loads")
    drafts, pairs = [], []
    for number, (_, sizes, changes, change, tensors, _) in enumerate(LOADS):
        sound, draft = folder / f"s{number}", folder / f"d{number}"
        for made in (sound, draft):
            save_random_draft(made, sizes, **changes)
        edit(draft, change)
        edit_tensors(draft, tensors)
        drafts.append(draft)
        pairs.append((speculative(sound), speculative(draft)))
    return list(zip(drafts, in_vllm(attempted_loads, target, pairs), strict=True))


@pytest.mark.parametrize("case", range(len(LOADS)), ids=lambda n: f"{n}-{LOADS[n][0]}")
def test_a_draft_that_does_not_load(case: int, loads: list[tuple[Path, bool | str]]) -> None:
    check, *_, said = LOADS[case]
    draft, made = loads[case]
    assert check in errors(draft, speculative(draft))
    if said is None:
        assert made is False, "vLLM loaded the sound draft's parameters"
    else:
        assert isinstance(made, str), made
        assert said in made


# ---------------------------------------------------------------------------------------------
# Drafts that load and then accept other tokens, or stop at the first request.
PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8]]


def ids_for_offsets(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "d2t": tensors["d2t"] + torch.arange(6)}


def turned(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """As a draft has them that was trained on its taps in descending order."""
    first, second = tensors["fc.weight"].split(64, 1)
    return {**tensors, "fc.weight": torch.cat((second, first), 1)}


RUNS: list[tuple[str, dict[str, Any], Change, Tensors, str | None]] = [
    ("taps", {}, put(target_layer_ids=[0, 0]), SAME, "target_layer_ids"),
    ("taps", {}, put(target_layer_ids=[2, 0]), turned, None),
    ("tap-range", {}, put(target_layer_ids=[0, 4]), SAME, ""),
    ("mask-token", {}, put(mask_token_id=12), SAME, None),
    ("rope-pairing", {}, put(is_neox_style=False), SAME, None),
    ("tensors", {}, NOTHING, without("fc.weight"), None),
    ("reduced-vocabulary", REDUCED, NOTHING, ids_for_offsets, "out of range"),
    ("vocab-size", {}, put(vocab_size=10, mask_token_id=9), SAME, ""),
    ("hidden-size", {"hidden_size": 48}, NOTHING, SAME, ""),
]


@pytest.mark.parametrize("case", range(len(RUNS)), ids=lambda n: f"{n}-{RUNS[n][0]}")
def test_a_draft_that_runs_and_accepts_something_else(
    case: int, target: Path, tmp_path: Path
) -> None:
    check, changes, change, tensors, said = RUNS[case]
    sound, draft = tmp_path / "sound", tmp_path / "draft"
    for made in (sound, draft):
        save_random_draft(made, GQA, **changes)
    edit(draft, change)
    edit_tensors(draft, tensors)
    assert check in errors(draft, speculative(draft))
    options = {"skip_tokenizer_init": True}
    if said is not None:
        with pytest.raises(RefusedError) as caught:
            in_vllm(answers, target, speculative(draft), PROMPTS, 32, **options)
        assert said in str(caught.value)
        return
    healthy = in_vllm(answers, target, speculative(sound), PROMPTS, 32, **options)
    there = in_vllm(answers, target, speculative(draft), PROMPTS, 32, **options)
    # No draft changes the text; this one wastes the target's time.
    assert [a.tokens for a in there] == [a.tokens for a in healthy]
    assert [a.accepted for a in there] != [a.accepted for a in healthy]


def test_the_dynamic_number_of_tokens_is_checked_when_the_scheduler_is_built(
    target: Path, tmp_path: Path
) -> None:
    draft = tmp_path / "draft"
    save_random_draft(draft)
    config = speculative(draft, num_speculative_tokens_per_batch_size=[[2, 4, 3]])
    assert "dynamic-tokens" in errors(draft, config)
    with pytest.raises(RefusedError):
        in_vllm(answers, target, config, PROMPTS, 8, skip_tokenizer_init=True)


def test_captured_states_of_another_number_are_believed(target: Path, tmp_path: Path) -> None:
    save_random_draft(tmp_path / "draft")
    draft = tmp_path / "speculators"
    convert_draft(tmp_path / "draft", draft, "speculators", target="org/target")
    edit(draft, put(aux_hidden_state_layer_ids=[2, 4], target_layer_ids=[0, 2]))
    assert "tap-offset" in errors(draft, speculative(draft))
    assert in_vllm(configured, target, speculative(draft)).captured == [2, 4]


def test_a_speculators_draft_alone_names_its_target_by_the_hub(tmp_path: Path) -> None:
    save_random_draft(tmp_path / "draft")
    draft = tmp_path / "speculators"
    convert_draft(tmp_path / "draft", draft, "speculators", target=str(tmp_path / "target"))
    found = findings(inspect(draft, FACTS))
    assert "verifier-name" in {finding.check for finding in found}
    with pytest.raises(RefusedError):
        in_vllm(served_alone, draft)


def test_the_first_runner_has_no_dspark(target: Path, tmp_path: Path) -> None:
    draft = tmp_path / "draft"
    save_random_draft(draft)
    line = "VLLM_USE_V2_MODEL_RUNNER=0 vllm serve org/target --speculative-config "
    serve = ServeArguments.parse(line + shlex.quote(json.dumps(speculative(draft))))
    found = findings(inspect(draft, FACTS, serve))
    assert "v2-runner" in {f.check for f in found if f.level == "error"}
    with pytest.raises(RefusedError, match="dspark"):
        in_vllm(configured_by, {"VLLM_USE_V2_MODEL_RUNNER": "0"}, target, speculative(draft))


UNSEEN = {
    "attention-split": "several devices",
    "aux-stream": "K3's streams exist in its model for GPUs alone",
    "batched-tokens": "vLLM 0.33 refuses it, 0.32 runs fewer requests at a time",
    "draft-backend": "a GPU's attention",
    "fp8-cache": "a GPU's attention",
    "manifest": "sparksmith's own file",
    "quantised-excludes": "quantised kernels of GPUs",
    "vocabulary-map": "sparksmith's own record of the map",
    "yarn-length": "vLLM 0.33 lowers the target's length, 0.32 the draft's",
}


def test_every_error_is_tried_in_vllm_or_cannot_be() -> None:
    tried = {row[0] for row in (*CONFIGS, *LINES, *LOADS, *RUNS)}
    alone = {"dynamic-tokens", "tap-offset", "verifier-name", "v2-runner", "weight-files"}
    wrong = {identifier for identifier, check in CHECKS.items() if check.level == "error"}
    assert wrong <= tried | alone | set(UNSEEN)
    assert not set(UNSEEN) & tried
