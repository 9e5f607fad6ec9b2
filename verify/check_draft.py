"""Checks of a draft's files: each one is a way in which a draft loads and is then worth nothing.

The facts about vLLM are those of versions 0.32 and 0.33, read in their sources; the docstring of
a check is the story that `sparksmith check --explain ID` tells.
"""

import re
from collections.abc import Iterable, Iterator

import torch

from sparksmith.draft.checkpoint import own_shapes, piece_shape
from sparksmith.draft.config import ARCHITECTURE, MLA_ARCHITECTURE, DSparkConfig
from sparksmith.draft.errors import UserError
from sparksmith.draft.layouts import EMBED, HEAD, OFFSETS, Piece, own_name, pieces
from sparksmith.draft.manifest import Manifest, vocabulary_hash
from sparksmith.draft.rotary import is_positive
from sparksmith.draft.vocabulary import target_ids_of
from sparksmith.verify.findings import Checks, Seen, Subject

DRAFT_CHECKS = Checks()
check = DRAFT_CHECKS

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
_GQA_SIZES = ("num_key_value_heads", "head_dim")
_MLA_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_PREFIXES = ("model.", "draft_model.")


@check("architecture", "error", "the architecture is one that engines know")
def architecture(subject: Subject) -> Iterator[Seen]:
    """vLLM chooses the draft's code by `architectures`. A name nearly right may be replaced:
    DSparkDraftModel without model_type qwen3 becomes a DeepSeek-V4 draft with the target's
    quantisation, and fails far from the cause; K3DSparkForCausalLM is not known. SpecForge's
    DSparkDraftModel is read as Qwen3DSparkModel, whose keys vLLM does not look for in
    dflash_config.
    """
    names = subject.values.get("architectures")
    if subject.layout == "speculators":
        if names not in (None, [ARCHITECTURE]):
            yield Seen(
                value=names,
                consequence="vLLM replaces it by Qwen3DSparkModel",
                remedy=f"Write [{ARCHITECTURE!r}].",
                level="warning",
            )
        return
    if subject.layout == "specforge" and subject.values.get("model_type") == "qwen3":
        if "markov_rank" not in subject.values:
            yield Seen(
                value=f"{names}, with markov_rank in dflash_config alone",
                consequence="vLLM reads it as Qwen3DSparkModel, whose keys are outside, and stops "
                "while it loads",
                remedy="Convert it with `sparksmith convert --to vllm`.",
            )
            return
        yield Seen(
            value=names,
            consequence="vLLM reads it as Qwen3DSparkModel; other engines take it for a "
            "DeepSeek-V4 draft",
            remedy="Convert it with `sparksmith convert --to vllm`.",
            level="warning",
        )
        return
    if names not in ([ARCHITECTURE], [MLA_ARCHITECTURE]):
        yield Seen(
            value=names,
            consequence="vLLM takes it for a DeepSeek-V4 draft, or does not know it",
            remedy=f"Write [{ARCHITECTURE!r}], or [{MLA_ARCHITECTURE!r}] for latent attention.",
        )
        return
    wanted = "k3_dspark" if subject.latent else "qwen3"
    if subject.values.get("model_type") != wanted:
        yield Seen(
            value=f"model_type {subject.values.get('model_type')!r}",
            consequence="the configuration is read by another class, with other defaults",
            remedy=f"Write {wanted!r}.",
        )


@check("num-target-layers", "error", "num_target_layers is the number of taps")
def num_target_layers(subject: Subject) -> Iterator[Seen]:
    """In a K3DSparkModel config `num_target_layers` counts the taps. In other layouts the same key
    is the target's depth, so people write 93; vLLM then refuses the draft with a message about
    neither.
    """
    number = subject.values.get("num_target_layers")
    if subject.latent and number != len(subject.taps):
        yield Seen(
            value=number,
            consequence="vLLM refuses the draft, or raises AttributeError where it is missing",
            remedy=f"Write {len(subject.taps)}, the number of target_layer_ids.",
        )


@check("taps", "error", "taps are distinct layers in ascending order")
def taps(subject: Subject) -> Iterator[Seen]:
    """vLLM captures the tapped layers sorted and without duplicates, whatever the config's order. A
    draft trained with another order meets its features permuted: same shape, no error, no
    acceptance. A duplicate gives fewer features than the projection expects.
    """
    ids = subject.taps
    whole = [i for i in ids if isinstance(i, int) and not isinstance(i, bool)]
    if not ids or whole != ids:
        yield Seen(
            value=subject.flat.get("target_layer_ids"),
            consequence="vLLM falls back to layers of its own choice",
            remedy="List the 0-based target layers that the draft was trained on.",
        )
    elif whole != sorted(set(whole)):
        yield Seen(
            value=ids,
            consequence="the engine sorts them: the projection meets features in another order",
            remedy="Write them ascending, and permute the projection's columns likewise.",
        )
    elif whole[0] < 0:
        yield Seen(
            value=ids,
            consequence="-1 taps the embeddings, which is no layer's output",
            remedy="Use layers from 0 on.",
        )


