"""What each part of a speculative step costs beside a plain step, on an idle machine.

    python benchmarks/step_cost.py DRAFT [STEPS]

DRAFT is the folder of a draft for the embedded target. Texts are random tokens, so that the
target's distributions are flat: the worst case for the nucleus.
"""

import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import TypeVar

import torch

from sparksmith.cli.draft_choice import bind_draft, load
from sparksmith.cli.target import TargetChoice, open_target
from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.sampling import Sampling, probabilities
from sparksmith.verify.accept import accept_block

T = TypeVar("T")
SAMPLING = Sampling(temperature=0.7, top_p=0.95)
CONTEXT = 200


class Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def __call__(self, name: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        self.seconds[name].append(time.perf_counter() - start)
        return result

    def milliseconds(self, name: str) -> float:
        return 1e3 * statistics.median(self.seconds[name])


@torch.inference_mode()
def main(folder: str, steps: int) -> None:
    draft = load(folder)
    assert draft is not None
    choice = TargetChoice(name="embedded", dtype="float32")
    opened = open_target(choice, taps=draft.config.target_layer_ids, identify=False)
    target, size = opened.target, draft.config.block_size
    bind_draft(draft, target, folder)
    text = torch.arange(CONTEXT) + 100
    features = target.begin(CONTEXT + 16).forward(text, 1).features
    assert features is not None
    streams = [target.begin(CONTEXT + 16) for _ in range(2)]
    for stream in streams:
        stream.forward(text, 1)
    timed = Stopwatch()
    for _ in range(steps):
        drafter = DSparkDrafter(draft, SAMPLING, torch.Generator().manual_seed(0))
        drafter.update(text, features)
        timed("draft: take in two tokens", lambda d=drafter: d.update(text[:2], features[:2]))
        proposal = timed("draft: propose", lambda d=drafter: d.propose(500, size))
        block = torch.cat([torch.tensor([500]), proposal.tokens])
        result = timed("verify: pass", lambda b=block: streams[0].forward(b, len(b)))
        probs = timed("verify: distributions", lambda r=result: probabilities(r.logits, SAMPLING))
        uniforms = torch.rand(size + 1, dtype=torch.float64)
        timed(
            "verify: accept",
            lambda p=probs, q=proposal, u=uniforms: accept_block(p, q.probs, q.tokens, u),
        )
        streams[0].rewind(CONTEXT)
        one = timed("plain: pass", lambda b=block: streams[1].forward(b[:1], 1))
        timed("plain: distribution", lambda r=one: probabilities(r.logits, SAMPLING))
        streams[1].rewind(CONTEXT)
    for name in timed.seconds:
        print(f"{name:28} {timed.milliseconds(name):6.2f} ms")
    plain, whole = (
        sum(timed.milliseconds(name) for name in timed.seconds if name.startswith("plain") == which)
        for which in (True, False)
    )
    print(f"a step of {size} drafted tokens costs {whole / plain:.2f} plain ones")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 80)
