"""Start the draft from the target: its last layers, and the tap next to them as the context.

With the same shapes, the target's last layers already turn features of this kind into words; a
draft that starts there is several thousand steps ahead of a random one.
"""

import torch
from torch import nn

from sparksmith.draft.model import DSparkDraft
from sparksmith.verify.target import TransformersTarget, decoder_layers


@torch.no_grad()
def start_from_target(draft: DSparkDraft, target: TransformersTarget) -> bool:
    """Copy the target's last layers, norm and deepest tap into the draft, where shapes allow.

    Returns whether the layers were copied; a draft of other shapes stays as it was initialised.
    """
    layers = list(decoder_layers(target.model))[-len(draft.layers) :]
    sources = [dict(layer.named_parameters()) for layer in layers]
    for layer, source in zip(draft.layers, sources, strict=True):
        for name, parameter in layer.named_parameters():
            found = source.get(name)
            # Llama has no query and key norms: the draft's stay at one.
            missing_is_fine = name.endswith(("q_norm.weight", "k_norm.weight"))
            if found is None and not missing_is_fine:
                return False
            if found is not None and found.shape != parameter.shape:
                return False
    for layer, source in zip(draft.layers, sources, strict=True):
        for name, parameter in layer.named_parameters():
            if name in source:
                parameter.copy_(source[name])
    _copy_norm(draft, target)
    # The context as the target's first copied layer sees it: the deepest tap, normed.
    width = draft.config.target_hidden_size
    if draft.config.hidden_size == width:
        nn.init.normal_(draft.fc.weight, std=0.002)
        draft.fc.weight[:, -width:] += torch.eye(width)
        draft.hidden_norm.weight.copy_(sources[0]["input_layernorm.weight"])
    return True


def _copy_norm(draft: DSparkDraft, target: TransformersTarget) -> None:
    decoder = target.model.get_decoder()
    for name in ("norm", "final_layernorm", "ln_f"):
        norm = getattr(decoder, name, None)
        if norm is not None and getattr(norm, "weight", None) is not None:
            if norm.weight.shape == draft.norm.weight.shape:
                draft.norm.weight.copy_(norm.weight)
            return
