"""Every check finds a draft broken in just its way, and none finds anything in a sound one."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import MLA as NARROW
from draft_models import tiny_draft
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparksmith.draft.checkpoint import export_draft
from sparksmith.draft.config import MLASizes
from sparksmith.draft.convert import TargetRows, convert_draft
from sparksmith.draft.errors import UserError
from sparksmith.draft.manifest import Manifest, TargetIdentity, write_manifest
from sparksmith.draft.rotary import Yarn
from sparksmith.verify.findings import Finding, TargetFacts
from sparksmith.verify.inspection import CHECKS, findings, inspect
from sparksmith.verify.serve_arguments import ServeArguments

TARGET = TargetFacts(
    name="org/target",
    num_layers=6,
    hidden_size=20,
    vocab_size=50,
    max_length=1024,
    special_tokens={"eos": 1, "pad": 2},
    words=frozenset(range(10, 50)),
    tokenizer_sha256="t1",
    chat_template_sha256="c1",
    revision="r1",
)
K3 = replace(TARGET, is_k3=True, num_layers=93, hidden_size=24)
CONFIG = {"method": "dspark", "model": "/elsewhere/draft", "num_speculative_tokens": 4}
SIZES = {"hidden_size": 20}
MLA: dict[str, Any] = {
    # As wide a latent as every attention backend takes.
    "mla": MLASizes(
        q_lora_rank=12, kv_lora_rank=512, qk_nope_head_dim=6, qk_rope_head_dim=64, v_head_dim=5
    ),
    "num_key_value_heads": 4,
    "head_dim": 70,
}


def known(**changes: Any) -> dict[str, Any]:
    target = TargetIdentity(
        name="org/target", revision="r1", tokenizer_sha256="t1", chat_template_sha256="c1"
    )
    return {"target": target, "trained_length": 1024, **changes}


def sound(folder: Path, **changes: Any) -> Path:
    """A draft with nothing wrong; of `stream` and what the manifest knows, by `changes`."""
    stream = changes.pop("stream", "residual")
    latent = "mla" in changes
    draft = tiny_draft(**{**({"target_hidden_size": 24} if latent else SIZES), **changes})
    export_draft(draft, folder, dtype=torch.bfloat16)
    manifest = Manifest.of(draft.config, draft.target_ids, **known(stream=stream))
    write_manifest(manifest, folder)
    return folder


def edited(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def retensored(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def line(environment: str = "", options: str = "", **changes: Any) -> ServeArguments:
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    text = f"{environment} vllm serve org/target --no-enable-prefix-caching {options} "
    return ServeArguments.parse(f"{text} --speculative-config '{json.dumps(config)}'")


def found(
    folder: Path, target: TargetFacts | None = TARGET, serve: ServeArguments | None = None
) -> list[Finding]:
    return findings(inspect(folder, target, serve))


def levels(findings_: list[Finding], check: str) -> set[str]:
    return {finding.level for finding in findings_ if finding.check == check}


SOUND: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "reduced": {"draft_vocab_size": 20},
    "window": {"sliding_window": 6},
    "no confidence head": {"enable_confidence_head": False},
    "latent": {**MLA, "stream": "prefix_sum"},
    "latent mixture": {**MLA, "stream": "attn_res_mixture"},
    "yarn": {"yarn": Yarn(factor=4.0, original_max_position_embeddings=256)},
}


@pytest.mark.parametrize("kind", SOUND)
def test_a_sound_draft_has_no_findings(kind: str, tmp_path: Path) -> None:
    folder = sound(tmp_path / "draft", **SOUND[kind])
    latent = "latent" in kind
    environment = "VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1" if kind == "latent mixture" else ""
    target = K3 if latent else TARGET
    notes = {"refused-requests", "last-block-taps"}
    for serve in (None, line(environment, "--max-model-len 1024 --max-num-batched-tokens 2048")):
        left = [f for f in found(folder, target, serve) if f.check not in notes]
        assert left == []


@pytest.mark.parametrize("layout", ["speculators", "specforge", "deepspec"])
def test_other_layouts_have_only_their_warnings(layout: Any, tmp_path: Path) -> None:
    folder = sound(tmp_path / "draft")
    rows = TargetRows(embed=torch.zeros(50, 24), head=torch.zeros(50, 24))
    convert_draft(folder, tmp_path / layout, layout, rows=rows, target="org/target")
    wanted = {"speculators": set(), "specforge": {"architecture"}, "deepspec": {"anchor-form"}}
    left = found(tmp_path / layout)
    assert {finding.check for finding in left} == wanted[layout]
    assert all(finding.level != "error" for finding in left)


def put(**keys: Any) -> Callable[[dict[str, Any]], None]:
    return lambda values: values.update(keys)


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    def change(values: dict[str, Any]) -> None:
        for key in keys:
            del values[key]

    return change


Break = Callable[[dict[str, Any]], None]
LATENT = {**MLA, "stream": "prefix_sum"}

# (check, level, kind of draft, what is done to config.json)
CONFIGS: list[tuple[str, str, dict[str, Any], Break]] = [
    ("architecture", "error", {}, put(architectures=["K3DSparkForCausalLM"])),
    ("architecture", "error", {}, put(architectures=["DSparkDraftModel"], model_type="llama")),
    ("architecture", "error", {}, put(model_type="qwen2")),
    ("architecture", "error", LATENT, put(model_type="deepseek_v3")),
    ("num-target-layers", "error", LATENT, put(num_target_layers=93)),
    ("num-target-layers", "error", LATENT, drop("num_target_layers")),
    ("taps", "error", {}, put(target_layer_ids=[3, 0])),
    ("taps", "error", {}, put(target_layer_ids=[3, 3])),
    ("taps", "error", {}, put(target_layer_ids=[-1, 3])),
    ("taps", "error", {}, drop("target_layer_ids")),
    ("tap-range", "error", {}, put(target_layer_ids=[0, 6])),
    ("tap-range", "warning", {}, put(target_layer_ids=[0, 5])),
    ("tap-override", "error", {}, put(eagle_aux_hidden_state_layer_ids=[1, 4])),
    ("tap-override", "error", {}, put(dflash_config={"target_layer_ids": [0, 3]})),
    ("tap-override", "error", LATENT, put(dspark_target_layer_ids=[0, 3])),
    ("fusion-width", "error", {}, put(target_layer_ids=[0, 2, 3])),
    ("hidden-size", "error", {}, put(target_hidden_size=24)),
    ("required-keys", "error", {}, drop("markov_rank")),
    ("required-keys", "error", LATENT, drop("target_hidden_size")),
    ("vocab-size", "error", {}, put(vocab_size=48)),
    ("tensors", "error", {}, put(intermediate_size=41)),
    ("mask-token", "error", {}, drop("mask_token_id")),
    ("mask-token", "error", {}, put(mask_token_id=50)),
    ("mask-token", "error", {}, put(dflash_config={"mask_token_id": 3})),
    ("mask-token", "warning", {}, put(mask_token_id=2)),
    ("mask-token", "warning", {}, put(mask_token_id=12)),
    ("block-size", "warning", {}, drop("block_size")),
    ("anchor-form", "warning", {}, drop("sample_from_anchor")),
    ("rope-keys", "error", LATENT, put(rope_scaling={"type": "yarn", "factor": 4.0})),
    ("rope-keys", "error", LATENT, drop("rope_parameters")),
    ("rope-keys", "warning", {}, put(rope_parameters={"rope_theta": 1e4})),
    (
        "rope-keys",
        "error",
        {},
        put(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}),
    ),
    ("rope-pairing", "error", {}, put(is_neox_style=False)),
    ("rope-pairing", "error", LATENT, put(rope_interleave=False)),
    ("yarn-length", "error", SOUND["yarn"], put(max_position_embeddings=2048)),
    ("sizes", "error", {}, drop("head_dim")),
    ("sizes", "error", LATENT, drop("kv_lora_rank")),
    ("sizes", "error", {}, put(rms_norm_eps=1)),
    ("sizes", "error", {}, put(rms_norm_eps="1e-5")),
    ("confidence-head", "error", {}, put(enable_confidence_head=False)),
    (
        "confidence-head",
        "error",
        {"enable_confidence_head": False},
        put(enable_confidence_head=True),
    ),
    ("confidence-head", "error", {}, put(confidence_head_with_markov=False)),
    ("latent-options", "error", LATENT, put(mla_use_nope=True)),
    ("latent-options", "error", LATENT, put(mla_use_output_gate=True)),
    ("latent-options", "error", LATENT, put(dspark_bonus_anchor=True)),
    ("latent-options", "error", LATENT, drop("q_lora_rank")),
    ("latent-options", "warning", LATENT, put(layer_types=["sliding_attention"] * 2)),
    ("latent-options", "warning", LATENT, put(fc_norm=True)),
    ("latent-width", "warning", {**NARROW, "stream": "prefix_sum"}, put()),
    ("activation", "error", {}, put(hidden_act="situ")),
    ("window", "error", SOUND["window"], drop("use_sliding_window")),
    ("window", "warning", SOUND["window"], drop("is_causal")),
    ("window", "warning", {}, put(layer_types=["sliding_attention", "full_attention"])),
    ("reduced-vocabulary", "error", LATENT, put(draft_vocab_size=20)),
    ("reduced-vocabulary", "error", {}, put(draft_vocab_size=20)),
    ("dtypes", "warning", {}, put(quantization_config={"quant_method": "fp8"})),
    (
        "quantised-excludes",
        "error",
        LATENT,
        put(quantization_config={"exclude_modules": ["layers.1.mlp*", "lm_head"]}),
    ),
    ("manifest", "error", {}, put(mask_token_id=3)),
    ("manifest", "error", {}, put(sample_from_anchor=False)),
]


@pytest.mark.parametrize(("check", "level", "kind", "change"), CONFIGS)
def test_a_broken_config(
    check: str, level: str, kind: dict[str, Any], change: Break, tmp_path: Path
) -> None:
    folder = sound(tmp_path / "draft", **kind)
    edited(folder, change)
    assert level in levels(found(folder, K3 if "mla" in kind else TARGET), check)


def without(name: str) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {k: v for k, v in tensors.items() if k != name}


def added(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    return lambda tensors: {**tensors, name: tensor}


def moved(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The ids themselves in place of offsets."""
    return {**tensors, "d2t": tensors["d2t"] + torch.arange(20)}


