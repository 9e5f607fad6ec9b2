"""The sizes and conventions of a DSpark draft, and their config.json form.

The JSON forms are the two flat layouts that vLLM reads: `Qwen3DSparkModel` for grouped-query
attention and `K3DSparkModel` for latent attention. Engines fill keys that are absent with silent
defaults of other models, so every size is written out.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args

from sparksmith.draft.errors import UserError
from sparksmith.draft.heads import MarkovHeadType
from sparksmith.draft.rotary import Yarn, is_positive

ARCHITECTURE = "Qwen3DSparkModel"
MLA_ARCHITECTURE = "K3DSparkModel"

_MOST = 1 << 24
# Of those that multiply each other, or repeat whole layers: what no draft has.
_MOST_OF = {
    "num_hidden_layers": 1_024,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "block_size": 1_024,
    "max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
    **dict.fromkeys(
        ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        1 << 16,
    ),
}
_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "max_position_embeddings",
    "block_size",
)


@dataclass(frozen=True, kw_only=True)
class MLASizes:
    """The sizes of multi-head latent attention, in DeepSeek-V3's names."""

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    def __post_init__(self) -> None:
        for field in fields(self):
            _check_count(field.name, getattr(self, field.name), at_least=1)
        if self.qk_rope_head_dim % 2:
            raise UserError(
                "qk_rope_head_dim",
                self.qk_rope_head_dim,
                "is odd",
                "Rotary pairs need an even size.",
            )


