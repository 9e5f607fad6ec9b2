"""A second, untimed look at finished responses: entropies, and the gap where two texts part.

The target runs over prompt + response in one pass, so nothing of this costs a timed step
anything. Tokens beyond the response are never looked at.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from sparksmith.eval.trace import Trace
from sparksmith.verify.entropy import entropy_bits
from sparksmith.verify.target import TransformersTarget


def response_logits(
    target: TransformersTarget, prompt_ids: Sequence[int], token_ids: Sequence[int]
) -> Tensor:
    """Logits [R, V] from which each of the R response tokens was chosen."""
    stream = target.begin(len(prompt_ids) + len(token_ids))
    tokens = torch.tensor([*prompt_ids, *token_ids[:-1]], device=target.device)
    return stream.forward(tokens, num_logits=len(token_ids)).logits


def with_entropy(target: TransformersTarget, trace: Trace, prompt_ids: Sequence[int]) -> Trace:
    """The trace with the target's entropy (bits, temperature 1) at every response token."""
    if not trace.token_ids:
        return replace(trace, entropy_lower=[], entropy_upper=[])
    entropies = entropy_bits(response_logits(target, prompt_ids, trace.token_ids)).tolist()
    rounded = [round(value, 4) for value in entropies]
    return replace(trace, entropy_lower=rounded, entropy_upper=list(rounded))


def relative_gap(
    target: TransformersTarget, prompt_ids: Sequence[int], common: Sequence[int]
) -> float:
    """How near the two top words are after prompt + `common`, as a share of the logits' range.

    Two greedy texts that part where this is tiny were parted by rounding: a block of tokens and a
    single token are summed in different orders.
    """
    logits = response_logits(target, prompt_ids, [*common, 0])[-1].double()
    top = logits.topk(2).values
    return float((top[0] - top[1]) / (logits.max() - logits.min()))