@check("tap-range", "error", "the taps exist in the target, and none is its last layer")
def tap_range(subject: Subject) -> Iterator[Seen]:
    """A tap beyond the last layer gives fewer features than the projection expects: a matrix error
    at the first step, after the whole model is loaded. The last layer's output is stored after the
    final norm by one library and before it by another, and some engines have no place for it.
    """
    if subject.target is None or not subject.tap_numbers:
        return
    depth, last = subject.target.num_layers, max(subject.tap_numbers)
    if last >= depth:
        yield Seen(
            value=f"tap {last} of a target of {depth} layers",
            consequence="the engine captures fewer features than the projection has columns for",
            remedy=f"Use layers 0 to {depth - 2}.",
        )
    elif last == depth - 1:
        yield Seen(
            value=f"tap {last} is the last layer",
            consequence="it is the state before or after the final norm, by the engine",
            remedy=f"Train with taps up to {depth - 2}.",
            level="warning",
        )


@check("tap-override", "error", "one key says which layers are tapped")
def tap_override(subject: Subject) -> Iterator[Seen]:
    """vLLM looks for the taps under several keys, and the first that is not empty wins:
    `eagle_aux_hidden_state_layer_ids`, `dflash_config.target_layer_ids`,
    `dspark_target_layer_ids`, then `target_layer_ids`. A leftover silently replaces the taps, and
    the first of these even counts them differently.
    """
    nested = subject.nested("dflash_config")
    found = {
        "eagle_aux_hidden_state_layer_ids": subject.values.get("eagle_aux_hidden_state_layer_ids"),
        "dspark_target_layer_ids": subject.values.get("dspark_target_layer_ids"),
        "dflash_config.target_layer_ids": nested.get("target_layer_ids"),
    }
    if subject.layout == "specforge" and "target_layer_ids" not in subject.values:
        del found["dflash_config.target_layer_ids"]
    for key, value in found.items():
        if value:
            yield Seen(
                value=f"{key} {value}",
                consequence="it takes the place of target_layer_ids",
                remedy="Remove it.",
            )


@check("tap-offset", "error", "captured states are taps + 1 in speculators' layout")
def tap_offset(subject: Subject) -> Iterator[Seen]:
    """speculators' config names captured states: state j has j layers behind it, so tap i is state
    i + 1. Taps copied unchanged into `aux_hidden_state_layer_ids` shift every feature by a layer,
    which has cost drafts twelve to sixteen times their accuracy.
    """
    if subject.layout != "speculators":
        return
    captured = subject.values.get("aux_hidden_state_layer_ids") or []
    beside = subject.values.get("target_layer_ids")
    if beside is not None and beside != [i - 1 for i in captured]:
        yield Seen(
            value=f"aux_hidden_state_layer_ids {captured} beside target_layer_ids {beside}",
            consequence="every feature comes from a neighbouring layer",
            remedy="Write each of target_layer_ids plus 1 as aux_hidden_state_layer_ids.",
        )
    if subject.manifest:
        wanted = [i + 1 for i in subject.manifest.taps]
        if captured != wanted:
            yield Seen(
                value=f"{captured}, and the draft was trained on states {wanted}",
                consequence="every feature comes from another layer",
                remedy=f"Write aux_hidden_state_layer_ids {wanted}.",
            )


@check("fusion-width", "error", "the projection's columns are taps times the target's width")
def fusion_width(subject: Subject) -> Iterator[Seen]:
    """The projection takes the tapped states side by side. Other numbers of columns give an
    AssertionError while loading, or a ValueError at the first step.
    """
    shape = _shape(subject, "fc.weight")
    width = subject.number("target_hidden_size") or subject.number("hidden_size")
    if shape is None or len(shape) != 2 or width is None or not subject.taps:
        return
    wanted = width * len(subject.taps)
    if shape[1] != wanted:
        yield Seen(
            value=f"{shape[1]} columns for {len(subject.taps)} taps of {width}",
            consequence="the engine stops with a bare assertion",
            remedy=f"Use a projection of {wanted} columns, or the taps that it was trained for.",
        )


