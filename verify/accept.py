"""The accept rules: which drafted tokens the target keeps, and the token it adds itself.

Both rules are lossless: the sequence of emitted tokens has the target's law, whatever the draft.
They are pure functions of distributions, drafted tokens and uniforms.

Shapes: K drafted tokens of one step (K may be 0), V words of the target's vocabulary.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The first `accepted` drafted tokens stand and `next_token`, the target's, follows them."""

    accepted: int
    next_token: int


def accept_standard(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, uniforms: Tensor
) -> Verdict:
    """Speculative sampling token by token (Leviathan et al. 2211.17192, Alg. 1; Chen et al.
    2302.01318, Alg. 2).

    `target_probs` [K+1, V]: row k is the target's distribution given the first k drafted tokens.
    `draft_probs` [K, V]: row k is the distribution `tokens[k]` was drawn from. `uniforms` [K+1]
    in [0, 1), best float64 (float32 ones are multiples of 2^-24): the k-th decides token k, the
    last one picks the next token. Distributions are float32 or float64; greedy decoding is a
    one-hot target row, and needs no code of its own.

    Token x is kept while u < target(x) / draft(x). At the first that is not, the next token is
    drawn from max(target - draft, 0) normalised; if all are kept, from the target's last row.
    The emitted tokens then follow the target's law exactly, for any draft. Raises ValueError if
    the row the next token is drawn from holds no positive probability (a target that gave NaN).
    """
    *decide, choose = uniforms.tolist()
    accepted = 0
    for uniform, (target, draft) in zip(
        decide, _taken(target_probs, draft_probs, tokens), strict=True
    ):
        # Multiplied out: right for draft 0 and for target 0, and exact where all three are float32.
        if not uniform * draft < target:
            break
        accepted += 1
    return _verdict(target_probs, draft_probs, accepted, 1.0, choose)


def accept_block(
    target_probs: Tensor, draft_probs: Tensor, tokens: Tensor, uniforms: Tensor
) -> Verdict:
    """Block verification (Sun et al. 2403.10444, Alg. 2): the drafted tokens are judged together.

    Arguments and errors as for `accept_standard`. With w_0 = 1 and
    w_k = min(1, w_{k-1} target(x_k) / draft(x_k)), the longest prefix of k tokens with u_k < h_k
    is kept, where h_K = w_K and otherwise h_k = r / (r + 1 - w_k) with
    r = sum over words of max(w_k target - draft, 0), both given the first k tokens. The next
    token is drawn from that residual, or from the target's last row if all K are kept.

    The emitted tokens follow the target's law exactly, and the expected number of accepted
    tokens is at least that of `accept_standard`. For a one-hot target both rules are the same.
    """
    *decide, choose = uniforms.tolist()
    weights = [1.0]
    for target, draft in _taken(target_probs, draft_probs, tokens):
        joint = weights[-1] * target
        # min(1, joint / draft), where a draft of 0 (never drawn) neither divides by 0 nor passes
        # a word that the target excludes.
        weights.append(joint / max(joint, draft) if joint > 0.0 else 0.0)
    # From the longest prefix down, so that a row's residual is computed only if it can matter.
    for accepted in range(len(decide), 0, -1):
        uniform, weight = decide[accepted - 1], weights[accepted]
        if uniform >= weight:  # h_k <= w_k, because r <= w_k
            continue
        # w_k = 1 gives h_k = 1, also in the limit r = 0.
        if accepted == len(decide) or weight == 1.0:
            break
        residual = _residual(target_probs[accepted], draft_probs[accepted], weight)
        mass = float(residual.sum(dtype=torch.float64))
        if uniform * (mass + 1.0 - weight) < mass:
            break
    else:
        accepted = 0
    return _verdict(target_probs, draft_probs, accepted, weights[accepted], choose)


AcceptRule = Callable[[Tensor, Tensor, Tensor, Tensor], Verdict]

ACCEPT_RULES: dict[str, AcceptRule] = {"standard": accept_standard, "block": accept_block}


def _taken(target_probs: Tensor, draft_probs: Tensor, tokens: Tensor) -> list[tuple[float, float]]:
    """What target and draft gave each drafted token, as Python floats (doubles)."""
    num_drafted = tokens.shape[0]
    assert target_probs.shape[0] == num_drafted + 1
    assert draft_probs.shape == (num_drafted, target_probs.shape[1])
    index = tokens.long()[:, None]
    target = target_probs[:-1].gather(1, index)[:, 0].tolist()
    draft = draft_probs.gather(1, index)[:, 0].tolist()
    return list(zip(target, draft, strict=True))


def _verdict(
    target_probs: Tensor, draft_probs: Tensor, accepted: int, weight: float, uniform: float
) -> Verdict:
    target_row = target_probs[accepted]
    next_token = None
    if accepted < draft_probs.shape[0]:
        residual = _residual(target_row, draft_probs[accepted], weight)
        next_token = _inverse_cdf(residual, uniform)
    if next_token is None:
        # All kept; or the residual vanished by rounding: then target and draft agree to the last
        # bits, and so few rejections happen that the target itself is as exact as can be.
        next_token = _inverse_cdf(target_row, uniform)
    if next_token is None:
        raise ValueError(
            f"target_probs row {accepted} has no positive probability; check its logits for NaN"
        )
    return Verdict(accepted=accepted, next_token=next_token)


def _residual(target_row: Tensor, draft_row: Tensor, weight: float) -> Tensor:
    """max(weight * target - draft, 0), not normalised; [V]."""
    scaled = target_row if weight == 1.0 else target_row * weight
    return (scaled - draft_row).clamp_(min=0.0)


def _inverse_cdf(masses: Tensor, uniform: float) -> int | None:
    """The word at which the cumulative mass passes `uniform`, or None if there is no mass.

    Never a word of zero mass. Summed in float64: a float32 sum over a large vocabulary would
    lose the tail.
    """
    cumulative = masses.to(torch.float64).cumsum(0)
    total = float(cumulative[-1])
    if not total > 0.0:
        return None
    word = int(torch.searchsorted(cumulative, uniform * total, right=True))
    if word < masses.shape[0] and masses[word] > 0.0:
        return word
    # Only where `uniform` rounds up to 1, or a parallel scan is not monotone to the last bit.
    return int(masses[:word].nonzero()[-1])
