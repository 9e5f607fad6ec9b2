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
        """[N, Vd] float32; a row sums to less than 1 by what the draft vocabulary leaves out."""
        return self._scaled(self.hidden[positions], positions)

    def _scaled(self, hidden: Tensor, positions: Tensor) -> Tensor:
        scaled = functional.linear(hidden.to(self.head.dtype), self.head).float()
        scaled /= self.temperature
        dropped = scaled < self.threshold[positions, None]
        probs = scaled.sub_(self.log_norm[positions, None]).exp_()
        return probs.masked_fill_(dropped, 0.0)


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


class _ChunkedDistance(torch.autograd.Function):
    """ce and tv terms as one scalar, of features [N, D] through weight [Vd, D].

    Only the last `trained` columns of the weight get a gradient: the others are the frozen head.
    """

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx,
        features: Tensor,
        head: Tensor,
        bias_weight: Tensor | None,
        slots: Slots,
        target: TargetRows,
        terms: tuple[float, float, int],
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        ce, tv, chunk = terms
        frozen = head.shape[1]
        weight = head if bias_weight is None else torch.cat((head, bias_weight), 1)
        weight = weight.to(features.dtype)
        grad_features = torch.empty_like(features)
        grad_bias = None if bias_weight is None else torch.zeros_like(bias_weight)
        total = torch.zeros((), dtype=torch.float64, device=features.device)
        rows = []
        for start in range(0, len(features), chunk):
            part = slice(start, start + chunk)
            x = features[part]
            grad, statistics = _chunk_gradient(x @ weight.T, part, slots, target, (ce, tv))
            total += ce * (slots.ce_weights[part] * statistics[1]).sum(dtype=torch.float64) + tv * (
                slots.weights[part] * statistics[2]
            ).sum(dtype=torch.float64)
            grad = grad.to(features.dtype)
            grad_features[part] = grad @ weight
            if grad_bias is not None:
                grad_bias += (grad.T @ x[:, frozen:]).to(grad_bias.dtype)
            rows.append(statistics)
        ctx.save_for_backward(grad_features, *(() if grad_bias is None else (grad_bias,)))
        overlap, negative_log, distance = (torch.cat(column) for column in zip(*rows, strict=True))
        ctx.mark_non_differentiable(overlap, negative_log, distance)
        return total.to(features.dtype), overlap, negative_log, distance

    @staticmethod
    def backward(
        ctx: torch.autograd.function.FunctionCtx, grad_total: Tensor, *_unused: Tensor
    ) -> tuple[Tensor | None, ...]:
        grad_features, *grad_bias = ctx.saved_tensors  # type: ignore[attr-defined]
        bias = grad_total * grad_bias[0] if grad_bias else None
        return grad_total * grad_features, None, bias, None, None, None


def _chunk_gradient(
    logits: Tensor, part: slice, slots: Slots, target: TargetRows, terms: tuple[float, float]
) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
    """d(loss) / d(logits) [n, Vd] of one chunk, and its (overlap, negative_log, distance)."""
    ce, tv = terms
    target_probs = target.probabilities(slots.positions[part])
    scaled = logits.float() / target.temperature
    log_total = scaled.logsumexp(-1, keepdim=True)
    labels = slots.labels[part]
    sayable = labels >= 0
    index = labels.clamp(min=0)[:, None]
    negative_log = (log_total - scaled.gather(1, index))[:, 0] * sayable
    draft_probs = scaled.sub_(log_total).exp_()
    sign = torch.sign(draft_probs - target_probs)
    overlap = torch.minimum(draft_probs, target_probs).sum(-1)
    # |q - p|_1 = sum q + sum p - 2 sum min(p, q), where both whole distributions sum to 1.
    distance = 2.0 - 2.0 * overlap
    # d|q - p|_1 / du_v = q_v (s_v - sum_w s_w q_w) / T with s = sign(q - p).
    sign -= (sign * draft_probs).sum(-1, keepdim=True)
    grad = sign.mul_(draft_probs).mul_((tv * slots.weights[part])[:, None])
    ce_weights = (ce * slots.ce_weights[part] * sayable)[:, None]
    grad.addcmul_(draft_probs, ce_weights)
    grad.scatter_add_(1, index, -ce_weights)
    return grad.div_(target.temperature), (overlap, negative_log, distance)


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
    the number of slots whose logits exist at a time.
    """
    hidden, markov = features
    head, bias_weight = weight
    joint = hidden if markov is None else torch.cat((hidden, markov), -1)
    total, overlap, negative_log, distance = _ChunkedDistance.apply(  # type: ignore[no-untyped-call]
        joint, head, bias_weight, slots, target, (weights.ce, weights.tv, chunk)
    )
    return total, SlotStatistics(overlap=overlap, negative_log=negative_log, distance=distance)


def confidence_loss(logits: Tensor, overlap: Tensor, slot_weights: Tensor) -> Tensor:
    """Weighted binary cross-entropy of confidence logits [N] against sum min(p, q) [N].

    That overlap is the probability that the slot is accepted given that all before it were; it is
    a constant here (DSpark eq. 8).
    """
    each = functional.binary_cross_entropy_with_logits(logits, overlap.detach(), reduction="none")
    return (each * slot_weights).sum()