def other_words(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {**tensors, "d2t": tensors["d2t"] - (torch.arange(20) == 0).long()}


def joined(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    gate, up = (tensors.pop(f"layers.0.mlp.{part}_proj.weight") for part in ("gate", "up"))
    return {**tensors, "layers.0.mlp.gate_up_proj.weight": torch.cat((gate, up))}


def test_another_file_of_tensors_beside_the_weights(tmp_path: Path) -> None:
    folder = sound(tmp_path / "draft")
    save_file({"step": torch.ones(1)}, folder / "optimizer.safetensors")
    (finding,) = found(folder)
    assert (finding.check, finding.level) == ("weight-files", "error")
    assert "optimizer.safetensors" in finding.value


REDUCED = {"draft_vocab_size": 20}
TENSORS: list[tuple[str, str, dict[str, Any], Any]] = [
    ("tensors", "error", {}, without("markov_head.markov_w2.weight")),
    ("tensors", "error", {}, without("layers.1.mlp.up_proj.weight")),
    ("tensors", "error", LATENT, without("layers.1.self_attn.kv_a_proj_with_mqa.weight")),
    ("tensors", "error", {}, added("norm.weight", torch.ones(23))),
    ("tensor-names", "error", {}, lambda t: {f"model.{k}": v for k, v in t.items()}),
    ("tensor-names", "error", {}, joined),
    ("tensor-names", "error", {}, added("layers.0.self_attn.sinks", torch.ones(4))),
    ("confidence-head", "error", {}, without("confidence_head.proj.weight")),
    ("confidence-head", "error", {}, without("confidence_head.proj.bias")),
    ("fusion-width", "error", {}, added("fc.weight", torch.ones(24, 60))),
    ("reduced-vocabulary", "note", REDUCED, without("lm_head.weight")),
    ("reduced-vocabulary", "error", REDUCED, without("d2t")),
    ("reduced-vocabulary", "error", REDUCED, moved),
    ("vocabulary-map", "error", REDUCED, other_words),
    ("dtypes", "warning", {}, added("norm.weight", torch.ones(24, dtype=torch.float16))),
]


@pytest.mark.parametrize(("check", "level", "kind", "change"), TENSORS)
def test_broken_tensors(
    check: str, level: str, kind: dict[str, Any], change: Any, tmp_path: Path
) -> None:
    folder = sound(tmp_path / "draft", **kind)
    retensored(folder, change)
    assert level in levels(found(folder, K3 if "mla" in kind else TARGET), check)


# (check, level, kind of draft, command line)
LINES: list[tuple[str, str, dict[str, Any], ServeArguments]] = [
    ("spec-method", "error", {}, line(method=None)),
    ("spec-method", "error", {}, line(method="eagle3")),
    ("known-keys", "error", {}, line(block_len=4)),
    ("known-keys", "error", {}, line(parallel_drafting=True)),
    ("known-keys", "error", {}, line(fly_window_size=2)),
    ("known-keys", "error", LATENT, line(dspark_draft_topk=8)),
    ("spec-method", "warning", {}, ServeArguments.parse("vllm serve org/target")),
    ("key-values", "error", {}, line(num_speculative_tokens=0)),
    ("key-values", "error", {}, line(num_speculative_tokens=-1)),
    ("key-values", "error", {}, line(num_speculative_tokens="x")),
    ("key-values", "error", {}, line(num_speculative_tokens=[1])),
    ("key-values", "error", {}, line(num_speculative_tokens=0.5)),
    ("key-values", "error", {}, line(num_speculative_tokens=float("inf"))),
    ("key-values", "error", {}, line(draft_tensor_parallel_size="x")),
    ("key-values", "error", {}, line(draft_sample_method="sampled")),
    ("key-values", "error", {}, line(rejection_sample_method=["block"])),
    ("key-values", "error", {}, line(attention_backend=7)),
    (
        "key-values",
        "error",
        {},
        line(rejection_sample_method="synthetic", synthetic_acceptance_length="3"),
    ),
    (
        "synthetic",
        "error",
        {},
        line(rejection_sample_method="synthetic", synthetic_acceptance_rates=["a", None, 1, 2]),
    ),
    ("dynamic-tokens", "error", {}, line(num_speculative_tokens_per_batch_size=[[1, 4, None]])),
    ("dynamic-tokens", "error", {}, line(num_speculative_tokens_per_batch_size="x")),
    ("draft-model", "error", {}, line(model=None)),
    ("draft-model", "error", {}, line(model="/")),
    ("draft-model", "warning", {}, line(model="RedHatAI/Kimi-K3-speculator.dspark")),
    ("draft-tokens", "error", {}, line(num_speculative_tokens=5)),
    ("draft-tokens", "error", {}, line(num_speculative_tokens="5")),
    ("draft-tokens", "error", {"sample_from_anchor": False}, line(num_speculative_tokens=4)),
    ("draft-tokens", "error", {"sample_from_anchor": False}, line(num_speculative_tokens=None)),
    ("sampling-methods", "warning", {}, line(rejection_sample_method="block")),
    ("sampling-methods", "error", {}, line(rejection_sample_method="fly")),
    ("synthetic", "error", {}, line(rejection_sample_method="synthetic")),
    (
        "synthetic",
        "error",
        {},
        line(rejection_sample_method="synthetic", synthetic_acceptance_rates=[0.5, 0.6, 0.1, 0]),
    ),
    (
        "synthetic",
        "error",
        {},
        line(rejection_sample_method="synthetic", synthetic_acceptance_length=6.0),
    ),
    ("dynamic-tokens", "error", {}, line(num_speculative_tokens_per_batch_size=[[2, 4, 3]])),
    (
        "dynamic-tokens",
        "error",
        {},
        line(num_speculative_tokens_per_batch_size=[[1, 4, 3], [4, 8, 2]]),
    ),
    ("dynamic-tokens", "error", {}, line(num_speculative_tokens_per_batch_size=[[1, 4, 9]])),
    (
        "dynamic-tokens",
        "warning",
        {},
        line("", "--data-parallel-size 2", num_speculative_tokens_per_batch_size=[[1, 4, 3]]),
    ),
    ("adaptive", "error", {}, line("", "--enforce-eager", enable_adaptive_verification=True)),
    ("adaptive", "error", {}, line("", "--enable-lora", enable_adaptive_verification=True)),
    ("adaptive", "error", {}, line("", "-pp 2", enable_adaptive_verification=True)),
    (
        "adaptive",
        "error",
        {},
        line("", "--attention-backend FLASHMLA", enable_adaptive_verification=True),
    ),
    (
        "adaptive",
        "warning",
        SOUND["no confidence head"],
        line(enable_adaptive_verification=True),
    ),
    ("draft-backend", "error", {}, line(attention_backend="flashmla")),
    ("draft-parallel", "error", {}, line("", "-tp 8", draft_tensor_parallel_size=4)),
    ("attention-split", "error", {}, line("", "-tp 8")),
    ("attention-split", "error", {}, line("", "--tensor-parallel-size=3")),
    (
        "attention-split",
        "error",
        {"num_attention_heads": 6, "num_key_value_heads": 2},
        line("", "-tp 3"),
    ),
    ("attention-split", "error", LATENT, line("", "-tp 8")),
    ("batched-tokens", "error", {}, line("", "--max-num-batched-tokens 4")),
    ("batched-tokens", "warning", {}, line("", "--max-num-batched-tokens=512 --max-num-seqs 256")),
    ("v2-runner", "error", {}, line("VLLM_USE_V2_MODEL_RUNNER=0")),
    ("aux-stream", "error", LATENT, line("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1")),
    ("aux-stream", "error", {**MLA, "stream": "attn_res_mixture"}, line()),
    ("aux-stream", "warning", {**MLA, "stream": "residual"}, line()),
    ("yarn-length", "error", SOUND["yarn"], line("", "--max-model-len 4k")),
    ("trained-length", "warning", {}, line("", "--max-model-len 128k")),
    ("prefix-caching", "warning", {}, line("", "--enable-prefix-caching")),
    ("fp8-cache", "error", LATENT, line("", "--kv-cache-dtype fp8")),
    (
        "fp8-cache",
        "error",
        LATENT,
        line("", "--kv-cache-dtype fp8 --attention-config.use_prefill_query_quantization=false"),
    ),
    ("refused-requests", "note", {}, line()),
]


@pytest.mark.parametrize(("check", "level", "kind", "serve"), LINES)
def test_a_broken_command_line(
    check: str, level: str, kind: dict[str, Any], serve: ServeArguments, tmp_path: Path
) -> None:
    folder = sound(tmp_path / "draft", **kind)
    assert level in levels(found(folder, K3 if "mla" in kind else TARGET, serve), check)


def test_a_training_checkpoint_is_an_error_only_where_it_is_served(tmp_path: Path) -> None:
    folder = sound(tmp_path / "draft", **REDUCED)
    retensored(folder, without("lm_head.weight"))
    (note,) = found(folder)
    assert (note.level, "export" in note.remedy) == ("note", True)
    assert levels(found(folder, TARGET, line()), "reduced-vocabulary") == {"error"}


@pytest.mark.parametrize(
    ("options", "changes"),
    [("-tp 2", {}), ("-tp 4", {}), ("-tp 8", {"draft_tensor_parallel_size": 1})],
)
def test_heads_that_divide_over_the_devices(
    options: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = sound(tmp_path / "draft")
    assert levels(found(folder, TARGET, line("", options, **changes)), "attention-split") == set()


def test_the_memory_of_kept_logits(tmp_path: Path) -> None:
    folder = sound(tmp_path / "draft")
    edited(folder, put(vocab_size=163840))
    serve = line("", "--max-num-seqs 512", draft_sample_method="probabilistic")
    (finding,) = [f for f in found(folder, None, serve) if f.check == "draft-logits"]
    # 512 sequences x 4 tokens x 163,840 words x 2 bytes.
    assert finding.value.startswith("0.67 GB")


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"tokenizer_sha256": "t2"}, "tokenizer"),
        ({"chat_template_sha256": "c2"}, "chat template"),
        ({"revision": "r2"}, "revision"),
    ],
)
def test_another_target_than_it_was_trained_for(
    change: dict[str, Any], what: str, tmp_path: Path
) -> None:
    folder = sound(tmp_path / "draft")
    (finding,) = found(folder, replace(TARGET, **change))
    assert finding.check == "trained-for"
    assert what in finding.value


