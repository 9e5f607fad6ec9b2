"""The distillation loss of DSpark, chunk by chunk, with its gradient formed on the way.

L = ce * CE + tv * |q - p|_1 + confidence * BCE, each a mean over supervised slots weighted by
w_k = exp(-k / gamma) (DSpark eq. 9-12; the raw L1 distance, range [0, 2]). q is the draft and p
the target, both as sampled: at the serving temperature, p truncated as the target truncates.

The logits of a chunk of slots live only while the chunk is worked on. The denominators are known
beforehand, so the gradient with respect to a chunk's logits is formed at once and only its
products (with the head and with the inputs) are kept: memory does not grow with the number of
slots times the vocabulary.

Shapes: N supervised slots, P target positions, Vd draft vocabulary, D width of the draft's last
features, H width of the target's.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from sparksmith.draft.errors import UserError


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """The weight of each term and the decay over slots; DeepSpec's released values."""

    ce: float = 0.1
    tv: float = 0.9
    confidence: float = 1.0
    gamma: float = 4.0

    def __post_init__(self) -> None:
        for name in ("ce", "tv", "confidence"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise UserError(name, value, "is not a weight", "Use a finite number, 0 or more.")
        if not self.gamma > 0.0:
            raise UserError(
                "gamma", self.gamma, "is not positive", "Use 4.0, or more to decay less."
            )

    def slot_weights(self, block_size: int) -> Tensor:
        """w_k for k = 0 .. block_size - 1."""
        return torch.exp(-torch.arange(block_size) / self.gamma)


@dataclass(frozen=True, kw_only=True)
class TargetRows:
    """The target's distributions at P positions, over the words the draft can say.

    `hidden` [P, H] is the head's input, `log_norm` [P] and `threshold` [P] the normaliser over the
    kept words and the smallest scaled logit kept (see `SampleFeatures`), `head` [Vd, H] the head's
    rows, `temperature` the serving temperature.
    """

    hidden: Tensor
    log_norm: Tensor
    threshold: Tensor
    head: Tensor
    temperature: float

    def probabilities(self, positions: Tensor) -> Tensor:
        """[N, Vd] in float32 (float64 stays); a row's sum falls short of 1 by what the draft
        vocabulary leaves out."""
        # Blocks of neighbouring anchors overlap: each position's logits are computed once.
        distinct, inverse = torch.unique(positions, return_inverse=True)
        scaled = scaled_logits((self.hidden[distinct], None), (self.head, None), self.temperature)
        dropped = scaled < self.threshold[distinct, None]
        probs = scaled.sub_(self.log_norm[distinct, None]).exp_().masked_fill_(dropped, 0.0)
        return probs if torch.equal(distinct, positions) else probs[inverse]


@dataclass(frozen=True, kw_only=True)
class Slots:
    """N supervised slots: which target position each one predicts, and how much it counts.

    `labels` [N] index the draft vocabulary, -1 where the draft cannot say the word: such a slot
    has no cross-entropy, and its lost mass stays in the total variation. `weights` [N] are w_k
    divided by the global sum of w_k over supervised slots (`ce_weights` by that over sayable ones).
    """

    positions: Tensor
    labels: Tensor
    weights: Tensor
    ce_weights: Tensor


@dataclass(frozen=True, kw_only=True)
class SlotStatistics:
    """Per slot, without gradient: overlap = sum of min(p, q) [N], the label's -log q [N] (0 where
    it cannot be said), and |q - p|_1 [N]."""

    overlap: Tensor
    negative_log: Tensor
    distance: Tensor


def scaled_logits(
    features: tuple[Tensor, Tensor | None], weight: tuple[Tensor, Tensor | None], temperature: float
) -> Tensor:
    """(hidden @ head.T + markov @ markov_w2.T) / temperature, [N, Vd] in float32 or float64.

    Half precision multiplies in half precision, as serving does, and is widened afterwards.
    """
    scale = 1.0 / temperature
    hidden, markov = features
    head, bias_weight = weight
    # The head's dtype where it stands alone (the target's own), else that of the draft.
    dtype = head.dtype if markov is None else hidden.dtype
    # The scale goes into the product: dividing would be a pass over all logits.
    zero = hidden.new_zeros((), dtype=dtype)
    logits = torch.addmm(zero, hidden.to(dtype), head.to(dtype).T, beta=0.0, alpha=scale)
    if markov is not None and bias_weight is not None:
        logits.addmm_(markov.to(dtype), bias_weight.to(dtype).T, alpha=scale)
    return at_least_float(logits)


def at_least_float(x: Tensor) -> Tensor:
    """float32 where x is in half precision, else x itself."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


class _ChunkedDistance(torch.autograd.Function):
    """The ce and tv terms as one scalar; the head gets no gradient, `markov_w2` does."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        hidden: Tensor,
        markov: Tensor | None,
        head: Tensor,
        bias_weight: Tensor | None,
        slots: Slots,
        target: TargetRows,
        terms: tuple[float, float, int],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ce, tv, chunk = terms
        gradients = [torch.zeros_like(x) for x in (hidden, markov, bias_weight) if x is not None]
        statistics = at_least_float(hidden).new_zeros(3, len(hidden))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            own = (hidden[part], None if markov is None else markov[part])
            logits = scaled_logits(own, (head, bias_weight), target.temperature)
            grad, scale, each = _chunk_gradient(logits, part, slots, target, (ce, tv))
            statistics[:, part] = each
            grad = grad.to(hidden.dtype)
            scale = scale.to(hidden.dtype)[:, None]
            gradients[0][part] = (grad @ head.to(hidden.dtype)).mul_(scale)
            if own[1] is not None and bias_weight is not None:
                gradients[1][part] = (grad @ bias_weight.to(hidden.dtype)).mul_(scale)
                gradients[2].addmm_(grad.T, own[1] * scale)
        ctx.save_for_backward(*gradients)
        overlap, negative_log, distance = statistics
        ctx.mark_non_differentiable(overlap, negative_log, distance)
        total = ce * (slots.ce_weights * negative_log).sum() + tv * (slots.weights * distance).sum()
        return total, overlap, negative_log, distance

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_total: Tensor, *_unused: Tensor
    ) -> tuple[Tensor | None, ...]:
        hidden, *others = (grad_total * saved for saved in ctx.saved_tensors)  # type: ignore[attr-defined]
        markov, bias_weight = others or (None, None)
        return hidden, markov, None, bias_weight, None, None, None