@dataclass(frozen=True, kw_only=True)
class DSparkConfig:
    """A DSpark draft's sizes; all counts are positive.

    `hidden_size` is the width of the draft and of the target's embedding and head;
    `target_hidden_size` the width of one tapped layer output. `target_layer_ids` are 0-based
    target layers, in the order in which their outputs are concatenated. `draft_vocab_size` is
    smaller than `vocab_size` when the draft's vocabulary is reduced. `markov_rank` 0 leaves the
    Markov head out. `is_causal` hides later slots of the block from earlier ones.

    `mla` None is grouped-query attention with rotary pairs (i, i + D/2). With `mla` every head has
    its own key and value (`num_key_value_heads` = `num_attention_heads`), `head_dim` is a query's
    size, qk_nope_head_dim + qk_rope_head_dim, and rotary pairs are interleaved. `yarn` stretches
    the rotary embedding. With `sliding_window` W a slot sees the W positions up to its own.

    Without `sample_from_anchor` (the "fill-in" form: read and used, never trained here) the
    anchor's slot predicts nothing and slot k the token at its own position, so a block drafts one
    token less.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    target_hidden_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    block_size: int
    markov_rank: int
    markov_head_type: MarkovHeadType = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    is_causal: bool = False
    sample_from_anchor: bool = True
    yarn: Yarn | None = None
    mla: MLASizes | None = None
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        for name in (*_SIZES, "draft_vocab_size", "target_hidden_size"):
            _check_count(name, getattr(self, name), at_least=1)
        _check_count("markov_rank", self.markov_rank, at_least=0)
        for name in ("rms_norm_eps", "rope_theta"):
            value = getattr(self, name)
            if not is_positive(value):
                raise UserError(name, value, "is not a positive number", "Copy the target's value.")
        if self.yarn is not None and self.rope_theta <= 1:
            raise UserError(
                "rope_theta", self.rope_theta, "is no base for YaRN", "Copy the trained value."
            )
        self._check_attention()
        self._check_window()
        self._check_taps()
        self._check_vocabulary()
        self._check_heads()

    def _check_attention(self) -> None:
        if self.mla is not None:
            self._check_mla(self.mla)
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                "num_attention_heads",
                self.num_attention_heads,
                f"is not a multiple of num_key_value_heads {self.num_key_value_heads}",
                "Let each key/value head serve the same number of query heads.",
            )
        if self.head_dim % 2:
            raise UserError("head_dim", self.head_dim, "is odd", "Rotary pairs need an even size.")

    def _check_mla(self, mla: MLASizes) -> None:
        if self.num_key_value_heads != self.num_attention_heads:
            raise UserError(
                "num_key_value_heads",
                self.num_key_value_heads,
                f"is not num_attention_heads {self.num_attention_heads}, as in latent attention",
                "Use the same number.",
            )
        if self.head_dim != mla.qk_nope_head_dim + mla.qk_rope_head_dim:
            raise UserError(
                "head_dim",
                self.head_dim,
                "is not qk_nope_head_dim + qk_rope_head_dim",
                f"Use {mla.qk_nope_head_dim + mla.qk_rope_head_dim}.",
            )
        if self.reduced_vocabulary:
            raise UserError(
                "draft_vocab_size",
                self.draft_vocab_size,
                "is reduced, which the K3DSparkModel layout does not know",
                f"Use the target's {self.vocab_size}.",
            )
        if self.markov_head_type != "vanilla" or not self.markov_rank:
            raise UserError(
                "markov_head_type",
                self.markov_head_type if self.markov_rank else "none (markov_rank 0)",
                "is not what the K3DSparkModel layout has",
                "Use vanilla, with a markov_rank.",
            )

    def _check_window(self) -> None:
        window = self.sliding_window
        if window is None:
            return
        _check_count("sliding_window", window, at_least=1)
        if window < self.block_size or self.mla is not None:
            raise UserError(
                "sliding_window",
                window,
                "does not hold a block"
                if self.mla is None
                else "is not known to latent attention's layout",
                f"Use {self.block_size} or more."
                if self.mla is None
                else "Leave it out: its layers see everything.",
            )

    def _check_taps(self) -> None:
        ids = self.target_layer_ids
        if not ids or any(
            isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < _MOST for i in ids
        ):
            raise UserError(
                "target_layer_ids", ids, "names no target layers", "Give 0-based layer numbers."
            )
        if list(ids) != sorted(set(ids)):
            raise UserError(
                "target_layer_ids",
                ids,
                "is not strictly ascending",
                "Features are concatenated in this order: list each layer once, ascending.",
            )

    def _check_vocabulary(self) -> None:
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(
                "draft_vocab_size",
                self.draft_vocab_size,
                f"is larger than vocab_size {self.vocab_size}",
                "Use vocab_size for the full vocabulary, or less for a reduced one.",
            )
        _check_count("mask_token_id", self.mask_token_id, at_least=0)
        if self.mask_token_id >= self.vocab_size:
            raise UserError(
                "mask_token_id",
                self.mask_token_id,
                f"is outside the vocabulary of {self.vocab_size}",
                "Use an id that the target's text never contains.",
            )

    def _check_heads(self) -> None:
        if self.markov_head_type not in get_args(MarkovHeadType):
            raise UserError(
                "markov_head_type",
                self.markov_head_type,
                "is not a known Markov head",
                f"Use one of {', '.join(get_args(MarkovHeadType))}.",
            )
        for name in (
            "enable_confidence_head",
            "confidence_head_with_markov",
            "is_causal",
            "sample_from_anchor",
        ):
            if not isinstance(getattr(self, name), bool):
                raise UserError(name, getattr(self, name), "is not a boolean", "Use true or false.")
        if (
            self.enable_confidence_head
            and self.confidence_head_with_markov
            and not self.markov_rank
        ):
            raise UserError(
                "confidence_head_with_markov",
                True,
                "needs the Markov head's embedding, and markov_rank is 0",
                "Set it to false, or give a markov_rank.",
            )
        if not self.sample_from_anchor and self.block_size < 2:
            raise UserError(
                "block_size",
                self.block_size,
                "drafts nothing where the anchor's slot predicts nothing",
                "Use 2 or more, or sample_from_anchor true.",
            )

    @property
    def reduced_vocabulary(self) -> bool:
        return self.draft_vocab_size < self.vocab_size

    @property
    def num_drafts(self) -> int:
        """How many tokens a block drafts at most."""
        return self.block_size if self.sample_from_anchor else self.block_size - 1

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dimensions are rotated."""
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def attention_scale(self) -> float:
        """What attention scores are multiplied by."""
        factor = 1.0 if self.mla is None or self.yarn is None else self.yarn.softmax_factor
        return factor * float(self.head_dim**-0.5)

    def to_json_dict(self) -> dict[str, Any]:
        """The config.json of the draft's layout, without `dtype`."""
        values = asdict(self)
        mla, yarn = values.pop("mla"), values.pop("yarn")
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": values.pop("rope_theta")}
        if yarn is not None:
            rope["rope_type"] = "yarn"
            rope |= {name: value for name, value in yarn.items() if value is not None}
        # Engines take an absent key for bidirectional, and a present one overrides all others.
        causal: dict[str, Any] = {"is_causal": True} if values.pop("is_causal") else {}
        window = values.pop("sliding_window")
        if window is not None:
            causal = {
                "layer_types": ["sliding_attention"] * self.num_hidden_layers,
                "sliding_window": window,
                "use_sliding_window": True,
                # A window alone would mean causal.
                "is_causal": self.is_causal,
            }
        layout: dict[str, Any] = {
            "architectures": [ARCHITECTURE],
            "model_type": "qwen3",
            "attention_bias": False,
        }
        if mla is not None:
            del values["head_dim"]
            layout = {
                "architectures": [MLA_ARCHITECTURE],
                "model_type": "k3_dspark",
                # Of taps, not of the target's layers, as in the public layout.
                "num_target_layers": len(self.target_layer_ids),
                **mla,
            }
        return {
            **layout,
            "hidden_act": "silu",
            "tie_word_embeddings": False,
            "rope_parameters": rope,
            **values,
            "target_layer_ids": list(self.target_layer_ids),
            **causal,
        }

    @classmethod
    def from_json_dict(cls, values: Mapping[str, Any]) -> "DSparkConfig":
        """Read either layout; UserError names the key that is missing or unfit.

        Keys that mean nothing to the draft's computation (ids of special tokens, initialiser
        ranges) are accepted and dropped; those that would change it are refused.
        """
        _refuse_other_computations(values)
        markov_rank = _required(values, "markov_rank")
        layers = _required(values, "target_layer_ids")
        if not isinstance(layers, list):
            raise UserError("target_layer_ids", layers, "is not a list", "Give a list of numbers.")
        confidence = values.get("enable_confidence_head", False)
        values, mla = _mla(values)
        theta, yarn = _rope(values)
        window, is_causal = _visibility(values)
        return cls(
            **{name: _required(values, name) for name in _SIZES},
            draft_vocab_size=values.get("draft_vocab_size") or _required(values, "vocab_size"),
            rms_norm_eps=_required(values, "rms_norm_eps"),
            rope_theta=theta,
            yarn=yarn,
            mla=mla,
            target_hidden_size=values.get("target_hidden_size") or _required(values, "hidden_size"),
            target_layer_ids=tuple(layers),
            mask_token_id=_required(values, "mask_token_id"),
            markov_rank=markov_rank,
            markov_head_type=values.get("markov_head_type", "vanilla"),
            enable_confidence_head=confidence,
            confidence_head_with_markov=values.get("confidence_head_with_markov", False),
            is_causal=is_causal,
            sliding_window=window,
            sample_from_anchor=values.get("sample_from_anchor", True),
        )


