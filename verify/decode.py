"""The decode loop of one user's stream: propose, verify, accept, commit, until the text ends.

Without a drafter the same loop is the autoregressive baseline: it proposes nothing, so that every
step emits the target's own token. Both arms run the same target code and the same sampling code.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from sparksmith.draft.errors import UserError
from sparksmith.draft.proposal import Drafter, Proposal
from sparksmith.draft.sampling import Sampling, probabilities
from sparksmith.verify.accept import ACCEPT_RULES, Verdict
from sparksmith.verify.response import DecodeResult, Step, collect
from sparksmith.verify.target import TargetPass, TransformersTarget


@dataclass(frozen=True, kw_only=True)
class DecodeSettings:
    """How one request is decoded; all but `num_tokens` and `accept_rule` hold for both arms.

    `num_tokens` is K, the most tokens drafted in a step; a drafter may give fewer.
    `stop_token_ids` None means the target's own. The same seed gives the same output.
    """

    sampling: Sampling = field(default_factory=Sampling)
    max_new_tokens: int = 256
    num_tokens: int = 4
    accept_rule: Literal["block", "standard"] = "block"
    seed: int = 0
    stop_token_ids: frozenset[int] | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise UserError("max_new_tokens", self.max_new_tokens, "is below 1", "Use 1 or more.")
        if self.num_tokens < 0:
            raise UserError("num_tokens", self.num_tokens, "is negative", "Use 0 to draft nothing.")
        if self.accept_rule not in ACCEPT_RULES:
            raise UserError(
                "accept_rule",
                self.accept_rule,
                "is not a known rule",
                f"Use one of {', '.join(sorted(ACCEPT_RULES))}.",
            )


def decode(
    target: TransformersTarget,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
    on_tokens: Callable[[list[int], list[bool]], None] | None = None,
) -> DecodeResult:
    """Decode one response; `drafter` (new for every request) None is the baseline.

    `on_tokens` hears the tokens of each step and which of them were drafted. The response has the
    target's law for any drafter, and for greedy sampling is the target's own text, up to ties
    that rounding decides. Raises UserError for a prompt or drafter that does not fit the target.
    """
    steps = []
    for step in stream_decode(target, drafter, prompt_ids, settings):
        steps.append(step)
        if on_tokens is not None:
            on_tokens(step.tokens, step.draft_kept)
    return collect(steps)


def stream_decode(
    target: TransformersTarget,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
) -> Iterator[Step]:
    """The steps of one response as they happen, as `decode` otherwise.

    Errors are raised by the call, before any work. Leaving the loop early, with Ctrl-C or a
    break, needs no cleaning up: `collect` makes a result of the steps so far.
    """
    _check_request(target, drafter, prompt_ids, settings)
    return _Request(target, drafter, prompt_ids, settings).steps()


class _Request:
    """One request under way: the committed tokens, the target's stream and the drafter."""

    def __init__(
        self,
        target: TransformersTarget,
        drafter: Drafter | None,
        prompt_ids: Sequence[int],
        settings: DecodeSettings,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._settings = settings
        self._accept = ACCEPT_RULES[settings.accept_rule]
        stop = settings.stop_token_ids
        self._stop = target.eos_token_ids if stop is None else stop
        self._generator = torch.Generator().manual_seed(settings.seed)
        self._stream = target.begin(len(prompt_ids) + settings.max_new_tokens)
        self._prompt = torch.tensor(prompt_ids, dtype=torch.long, device=target.device)
        self._nothing = Proposal(
            tokens=self._prompt[:0],
            probs=torch.empty(0, target.vocab_size, device=target.device),
        )
        self._remaining = settings.max_new_tokens
        self._committed = 0
        # The last token emitted: the target has not run on it yet.
        self._anchor = -1
        # Committed tokens and their features that the drafter has yet to be told of.
        self._news: tuple[Tensor, Tensor | None] | None = None

    def steps(self) -> Iterator[Step]:
        step = self._prefill()
        yield step
        while step.finish_reason is None:
            step = self._step(step.number + 1)
            yield step

    @torch.inference_mode()
    def _prefill(self) -> Step:
        """Run the prompt; the first token is the target's own."""
        start = self._now()
        result = self._stream.forward(self._prompt, num_logits=1)
        verdict = self._choose(self._nothing, result)
        emitted, reason = self._cut([verdict.next_token])
        self._commit(self._prompt, result.features, emitted)
        return Step(
            number=0,
            tokens=emitted,
            draft_kept=[False],
            drafted=0,
            accepted=0,
            draft_seconds=0.0,
            verify_seconds=self._now() - start,
            finish_reason=reason,
        )

    @torch.inference_mode()
    def _step(self, number: int) -> Step:
        start = self._now()
        proposal = self._propose()
        drafted = self._now()
        block, result = self._verify(proposal)
        verdict = self._choose(proposal, result)
        kept = block[1 : 1 + verdict.accepted].tolist()
        emitted, reason = self._cut([*kept, verdict.next_token])
        if reason is None:
            self._commit(block[: 1 + verdict.accepted], result.features, emitted)
        accepted = min(verdict.accepted, len(emitted))
        return Step(
            number=number,
            tokens=emitted,
            draft_kept=[position < accepted for position in range(len(emitted))],
            drafted=len(proposal.tokens),
            accepted=accepted,
            draft_seconds=drafted - start,
            verify_seconds=self._now() - drafted,
            finish_reason=reason,
        )

    def _propose(self) -> Proposal:
        """Tell the drafter what was committed, and ask for no more than can be emitted."""
        if self._drafter is None:
            return self._nothing
        if self._news is not None:
            self._drafter.update(*self._news)
            self._news = None
        # A step emits one token more than it accepts.
        num_tokens = min(self._settings.num_tokens, self._remaining - 1)
        if num_tokens < 1:
            return self._nothing
        proposal = self._drafter.propose(self._anchor, num_tokens)
        assert len(proposal.tokens) <= num_tokens
        device = self._target.device
        return Proposal(tokens=proposal.tokens.to(device), probs=proposal.probs.to(device))

    def _verify(self, proposal: Proposal) -> tuple[Tensor, TargetPass]:
        """One target pass over the block [anchor, x_1 .. x_K], with logits after each token."""
        anchor = torch.tensor([self._anchor], device=self._target.device)
        block = torch.cat([anchor, proposal.tokens])
        return block, self._stream.forward(block, num_logits=len(block))

    def _choose(self, proposal: Proposal, result: TargetPass) -> Verdict:
        """Which drafted tokens stand, and the target's token after them."""
        target_probs = probabilities(result.logits, self._settings.sampling)
        uniforms = torch.rand(len(target_probs), dtype=torch.float64, generator=self._generator)
        return self._accept(target_probs, proposal.probs, proposal.tokens, uniforms)

    def _cut(self, emitted: list[int]) -> tuple[list[int], Literal["stop", "length"] | None]:
        """What the response takes of a step's tokens, and why it ends, if it does."""
        for count, token in enumerate(emitted, 1):
            if token in self._stop:
                return emitted[:count], "stop"
        self._remaining -= len(emitted)
        return emitted, None if self._remaining else "length"

    def _commit(self, tokens: Tensor, features: Tensor | None, emitted: list[int]) -> None:
        """Take back what was rejected: `tokens` [n] of the last pass stand."""
        self._committed += len(tokens)
        self._stream.rewind(self._committed)
        self._anchor = emitted[-1]
        self._news = tokens, None if features is None else features[: len(tokens)]

    def _now(self) -> float:
        if self._target.device.type == "cuda":
            torch.cuda.synchronize(self._target.device)
        return time.perf_counter()


def _check_request(
    target: TransformersTarget,
    drafter: Drafter | None,
    prompt_ids: Sequence[int],
    settings: DecodeSettings,
) -> None:
    if not prompt_ids:
        raise UserError("prompt", [], "has no tokens", "Give at least one token.")
    if not 0 <= min(prompt_ids) <= max(prompt_ids) < target.vocab_size:
        raise UserError(
            "prompt",
            [min(prompt_ids), max(prompt_ids)],
            f"(least and largest token) are not in a vocabulary of {target.vocab_size}",
            "Use the target's own tokenizer.",
        )
    room = target.max_length - len(prompt_ids)
    if settings.max_new_tokens > room:
        remedy = (
            f"Use at most {room}, or a shorter prompt." if room > 0 else "Use a shorter prompt."
        )
        raise UserError(
            "max_new_tokens",
            settings.max_new_tokens,
            f"after a prompt of {len(prompt_ids)} tokens is beyond the target's "
            f"{target.max_length} positions",
            remedy,
        )
    if drafter is not None and drafter.taps and drafter.taps != target.taps:
        raise UserError(
            "target_layer_ids",
            list(drafter.taps),
            f"of the draft are not the layers tapped of the target, {list(target.taps)}",
            "Load the target with the draft's own target_layer_ids.",
        )
