"""A target without its layers: embedding, final norm and head, which fit where the target does not.

What a server's states, or features on disk, lack to become the target's distribution.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedTokenizerBase

from sparksmith.draft.errors import UserError
from sparksmith.verify.head_tensors import read_head_tensors
from sparksmith.verify.loading import read_config, read_dtype, read_tokenizer
from sparksmith.verify.target import check_taps

# Their logits are more than the head's product, or their head takes more than the norm's output.
_SCALES = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")
# Gemma's norm weights are stored as what is added to 1.
_OFFSET_NORMS = ("gemma", "gemma2", "gemma3", "gemma3_text")
_K3 = ("kimi_k3", "k3_mini")


@dataclass(frozen=True, kw_only=True)
class TargetEnds:
    """Embedding and head [V, H] and the final norm's weight [H], with what the configuration says.

    It stands where a `TransformersTarget` does as long as nothing has to pass the layers.
    """

    config: Any
    taps: tuple[int, ...]
    stream: str
    embed_weight: Tensor
    norm_weight: Tensor
    head_weight: Tensor
    norm_epsilon: float
    eos_token_ids: frozenset[int]
    bytes_read: int = 0
    """Of the target's weights; the layers' stay where they are."""

    @property
    def num_layers(self) -> int:
        return int(self.config.num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        return int(self.head_weight.shape[0])

    @property
    def hidden_size(self) -> int:
        return int(self.head_weight.shape[1])

    @property
    def max_length(self) -> int:
        """Positions the model was made for: prompt and response together."""
        return int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)

    @property
    def dtype(self) -> torch.dtype:
        return self.head_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.head_weight.device

    def cast(self, dtype: torch.dtype) -> "TargetEnds":
        """The same in another type."""
        embed = self.embed_weight.to(dtype)
        tied = self.head_weight is self.embed_weight
        return replace(
            self,
            embed_weight=embed,
            norm_weight=self.norm_weight.to(dtype),
            head_weight=embed if tied else self.head_weight.to(dtype),
        )

    def head_input(self, states: Tensor) -> Tensor:
        """The last layer's output [..., H] through the final norm, in float32 inside."""
        precise = states.float()
        scale = torch.rsqrt(precise.pow(2).mean(-1, keepdim=True) + self.norm_epsilon)
        return self.norm_weight * (precise * scale).to(self.norm_weight.dtype)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., V] of the head's input."""
        return hidden.to(self.dtype) @ self.head_weight.T


def load_target_ends(
    name_or_path: str | Path,
    *,
    dtype: str = "auto",
    taps: Sequence[int] = (),
    stream: str | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
) -> tuple[TargetEnds, PreTrainedTokenizerBase]:
    """Read the ends of a target and its tokenizer; the files of its layers are not opened.

    Raises UserError as `load_target` and `read_head_tensors` do, and for a target whose logits or
    final norm are of a kind that is not computed here.
    """
    name = str(name_or_path)
    torch_dtype = read_dtype(dtype, device)
    config = read_config(name, trust_remote_code)
    text = config.get_text_config(decoder=True)
    check_taps(taps, int(text.num_hidden_layers))
    epsilon = getattr(text, "rms_norm_eps", None)
    scales = [key for key in _SCALES if getattr(text, key, None) not in (None, 1, 1.0)]
    if epsilon is None or scales:
        what = f"has {scales[0]}" if scales else "has no rms_norm_eps"
        raise UserError(
            "target",
            name,
            f"{what}, so its logits are not the head's product with an RMS norm's output",
            "Capture in this process, where the model's own code runs.",
        )
    found = read_head_tensors(name)
    embed = found.embed.to(device, torch_dtype)
    norm = found.norm.float() + 1 if text.model_type in _OFFSET_NORMS else found.norm
    ends = TargetEnds(
        config=text,
        taps=tuple(taps),
        stream=_stream(str(config.model_type), stream),
        embed_weight=embed,
        norm_weight=norm.to(device, torch_dtype),
        head_weight=embed if found.tied else found.head.to(device, torch_dtype),
        norm_epsilon=float(epsilon),
        eos_token_ids=_eos_token_ids(name, text),
        bytes_read=found.bytes_read,
    )
    return ends, read_tokenizer(name, trust_remote_code)


def stream_of(name: str, stream: str | None, trust_remote_code: bool = False) -> str:
    """The stream that `stream` means for a target, None being its default; UserError for one that
    it does not have."""
    return _stream(str(read_config(name, trust_remote_code).model_type), stream)


def _stream(model_type: str, stream: str | None) -> str:
    streams = ("prefix_sum", "attn_res_mixture") if model_type in _K3 else ("residual",)
    if stream is not None and stream not in streams:
        raise UserError(
            "stream", stream, f"is not one that {model_type} has", f"Use {' or '.join(streams)}."
        )
    return stream or streams[0]


def _eos_token_ids(name: str, config: Any) -> frozenset[int]:
    """The tokens that end a text: the generation settings' where there are any."""
    ids = None
    with suppress(OSError, ValueError):  # a checkpoint need not have them
        ids = GenerationConfig.from_pretrained(name).eos_token_id
    if ids is None:
        ids = getattr(config, "eos_token_id", None)
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
