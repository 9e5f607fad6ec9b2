"""vLLM's own K3 draft, built, loaded and run without a GPU.

vLLM's code computes the fusion of the taps, the latents of the context, every projection, norm,
rotation, feed-forward layer and head. What exists for GPUs alone is stood in for: writing the
latents to the paged cache (they are kept as they come), and the paged attention kernel (its
formula, written out in `_attention`).
"""

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any

import numpy as np
import torch
import vllm_engine
from torch import Tensor

Arrays = dict[str, np.ndarray]
"""Between processes: tensors would go by a descriptor that ends with its process."""


def loaded(target: Path, speculative: Mapping[str, Any]) -> Arrays:
    """The parameters of the draft that vLLM builds and loads, and its `rotary` table."""
    model = load(target, speculative)
    made = {name: p.detach().numpy() for name, p in model.named_parameters()}
    rotary = model.model.layers[0].self_attn.rotary_emb
    return {**made, "rotary": rotary.cos_sin_cache.detach().numpy()}


def attempted_loads(
    target: Path, pairs: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]
) -> list[bool | str]:
    """For each pair of a sound draft and a broken one: whether vLLM loads the same parameters, or
    what it says in refusing the broken one."""
    made: list[bool | str] = []
    for sound, broken in pairs:
        wanted = loaded(target, sound)
        try:
            found = loaded(target, broken)
        except Exception as error:
            made.append(f"{type(error).__name__}: {error}")
        else:
            same = wanted.keys() == found.keys()
            made.append(same and all(np.array_equal(wanted[n], found[n]) for n in wanted))
    return made


def computed(
    target: Path,
    speculative: Mapping[str, Any],
    given: Arrays,
) -> Arrays:
    """All that vLLM's draft computes of one `block` [K] after a context of `features` [n, m * Ht].

    `embed` and `head` [V, H] are the target's. The biases and confidences follow the block's own
    tokens.
    """
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.workspace import init_workspace_manager

    embed, head, features, block = (
        torch.from_numpy(given[name]) for name in ("embed", "head", "features", "block")
    )
    length = len(features)
    with torch.inference_mode(), set_current_vllm_config(_config(target, speculative)):
        model = load(target, speculative)
        model.model.embed_tokens = lambda tokens: torch.nn.functional.embedding(tokens, embed)
        init_workspace_manager(torch.device("cpu"))
        context = model.combine_hidden_states(features)
        latents, keys = _context_latents(model, context)
        for layer, latent, key in zip(model.model.layers, latents, keys, strict=True):
            layer.self_attn.context = latent, key
            layer.self_attn._attention = MethodType(_attention, layer.self_attn)
        hidden = model(block, length + torch.arange(len(block)))
        embedded = model.markov_embed(block)
        scale = model.logits_processor.scale
        made = {
            "context": context,
            "latents": latents,
            "keys": keys,
            "hidden": hidden,
            "base": scale * hidden @ head.T,
            "markov": model.markov_bias(embedded),
            "confidence": model.compute_confidence(hidden, embedded),
        }
        return {name: tensor.numpy() for name, tensor in made.items()}


def load(target: Path, speculative: Mapping[str, Any]) -> Any:
    import vllm.model_executor.layers.utils as layer_utils
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    # The loader empties an accelerator's cache, and here is none.
    torch.accelerator.empty_cache = lambda: None
    # Linear layers for CPUs pack their weights and drop them, of which the absorbed form and the
    # tests want to read some.
    packed = layer_utils.dispatch_cpu_unquantized_gemm
    layer_utils.dispatch_cpu_unquantized_gemm = lambda layer, **_: packed(
        layer, remove_weight=False
    )
    config = _config(target, speculative)
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            rendezvous = Path(tempfile.mkdtemp()) / "rendezvous"
            init_distributed_environment(1, 0, rendezvous.as_uri(), 0, "gloo")
            initialize_model_parallel()
        return get_model(
            vllm_config=config, model_config=config.speculative_config.draft_model_config
        )


def _config(target: Path, speculative: Mapping[str, Any]) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    options = {"skip_tokenizer_init": True, **vllm_engine.ENGINE}
    arguments = EngineArgs(model=str(target), speculative_config=dict(speculative), **options)
    return arguments.create_engine_config()


def _context_latents(model: Any, context: Tensor) -> tuple[Tensor, Tensor]:
    """What vLLM would write to the cache: normed latents [L, n, rank], rotated keys [L, n, r]."""
    import vllm._custom_ops as ops

    kept: list[Tensor] = []

    def keep(latents: Tensor, keys: Tensor, *_cache: object) -> None:
        kept.extend((latents.clone(), keys.reshape(*latents.shape[:2], -1).clone()))

    ops.concat_and_cache_mla_grouped = keep
    torch.cuda.is_current_stream_capturing = lambda: False
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.kv_cache = torch.zeros(1, len(context), attention.head_size)
    slots = torch.arange(len(context))
    model.precompute_and_store_context_kv(context, slots, slots)
    latents, keys = kept
    return latents, keys


def _attention(
    self: Any, positions: Tensor, q: Tensor, latent: Tensor, key: Tensor, out: Tensor
) -> None:
    """Latent attention of a bidirectional block on itself and all of the context:
    softmax(scale * (q_nope W_UK . latent + rot(q_pe) . rot(k_pe))) latent W_UV."""
    import vllm._custom_ops as ops

    nope, rotated = q.split([self.qk_nope_head_dim, self.qk_rope_head_dim], -1)
    rotated, key = rotated.contiguous(), key.contiguous()
    for part in (rotated, key):
        flat = part.view(len(positions), -1)
        rotary = self.rotary_emb
        ops.rotary_embedding(
            positions, flat, None, rotary.head_size, rotary.cos_sin_cache, rotary.is_neox_style
        )
    before, before_keys = self.context
    latents = torch.cat((before, latent))
    keys = torch.cat((before_keys, key.squeeze(1)))
    absorbed = torch.einsum("tnp,npl->tnl", nope, self.W_UK_T)
    scores = torch.einsum("tnl,sl->tns", absorbed, latents)
    scores = scores + torch.einsum("tnr,sr->tns", rotated, keys)
    mixed = torch.einsum("tns,sl->tnl", (self.scale * scores).softmax(-1), latents)
    out.copy_(torch.einsum("tnl,nlv->tnv", mixed, self.W_UV).flatten(1))