def _chunk_gradient(
    logits: Tensor, part: slice, slots: Slots, target: TargetRows, terms: tuple[float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """(G [n, Vd], s [n]), whose product s * G is d(loss) / d(unscaled logits) of one chunk, and
    its statistics [3, n]: overlap, negative_log, distance.

    With q the draft, p the target and A the mass of q where q > p,
    d|q - p|_1 / du_v = 2 q_v ([q_v > p_v] - A) / T, and d(-log q_x) / du_v = (q_v - [v = x]) / T.
    """
    ce, tv = terms
    index = slots.labels[part].clamp(min=0)[:, None]
    sayable = slots.labels[part] >= 0
    log_probs = logits.log_softmax(-1)
    negative_log = -log_probs.gather(1, index)[:, 0] * sayable
    draft_probs = log_probs.exp_()
    excess = draft_probs - target.probabilities(slots.positions[part])
    over = excess > 0.0
    # Where both distributions sum to 1, sum min(p, q) = 1 - sum max(q - p, 0), and |q - p|_1 is
    # twice the rest; the draft's sum is 1, the target's is too over its whole vocabulary.
    distance = 2.0 * excess.clamp_(min=0.0).sum(-1)
    statistics = torch.stack((1.0 - distance / 2, negative_log, distance))
    ce_scale = ce * slots.ce_weights[part].to(logits.dtype) * sayable
    tv_scale = 2.0 * tv * slots.weights[part].to(logits.dtype)
    if tv == 0.0:
        grad, scale, ce_share = draft_probs, ce_scale, torch.ones_like(ce_scale)
    else:
        grad = torch.where(over, draft_probs, 0.0)
        scale, ce_share = tv_scale, ce_scale / tv_scale
        grad.addcmul_(draft_probs, (ce_share - grad.sum(-1))[:, None])
    grad.scatter_add_(1, index, -ce_share[:, None])
    return grad, scale / target.temperature, statistics


def distillation_loss(
    features: tuple[Tensor, Tensor | None],
    weight: tuple[Tensor, Tensor | None],
    slots: Slots,
    target: TargetRows,
    weights: LossWeights,
    chunk: int = 256,
) -> tuple[Tensor, SlotStatistics]:
    """The cross-entropy and total-variation terms, and what each slot contributed.

    `features` are the draft's post-norm hidden states [N, H] and the Markov features [N, r] (or
    None); `weight` the head's rows [Vd, H], frozen, and `markov_w2` [Vd, r] (or None). `chunk` is
    the number of slots whose logits exist at a time. Without slots the loss is 0.
    """
    total, overlap, negative_log, distance = _ChunkedDistance.apply(  # type: ignore[no-untyped-call]
        *features, *weight, slots, target, (weights.ce, weights.tv, chunk)
    )
    return total, SlotStatistics(overlap=overlap, negative_log=negative_log, distance=distance)


def confidence_loss(logits: Tensor, overlap: Tensor, slot_weights: Tensor) -> Tensor:
    """Weighted binary cross-entropy of confidence logits [N] against sum min(p, q) [N].

    That overlap is the probability that the slot is accepted given that all before it were; it is
    a constant here (DSpark eq. 8).
    """
    label = overlap.detach().to(logits.dtype).clamp(0.0, 1.0)
    each = functional.binary_cross_entropy_with_logits(logits, label, reduction="none")
    return (at_least_float(each) * slot_weights).sum()
