"""What ending a draft early would gain: steps with whole blocks, replayed under each limit.

    python benchmarks/survival.py DRAFT [PROMPTS] [FIXED PER_TOKEN PLAIN]

FIXED and PER_TOKEN are the milliseconds of a speculative step without drafted tokens and of each
drafted token, PLAIN those of a plain step, as `step_cost.py` measures them. Standard acceptance,
so that a step cut short accepts what it accepted of the tokens that remain.
"""

import sys

import torch

from sparksmith.cli.draft_choice import bind_draft, load
from sparksmith.cli.target import TargetChoice, open_target
from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.proposal import Proposal
from sparksmith.draft.sampling import Sampling
from sparksmith.eval.prompt_sets import load_workloads
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.loading import render_prompt

LIMITS = (0.0, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3)
Judged = tuple[list[float], int]


class Remembering(DSparkDrafter):
    """Keeps the confidences of every draft."""

    def propose(self, anchor: int, num_tokens: int) -> Proposal:
        proposal = super().propose(anchor, num_tokens)
        assert proposal.confidences is not None
        self.said.append(proposal.confidences.tolist())
        return proposal

    said: list[list[float]]


def record(folder: str, prompts: int) -> dict[str, list[Judged]]:
    """By workload: the confidences of each draft, and how many of its tokens were accepted."""
    draft = load(folder)
    assert draft is not None
    choice = TargetChoice(name="embedded", dtype="float32")
    opened = open_target(choice, taps=draft.config.target_layer_ids, identify=False)
    bind_draft(draft, opened.target, folder)
    sampling = Sampling(temperature=0.7, top_p=0.95)
    found: dict[str, list[Judged]] = {}
    for workload in ("code", "creative"):
        for seed, prompt in enumerate(load_workloads([workload], limit=prompts)):
            drafter = Remembering(
                draft, sampling, torch.Generator().manual_seed(seed), confidences=True
            )
            drafter.said = []
            settings = DecodeSettings(
                sampling=sampling,
                max_new_tokens=128,
                num_tokens=draft.config.block_size,
                accept_rule="standard",
                seed=seed,
            )
            ids = render_prompt(opened.tokenizer, prompt.messages)
            result = decode(opened.target, drafter, ids, settings)
            drafted = [a for d, a in zip(result.drafted, result.accepted, strict=True) if d]
            found.setdefault(workload, []).extend(zip(drafter.said, drafted, strict=True))
    return found


def replay(steps: list[Judged], limit: float) -> tuple[float, float]:
    """Mean drafted and mean accepted tokens of a step."""
    drafted = accepted = 0
    for confidences, kept in steps:
        survival, length = 1.0, 0
        for confidence in confidences:
            survival *= confidence
            if survival < limit:
                break
            length += 1
        drafted += length
        accepted += min(kept, length)
    return drafted / len(steps), accepted / len(steps)


def main(folder: str, prompts: int, fixed: float, per_token: float, plain: float) -> None:
    for workload, steps in record(folder, prompts).items():
        print(f"{workload}: {len(steps)} steps")
        for slot in range(max(len(confidences) for confidences, _ in steps)):
            here = [(c[slot], kept > slot) for c, kept in steps if len(c) > slot <= kept]
            if here:
                said, held = (sum(values) / len(here) for values in zip(*here, strict=True))
                print(f"  slot {slot + 1}: confidence {said:.2f}, accepted {held:.2f}")
        for limit in LIMITS:
            drafted, accepted = replay(steps, limit)
            ratio = (1 + accepted) * plain / (fixed + per_token * drafted)
            print(f"  {limit:4.2f}: {1 + accepted:.3f} a step, {drafted:.2f} drafted, {ratio:.3f}x")


if __name__ == "__main__":
    costs = [float(value) for value in sys.argv[3:6]] or [49.3, 3.3, 44.3]
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 8, *costs)