@check(
    "hidden-size", "error", "the draft is as wide as the target, or ships its embedding and head"
)
def hidden_size(subject: Subject) -> Iterator[Seen]:
    """A draft uses the target's embedding and head. Another width works only with an embedding and
    a head of its own, which the K3 layout does not allow. A wrong target_hidden_size fails at the
    first step.
    """
    if subject.target is None:
        return
    width, own = subject.target.hidden_size, subject.number("hidden_size")
    ships = {EMBED, HEAD} <= _found(subject).keys() and not subject.latent
    if own != width and not ships:
        yield Seen(
            value=f"{own} beside the target's {width}",
            consequence="the target's embedding does not fit: a matrix error, late",
            remedy="Use the target that the draft was trained for.",
        )
    tapped = subject.number("target_hidden_size") or own
    if tapped != width:
        yield Seen(
            value=f"target_hidden_size {tapped} beside the target's {width}",
            consequence="the tapped states do not fit the projection",
            remedy="Use the target that the draft was trained for.",
        )


@check("required-keys", "error", "keys without any default are there")
def required_keys(subject: Subject) -> Iterator[Seen]:
    """The K3 layout has no default for `target_hidden_size`, `markov_rank` and `target_layer_ids`:
    vLLM raises AttributeError. The Qwen3 layout has none for `markov_rank`.
    """
    keys = ["markov_rank"]
    if subject.latent:
        keys += ["target_hidden_size", "target_layer_ids"]
    for key in keys:
        if subject.flat.get(key) is None:
            yield Seen(
                value=f"{key} is missing",
                consequence="vLLM raises AttributeError while it builds the draft",
                remedy="Write it.",
            )


@check("vocab-size", "error", "the vocabulary is the target's")
def vocab_size(subject: Subject) -> Iterator[Seen]:
    """With probabilistic drafting a smaller draft vocabulary truncates the target's distribution:
    the text is no longer the target's. A larger one needs an embedding of its own. The padded size
    of the target's embedding counts, not the tokenizer's.
    """
    if subject.target is None:
        return
    own, wanted = subject.number("vocab_size"), subject.target.vocab_size
    if own != wanted:
        yield Seen(
            value=f"{own} beside the target's {wanted}",
            consequence="a bare AssertionError, or a target distribution that is cut short",
            remedy=f"Use {wanted}, with the embedding rows to match.",
        )


@check("tensors", "error", "every tensor is there, whole, and of the right shape")
def tensors(subject: Subject) -> Iterator[Seen]:
    """vLLM's Qwen3 loader does not check for missing weights at all; its K3 loader misses a norm,
    but no linear layer (0.32), and not half of a fused pair (up without gate, one layer's kv_a).
    The draft then runs with whatever was in memory: it proposes noise, and nothing says so.
    """
    try:
        config = DSparkConfig.from_json_dict(subject.flat)
    except UserError:
        return  # other checks say what is wrong with it
    wanted = own_shapes(config)
    found, _ = pieces(subject.shapes, wanted, config)
    missing = sorted(wanted.keys() - found.keys())
    if missing:
        yield Seen(
            value=_list(missing),
            consequence="vLLM runs with uninitialised memory in their place",
            remedy="Save the draft again, with every tensor.",
        )
    for name in sorted(wanted.keys() & found.keys()):
        seen = piece_shape(found[name], subject.shapes)
        if seen != wanted[name]:
            yield Seen(
                value=f"{name} is {list(seen)}, and config.json means {list(wanted[name])}",
                consequence="vLLM stops with a bare AssertionError",
                remedy="Put the config.json beside the weights that it belongs to.",
            )


@check("tensor-names", "error", "tensors have the names that the loader knows")
def tensor_names(subject: Subject) -> Iterator[Seen]:
    """Both of vLLM's loaders put `model.` in front themselves: a file that carries it already names
    unknown parameters. Projections must come apart: a fused one is unknown too.
    """
    found = _found(subject)
    prefixed = [name for name in subject.shapes if name.startswith(_PREFIXES)]
    if prefixed:
        yield Seen(
            value=_list(prefixed),
            consequence='vLLM stops: "There is no module or parameter named ..."',
            remedy="Convert it: `sparksmith convert` writes the names without the prefix.",
        )
    joined = sorted(
        {p.name for p in found.values() if sum(q.name == p.name for q in found.values()) > 1}
    )
    if joined:
        yield Seen(
            value=_list(joined),
            consequence="vLLM does not know fused projections in a file",
            remedy="Convert it: `sparksmith convert` takes them apart.",
        )
    unknown = subject.tensors[1]
    if unknown:
        yield Seen(
            value=_list(unknown),
            consequence='vLLM stops: "There is no module or parameter named ..."',
            remedy="Remove them, if the draft does without.",
        )


@check("weight-files", "error", "the folder holds the draft's weights and no others")
def weight_files(subject: Subject) -> Iterator[Seen]:
    """Without an index, vLLM loads every *.safetensors file of the folder as weights of the draft:
    an optimizer's state or a record of tensors beside model.safetensors ends the server with a name
    that it does not know.
    """
    if subject.stray:
        yield Seen(
            value=_list(subject.stray),
            consequence="vLLM reads their tensors as the draft's and refuses the first",
            remedy="Move them out of the folder.",
        )


