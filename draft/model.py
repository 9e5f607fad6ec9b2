"""The DSpark draft: target features in, a block of hidden states and token logits out.

The embedding and the head are the target's own tensors: `bind` keeps references, outside the
parameters, so the draft adds no copy of them to memory, to the optimizer or to a checkpoint.
Shapes: B sequences, S positions, A anchors, K slots of a block, m taps, H hidden, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from sparksmith.draft.backbone import BlockMask, DraftLayer, RMSNorm
from sparksmith.draft.config import DSparkConfig
from sparksmith.draft.errors import UserError
from sparksmith.draft.heads import MARKOV_HEADS, ConfidenceHead, MarkovHead
from sparksmith.draft.rotary import Rotary, rotary

_INITIAL_STD = 0.02


@dataclass(frozen=True)
class BoundWeights:
    """The target's embedding [V, H] and the head's rows [Vd, H] that the draft can say."""

    embed: Tensor
    head: Tensor


class DSparkDraft(nn.Module):
    """The trainable draft (DSpark, arXiv 2607.05147, section 3.1).

    A block is [anchor, mask, ..., mask] at positions p, p+1, ...; slot k predicts the token at
    p+k+1. `state_dict()` has the names of the `Qwen3DSparkModel` checkpoint and nothing else.
    """

    target_ids: Tensor

    def __init__(self, config: DSparkConfig, target_ids: Tensor | None = None) -> None:
        """`target_ids` [Vd] int64, ascending, is the reduced vocabulary; None for the full one."""
        super().__init__()
        self.config = config
        hidden, eps = config.hidden_size, config.rms_norm_eps
        num_features = config.target_hidden_size * len(config.target_layer_ids)
        self.fc = nn.Linear(num_features, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, eps)
        self.markov_head: MarkovHead | None = None
        if config.markov_rank:
            head = MARKOV_HEADS[config.markov_head_type]
            self.markov_head = head(
                config.markov_rank, hidden, config.vocab_size, config.draft_vocab_size
            )
        self.confidence_head: ConfidenceHead | None = None
        if config.enable_confidence_head:
            rank = config.markov_rank if config.confidence_head_with_markov else 0
            self.confidence_head = ConfidenceHead(hidden, rank)
        if target_ids is None:
            assert not config.reduced_vocabulary, "a reduced vocabulary needs target_ids"
            target_ids = torch.arange(config.vocab_size)
        assert target_ids.shape == (config.draft_vocab_size,)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self._bound: BoundWeights | None = None
        self.apply(_initialise)

    def bind(self, embed_weight: Tensor, head_weight: Tensor) -> None:
        """Use the target's embedding [V, H] and head [V, H], or the head's draft rows [Vd, H].

        References are kept, except that a reduced vocabulary copies its rows of a full head.
        Raises UserError if the width or the vocabulary is not the draft's.
        """
        config = self.config
        _check_bound("embedding", embed_weight, (config.vocab_size,), config.hidden_size)
        vocabularies = (config.draft_vocab_size, config.vocab_size)
        _check_bound("head", head_weight, vocabularies, config.hidden_size)
        head = head_weight.detach()
        if head.shape[0] != config.draft_vocab_size:
            head = head.index_select(0, self.target_ids.to(head.device))
        self._bound = BoundWeights(embed_weight.detach(), head)

    @property
    def bound(self) -> BoundWeights:
        assert self._bound is not None, "bind() the target's embedding and head first"
        return self._bound

    def fuse(self, features: Tensor) -> Tensor:
        """Target features [..., m * Ht], taps concatenated in their order, to context [..., H]."""
        fused: Tensor = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        return fused

    def embed(self, tokens: Tensor) -> Tensor:
        """The bound embedding of tokens [...], in the draft's dtype: [..., H]."""
        return functional.embedding(tokens, self.bound.embed).to(self.fc.weight.dtype)

    def rotary(self, positions: Tensor) -> Rotary:
        """Cosines and sines [..., D] at `positions` [...], in float32."""
        config = self.config
        return rotary(positions, config.rotary_dim, config.rope_theta, config.yarn)

    def forward_blocks(
        self, features: Tensor, tokens: Tensor, anchors: Tensor, valid: Tensor | None = None
    ) -> Tensor:
        """Train-time forward of many blocks of each sequence at once: [B, A, K, H], post-norm.

        features [B, S, m * Ht], tokens [B, S], anchors [B, A] positions in [0, S). A block sees
        the context strictly before its anchor and itself, never another block; so what pads a
        sequence on the right is never seen. Blocks that are not `valid` [B, A] are computed as
        if anchored at 0, and their results mean nothing.
        """
        config = self.config
        if valid is not None:
            anchors = anchors.masked_fill(~valid, 0)
        batch, num_anchors = anchors.shape
        offsets = torch.arange(config.block_size, device=anchors.device)
        slot_tokens = torch.full(
            (batch, num_anchors, config.block_size), config.mask_token_id, device=anchors.device
        )
        slot_tokens[:, :, 0] = tokens.gather(1, anchors)
        slot_positions = (anchors.unsqueeze(-1) + offsets).flatten(1)
        # No block sees past the last anchor: the columns behind it are not computed.
        length = int(anchors.max())
        context = self.fuse(features[:, :length])
        rotaries = (
            self.rotary(slot_positions),
            self.rotary(torch.arange(length, device=anchors.device)),
        )
        mask = BlockMask.of(anchors, length, config)
        x = self.embed(slot_tokens.flatten(1))
        for layer in self.layers:
            x = layer(x, context, rotaries, mask)
        hidden: Tensor = self.norm(x)
        return hidden.view(batch, num_anchors, config.block_size, -1)

    def base_logits(self, hidden: Tensor) -> Tensor:
        """Logits [..., Vd] of post-norm hidden states, before the Markov bias."""
        return functional.linear(hidden, self.bound.head.to(hidden.dtype))

    def markov_features(self, prev_tokens: Tensor, hidden: Tensor) -> Tensor:
        """The low-rank factor [..., K, r] of the Markov bias: bias = features @ markov_w2.T.

        prev_tokens [..., K] are target ids, [anchor, x_1, ..., x_{K-1}]; hidden [..., K, H].
        """
        assert self.markov_head is not None
        return self.markov_head.features(prev_tokens, hidden)

    def markov_bias(self, prev_tokens: Tensor, hidden: Tensor) -> Tensor:
        """The Markov bias [..., K, Vd] under teacher forcing; the state starts afresh at slot 0."""
        assert self.markov_head is not None
        bias: Tensor = self.markov_head.markov_w2(self.markov_features(prev_tokens, hidden))
        return bias

    def markov_step(
        self, prev_token: Tensor, hidden: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """The same bias one slot at a time: prev_token [...], hidden [..., H] to bias [..., Vd].

        `state` is None at slot 0 and then what the step before returned.
        """
        assert self.markov_head is not None
        features, state = self.markov_head.step(prev_token, hidden, state)
        return self.markov_head.markov_w2(features), state

    def logits(self, prev_tokens: Tensor, hidden: Tensor) -> Tensor:
        """Logits [..., K, Vd] with the Markov bias, if there is such a head."""
        base = self.base_logits(hidden)
        return base if self.markov_head is None else base + self.markov_bias(prev_tokens, hidden)

    def confidence_logits(self, prev_tokens: Tensor, hidden: Tensor) -> Tensor:
        """Logits [..., K] of P(slot k accepted | slots before it accepted); DSpark eq. 7."""
        assert self.confidence_head is not None
        embedded = None
        if self.config.confidence_head_with_markov:
            assert self.markov_head is not None
            embedded = self.markov_head.markov_w1(prev_tokens)
        logits: Tensor = self.confidence_head(hidden, embedded)
        return logits


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=_INITIAL_STD)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def _check_bound(what: str, weight: Tensor, vocabularies: tuple[int, ...], width: int) -> None:
    if weight.dim() == 2 and weight.shape[1] == width and weight.shape[0] in vocabularies:
        return
    sizes = " or ".join(str(size) for size in dict.fromkeys(vocabularies))
    raise UserError(
        f"target {what}",
        tuple(weight.shape),
        f"does not fit the draft, which needs [{sizes}, {width}] (vocabulary, width)",
        "Use the target that this draft was trained for, or train a draft for this target.",
    )
