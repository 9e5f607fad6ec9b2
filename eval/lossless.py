"""The check that matters most: greedy speculative text is the target's own, token for token."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch

from sparksmith.draft.proposal import Drafter
from sparksmith.draft.sampling import Sampling
from sparksmith.eval.replay import relative_gap
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.target import TransformersTarget

TIE = 1e-4
"""Two top words nearer than this share of the logit range are a tie that rounding decides."""

DrafterMaker = Callable[[Sampling, int], Drafter]
"""A new drafter for one request, given how it samples and its seed."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where a speculative text first left the target's own."""

    prompt_id: str
    position: int
    relative_gap: float

    @property
    def tie(self) -> bool:
        return self.relative_gap < TIE


def check_lossless(
    target: TransformersTarget,
    make_drafter: DrafterMaker,
    prompts: Sequence[tuple[str, list[int]]],
    settings: DecodeSettings,
    on_prompt: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Decode (id, token ids) prompts greedily with and without the drafter and compare.

    Returns what `eval.summary.summarise` takes: prompts, tokens, equal, ties, differences, and
    the details of the latter two. A tie is a first difference where the two top words are nearer
    than 1e-4 of the logit range; any other difference is a failure. Meaningful in float32.
    """
    greedy = replace(settings, sampling=Sampling(temperature=0.0))
    equal, tokens, found = 0, 0, []
    for prompt_id, prompt_ids in prompts:
        plain = decode(target, None, prompt_ids, greedy).token_ids
        drafter = make_drafter(greedy.sampling, greedy.seed)
        speculative = decode(target, drafter, prompt_ids, greedy).token_ids
        tokens += len(plain)
        if plain == speculative:
            equal += 1
        else:
            pairs = zip(plain, speculative, strict=False)
            common = [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
            gap = relative_gap(target, prompt_ids, common)
            found.append(Difference(prompt_id=prompt_id, position=len(common), relative_gap=gap))
        on_prompt()
    return {
        "prompts": len(prompts),
        "tokens": tokens,
        "equal": equal,
        "ties": sum(difference.tie for difference in found),
        "differences": sum(not difference.tie for difference in found),
        "dtype": str(target.dtype).removeprefix("torch."),
        "parted": [
            {"prompt_id": d.prompt_id, "position": d.position, "relative_gap": d.relative_gap}
            for d in found
        ],
        "threads": torch.get_num_threads(),
    }