@check("mask-token", "error", "the mask token is a word of the vocabulary that no text contains")
def mask_token(subject: Subject) -> Iterator[Seen]:
    """The slots behind the anchor hold the mask token. Public K3 drafts use four different ones.
    An id beyond the embedding is a device assertion in the middle of serving; the padding token or
    a word of the text was trained as something else.
    """
    mask = subject.flat.get("mask_token_id")
    if mask is None:
        yield Seen(
            value="mask_token_id is missing",
            consequence="the worker stops with a ValueError after the target is loaded",
            remedy="Write the id with which the draft was trained.",
        )
        return
    size = subject.number("vocab_size")
    if (
        not isinstance(mask, int)
        or isinstance(mask, bool)
        or (size is not None and not 0 <= mask < size)
    ):
        yield Seen(
            value=f"{mask} of a vocabulary of {size}",
            consequence="an index beyond the embedding: a device assertion while serving",
            remedy="Write the id with which the draft was trained.",
        )
        return
    nested = subject.nested("dflash_config").get("mask_token_id")
    if nested is not None and nested != mask:
        yield Seen(
            value=f"{mask}, and dflash_config says {nested}",
            consequence="engines differ in which of the two they take",
            remedy="Keep one.",
        )
    if subject.target is None:
        return
    for name, token in subject.target.special_tokens.items():
        if token == mask:
            yield Seen(
                value=f"{mask} is the target's {name} token",
                consequence="it means something else to the embedding, and occurs in text",
                remedy="Check the id with which the draft was trained: a reserved one.",
                level="warning",
            )
    if subject.target.words is not None and mask in subject.target.words:
        yield Seen(
            value=f"{mask} is an ordinary word of the target's tokenizer",
            consequence="masked slots look like text",
            remedy="Check the id with which the draft was trained: a reserved one.",
            level="warning",
        )


@check("block-size", "warning", "block_size says how many tokens a block was trained for")
def block_size(subject: Subject) -> Iterator[Seen]:
    """Without it the engine drafts as many tokens as it is told. A bidirectional block sees all its
    slots, so more of them than in training spoils every position, not only the last: a block of 5
    drafted 7 long fell from 2.74 to 1.31 tokens a step.
    """
    size = subject.flat.get("block_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        yield Seen(
            value=size,
            consequence="more may be drafted than was trained, and all positions suffer",
            remedy="Write the trained block size.",
        )


@check("anchor-form", "warning", "sample_from_anchor is written out")
def anchor_form(subject: Subject) -> Iterator[Seen]:
    """In one form the anchor's slot predicts the first drafted token, in the other (fill-in) it
    predicts nothing. The flat layouts default to the first, speculators to the second, and
    DeepSpec has no key. Read in the wrong form, drafts are off by one slot: under 1% acceptance.
    """
    if subject.values.get("sample_from_anchor") is None and not (
        subject.nested("dflash_config").get("sample_from_anchor") is not None
    ):
        default = "false" if subject.layout == "speculators" else "true"
        yield Seen(
            value="sample_from_anchor is missing",
            consequence=f"it is read as {default} in this layout, and as the opposite in another",
            remedy="Write true or false, as it was trained. `check --target` can tell which.",
        )


@check("rope-keys", "error", "rope_parameters holds rope_type and rope_theta")
def rope_keys(subject: Subject) -> Iterator[Seen]:
    """In the K3 layout a legacy `rope_scaling` sets the base to 10,000 without a word, whatever
    `rope_theta` says beside it; some runtimes read only `rope_scaling` and miss a YaRN under
    `rope_parameters`. Types without an original length end in KeyError.
    """
    rope = subject.flat.get("rope_parameters")
    if subject.flat.get("rope_scaling") is not None:
        yield Seen(
            value=f"rope_scaling {subject.flat['rope_scaling']}",
            consequence="in the K3 layout the base becomes 10,000, silently"
            if subject.latent
            else "engines differ in whether they read it",
            remedy="Write rope_parameters with rope_type and rope_theta instead.",
            level="error" if subject.latent else "warning",
        )
    if not isinstance(rope, dict) or not {"rope_type", "rope_theta"} <= rope.keys():
        yield Seen(
            value=rope,
            consequence="the base is a default: 10,000, 50,000 or 1,000,000, by the engine",
            remedy='Write {"rope_type": ..., "rope_theta": ...} as trained.',
            level="error" if subject.latent else "warning",
        )
    elif rope["rope_type"] != "default":
        missing = {"factor", "original_max_position_embeddings"} - rope.keys()
        if missing:
            yield Seen(
                value=f"{rope['rope_type']} without {_list(sorted(missing))}",
                consequence="vLLM stops with a KeyError",
                remedy="Write the values with which the draft was trained.",
            )


