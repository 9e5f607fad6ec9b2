"""Start the draft from the target: its last layers, and the tap next to them as the context.

With the same shapes, the target's last layers already turn features of this kind into words. The
draft's own input is another one, so the start is no better than a random one at first; what it is
worth at a given learning rate is measured in benchmarks/README.md.
"""

import torch
from torch import nn
from torch.nn import functional

from sparksmith.draft.model import DSparkDraft
from sparksmith.verify.target import TransformersTarget, decoder_layers

_HEAD_NORMS = ("q_norm.weight", "k_norm.weight")


@torch.no_grad()
def start_from_target(draft: DSparkDraft, target: TransformersTarget) -> bool:
    """Copy the target's last layers, norm and deepest tap into the draft, where shapes allow.

    Returns whether the layers were copied; a draft of other shapes stays as it was initialised.
    """
    layers = list(decoder_layers(target.model))[-len(draft.layers) :]
    eps = draft.config.rms_norm_eps
    if len(layers) != len(draft.layers):
        return False
    pairs = list(zip(draft.layers, layers, strict=True))
    if not all(_fits(own, theirs, eps) for own, theirs in pairs):
        return False
    for own, theirs in pairs:
        source = dict(theirs.named_parameters())
        for name, parameter in own.named_parameters():
            if name in source:
                parameter.copy_(source[name])
    norm = _final_norm(target)
    if norm is not None and _is_plain_norm(norm, draft.config.hidden_size, eps):
        draft.norm.weight.copy_(norm.get_parameter("weight"))
    # The context as the target's first copied layer sees it: the deepest tap, normed.
    width = draft.config.target_hidden_size
    if draft.config.hidden_size == width:
        nn.init.normal_(draft.fc.weight, std=0.002)
        draft.fc.weight[:, -width:] += torch.eye(width).to(draft.fc.weight)
        draft.hidden_norm.weight.copy_(layers[0].get_parameter("input_layernorm.weight"))
    return True


def _fits(own: nn.Module, theirs: nn.Module, eps: float) -> bool:
    """Whether a target layer is one of the draft's: the same tensors, up to what is ignored."""
    wanted = {name: p.shape for name, p in own.named_parameters()}
    found = {name: p.shape for name, p in theirs.named_parameters()}
    # Llama has no query and key norms: the draft's stay at one. Qwen2's biases stay behind.
    missing = {name for name in wanted.keys() - found.keys() if not name.endswith(_HEAD_NORMS)}
    unknown = {name for name in found.keys() - wanted.keys() if not name.endswith(".bias")}
    if missing or unknown or any(found.get(name, s) != s for name, s in wanted.items()):
        return False
    norms = [m for name, m in theirs.named_modules() if name.endswith("layernorm")]
    width = wanted["input_layernorm.weight"][0]
    return all(_is_plain_norm(norm, width, eps) for norm in norms)


def _final_norm(target: TransformersTarget) -> nn.Module | None:
    decoder = target.model.get_decoder()
    for name in ("norm", "final_layernorm", "ln_f"):
        norm = getattr(decoder, name, None)
        if isinstance(norm, nn.Module):
            return norm
    return None


def _is_plain_norm(norm: nn.Module, width: int, eps: float) -> bool:
    """Whether it is the draft's RMSNorm, tried on a vector: Gemma's weights are offsets from 1."""
    weight = dict(norm.named_parameters()).get("weight")
    if weight is None or weight.shape != (width,):
        return False
    probe = torch.linspace(-1.0, 2.0, width).to(weight)
    wanted = functional.rms_norm(probe, weight.shape, weight, eps).float()
    found = norm(probe[None])[0].float()
    return bool((found - wanted).abs().max() <= 0.02 * wanted.abs().max() + 1e-6)
