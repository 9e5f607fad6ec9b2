"""Traces grouped by prompt: the unit that is paired between arms and resampled."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from sparksmith.eval.trace import Trace


@dataclass(frozen=True, kw_only=True)
class PromptTraces:
    """Every response to one prompt, by arm; several seeds of one prompt stay together."""

    prompt_id: str
    workload: str
    speculative: tuple[Trace, ...]
    autoregressive: tuple[Trace, ...]

    def arm(self, name: str) -> tuple[Trace, ...]:
        """The traces of arm "speculative" or "autoregressive"."""
        return self.speculative if name == "speculative" else self.autoregressive


ARMS = ("speculative", "autoregressive")


def by_prompt(traces: Sequence[Trace]) -> list[PromptTraces]:
    """Group traces by (workload, prompt id), in order of first appearance."""
    grouped: dict[tuple[str, str], list[Trace]] = {}
    for trace in traces:
        grouped.setdefault((trace.workload, trace.prompt_id), []).append(trace)
    return [
        PromptTraces(
            prompt_id=prompt_id,
            workload=workload,
            speculative=tuple(t for t in group if t.arm == "speculative"),
            autoregressive=tuple(t for t in group if t.arm == "autoregressive"),
        )
        for (workload, prompt_id), group in grouped.items()
    ]


def traces_of(prompts: Iterable[PromptTraces], arm: str) -> list[Trace]:
    """All traces of one arm."""
    return [trace for prompt in prompts for trace in prompt.arm(arm)]
