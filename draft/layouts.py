"""The layouts in which DSpark drafts are published: how each is read, and how each is written.

- `vllm`: flat `Qwen3DSparkModel`; an absent `sample_from_anchor` means true.
- `k3`: flat `K3DSparkModel`, latent attention; `num_target_layers` is the number of taps.
- `deepspec`: the flat one as DeepSpec's trainer saves it, with copies of embedding and head.
- `speculators`: nested; captured states are tap + 1; an absent `sample_from_anchor` means false.
- `specforge`: `DSparkDraftModel` with the draft's keys in `dflash_config`.

Reading turns any of them into the flat form that `DSparkConfig` reads, and file tensors into the
draft's own, whatever prefix they carry and whether projections are fused.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from sparksmith.draft.config import ARCHITECTURE, MLA_ARCHITECTURE, DSparkConfig
from sparksmith.draft.errors import UserError

Layout = Literal["vllm", "k3", "deepspec", "speculators", "specforge"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

_SPECFORGE = "DSparkDraftModel"
_NESTED = (
    "block_size",
    "mask_token_id",
    "target_layer_ids",
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "sample_from_anchor",
)
# Those that vLLM reads outside `dflash_config` alone.
_OUTER = (
    "block_size",
    "sample_from_anchor",
    "markov_rank",
    "enable_confidence_head",
    "confidence_head_with_markov",
)
# Keys of SpecForge's dflash_config that say how it was trained, with the one value that fits.
_TRAINING = {"attention_mode": "gqa", "projector_type": "dspark"}
_TRAINING_FREE = frozenset({"confidence_head_alpha", "num_anchors", "loss_decay_gamma"})

EMBED, HEAD, OFFSETS, KEPT = "embed_tokens.weight", "lm_head.weight", "d2t", "t2d"
SHIPPED = frozenset({EMBED, HEAD, OFFSETS, KEPT})
"""Tensors that are the target's, or say which of its words the draft knows."""
_MEANINGLESS = ("rotary_emb.inv_freq", "mask_embedding")
_PREFIXES = ("model.", "draft_model.")
_RENAMED = {
    "context_proj.": "fc.",
    "context_norm.": "hidden_norm.",
    "final_norm.": "norm.",
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "midlayer.": "layers.0.",
}
_K3_NAMES = {
    "fc.weight": "context_proj.weight",
    "hidden_norm.weight": "context_norm.weight",
    "norm.weight": "final_norm.weight",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A config.json as the flat layouts have it; `assumed` says what it left open."""

    layout: Layout
    values: Mapping[str, Any]
    assumed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows `start` to `stop` of a file's tensor."""

    name: str
    start: int
    stop: int


Shapes = Mapping[str, tuple[int, ...]]


def flatten(values: Mapping[str, Any], shapes: Shapes) -> Reading:
    """Read any layout's config.json; `shapes` of the file's tensors settle a head size left out.

    Raises UserError for a layout that is none of these, or asks for what a draft does not compute.
    """
    if values.get("speculators_model_type") is not None or "speculators_config" in values:
        return _from_speculators(values, shapes)
    architectures = values.get("architectures")
    if architectures == [_SPECFORGE]:
        return _from_specforge(values, shapes)
    if architectures == [MLA_ARCHITECTURE]:
        return Reading(layout="k3", values=values, assumed=_open(values))
    layout: Layout = "deepspec" if "num_anchors" in values else "vllm"
    values = {**values}
    # The draft's own keys say it; inherited from the target's configuration, it means nothing.
    values.pop("num_target_layers", None)
    return Reading(layout=layout, values=values, assumed=_open(values))


def _open(values: Mapping[str, Any]) -> tuple[str, ...]:
    if "sample_from_anchor" in values:
        return ()
    return ("sample_from_anchor is true, this layout's default",)


def _from_specforge(values: Mapping[str, Any], shapes: Shapes) -> Reading:
    nested = dict(_inner(values, "dflash_config"))
    for key, wanted in _TRAINING.items():
        if nested.pop(key, wanted) != wanted:
            raise UserError(
                f"config.json dflash_config.{key}",
                values["dflash_config"][key],
                "is another kind of draft",
                f"Use a draft whose {key} is {wanted}.",
            )
    flat = {key: value for key, value in values.items() if key != "dflash_config"}
    flat |= {key: nested.pop(key) for key in _NESTED if key in nested}
    for key in _TRAINING_FREE:
        nested.pop(key, None)
    flat.pop("num_target_layers", None)
    if nested:
        flat["dflash_config"] = nested
    flat["architectures"] = [ARCHITECTURE]
    return Reading(layout="specforge", values=_with_head_dim(flat, shapes), assumed=_open(flat))


def _from_speculators(values: Mapping[str, Any], shapes: Shapes) -> Reading:
    kind = values.get("speculators_model_type")
    if kind != "dspark":
        raise UserError(
            "config.json speculators_model_type",
            kind,
            "is another kind of draft",
            "Use a draft whose speculators_model_type is dspark.",
        )
    for key in ("transformer_layer_config", "aux_hidden_state_layer_ids"):
        if key not in values:
            raise UserError(
                f"config.json {key}", None, "is missing", "Save the draft with speculators again."
            )
    captured = values["aux_hidden_state_layer_ids"]
    if not isinstance(captured, list) or not all(type(number) is int for number in captured):
        raise UserError(
            "config.json aux_hidden_state_layer_ids",
            captured,
            "is no list of whole numbers",
            "Write the captured states: those of the tapped layers, plus 1.",
        )
    flat: dict[str, Any] = dict(_inner(values, "transformer_layer_config"))
    flat |= {key: values[key] for key in _NESTED if values.get(key) is not None}
    flat |= {
        key: values[key] for key in ("draft_vocab_size", "target_hidden_size") if values.get(key)
    }
    flat["architectures"], flat["model_type"] = [ARCHITECTURE], "qwen3"
    # A captured state has as many layers behind it as its number says.
    flat["target_layer_ids"] = [number - 1 for number in captured]
    assumed = []
    if values.get("sample_from_anchor") is None:
        flat["sample_from_anchor"] = False
        assumed.append("sample_from_anchor is false, this layout's default")
    if "rope_parameters" not in flat and "rope_theta" not in flat:
        flat["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e6}
        assumed.append("rope_theta is 1e6, this layout's default")
    kinds = flat.get("layer_types")
    if isinstance(kinds, list) and kinds and all(kind == "sliding_attention" for kind in kinds):
        flat["use_sliding_window"] = True
    return Reading(
        layout="speculators", values=_with_head_dim(flat, shapes), assumed=tuple(assumed)
    )


def _inner(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object in config.json, empty where there is none."""
    found = values.get(key)
    if found is None:
        return {}
    if not isinstance(found, Mapping):
        raise UserError(f"config.json {key}", found, "is not an object", "Save the draft again.")
    return found


def _with_head_dim(flat: dict[str, Any], shapes: Shapes) -> dict[str, Any]:
    if flat.get("head_dim"):
        return flat
    norms = [shape for name, shape in shapes.items() if name.endswith("self_attn.q_norm.weight")]
    if norms and norms[0]:
        return {**flat, "head_dim": norms[0][0]}
    return {k: v for k, v in flat.items() if k != "head_dim"}


def layout_config(config: DSparkConfig, layout: Layout, target: str | None) -> dict[str, Any]:
    """The config.json of `config` in a layout, without `dtype`; `target` is the target's name.

    Raises UserError, saying why, where the layout cannot express the draft.
    """
    check_layout(config, layout)
    flat = config.to_json_dict()
    if layout in ("vllm", "k3"):
        return flat
    if layout == "deepspec":
        del flat["sample_from_anchor"]
        # Blocks a sequence in training: it says nothing of the draft, and marks the layout.
        return {**flat, "num_anchors": 512}
    own = {key: flat.pop(key) for key in _NESTED}
    if layout == "specforge":
        nested: dict[str, Any] = {**_TRAINING, **own}
        nested["causal"] = flat.pop("is_causal", False)
        # SpecForge reads the nested keys and vLLM these outer ones. vLLM refuses a nested
        # `sample_from_anchor` that is true, as of a DFlash draft.
        outer = {key: nested[key] for key in _OUTER}
        for key in ("block_size", "sample_from_anchor"):
            del nested[key]
        return {**flat, "architectures": [_SPECFORGE], **outer, "dflash_config": nested}
    layers = {
        key: value
        for key, value in flat.items()
        if key not in ("architectures", "draft_vocab_size", "target_hidden_size")
    }
    captured = [number + 1 for number in own.pop("target_layer_ids")]
    verifier = {"name_or_path": target} if target else {}
    return {
        "architectures": [ARCHITECTURE],
        "speculators_model_type": "dspark",
        **own,
        "aux_hidden_state_layer_ids": captured,
        "target_hidden_size": config.target_hidden_size,
        "draft_vocab_size": config.draft_vocab_size,
        "speculators_config": {
            "algorithm": "dspark",
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {"proposal_type": "greedy", "speculative_tokens": config.num_drafts}
            ],
            "verifier": verifier,
        },
        "transformer_layer_config": layers,
    }


def check_layout(config: DSparkConfig, layout: Layout) -> None:
    """UserError where the layout has no place for something that the draft computes."""
    if layout not in LAYOUTS:
        raise UserError("--to", layout, "is no layout", f"Use one of {', '.join(LAYOUTS)}.")
    latent = config.mla is not None
    problem = None
    if latent != (layout == "k3"):
        if latent and layout == "vllm":
            problem = "holds grouped-query attention, and the draft's is latent; `k3` is vLLM's too"
        elif latent:
            problem = "holds grouped-query attention, and the draft's is latent"
        else:
            problem = "holds latent attention, and the draft's is grouped-query"
    elif layout == "deepspec":
        if config.is_causal:
            problem = "has no key for a causal block"
        elif not config.sample_from_anchor:
            problem = "is read as predicting from the anchor's slot, and this draft does not"
        elif config.reduced_vocabulary:
            problem = "has no reduced vocabulary"
        elif config.sliding_window is not None:
            problem = "has no sliding window"
    if problem is not None:
        raise UserError("--to", layout, problem, "Choose another layout; nothing has been written.")


def file_name(name: str, layout: Layout) -> str:
    """A layout's name of one of the draft's own tensors."""
    return _K3_NAMES.get(name, name) if layout == "k3" else name


def pieces(
    shapes: Shapes, wanted: Shapes, config: DSparkConfig
) -> tuple[dict[str, Piece], list[str]]:
    """Where in the file each of the draft's own and shipped tensors is, by its own name, and the
    file's names that mean nothing here. `wanted` are the draft's own tensors."""
    found: dict[str, Piece] = {}
    unknown = []
    for name, shape in shapes.items():
        own = own_name(name)
        if own in wanted or own in SHIPPED:
            found[own] = Piece(name=name, start=0, stop=shape[0] if shape else 0)
            continue
        parts = _parts(own, config)
        if parts:
            start = 0
            for part, rows in parts:
                found[part] = Piece(name=name, start=start, stop=start + rows)
                start += rows
        elif not own.endswith(_MEANINGLESS):
            unknown.append(name)
    return found, unknown


def own_name(name: str) -> str:
    """The draft's own name of a file's tensor, whatever its prefix and layout."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for theirs, own in _RENAMED.items():
        if name.startswith(theirs):
            return own + name.removeprefix(theirs)
    return name


def _parts(name: str, config: DSparkConfig) -> list[tuple[str, int]]:
    """The tensors that are stacked in a fused projection, with their rows; empty for others."""
    layer, _, kind = name.rpartition(".self_attn.")
    if kind == "qkv_proj.weight":
        kv = config.num_key_value_heads * config.head_dim
        sizes = [("q", config.num_attention_heads * config.head_dim), ("k", kv), ("v", kv)]
        return [(f"{layer}.self_attn.{part}_proj.weight", rows) for part, rows in sizes]
    if kind == "fused_qkv_a_proj.weight" and config.mla is not None:
        key = config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
        return [
            (f"{layer}.self_attn.q_a_proj.weight", config.mla.q_lora_rank),
            (f"{layer}.self_attn.kv_a_proj_with_mqa.weight", key),
        ]
    layer, _, kind = name.rpartition(".mlp.")
    if kind == "gate_up_proj.weight":
        rows = config.intermediate_size
        return [(f"{layer}.mlp.{part}_proj.weight", rows) for part in ("gate", "up")]
    return []