def test_taps_in_k3s_last_block_are_noted(tmp_path: Path) -> None:
    folder = sound(tmp_path / "draft", **{**LATENT, "target_layer_ids": (11, 85)})
    assert levels(found(folder, K3), "last-block-taps") == {"note"}


def speculators(tmp_path: Path, change: Break) -> Path:
    folder = sound(tmp_path / "draft")
    convert_draft(folder, tmp_path / "there", "speculators", target="org/target")
    edited(tmp_path / "there", change)
    return tmp_path / "there"


SPECULATORS: list[tuple[str, str, Break]] = [
    ("tap-offset", "error", put(target_layer_ids=[1, 4])),
    ("tap-offset", "error", put(aux_hidden_state_layer_ids=[2, 5])),
    ("architecture", "warning", put(architectures=["Eagle3Draft"])),
    ("verifier-name", "warning", lambda v: v["speculators_config"].update(verifier={})),
    (
        "verifier-name",
        "error",
        lambda v: v["speculators_config"].update(
            proposal_methods=[{"proposal_type": "greedy", "speculative_tokens": 7}]
        ),
    ),
    ("anchor-form", "warning", drop("sample_from_anchor")),
]


@pytest.mark.parametrize(("check", "level", "change"), SPECULATORS)
def test_a_broken_speculators_config(check: str, level: str, change: Break, tmp_path: Path) -> None:
    assert level in levels(found(speculators(tmp_path, change)), check)


