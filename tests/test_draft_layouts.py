"""Public layouts: read as they are described, written back bit for bit, refused where lossy."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_models import MLA, VOCABULARY, tiny_draft, tiny_features
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparksmith.draft.checkpoint import load_draft, open_draft, save_draft
from sparksmith.draft.convert import TargetRows, convert_draft
from sparksmith.draft.decoder import DraftDecoder
from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.errors import UserError
from sparksmith.draft.layouts import LAYOUTS, flatten, layout_config
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.rotary import Yarn
from sparksmith.draft.sampling import Sampling

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "reduced": {"draft_vocab_size": 20},
    "fill-in": {"sample_from_anchor": False},
    "window": {"sliding_window": 6},
    "causal window": {"sliding_window": 6, "is_causal": True},
    "yarn": {"yarn": Yarn(factor=4.0, original_max_position_embeddings=32)},
    "latent": MLA,
    "markov rnn": {"markov_head_type": "rnn"},
}
# What each layout has no place for; all else it keeps.
LOSSY = {
    "vllm": {"latent"},
    "k3": set(KINDS) - {"latent"},
    "speculators": {"latent"},
    "specforge": {"latent"},
    "deepspec": {"latent", "causal", "reduced", "fill-in", "window", "causal window"},
}


def rows(draft: DSparkDraft, *, full: bool = False) -> TargetRows:
    config = draft.config
    generator = torch.Generator().manual_seed(5)
    shape = (config.vocab_size, config.hidden_size)
    return TargetRows(
        embed=torch.randn(shape, generator=generator), head=torch.randn(shape, generator=generator)
    )


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_round_trips_are_bit_exact(kind: str, layout: Any, tmp_path: Path) -> None:
    draft = tiny_draft(**KINDS[kind])
    first, there, back = tmp_path / "first", tmp_path / "there", tmp_path / "back"
    save_draft(draft, first, dtype=torch.bfloat16)
    if kind in LOSSY[layout]:
        with pytest.raises(UserError, match="--to"):
            convert_draft(first, there, layout, rows=rows(draft))
        assert not there.exists()
        return
    done = convert_draft(first, there, layout, rows=rows(draft), target="org/target")
    loaded = load_draft(there)
    assert loaded.config == draft.config
    assert done.layout == layout
    convert_draft(there, back, "k3" if "mla" in KINDS[kind] else "vllm")
    before, after = load_file(first / "model.safetensors"), load_file(back / "model.safetensors")
    assert before.keys() <= after.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    config = json.loads((first / "config.json").read_text())
    assert json.loads((back / "config.json").read_text()) == config


SPECULATORS = {
    "architectures": ["Qwen3DSparkModel"],
    "speculators_model_type": "dspark",
    "block_size": 8,
    "sample_from_anchor": False,
    "mask_token_id": 151669,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
    "target_hidden_size": 4096,
    "draft_vocab_size": 151936,
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "speculators_config": {
        "algorithm": "dspark",
        "default_proposal_method": "greedy",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 7}],
        "verifier": {"name_or_path": "Qwen/Qwen3-8B"},
    },
    "transformer_layer_config": {
        "model_type": "qwen3",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 5,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "hidden_act": "silu",
        "vocab_size": 151936,
        "rms_norm_eps": 1e-06,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
        "attention_bias": False,
        "tie_word_embeddings": False,
    },
}


def config_of(values: dict[str, Any], shapes: dict[str, tuple[int, ...]] | None = None) -> Any:
    from sparksmith.draft.config import DSparkConfig

    reading = flatten(values, shapes or {})
    return reading, DSparkConfig.from_json_dict(reading.values)


def test_speculators_layers_are_one_less_and_its_default_is_fill_in() -> None:
    reading, config = config_of(SPECULATORS)
    assert (reading.layout, reading.assumed) == ("speculators", ())
    assert config.target_layer_ids == (1, 9, 17, 25, 33)
    assert (config.sample_from_anchor, config.num_drafts) == (False, 7)
    silent = {k: v for k, v in SPECULATORS.items() if k != "sample_from_anchor"}
    reading, again = config_of(silent)
    assert again == config
    assert any("sample_from_anchor is false" in line for line in reading.assumed)


def test_speculators_may_leave_the_head_size_and_the_base_out() -> None:
    layers = dict(SPECULATORS["transformer_layer_config"])  # type: ignore[call-overload]
    del layers["head_dim"], layers["rope_parameters"]
    values = {**SPECULATORS, "transformer_layer_config": layers}
    shapes = {"layers.0.self_attn.q_norm.weight": (96,)}
    reading, config = config_of(values, shapes)
    assert (config.head_dim, config.rope_theta) == (96, 1e6)
    assert any("rope_theta" in line for line in reading.assumed)


def test_a_speculators_window_is_causal_unless_told_otherwise() -> None:
    layers = {
        **SPECULATORS["transformer_layer_config"],  # type: ignore[dict-item]
        "layer_types": ["sliding_attention"] * 5,
        "sliding_window": 2048,
    }
    _, config = config_of({**SPECULATORS, "transformer_layer_config": layers})
    assert (config.sliding_window, config.is_causal) == (2048, True)
    layers["is_causal"] = False
    _, config = config_of({**SPECULATORS, "transformer_layer_config": layers})
    assert (config.sliding_window, config.is_causal) == (2048, False)


# A public K3 draft's training configuration, all keys.
SPECFORGE = {
    "architectures": ["DSparkDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dspark.DSparkDraftModel"},
    "block_size": 7,
    "bos_token_id": 163584,
    "dflash_config": {
        "attention_mode": "gqa",
        "confidence_head_alpha": 1.0,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "markov_head_type": "vanilla",
        "markov_rank": 256,
        "mask_token_id": 163824,
        "projector_type": "dspark",
        "target_layer_ids": [7, 23, 51, 67, 83],
    },
    "dtype": "bfloat16",
    "eos_token_id": 163586,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 65536,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 64,
    "num_hidden_layers": 5,
    "num_key_value_heads": 16,
    "num_target_layers": 93,
    "pad_token_id": 163839,
    "rms_norm_eps": 1e-05,
    "rope_parameters": {
        "factor": 16.0,
        "original_max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rope_type": "yarn",
    },
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 163840,
}


def test_specforges_nested_keys_and_its_93_layers() -> None:
    reading, config = config_of(SPECFORGE)
    assert reading.layout == "specforge"
    assert config.target_layer_ids == (7, 23, 51, 67, 83)
    assert (config.mask_token_id, config.markov_rank, config.block_size) == (163824, 256, 7)
    assert config.yarn is not None
    assert (config.yarn.factor, config.is_causal) == (16.0, False)


def test_deepspecs_configuration_inherits_the_targets_depth() -> None:
    values = layout_config(tiny_draft().config, "deepspec", None) | {"num_target_layers": 36}
    reading, config = config_of(values)
    assert reading.layout == "deepspec"
    assert config == tiny_draft().config
    assert any("sample_from_anchor is true" in line for line in reading.assumed)


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({**SPECULATORS, "speculators_model_type": "eagle3"}, "speculators_model_type"),
        (
            {k: v for k, v in SPECULATORS.items() if k != "aux_hidden_state_layer_ids"},
            "aux_hidden_state_layer_ids",
        ),
        (
            {**SPECFORGE, "dflash_config": {**SPECFORGE["dflash_config"], "attention_mode": "kda"}},  # type: ignore[dict-item]
            "attention_mode",
        ),
        (
            {**SPECFORGE, "dflash_config": {**SPECFORGE["dflash_config"], "sink": 4}},  # type: ignore[dict-item]
            "dflash_config",
        ),
    ],
)
def test_other_drafts_are_refused(values: dict[str, Any], field: str) -> None:
    with pytest.raises(UserError) as error:
        config_of(values)
    assert field in error.value.field


def rewritten(folder: Path, out: Path, change: Any) -> Path:
    """A copy of a saved draft with other tensors."""
    out.mkdir()
    (out / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(change(load_file(folder / "model.safetensors")), out / "model.safetensors")
    return out


def fused(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    groups = {
        "self_attn.qkv_proj.weight": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "mlp.gate_up_proj.weight": ("mlp.gate_proj", "mlp.up_proj"),
        "self_attn.fused_qkv_a_proj.weight": (
            "self_attn.q_a_proj",
            "self_attn.kv_a_proj_with_mqa",
        ),
    }
    found = dict(tensors)
    for layer in ("layers.0.", "layers.1."):
        for name, parts in groups.items():
            names = [f"{layer}{part}.weight" for part in parts]
            if names[0] in found:
                found[layer + name] = torch.cat([found.pop(part) for part in names])
    return found


@pytest.mark.parametrize("kind", ["plain", "latent"])
def test_prefixed_and_fused_tensors_are_the_same_draft(kind: str, tmp_path: Path) -> None:
    draft = tiny_draft(**KINDS[kind])
    save_draft(draft, tmp_path / "own")
    prefixed = rewritten(
        tmp_path / "own",
        tmp_path / "prefixed",
        lambda tensors: {f"model.{name}": tensor for name, tensor in tensors.items()},
    )
    together = rewritten(tmp_path / "own", tmp_path / "fused", fused)
    assert len(load_file(together / "model.safetensors")) < len(draft.state_dict())
    for folder in (prefixed, together):
        loaded = load_draft(folder)
        for name, tensor in draft.state_dict().items():
            assert torch.equal(loaded.state_dict()[name], tensor)


def test_a_fused_tensor_of_the_wrong_size_is_named(tmp_path: Path) -> None:
    save_draft(tiny_draft(), tmp_path / "own")

    def cut(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found = fused(tensors)
        name = "layers.0.mlp.gate_up_proj.weight"
        return {**found, name: found[name][:-3].clone()}

    with pytest.raises(UserError, match=r"up_proj\.weight is \[37, 24\]"):
        load_draft(rewritten(tmp_path / "own", tmp_path / "cut", cut))


def test_shards_with_an_index(tmp_path: Path) -> None:
    draft = tiny_draft()
    save_draft(draft, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    where = {}
    for number, part in enumerate((names[:5], names[5:])):
        file = f"model-0000{number + 1}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        where |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": where}), encoding="utf-8")
    loaded = load_draft(tmp_path)
    assert all(torch.equal(loaded.state_dict()[n], t) for n, t in draft.state_dict().items())
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="00002-of-00002"):
        load_draft(tmp_path)


def test_a_fill_in_block_drafts_from_the_slots_after_the_anchors() -> None:
    """The same weights in both forms: the fill-in draft's first word is the other's second slot."""
    ours, fill_in = tiny_draft(), tiny_draft(sample_from_anchor=False)
    fill_in.load_state_dict(ours.state_dict())
    fill_in.bind(ours.bound.embed, ours.bound.head)
    features = tiny_features(ours, 10)
    drafter = DSparkDrafter(fill_in, Sampling(temperature=1.0, top_p=1.0), None)
    drafter.update(torch.arange(10), features)
    proposal = drafter.propose(9, 8)
    assert len(proposal.tokens) == fill_in.config.num_drafts == ours.config.block_size - 1
    decoder = DraftDecoder(ours)
    with torch.no_grad():
        decoder.append(features)
        hidden = decoder.block(torch.tensor([9, 7, 7, 7]))
        previous = torch.cat((torch.tensor([9]), proposal.tokens[:-1]))
        expected = ours.logits(previous, hidden[1:]).softmax(-1)
    assert torch.allclose(proposal.probs, expected, atol=1e-6)


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_window_hides_what_is_before_it(is_causal: bool) -> None:
    draft = tiny_draft(sliding_window=6, is_causal=is_causal)
    features = tiny_features(draft, 1, 20)
    tokens = torch.randint(0, VOCABULARY, (1, 20), generator=torch.Generator().manual_seed(2))
    anchors = torch.tensor([[3, 12, 19]])
    with torch.no_grad():
        hidden = draft.forward_blocks(features, tokens, anchors)
        # One layer sees 5 positions before slot 0 at 12, which are 7 to 11; two layers see no
        # more, since the context passes through none.
        far, near = features.clone(), features.clone()
        far[0, :7] = 100.0
        near[0, 7] += 1.0
        assert torch.equal(draft.forward_blocks(far, tokens, anchors)[0, 1], hidden[0, 1])
        changed = draft.forward_blocks(near, tokens, anchors)
        assert not torch.allclose(changed[0, 1, 0], hidden[0, 1, 0], atol=1e-4)
        if is_causal:
            # Position 7 is beyond the window of slot 1 at 13, and a later slot cannot pass it on.
            narrow = draft.forward_blocks(near, tokens, anchors)[0, 1]
            assert not torch.equal(narrow[0], hidden[0, 1, 0])
        for block, anchor in enumerate(anchors[0].tolist()):
            decoder = DraftDecoder(draft)
            decoder.append(features[0, :anchor])
            decoded = decoder.block(torch.tensor([int(tokens[0, anchor]), 7, 7, 7]))
            assert torch.allclose(decoded, hidden[0, block], atol=1e-5)


def test_a_missing_row_of_the_target_is_asked_for(tmp_path: Path) -> None:
    save_draft(tiny_draft(), tmp_path / "draft")
    with pytest.raises(UserError, match="--target"):
        convert_draft(tmp_path / "draft", tmp_path / "out", "deepspec")
    assert not (tmp_path / "out").exists()


def test_the_layout_is_recognised(tmp_path: Path) -> None:
    draft = tiny_draft()
    save_draft(draft, tmp_path / "vllm")
    for layout in ("deepspec", "speculators", "specforge"):
        convert_draft(tmp_path / "vllm", tmp_path / layout, layout, rows=rows(draft))
        assert open_draft(tmp_path / layout).reading.layout == layout