def _mla(values: Mapping[str, Any]) -> tuple[Mapping[str, Any], MLASizes | None]:
    """The sizes of latent attention, if the layout has it, and `values` with what follows."""
    if values["architectures"] != [MLA_ARCHITECTURE]:
        return values, None
    sizes = MLASizes(**{field.name: _required(values, field.name) for field in fields(MLASizes)})
    taps = values["target_layer_ids"]
    if values.get("num_target_layers", len(taps)) != len(taps):
        raise UserError(
            "config.json num_target_layers",
            values["num_target_layers"],
            f"is not the number of taps, {len(taps)}",
            "Write the number of target_layer_ids; the target's depth is another number.",
        )
    derived = {
        "num_key_value_heads": _required(values, "num_attention_heads"),
        "head_dim": sizes.qk_nope_head_dim + sizes.qk_rope_head_dim,
    }
    return {**values, **derived}, sizes


def _check_count(name: str, value: object, *, at_least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
        raise UserError(
            name, value, "is not a valid count", f"Use an integer of {at_least} or more."
        )
    most = _MOST_OF.get(name, _MOST)
    if value > most:
        raise UserError(
            name, value, "is larger than any draft's", f"Use {most} at most: the trained value."
        )


def _required(values: Mapping[str, Any], key: str) -> Any:
    if key not in values:
        raise UserError(
            f"config.json {key}", None, "is missing", "Write the key: it has no safe default."
        )
    return values[key]


def _refuse_other_computations(values: Mapping[str, Any]) -> None:
    architectures = _required(values, "architectures")
    known = ([ARCHITECTURE], [MLA_ARCHITECTURE])
    if architectures not in known:
        raise UserError(
            "config.json architectures",
            architectures,
            "is not a DSpark draft's",
            f"Point at a folder whose architectures is {known[0]} or {known[1]}.",
        )
    only = {
        "hidden_act": "silu",
        "attention_bias": False,
        "logit_scale": 1.0,
        "is_neox_style": True,
        "use_aux_hidden_state": True,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "mla_use_qk_norm": False,
    }
    for key, wanted in only.items():
        if values.get(key, wanted) != wanted:
            raise UserError(
                f"config.json {key}",
                values[key],
                "asks for a computation that this draft does not do",
                f"Use a draft trained with {wanted!r}.",
            )


def _rope(values: Mapping[str, Any]) -> tuple[float, Yarn | None]:
    """The base of the rotary frequencies, and how they are stretched."""
    rope = values.get("rope_parameters")
    if rope is None and "rope_theta" in values:
        # transformers before 5 wrote the base at the top level.
        scaling = values.get("rope_scaling")
        stretched = scaling if isinstance(scaling, Mapping) else {}
        rope = {"rope_theta": values["rope_theta"], **stretched}
        if scaling is not None and not isinstance(scaling, Mapping):
            rope = None
    if not isinstance(rope, Mapping) or "rope_theta" not in rope:
        raise UserError(
            "config.json rope_parameters",
            rope,
            "does not give rope_theta",
            'Write {"rope_type": "default", "rope_theta": ...}.',
        )
    theta: float = rope["rope_theta"]
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind != "yarn" or rope.get("attention_factor") or not rope.get("truncate", True):
        raise UserError(
            "config.json rope_parameters",
            dict(rope),
            "asks for a rotary embedding that this draft does not have",
            'Use a draft of rope_type "default" or "yarn", without attention_factor.',
        )
    names = {field.name for field in fields(Yarn)}
    for name in ("factor", "original_max_position_embeddings"):
        if rope.get(name) is None:
            raise UserError(
                f"config.json rope_parameters.{name}",
                None,
                "is missing",
                "Write the value with which the draft was trained.",
            )
    return theta, Yarn(**{k: v for k, v in rope.items() if k in names and v is not None})


def _visibility(values: Mapping[str, Any]) -> tuple[int | None, bool]:
    """The sliding window of all layers, if they have one, and whether a block is causal.

    As vLLM reads it: `is_causal` rules; else `dflash_config.causal`; else layers of the type
    `sliding_attention` are causal and all others are not.
    """
    nested = values.get("dflash_config")
    nested = {} if nested is None else nested
    if not isinstance(nested, Mapping):
        raise UserError(
            "config.json dflash_config", nested, "is not an object", "Remove it, or save it again."
        )
    if set(nested) - {"causal", "use_swa", "swa_window_size"}:
        raise UserError(
            "config.json dflash_config",
            dict(nested),
            "holds keys that this draft does not know",
            "Use the flat Qwen3DSparkModel layout.",
        )
    listed = values.get("layer_types")
    if listed is not None and not (
        isinstance(listed, list) and all(isinstance(kind, str) for kind in listed)
    ):
        raise UserError(
            "config.json layer_types", listed, "is no list of names", "Write one for each layer."
        )
    kinds = set(listed or ["full_attention"])
    slides = kinds == {"sliding_attention"}
    if not slides and kinds != {"full_attention"}:
        raise UserError(
            "config.json layer_types",
            values["layer_types"],
            "mixes layers of different kinds",
            "Use a draft whose layers are all full_attention, or all sliding_attention.",
        )
    # transformers drops the window of a configuration that does not switch it on.
    if slides != bool(values.get("use_sliding_window", False)):
        raise UserError(
            "config.json use_sliding_window",
            values.get("use_sliding_window"),
            f"contradicts layer_types, which are {kinds.pop()}",
            "Write use_sliding_window true with sliding_attention layers and a sliding_window.",
        )
    window = _required(values, "sliding_window") if slides else None
    if nested.get("use_swa"):
        window = _required(nested, "swa_window_size")
    causal = values.get("is_causal")
    if causal is None:
        causal = nested.get("causal")
    return window, slides if causal is None else causal
