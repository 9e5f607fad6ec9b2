"""Acceptance: length, by position, and against the target's entropy, all pooled over steps.

The last step of a response can be cut: a stop token or the cap ended the response inside the
accepted tokens, so the step emitted its `accepted` tokens and no bonus. Nobody knows what the
next position would have been. A cut step therefore counts

- in the acceptance length, as one step with the tokens it kept (the figure is a little low,
  by at most one step a response; `cut_steps` is reported);
- at positions 1..accepted, as accepted;
- at no later position: neither as a rejection nor in a denominator.

A step that ends a response with the target's own token (emitted = accepted + 1) is not cut: its
rejection, if it drafted more than it kept, was observed.

Dropping cut steps from the denominator of a plain quotient would leave out steps that did well,
so by position the conditional rates come first and the joint rate is their product (the
product-limit estimate, Kaplan and Meier 1958):

    conditional(k) = steps with accepted >= k / steps that drafted k, kept k-1, and went on
    joint(k)       = product over j <= k of
                     steps with accepted >= j / steps that kept j-1 and went on

A step that did not draft position k, because its drafter stopped before, went on without it: it
counts against the joint rate and not against the conditional one. With no cut step joint(k) is
exactly (steps with accepted >= k) / steps, and 1 + sum of joint(k) is the acceptance length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparksmith.draft.errors import UserError
from sparksmith.eval.bands import EDGES, LABELS, band_index, upper_edge
from sparksmith.eval.bootstrap import Array, PromptResamples, divide
from sparksmith.eval.pairing import PromptTraces
from sparksmith.eval.trace import Trace


@dataclass(frozen=True)
class Step:
    """One verification: `first` is the index in `token_ids` of the first token it emitted."""

    drafted: int
    accepted: int
    first: int
    cut: bool

    @property
    def reached(self) -> int:
        """How many drafted positions the target judged with all earlier drafts accepted."""
        return min(self.went_on, self.drafted)

    @property
    def went_on(self) -> int:
        """How many positions had all earlier drafts accepted and some token after them."""
        return self.accepted if self.cut else self.accepted + 1


def steps_of(trace: Trace) -> list[Step] | None:
    """The steps of a speculative trace, None where the engine gave no counts per step.

    Raises UserError where the counts do not add up to the tokens, for such a trace would make
    every figure wrong without looking so (a known fault: tokens after a stop counted as accepted).
    """
    if trace.drafted is None or trace.accepted is None:
        return None
    first = 1
    steps = []
    for drafted, accepted in zip(trace.drafted, trace.accepted, strict=False):
        cut = first + accepted == len(trace.token_ids)
        steps.append(Step(drafted, accepted, first, cut))
        first += accepted if cut else accepted + 1
    if (
        len(trace.drafted) != len(trace.accepted)
        or first != max(1, len(trace.token_ids))
        or any(s.accepted > s.drafted or s.accepted < 0 for s in steps)
        or any(s.cut for s in steps[:-1])
        or any(s.cut and s.accepted == 0 for s in steps)
    ):
        raise UserError(
            f"trace {trace.workload}/{trace.prompt_id}",
            {"tokens": len(trace.token_ids), "steps": len(steps), "emitted": first},
            "has drafted and accepted counts that do not give its number of tokens "
            "(1 + the sum of accepted + 1 over steps, the last step's bonus aside)",
            "Record the accepted tokens that were kept, and include the stop token.",
        )
    return steps


def measured(prompts: Sequence[PromptTraces]) -> list[PromptTraces]:
    """Prompts with at least one speculative trace that has counts per step."""
    return [p for p in prompts if any(t.drafted is not None for t in p.speculative)]


def acceptance(prompts: Sequence[PromptTraces]) -> dict[str, Any] | None:
    """Acceptance length with and without the bonus, and its raw counters; None without counts.

    Both lengths and the rate are estimates {"value", "low", "high"} over prompts.
    """
    prompts = measured(prompts)
    if not prompts:
        return None
    rows = [[_totals(t) for t in p.speculative if t.drafted is not None] for p in prompts]
    counts = np.array([np.sum(row, axis=0) for row in rows], dtype=np.float64)
    steps, drafted, accepted, cut, tokens = counts.T
    resamples = PromptResamples(len(prompts))
    return {
        "acceptance_length": resamples.ratio(accepted, steps, plus=1.0),
        "accepted_per_step": resamples.ratio(accepted, steps),
        "acceptance_rate": resamples.ratio(accepted, drafted),
        "prompts": len(prompts),
        "responses": sum(len(row) for row in rows),
        "steps": int(steps.sum()),
        "drafted": int(drafted.sum()),
        "accepted": int(accepted.sum()),
        "cut_steps": int(cut.sum()),
        "tokens": int(tokens.sum()),
    }


def _totals(trace: Trace) -> list[int]:
    steps = steps_of(trace)
    assert steps is not None
    return [
        len(steps),
        sum(s.drafted for s in steps),
        sum(s.accepted for s in steps),
        sum(s.cut for s in steps),
        len(trace.token_ids),
    ]


def by_position(prompts: Sequence[PromptTraces]) -> list[dict[str, Any]]:
    """Joint and conditional acceptance of each drafted position, with the counts behind them.

    Position 1 is the first drafted token. Empty without counts per step.
    """
    prompts = measured(prompts)
    num_positions = max(
        (max(t.drafted, default=0) for p in prompts for t in p.speculative if t.drafted), default=0
    )
    if num_positions == 0:
        return []
    # Axes: prompts, (drafted that far, reached, went on, accepted), positions.
    counts = np.zeros((len(prompts), 4, num_positions))
    for row, prompt in zip(counts, prompts, strict=True):
        for step in (s for t in prompt.speculative for s in steps_of(t) or ()):
            row[0, : step.drafted] += 1
            row[1, : step.reached] += 1
            row[2, : step.went_on] += 1
            row[3, : step.accepted] += 1

    estimates = PromptResamples(len(prompts)).estimate(
        counts[:, 1:].reshape(len(prompts), -1), _conditional_and_joint
    )
    drafted, reached, _, accepted = counts.sum(axis=0).astype(int).tolist()
    return [
        {
            "position": k + 1,
            "joint": estimates[num_positions + k],
            "conditional": estimates[k],
            "steps_drafted": drafted[k],
            "steps_reached": reached[k],
            "steps_accepted": accepted[k],
        }
        for k in range(num_positions)
    ]


def _conditional_and_joint(sums: Array) -> Array:
    """[N, 3K] counts (reached, went on, accepted) to [N, 2K] rates (conditional, joint)."""
    reached, went_on, accepted = np.split(sums, 3, axis=1)
    kept = divide(accepted, went_on)
    joint = np.ones_like(kept)
    survived = np.ones(len(sums))
    for k in range(kept.shape[1]):
        # Where nothing survives, later positions are never reached and the joint rate is still 0.
        survived = np.where(survived == 0, 0.0, survived * kept[:, k])
        joint[:, k] = survived
    return np.concatenate([divide(accepted, reached), joint], axis=1)


@dataclass(frozen=True)
class DraftedToken:
    """A drafted position that the target judged: its entropy bounds in bits, and the verdict."""

    lower: float
    upper: float
    accepted: bool


def judged_tokens(trace: Trace) -> Iterator[DraftedToken]:
    """Drafted positions whose earlier drafts were all accepted, the rejected one included.

    The token emitted there was chosen after the same prefix that the draft was judged on, so its
    entropy is the target's entropy at the drafted position. Bonus tokens had no draft, and the
    position after a cut step's last token has no entropy: neither is here. Nothing comes from a
    trace without counts or entropies.
    """
    steps = steps_of(trace)
    lower, upper = trace.entropy_lower, trace.entropy_upper
    if steps is None or lower is None or upper is None:
        return
    for step in steps:
        for j in range(step.reached):
            index = step.first + j
            yield DraftedToken(lower[index], upper[index], j < step.accepted)


def entropy_curve(prompts: Sequence[PromptTraces]) -> dict[str, Any] | None:
    """Acceptance of judged tokens by entropy band; None where no trace has entropies and counts."""
    usable = [
        p for p in measured(prompts) if any(t.entropy_lower is not None for t in p.speculative)
    ]
    if not usable:
        return None
    counts = np.zeros((len(usable), 2, len(EDGES)))
    undetermined = 0
    for row, prompt in zip(counts, usable, strict=True):
        for token in (e for t in prompt.speculative for e in judged_tokens(t)):
            band = band_index(token.lower, token.upper)
            if band is None:
                undetermined += 1
                continue
            row[0, band] += 1
            row[1, band] += token.accepted
    resamples = PromptResamples(len(usable))
    total = counts.sum(axis=0).astype(int)
    return {
        "prompts": len(usable),
        "tokens": int(total[0].sum()),
        "undetermined_tokens": undetermined,
        "bands": [
            {
                "band": LABELS[b],
                "low_bits": EDGES[b],
                "high_bits": None if np.isinf(upper_edge(b)) else upper_edge(b),
                "tokens": int(total[0, b]),
                "accepted": int(total[1, b]),
                "acceptance": resamples.ratio(counts[:, 1, b], counts[:, 0, b]),
            }
            for b in range(len(EDGES))
        ],
    }
