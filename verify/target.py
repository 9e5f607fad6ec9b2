"""The target in this process: any transformers causal language model, run for one user's stream.

It hands out what speculative decoding needs of a target pass and nothing else: logits at the last
positions, and the outputs of the tapped layers (tap i = output of 0-based layer i, before any
final norm).
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from sparksmith.draft.errors import UserError
from sparksmith.verify.caches import RewindingCache, cache_argument

# Kept tokens are run again together with the next block until there are this many of them: a few
# more tokens in a pass cost less than a pass of their own.
_MAX_PENDING = 16


@dataclass(frozen=True, kw_only=True)
class TargetPass:
    """What one pass over n tokens returned: logits [num_logits, V] of the last positions, in the
    target's dtype, and features [n, taps * H] (taps concatenated in ascending order)."""

    logits: Tensor
    features: Tensor | None


def decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    """The stack of decoder layers of a causal language model.

    Raises UserError when the model has no single stack of `num_hidden_layers` layers.
    """
    count = model.config.get_text_config(decoder=True).num_hidden_layers
    stacks = [
        module
        for name, module in model.get_decoder().named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module) == count
        and name.rsplit(".", 1)[-1] in ("layers", "h", "blocks")
    ]
    if len(stacks) != 1:
        raise UserError(
            "target",
            type(model).__name__,
            f"has {len(stacks)} stacks of {count} decoder layers, so its taps are not defined",
            "Use a decoder-only causal language model.",
        )
    return stacks[0]


def streams_of(model: PreTrainedModel) -> tuple[str, ...]:
    """What "the output of a layer" can mean in this model, the engines' default first."""
    streams: tuple[str, ...] = getattr(model.get_decoder(), "streams", ("residual",))
    return streams


def tap_modules(model: PreTrainedModel, stream: str | None) -> tuple[str, Sequence[nn.Module]]:
    """The stream, by default the model's first, and for each layer the module whose output it is.

    Raises UserError for a stream that the model does not have.
    """
    streams = streams_of(model)
    chosen = streams[0] if stream is None else stream
    if chosen not in streams:
        raise UserError(
            "stream",
            chosen,
            f"is not one that {type(model).__name__} has",
            f"Use {' or '.join(streams)}.",
        )
    if streams == ("residual",):
        return chosen, list(decoder_layers(model))
    return chosen, model.get_decoder().tap_modules(chosen)


class TapRecorder:
    """Keeps the outputs of some layers of the last pass, and no others' hidden states."""

    def __init__(self, layers: Sequence[nn.Module], taps: Sequence[int]) -> None:
        self.taps = tuple(taps)
        self._outputs: dict[int, Tensor] = {}
        for tap in self.taps:
            layers[tap].register_forward_hook(self._keep(tap))

    def _keep(self, tap: int) -> Callable[[nn.Module, object, Tensor | tuple[Tensor, ...]], None]:
        def hook(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs[tap] = output if isinstance(output, Tensor) else output[0]

        return hook

    def take(self) -> Tensor | None:
        """The taps of the last pass, concatenated [..., taps * H]; they are then forgotten."""
        if not self.taps:
            return None
        features = torch.cat([self._outputs[tap] for tap in self.taps], -1)
        self._outputs.clear()
        return features


def check_taps(taps: Sequence[int], num_layers: int) -> None:
    """Taps must be strictly ascending layers, never the last one.

    Raises UserError. The last layer is excluded because engines disagree on whether its output is
    normed.
    """
    ordered = all(low < high for low, high in itertools.pairwise(taps))
    if not ordered or (taps and (taps[0] < 0 or taps[-1] >= num_layers - 1)):
        raise UserError(
            "target_layer_ids",
            list(taps),
            f"do not fit a target of {num_layers} layers",
            f"Use strictly ascending layer numbers from 0 to {num_layers - 2}.",
        )


class TransformersTarget:
    """A causal language model of transformers as the target of speculative decoding.

    `stream` says which output of a layer is tapped, where a model has several (K3's Attention
    Residuals: `prefix_sum` or `attn_res_mixture`); None is the model's, and the engines', default.
    """

    def __init__(
        self, model: PreTrainedModel, taps: Sequence[int] = (), stream: str | None = None
    ) -> None:
        self.model = model.eval()
        self.config = model.config.get_text_config(decoder=True)
        self.num_layers: int = self.config.num_hidden_layers
        check_taps(taps, self.num_layers)
        self.stream, modules = tap_modules(model, stream)
        self.recorder = TapRecorder(modules, taps)
        self.vocab_size = int(self.head_weight.shape[0])
        self.hidden_size = int(self.head_weight.shape[1])
        self.max_length = int(getattr(self.config, "max_position_embeddings", None) or 1 << 20)
        """Positions the model was made for: prompt and response together."""
        self.eos_token_ids = _eos_token_ids(model)

    @property
    def taps(self) -> tuple[int, ...]:
        return self.recorder.taps

    @property
    def embed_weight(self) -> Tensor:
        """[V, H], the model's own tensor."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight(self) -> Tensor:
        """[V, H], the model's own tensor (the embedding's when they are tied)."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @property
    def dtype(self) -> torch.dtype:
        return self.embed_weight.dtype

    @property
    def device(self) -> torch.device:
        return self.embed_weight.device

    def begin(self, capacity: int) -> "TargetStream":
        """A new request with room for `capacity` tokens (it grows when more come)."""
        return TargetStream(self, RewindingCache(self.config, capacity))

    @torch.inference_mode()
    def head_is_plain(self) -> bool:
        """Whether logits are exactly hidden @ head_weight.T, tried on a few tokens.

        Not so where a model caps or scales its logits or its head has a bias. Decoding works all
        the same; a trainer that computes the target's logits from its hidden states does not.
        """
        inputs: list[Tensor] = []
        head = self.model.get_output_embeddings()
        handle = head.register_forward_pre_hook(lambda _module, args: inputs.append(args[0]))
        try:
            output = self.begin(8).forward(_probe_tokens(self, 8), num_logits=8)
        finally:
            handle.remove()
        if len(inputs) != 1 or inputs[0].shape[-1] != self.hidden_size:
            return False
        logits = output.logits.float()
        plain = inputs[0].reshape(-1, self.hidden_size)[-8:].float() @ self.head_weight.float().T
        # Half precision rounds the head's own output; a cap or a scale moves it further.
        tolerance = max(1e-4, 2 * torch.finfo(self.dtype).eps)
        return bool((logits - plain).abs().max() <= tolerance * logits.abs().max())

    def check_rewind(self) -> None:
        """Raise UserError unless rejected tokens leave no trace in this model's caches.

        Tried on a dozen tokens, since a model may keep states where no cache knows of them.
        """
        tokens = _probe_tokens(self, 12)
        stream = self.begin(8)
        stream.forward(tokens[:6], 1)
        stream.forward(tokens[[6, 0, 1, 2]], 4)
        stream.rewind(7)
        logits = stream.forward(tokens[7:], 5).logits.float()
        fresh = self.begin(12)
        expected = fresh.forward(tokens, 5).logits.float()
        tolerance = max(1e-4, 32 * torch.finfo(self.dtype).eps)
        if not (logits - expected).abs().max() <= tolerance * expected.abs().max():
            raise UserError(
                "target",
                type(self.model).__name__,
                "does not come back to the same state after rejected tokens",
                "Use a model whose states are all in transformers' cache.",
            )