def test_every_check_is_broken_somewhere_above() -> None:
    tried = {row[0] for row in (*CONFIGS, *TENSORS, *LINES, *SPECULATORS)}
    alone = {"draft-logits", "trained-for", "last-block-taps", "weight-files"}
    assert set(CHECKS) == tried | alone


def test_every_check_tells_a_story() -> None:
    for check in CHECKS.values():
        assert len(check.story.split()) >= 6, check.id
        assert not check.title.endswith(".")


@pytest.mark.parametrize(
    "text",
    [
        "--speculative-config '{",
        "--speculative-config 7",
        "--speculative-config '[]'",
        "--speculative-config '[[1, 2]]'",
        "--speculative-config '{}'",
        pytest.param(f"--speculative-config '{'[' * 100_000}'", id="deep"),
        "--speculative-config",
        "vllm serve t --speculative-config --enforce-eager",
        "--speculative-config.method",
        "--spec-tokens 3 --speculative-config.num_speculative_tokens=3",
        "-tp",
        "-tp x",
        "-tp 0",
        "--max-num-seqs 2.5",
        "--max-num-seqs inf",
        "--max-model-len nan",
        "'",
    ],
)
def test_a_command_line_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError) as caught:
        ServeArguments.parse(text)
    assert caught.value.field.startswith("-")


