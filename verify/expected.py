"""Expected acceptance of a draft, from the target's own rollouts and without running the loop.

Validation has rollouts x drawn from the target, and both distributions at every position; it
wants the law of the number of accepted tokens, which is defined by drafts drawn from the draft.
"""

import torch
from torch import Tensor


def expected_accepts(
    target_token_probs: Tensor, draft_token_probs: Tensor, overlaps: Tensor
) -> Tensor:
    """Per block, an unbiased estimate of P(at least k tokens accepted) for k = 1..K; [N, K].

    `target_token_probs` and `draft_token_probs` [N, K] are what target and draft give the
    rollout's own tokens x_1..x_K after the anchor, and `overlaps` [N, K] the sums over words of
    min(target, draft); position k is conditional on the rollout's tokens before k (teacher
    forcing), for the draft too. The target is exactly the distribution the rollout was sampled
    from, temperature and truncation included; the draft is as it samples. One block's value is in
    [0, 1]; the mean over blocks is the estimate, and its sum over k the expected number of
    accepted tokens. Acceptance length, bonus counted, is 1 more.

    With p the target, q the draft, `accept_standard` keeps a drafted token with probability
    min(1, p/q), so, writing p_i for p(x_i | x_<i) and likewise q_i,

        P(at least k) = sum over x_1..x_k of prod_{i<=k} q_i min(1, p_i/q_i)
                      = sum over x_1..x_k of prod_{i<=k} min(p_i, q_i)
                      = sum over x_<k of prod_{i<k} [p_i min(1, q_i/p_i)] overlap_k(x_<k)
                      = E over x_<k from p of prod_{i<k} min(1, q_i/p_i) * overlap_k(x_<k).

    The last position is summed over all words, which lowers the variance. The mean of
    prod_{i<=k} overlap_i is a different number: it walks prefixes by p, while accepted prefixes
    follow min(p, q). For a one-hot target and draft the result is the exact-match prefix.

    A token of target probability 0 cannot be drawn from the target; where recomputing in another
    precision has pushed one out of a truncated set, the block counts as ended there, so that the
    estimate errs low. Blocks shorter than K: pad with overlap 0.
    """
    assert target_token_probs.shape == draft_token_probs.shape == overlaps.shape
    drawn = target_token_probs > 0.0
    ratios = draft_token_probs / target_token_probs.masked_fill(~drawn, 1.0)
    kept = ratios.clamp(max=1.0).masked_fill(~drawn, 0.0)
    before = torch.ones_like(kept)
    before[:, 1:] = kept[:, :-1].cumprod(-1)
    return before * overlaps