@check("rope-pairing", "error", "rotary pairs are the layout's")
def rope_pairing(subject: Subject) -> Iterator[Seen]:
    """Qwen3-style heads rotate dimension i with i + D/2, latent ones 2i with 2i + 1. An engine
    takes the pairing from the layout: a key that says otherwise describes a draft that it will
    misread, and acceptance collapses.
    """
    key, wanted = ("rope_interleave", True) if subject.latent else ("is_neox_style", True)
    value = subject.flat.get(key, wanted)
    if value != wanted:
        yield Seen(
            value=f"{key} {value}",
            consequence="vLLM's pairing for this layout is the other one"
            if subject.latent
            else "interleaved pairs: not those of a Qwen3 layer",
            remedy="Permute the projections' rows to the layout's pairing, and drop the key.",
        )


@check("yarn-length", "error", "YaRN's length covers max_position_embeddings")
def yarn_length(subject: Subject) -> Iterator[Seen]:
    """Under YaRN vLLM computes original length x factor rows of angles; positions beyond are read
    out of bounds. And where max_position_embeddings is below the served length, vLLM lowers the
    *target's* length to the draft's.
    """
    rope = subject.flat.get("rope_parameters")
    length = subject.number("max_position_embeddings")
    if not isinstance(rope, dict) or rope.get("rope_type", "default") == "default":
        return
    original, factor = rope.get("original_max_position_embeddings"), rope.get("factor")
    if is_positive(original) and is_positive(factor) and length and length > original * factor:
        yield Seen(
            value=f"{length} positions, and YaRN covers {original} x {factor:g}",
            consequence="angles beyond are read out of bounds",
            remedy=f"Write max_position_embeddings {original * factor:.0f}.",
        )
    served = subject.serve.number("max-model-len") if subject.serve else None
    served = served or (subject.target.max_length if subject.target and subject.serve else None)
    if length and served and length < served:
        yield Seen(
            value=f"{length} positions, served {served}",
            consequence=f"vLLM lowers the target's length to {length}",
            remedy=f"Serve with --max-model-len {length}, or train the draft for more.",
        )


@check("sizes", "error", "every size is written out, and rms_norm_eps is a float")
def sizes(subject: Subject) -> Iterator[Seen]:
    """The config classes are strict about types and silent about absence: a size left out becomes
    DeepSeek-V3's or Qwen3's (61 layers, a head size of 128), and `rms_norm_eps` as `1` or "1e-5"
    is a StrictDataclass error that names neither file nor draft.
    """
    keys = _SIZES + (_MLA_SIZES if subject.latent else _GQA_SIZES)
    missing = [key for key in keys if subject.flat.get(key) is None]
    if missing:
        yield Seen(
            value=f"{_list(missing)} missing",
            consequence="other models' sizes are used in their place",
            remedy="Write them out.",
        )
    eps = subject.flat.get("rms_norm_eps")
    if not isinstance(eps, float):
        yield Seen(
            value=f"rms_norm_eps {eps!r}",
            consequence="vLLM's configuration refuses it, or takes 1e-6",
            remedy="Write a JSON number with a point or an exponent, such as 1e-06.",
        )


@check("confidence-head", "error", "the confidence head is declared as it is stored")
def confidence_head(subject: Subject) -> Iterator[Seen]:
    """Declared without tensors, the K3 loader stops and the Qwen3 loader switches the head off, so
    adaptive verification schedules on guesses. Stored without being declared, it is dropped. The
    width must be H, or H + r with the Markov embedding.
    """
    shape = _shape(subject, "confidence_head.proj.weight")
    declared = bool(subject.flat.get("enable_confidence_head", False))
    if declared != (shape is not None):
        yield Seen(
            value=f"enable_confidence_head {str(declared).lower()}, tensors "
            f"{'there' if shape else 'missing'}",
            consequence="the head is dropped, or the load fails",
            remedy=f"Write {str(shape is not None).lower()}, or save the head's tensors.",
        )
        return
    width, rank = subject.number("hidden_size"), subject.number("markov_rank")
    if shape is None or len(shape) != 2 or width is None or rank is None:
        return
    with_markov = bool(subject.flat.get("confidence_head_with_markov", False))
    wanted = width + rank if with_markov else width
    if shape[1] != wanted:
        yield Seen(
            value=f"{shape[1]} inputs, confidence_head_with_markov {str(with_markov).lower()}",
            consequence="the load fails",
            remedy=f"Write confidence_head_with_markov {str(not with_markov).lower()}, if "
            "it was trained so.",
        )
    if _shape(subject, "confidence_head.proj.bias") is None:
        yield Seen(
            value="confidence_head.proj.bias is missing",
            consequence="vLLM needs it beside the weight",
            remedy="Store a zero bias.",
        )