@pytest.mark.parametrize(
    "before",
    [
        "VLLM_USE_V2_MODEL_RUNNER=0 ",
        "export VLLM_USE_V2_MODEL_RUNNER=0; ",
        "export VLLM_USE_V2_MODEL_RUNNER=0 && ",
        "env VLLM_USE_V2_MODEL_RUNNER=0 ",
        "env -u OTHER VLLM_USE_V2_MODEL_RUNNER=0 /usr/bin/",
        "#!/bin/sh\nset -e\nVLLM_USE_V2_MODEL_RUNNER=0 ",
    ],
)
def test_variables_before_the_command(before: str, tmp_path: Path) -> None:
    config = json.dumps({**CONFIG, "model": str(tmp_path / "draft")})
    text = (
        f"{before}vllm serve org/t \\\n  --speculative-config '{config}' \\\n  \"$@\"; echo -tp 8"
    )
    serve = ServeArguments.parse(text)
    assert serve.environment == {"VLLM_USE_V2_MODEL_RUNNER": "0"}
    assert serve.options.keys() == {"speculative-config"}
    assert levels(found(sound(tmp_path / "draft"), TARGET, serve), "v2-runner") == {"error"}


def test_dotted_keys_are_those_of_the_json() -> None:
    serve = ServeArguments.parse(
        "vllm serve t --speculative-config.method dspark -sc.model=/a.b/c "
        "--speculative-config.num-speculative-tokens 4 --attention-config.backend X "
        "--attention-config '{\"use_prefill_query_quantization\": true}'"
    )
    assert serve.speculative == {"method": "dspark", "model": "/a.b/c", "num_speculative_tokens": 4}
    assert serve.json_object("attention-config") == {
        "backend": "X",
        "use_prefill_query_quantization": True,
    }


def test_a_command_line_is_read_as_vllm_reads_it() -> None:
    serve = ServeArguments.parse(
        "A=1 B=x=y vllm serve org/t --max-model-len 32K --max_num_seqs=5 "
        "--no-enable-prefix-caching --enforce-eager -tp 8 --spec-method dspark --spec-tokens 7"
    )
    assert serve.environment == {"A": "1", "B": "x=y"}
    assert serve.number("max-model-len") == 32768
    assert serve.number("max-num-seqs") == 5
    assert serve.number("tensor-parallel-size") == 8
    assert serve.options["enable-prefix-caching"] is False
    assert serve.has("enforce-eager")
    assert serve.speculative == {"method": "dspark", "num_speculative_tokens": 7}
