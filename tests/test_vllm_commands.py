"""What `sparksmith vllm` prints, read by vLLM's own parser and configuration classes."""

import json
import shlex
from pathlib import Path
from typing import Any

import pytest
from vllm_drafts import MLA, WORDS, save_random_draft, save_target
from vllm_engine import in_vllm, parsed

from sparksmith.cli.main import main
from sparksmith.draft.manifest import Manifest
from sparksmith.draft.presets import PRESETS
from sparksmith.verify.vllm_config import HARDWARE, Request, plan

pytestmark = pytest.mark.vllm

# The public sizes of K3: 93 layers, of which every fourth and the last have full attention.
FULL = [number for number in range(1, 94) if number % 4 == 0 or number == 93]
K3: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "dtype": "bfloat16",
    "vision_config": {},
    "text_config": {
        "model_type": "kimi_linear",
        "vocab_size": 163_840,
        "hidden_size": 7_168,
        "intermediate_size": 18_432,
        "num_hidden_layers": 93,
        "num_attention_heads": 96,
        "num_key_value_heads": 96,
        "hidden_act": "situ",
        "rms_norm_eps": 1e-5,
        "moe_intermediate_size": 3_072,
        "num_experts": 896,
        "num_experts_per_token": 16,
        "num_shared_experts": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 1_536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "attn_res_block_size": 12,
        "routed_expert_hidden_size": 3_584,
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "max_position_embeddings": 1_048_576,
        "linear_attn_config": {
            "kda_layers": [number for number in range(1, 94) if number not in FULL],
            "full_attn_layers": FULL,
            "num_heads": 96,
            "head_dim": 128,
            "short_conv_kernel_size": 4,
        },
    },
}


@pytest.fixture(scope="module")
def k3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kimi-k3")
    (folder / "config.json").write_text(json.dumps(K3), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", [name for name in PRESETS if not name.endswith("-mini")])
def test_every_command_for_a_preset_is_accepted(name: str, k3: Path, tmp_path: Path) -> None:
    config = PRESETS[name]
    (tmp_path / "config.json").write_text(json.dumps(config.to_json_dict()), encoding="utf-8")
    manifest = Manifest.of(config, None, stream="prefix_sum")
    commands, plans = [], []
    for hardware in (h for h in HARDWARE.values() if h.family != "cpu"):
        for goal in ("latency", "throughput"):
            for temperature in (0.0, 1.0):
                request = Request(
                    target=str(k3),
                    draft=str(tmp_path),
                    hardware=hardware,
                    goal=goal,
                    context=32_768,
                    temperature=temperature,
                    is_k3=True,
                )
                made = plan(request, config, manifest)
                words = shlex.split(made.command(str(k3)).replace("\\\n", " "))
                commands.append(words[words.index("serve") + 1 :])
                plans.append(made)
    architecture = "K3DSparkModel" if config.mla else "Qwen3DSparkModel"
    for made, (read, given) in zip(plans, in_vllm(parsed_all, commands), strict=True):
        assert read.method == "dspark"
        assert read.architecture == architecture
        assert read.num_tokens == made.speculative["num_speculative_tokens"]
        assert read.captured == [tap + 1 for tap in config.target_layer_ids]
        assert read.mask_token == config.mask_token_id
        assert read.theta == config.rope_theta
        assert not read.causal
        assert read.target_length == 32_768
        # Every option is known, and means something other than vLLM's default or is stated.
        options = {option.replace("-", "_").removeprefix("no_") for option in made.options}
        assert given.keys() - {"model_tag", "speculative_config"} <= options


def test_the_command_for_a_cpu_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = save_target(tmp_path / "target")
    save_random_draft(tmp_path / "draft")
    arguments = ["vllm", str(tmp_path / "draft"), "--target", str(target), "--hardware", "cpu"]
    assert main([*arguments, "--temperature", "0", "--context", "256", "--write"]) == 0
    capsys.readouterr()
    script = (tmp_path / "draft" / "serve.sh").read_text(encoding="utf-8")
    words = shlex.split(script.replace("\\\n", " ").replace('"$@"', ""))
    read, given = in_vllm(parsed, words[words.index("serve") + 1 :])
    assert (read.method, read.num_tokens, read.captured) == ("dspark", 4, [1, 3])
    assert given["dtype"] == "float32"
    assert given["max_num_seqs"] == 2


@pytest.mark.parametrize("context", [4_096, 1_048_576])
def test_the_printed_command_for_k3_is_accepted(
    context: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A draft of the K3 preset's form, smaller: the same keys, YaRN and stream."""
    text = {**K3["text_config"], "hidden_size": 64, "vocab_size": WORDS}
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text(json.dumps({**K3, "text_config": text}), encoding="utf-8")
    form = PRESETS["k3-mla"]
    sizes = {**MLA, "num_attention_heads": 16, "num_key_value_heads": 16}
    save_random_draft(
        tmp_path / "draft",
        sizes,
        yarn=form.yarn,
        rope_theta=form.rope_theta,
        max_position_embeddings=form.max_position_embeddings,
        target_layer_ids=form.target_layer_ids,
        block_size=form.block_size,
    )
    arguments = ["vllm", str(tmp_path / "draft"), "--target", str(target)]
    commands = []
    for hardware in ("b300", "h200", "mi355x"):
        assert main([*arguments, "--hardware", hardware, "--context", str(context)]) == 0
        printed = capsys.readouterr().out.split("command\n")[1].split("\n\nwhy")[0]
        words = shlex.split(printed.replace("\\\n", " "))
        commands.append(words[words.index("serve") + 1 :])
    for read, _ in in_vllm(parsed_all, commands):
        assert (read.architecture, read.num_tokens) == ("K3DSparkModel", form.block_size)
        assert read.captured == [tap + 1 for tap in form.target_layer_ids]
        assert read.target_length == context
        assert read.max_length >= context


def parsed_all(commands: list[list[str]]) -> list[Any]:
    return [parsed(command) for command in commands]