@check("latent-options", "error", "latent attention has nothing that vLLM does not compute")
def latent_options(subject: Subject) -> Iterator[Seen]:
    """K3's own attention has no rotary part and an output gate; vLLM's draft has a rotary part and
    no gate, and refuses configs that ask otherwise. Without positions a block's masked slots are
    all the same, so such a draft cannot work anyway. The query's low rank is required.
    """
    if not subject.latent:
        return
    for key in ("mla_use_nope", "mla_use_output_gate", "mla_use_qk_norm", "dspark_bonus_anchor"):
        if subject.flat.get(key):
            yield Seen(
                value=f"{key} true",
                consequence='vLLM refuses it: "MLA DSpark does not support ..."',
                remedy="Train a draft without it.",
            )
    if subject.flat.get("q_lora_rank") is None:
        yield Seen(
            value="q_lora_rank is missing",
            consequence="vLLM's draft has no full-rank query",
            remedy="Train a draft with a low-rank query.",
        )
    if subject.flat.get("layer_types"):
        yield Seen(
            value=f"layer_types {subject.flat['layer_types']}",
            consequence="no window is applied; sliding layers only make the block causal",
            remedy="Remove it, and write is_causal.",
            level="warning",
        )
    for key in ("fc_norm", "aux_hidden_stream"):
        if subject.flat.get(key):
            yield Seen(
                value=f"{key} {subject.flat[key]}",
                consequence="vLLM ignores it",
                remedy="Make sure that the draft does without it, or serve it with its own engine.",
                level="warning",
            )


@check("latent-width", "warning", "a position's latent is 576 numbers wide")
def latent_width(subject: Subject) -> Iterator[Seen]:
    """Latent attention keeps kv_lora_rank + qk_rope_head_dim numbers a position. DeepSeek's are
    512 + 64, and several of vLLM's attention backends are written for 576 alone: they refuse
    another width when the draft is built, or are left out of the choice.
    """
    if not subject.latent:
        return
    rank, rotary = subject.number("kv_lora_rank"), subject.number("qk_rope_head_dim")
    if rank is not None and rotary is not None and rank + rotary != 576:
        yield Seen(
            value=f"{rank} + {rotary} = {rank + rotary}",
            consequence="several MLA backends refuse it, those of CPUs and Hopper among them",
            remedy="Train a draft of kv_lora_rank 512 and qk_rope_head_dim 64.",
        )


@check("activation", "error", "the feed-forward activation is silu")
def activation(subject: Subject) -> Iterator[Seen]:
    """K3 itself uses SiTU with beta 4. In a draft vLLM takes `situ` with beta 1, whatever
    `activation_situ_beta` says: it runs, and computes something else.
    """
    value = subject.flat.get("hidden_act", "silu")
    if value != "silu":
        yield Seen(
            value=value,
            consequence="vLLM computes it with other constants than it was trained with",
            remedy="Train a draft with silu.",
        )


@check("window", "error", "a sliding window says what it means")
def window(subject: Subject) -> Iterator[Seen]:
    """Layers of the type `sliding_attention` are causal inside the block unless is_causal says
    otherwise, and full ones are not: the same weights, another computation. And without
    use_sliding_window transformers forgets the window.
    """
    if subject.latent:
        return
    listed = subject.flat.get("layer_types")
    kinds = {str(kind) for kind in listed} if isinstance(listed, list) else set()
    if "sliding_attention" not in kinds:
        return
    if len(kinds) > 1:
        yield Seen(
            value=f"layer_types {sorted(kinds)}",
            consequence="some layers of a block are causal and others are not",
            remedy="Write is_causal.",
            level="warning",
        )
    layers = subject.nested("transformer_layer_config") or subject.values
    if subject.layout != "speculators" and not layers.get("use_sliding_window"):
        yield Seen(
            value="use_sliding_window is not true",
            consequence="transformers drops the window, and vLLM stops with a ValueError",
            remedy="Write use_sliding_window true.",
        )
    nested = subject.nested("dflash_config")
    if layers.get("is_causal") is None and nested.get("causal") is None:
        yield Seen(
            value="is_causal is missing",
            consequence="sliding layers make the block causal",
            remedy="Write is_causal as it was trained.",
            level="warning",
        )