class TargetStream:
    """One request: the tokens committed so far, and the caches behind them."""

    def __init__(self, target: TransformersTarget, cache: RewindingCache) -> None:
        self._target = target
        self._cache = cache
        self.length = 0
        """Tokens run and not taken back."""
        # Only for caches that cannot be cropped. The checkpoint is from before `_undoable`;
        # `_pending` was kept of it, but the restored states have yet to see it.
        self._undoable: Tensor | None = None
        self._pending: Tensor | None = None

    @torch.inference_mode()
    def forward(self, tokens: Tensor, num_logits: int) -> TargetPass:
        """Run tokens [n] int64 after what is there; logits of the last num_logits, 1 to n."""
        assert 1 <= num_logits <= len(tokens)
        run = tokens if self._pending is None else torch.cat([self._pending, tokens])
        if not self._cache.crops:
            # After a restored checkpoint the states are still those of the checkpoint. A single
            # token is the anchor, which stands, so that plain decoding copies no states.
            if self._pending is None and len(tokens) > 1:
                self._cache.checkpoint()
            self._undoable = run if len(run) > 1 else None
            self._pending = None
        result = self._run(run, self.length + len(tokens) - len(run), num_logits)
        self.length += len(tokens)
        if result.features is None or len(run) == len(tokens):
            return result
        return TargetPass(logits=result.logits, features=result.features[-len(tokens) :])

    @torch.inference_mode()
    def rewind(self, length: int) -> None:
        """Undo the tokens of the last pass from position `length` on.

        The stream then goes on exactly as one that never saw the rejected tokens. States that
        cannot be cropped go back to before the pass, and the kept tokens run again with the next
        one; a pass of one token cannot be undone there.
        """
        assert length <= self.length
        if self._cache.crops or length == self.length:
            if length < self.length:
                self._cache.restore(length)
            self.length = length
            return
        assert self._undoable is not None
        start = self.length - len(self._undoable)
        assert length >= start
        self._cache.restore(start)
        kept = self._undoable[: length - start]
        if len(kept) > _MAX_PENDING:
            self._run(kept, start, 1)
        elif len(kept):
            self._pending = kept
        self._undoable = None
        self.length = length

    def _run(self, tokens: Tensor, start: int, num_logits: int) -> TargetPass:
        """One pass of the model over tokens at positions from `start` on."""
        positions = torch.arange(start, start + len(tokens), device=tokens.device)
        output = self._target.model(
            input_ids=tokens[None],
            position_ids=positions[None],
            use_cache=True,
            logits_to_keep=num_logits,
            **cache_argument(self._target.model, self._cache.cache),
        )
        features = self._target.recorder.take()
        return TargetPass(
            logits=output.logits[0], features=None if features is None else features[0]
        )


def _probe_tokens(target: TransformersTarget, count: int) -> Tensor:
    """A few different words, for trying the model out."""
    words = torch.arange(1, count + 1, device=target.device) * 37
    return words % target.embed_weight.shape[0]


def _eos_token_ids(model: PreTrainedModel) -> frozenset[int]:
    """The tokens that end a text: the generation settings' where given, as for `generate`."""
    ids = getattr(model.generation_config, "eos_token_id", None)
    if ids is None:
        ids = model.config.get_text_config(decoder=True).eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)
