"""Where `sparksmith generate` takes its prompts from, as its options say."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparksmith.draft.errors import UserError

if TYPE_CHECKING:
    from sparksmith.verify.prompts import Prompt, Turns

DEFAULT_COUNT = 2000


@dataclass(frozen=True, kw_only=True)
class PromptSource:
    """One of three sources of prompts, checked when made; `mix` is the command line's text."""

    prompts: Path | None
    dataset: str | None
    count: int | None
    mix: str | None
    seed: int

    def __post_init__(self) -> None:
        if self.prompts and self.dataset:
            raise UserError("--dataset", self.dataset, "and --prompts are both given", "Give one.")
        if self.mix and (self.prompts or self.dataset):
            raise UserError("--mix", self.mix, "is for the packaged prompts only", "Leave it out.")

    def read(self, *, whole: bool = False) -> "list[Prompt]":
        """The prompts; `whole` keeps the later user turns of a file's conversations."""
        from sparksmith.distill import prompt_sources

        if self.prompts:
            turns: Turns = "whole" if whole else "first"
            return prompt_sources.file_prompts(self.prompts, self.count, turns)
        count = self.count or DEFAULT_COUNT
        if self.dataset:
            return prompt_sources.dataset_prompts(
                prompt_sources.DatasetColumn.parse(self.dataset), count
            )
        return prompt_sources.packaged_prompts(count, seed=self.seed, mix=parse_mix(self.mix))

    def record(self) -> dict[str, Any]:
        """What identifies the source; the count does not, since a longer run begins alike."""
        from sparksmith.verify.run_record import fingerprint

        if self.prompts:
            return fingerprint(self.prompts)
        return {"dataset": self.dataset} if self.dataset else {"packaged": self.mix or "default"}


def parse_mix(text: str | None) -> dict[str, float] | None:
    """Weights from KIND=WEIGHT,KIND=WEIGHT; the kinds are checked where they are used."""
    if text is None:
        return None
    mix = {}
    for part in text.split(","):
        kind, _, weight = part.partition("=")
        try:
            mix[kind.strip()] = float(weight)
        except ValueError:
            raise UserError(
                "--mix", text, f"has the part {part!r}", "Write code=0.5,creative=0.5."
            ) from None
    return mix