@check("reduced-vocabulary", "error", "a reduced vocabulary has its map and its rows of the head")
def reduced_vocabulary(subject: Subject) -> Iterator[Seen]:
    """`d2t` holds offsets: target id = draft id + d2t[draft id]. Stored as ids, every word moves,
    and drafts look sensible while nothing is accepted. The head must ship the draft's own rows: a
    checkpoint of training does without them, and `sparksmith export` adds them for serving. The
    K3 layout knows no reduced vocabulary.
    """
    size, own = subject.number("vocab_size"), subject.number("draft_vocab_size")
    if size is None or own is None or own == size:
        return
    if subject.latent:
        yield Seen(
            value=f"draft_vocab_size {own} of {size}",
            consequence="vLLM refuses it",
            remedy="Train over the whole vocabulary.",
        )
        return
    missing = [name for name in (OFFSETS, HEAD) if name not in _found(subject)]
    if missing == [HEAD]:
        yield Seen(
            value="a training checkpoint: the head's rows are not in it",
            consequence="vLLM refuses it; everything here takes them from the target",
            remedy="Serve what `sparksmith export` makes of it, which adds the rows.",
            level="error" if subject.serve is not None else "note",
        )
    elif missing:
        yield Seen(
            value=f"{_list(missing)} missing",
            consequence="vLLM refuses it, and nothing says which words the draft knows",
            remedy="Save the draft again, with its map.",
        )
    if subject.offsets is not None:
        try:
            target_ids_of(torch.tensor(subject.offsets), size)
        except UserError as error:
            yield Seen(
                value=f"d2t {error.problem}",
                consequence="drafted words are other words of the target",
                remedy=error.remedy,
            )


@check("vocabulary-map", "error", "the vocabulary's map is the one that the draft was trained with")
def vocabulary_map(subject: Subject) -> Iterator[Seen]:
    """A map of the same size with other words is accepted by every loader, and points each word
    somewhere else. The manifest holds the hash of the one in training.
    """
    manifest = subject.manifest
    if manifest is None or manifest.vocabulary_sha256 is None or subject.offsets is None:
        return
    offsets = torch.tensor(subject.offsets)
    if vocabulary_hash(offsets + torch.arange(len(offsets))) != manifest.vocabulary_sha256:
        yield Seen(
            value="d2t is not the one of sparksmith.json",
            consequence="drafted words are other words of the target",
            remedy="Put the files of one draft together.",
        )


@check("aux-stream", "error", "the tapped stream is stated and is the served one")
def aux_stream(subject: Subject) -> Iterator[Seen]:
    """In K3 a layer's output can be the running prefix sum or the mixture that the next layer
    reads: same shape, same type, other numbers. vLLM takes the prefix sum unless
    VLLM_KIMI_K3_AUX_ATTN_RES_STREAM=1, and no config.json says which a draft was trained on. The
    wrong one has cost a draft twelve times its acceptance, silently.
    """
    is_k3 = subject.target is not None and subject.target.is_k3
    if not is_k3 and not subject.latent:
        return
    manifest = subject.manifest
    if manifest is None or "taps.stream" in manifest.assumed or manifest.stream == "residual":
        yield Seen(
            value="not stated",
            consequence="the engine's default may be the other one: acceptance near chance",
            remedy="Say it in sparksmith.json, or let `check --target` find out.",
            level="warning",
        )
        return
    if subject.serve is None:
        return
    served = subject.serve.environment.get("VLLM_KIMI_K3_AUX_ATTN_RES_STREAM", "0")
    wanted = "1" if manifest.stream == "attn_res_mixture" else "0"
    if (served not in ("0", "")) != (wanted == "1"):
        yield Seen(
            value=f"trained on {manifest.stream}, VLLM_KIMI_K3_AUX_ATTN_RES_STREAM={served}",
            consequence="the draft meets other features, and acceptance is near chance",
            remedy=f"Serve with VLLM_KIMI_K3_AUX_ATTN_RES_STREAM={wanted}.",
        )


@check("last-block-taps", "note", "K3's taps see whole blocks of layers")
def last_block_taps(subject: Subject) -> Iterator[Seen]:
    """K3's prefix sum restarts every 12 layers: taps 11, 23, 35, 47, 59, 71 and 83 see whole
    blocks. Taps in the last block (84 on) see the sum of a few layers only.
    """
    if subject.target is None or not subject.target.is_k3 or subject.target.num_layers != 93:
        return
    if subject.manifest and subject.manifest.stream == "attn_res_mixture":
        return
    short = [tap for tap in subject.tap_numbers if tap % 12 < 4 and tap > 11]
    if short:
        yield Seen(
            value=f"taps {short}",
            consequence="their prefix sums hold one to four layers",
            remedy="When training the next draft, try 11, 23, 47, 71, 83.",
        )


