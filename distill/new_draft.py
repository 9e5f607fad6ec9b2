"""A new draft for a target: sizes from the target's configuration, words from its outputs."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sparksmith.distill.generation import Response
from sparksmith.draft.config import DSparkConfig, MLASizes
from sparksmith.draft.errors import UserError
from sparksmith.draft.heads import MarkovHeadType
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.presets import preset
from sparksmith.draft.vocabulary import frequent_words
from sparksmith.verify.target import TransformersTarget
from sparksmith.verify.target_ends import TargetEnds


@dataclass(frozen=True, kw_only=True)
class DraftShape:
    """What may be chosen about a draft; the rest follows from its target.

    `block_size` is the most tokens drafted in a step. `draft_vocab_size` 0 keeps the target's
    whole vocabulary. `mask_token_id` None picks a reserved id that no text contains. The features
    reach the draft through its keys and values alone, so by default those are wider than the
    target's: as many key/value heads as query heads (`num_kv_heads`), each of twice the target's
    size (`head_dim`). `mla` gives latent attention instead, whose layout has neither a reduced
    vocabulary (`draft_vocab_size` must be 0) nor another Markov head than the vanilla one.
    """

    num_layers: int = 2
    block_size: int = 5
    markov_rank: int = 128
    markov_head_type: MarkovHeadType = "vanilla"
    draft_vocab_size: int = 8192
    mla: bool = False
    num_taps: int = 5
    head_dim: int | None = None
    num_kv_heads: int | None = None
    is_causal: bool = False
    mask_token_id: int | None = None
    preset: str | None = None
    """A configuration by its name, in the place of all of the above."""


def default_taps(num_layers: int, num_taps: int) -> tuple[int, ...]:
    """Layers spread evenly over the depth, the deepest being the third from the end.

    For 36 layers and 5 taps: 5, 12, 19, 26, 33. The last layers are left out: they turn features
    into words, and the very last is never tapped.
    """
    deepest = num_layers - 3
    if num_taps < 1 or num_taps > deepest + 1:
        raise UserError(
            "num_taps",
            num_taps,
            f"does not fit a target of {num_layers} layers",
            f"Use 1 to {max(1, deepest + 1)}, or give the layers themselves with --taps.",
        )
    stride = max(1, num_layers // num_taps)
    stride = min(stride, deepest // max(1, num_taps - 1)) if num_taps > 1 else stride
    return tuple(deepest - stride * back for back in reversed(range(num_taps)))


def word_counts(responses: Iterable[Response], vocab_size: int) -> Tensor:
    """How often each word occurs in the responses; [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.long)
    for response in responses:
        counts += torch.bincount(torch.tensor(response.token_ids), minlength=vocab_size)
    return counts


def reserved_token(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, responses: Sequence[Response]
) -> int:
    """An id for the mask: beyond the tokenizer's words, or a special token that no text contains.

    Raises UserError when there is none.
    """
    used = torch.zeros(vocab_size, dtype=torch.bool)
    for response in responses:
        used[torch.tensor(response.prompt_ids + response.token_ids)] = True
    unused = [token for token in tokenizer.all_special_ids if token < vocab_size]
    unused += [t for t in tokenizer.added_tokens_decoder if t < vocab_size]
    meaningful = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    meaningful.add(tokenizer.unk_token_id)
    candidates = [*range(len(tokenizer), vocab_size), *sorted(set(unused) - meaningful)]
    for token in candidates:
        if not used[token]:
            return int(token)
    raise UserError(
        "mask_token_id", None, "cannot be chosen: no reserved id is unused", "Give --mask-token-id."
    )


def _of_preset(target: TransformersTarget | TargetEnds, name: str) -> DSparkDraft:
    config = preset(name)
    sizes = ("hidden_size", target.hidden_size), ("vocab_size", target.vocab_size)
    for key, size in sizes:
        if getattr(config, key) != size:
            raise UserError(
                "--preset",
                name,
                f"is for a target whose {key} is {getattr(config, key)}, and this one's is {size}",
                "Use another preset, or none: the draft's sizes then follow from the target's.",
            )
    draft = DSparkDraft(config).to(target.device)
    draft.bind(target.embed_weight, target.head_weight)
    return draft


def latent_sizes(hidden_size: int, head_dim: int) -> MLASizes:
    """Sizes of latent attention for a small target, whose heads have `head_dim` dimensions.

    The features reach the draft through the key/value latent alone: it is as wide as the draft.
    """
    return MLASizes(
        q_lora_rank=max(1, hidden_size // 2),
        kv_lora_rank=hidden_size,
        qk_nope_head_dim=head_dim,
        qk_rope_head_dim=2 * max(1, head_dim // 4),
        v_head_dim=head_dim,
    )


def new_draft(
    target: TransformersTarget | TargetEnds,
    shape: DraftShape,
    mask_token_id: int,
    counts: Tensor,
) -> DSparkDraft:
    """A draft of the target's width, on its device, bound to its embedding and head.

    `counts` [V] choose the reduced vocabulary; the target's stop tokens are always in it. Raises
    UserError for a shape that no layout has.
    """
    if shape.preset is not None:
        return _of_preset(target, shape.preset)
    config = target.config
    heads = int(config.num_attention_heads)
    vocab_size = target.vocab_size
    if shape.mla and shape.draft_vocab_size:
        raise UserError(
            "--draft-vocab",
            shape.draft_vocab_size,
            "is a reduced vocabulary, which the layout of latent attention does not know",
            "Use 0, the whole vocabulary.",
        )
    target_ids = None
    if 0 < shape.draft_vocab_size < vocab_size:
        target_ids = frequent_words(counts, shape.draft_vocab_size, target.eos_token_ids)
    hidden = target.hidden_size
    target_head_dim = int(getattr(config, "head_dim", None) or hidden // heads)
    mla = latent_sizes(hidden, target_head_dim) if shape.mla else None
    kv_heads = heads if shape.num_kv_heads is None or mla else shape.num_kv_heads
    head_dim = 2 * target_head_dim if shape.head_dim is None else shape.head_dim
    if mla is not None:
        head_dim = mla.qk_nope_head_dim + mla.qk_rope_head_dim
    draft_config = DSparkConfig(
        hidden_size=hidden,
        intermediate_size=int(getattr(config, "intermediate_size", None) or 4 * hidden),
        num_hidden_layers=shape.num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        mla=mla,
        vocab_size=vocab_size,
        draft_vocab_size=vocab_size if target_ids is None else len(target_ids),
        rms_norm_eps=float(getattr(config, "rms_norm_eps", 1e-6)),
        rope_theta=_rope_theta(config),
        max_position_embeddings=target.max_length,
        target_hidden_size=hidden,
        target_layer_ids=target.taps,
        mask_token_id=mask_token_id,
        block_size=shape.block_size,
        markov_rank=shape.markov_rank,
        markov_head_type=shape.markov_head_type,
        is_causal=shape.is_causal,
    )
    draft = DSparkDraft(draft_config, target_ids).to(target.device)
    draft.bind(target.embed_weight, target.head_weight)
    return draft


def _rope_theta(config: object) -> float:
    parameters = getattr(config, "rope_parameters", None) or {}
    return float(parameters.get("rope_theta") or getattr(config, "rope_theta", None) or 10_000.0)