@check("manifest", "error", "sparksmith.json belongs to the draft beside it")
def manifest_fits(subject: Subject) -> Iterator[Seen]:
    """A manifest copied from another draft says the wrong taps, stream or vocabulary with
    authority. Whatever config.json says too must be the same in both.
    """
    manifest = subject.manifest
    if manifest is None:
        return
    try:
        config = DSparkConfig.from_json_dict(subject.flat)
    except UserError:
        return
    own = Manifest.of(config, None)
    for name in ("taps", "mask_token_id", "block_size", "sample_from_anchor", "is_causal", "rope"):
        if getattr(manifest, name) != getattr(own, name):
            yield Seen(
                value=f"{name} {getattr(manifest, name)}, in config.json {getattr(own, name)}",
                consequence="one of the two is wrong, and tools differ in which they believe",
                remedy="Put the files of one draft together, or delete the manifest.",
            )


@check("trained-for", "warning", "the draft was trained for this target and this text")
def trained_for(subject: Subject) -> Iterator[Seen]:
    """A target that was fine-tuned, another revision, another tokenizer or chat template: the
    shapes fit, and acceptance is lower than it was. A raw prompt in place of the chat template
    brought a K3 draft from 6.00 to 2.40 tokens a step.
    """
    manifest, target = subject.manifest, subject.target
    if manifest is None or target is None:
        return
    for what, known, seen in (
        ("tokenizer", manifest.target.tokenizer_sha256, target.tokenizer_sha256),
        ("chat template", manifest.target.chat_template_sha256, target.chat_template_sha256),
        ("revision", manifest.target.revision, target.revision),
    ):
        if known and seen and known != seen:
            yield Seen(
                value=f"another {what}: {seen[:12]} in place of {known[:12]}",
                consequence="the draft meets text or states that it did not learn",
                remedy="Measure it with `sparksmith eval` before serving, or fine-tune it.",
            )


@check("trained-length", "warning", "the draft was trained on texts as long as those served")
def trained_length(subject: Subject) -> Iterator[Seen]:
    """Positions beyond training are extrapolated. A K3 draft that accepted 3.8 tokens at 32,000
    positions accepted exactly none at 131,072, and nothing in the log says why.
    """
    manifest = subject.manifest
    trained = manifest.trained_length if manifest else None
    served = subject.serve.number("max-model-len") if subject.serve else None
    if trained and served and served > 4 * trained:
        yield Seen(
            value=f"trained on up to {trained} tokens, served up to {served}",
            consequence="acceptance may fall to nothing at long contexts",
            remedy="Measure acceptance at the served length, or train on longer texts.",
        )


@check("dtypes", "warning", "weights are stored in one floating-point type")
def dtypes(subject: Subject) -> Iterator[Seen]:
    """A quantised draft is loaded without the check for missing weights, and a draft beside a
    quantised target may inherit its quantisation: layers are then skipped, or multiplied in
    another type, and acceptance is 0.
    """
    floating = {d for d in subject.dtypes if d not in ("I64", "I32", "BOOL", "U8")}
    quantised = "quantization_config" in subject.values or any(
        d.startswith(("F8", "F4", "I8", "U8")) for d in subject.dtypes
    )
    if quantised:
        yield Seen(
            value=_list(sorted(subject.dtypes)),
            consequence="vLLM does not look for missing weights in a quantised draft",
            remedy="Check the draft in bfloat16 first, and compare its acceptance.",
        )
    elif len(floating) > 1:
        yield Seen(
            value=_list(sorted(floating)),
            consequence="some tensors are converted on load",
            remedy="Store all in one type.",
        )


@check("quantised-excludes", "error", "a quantised K3 draft names its exempt layers as vLLM does")
def quantised_excludes(subject: Subject) -> Iterator[Seen]:
    """vLLM numbers the layers of a K3 draft behind the target's: layer 0 is `layers.93`. A
    ModelOpt checkpoint that exempts `layers.0...` by the draft's own number exempts nothing, and
    the layer's weights are taken for quantised ones.
    """
    quantised = subject.values.get("quantization_config")
    if not subject.latent or not isinstance(quantised, dict):
        return
    names = quantised.get("exclude_modules", quantised.get("ignore"))
    depth, own = subject.number("num_hidden_layers"), []
    for name in names if isinstance(names, list) else []:
        found = re.search(r"\blayers\.(\d+)\b", str(name))
        if found and depth is not None and int(found.group(1)) < depth:
            own.append(str(name))
    if own:
        first = subject.target.num_layers if subject.target else 93
        yield Seen(
            value=_list(own),
            consequence="vLLM exempts nothing, and reads these weights as quantised ones",
            remedy=f"Number the draft's layers from {first} on.",
        )


def _found(subject: Subject) -> dict[str, Piece]:
    return subject.tensors[0]


def _shape(subject: Subject, name: str) -> tuple[int, ...] | None:
    """The shape of one of the draft's own tensors, if it is there."""
    # By name alone: config.json may deny a tensor that is there.
    return next((shape for file, shape in subject.shapes.items() if own_name(file) == name), None)


def _list(names: Iterable[str]) -> str:
    """The first few of many names."""
    found = list(names)
    return ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
