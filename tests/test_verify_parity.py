"""A replay finds nothing on the same draft, and names the first stage that was changed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from distill_samples import TAPS, fitting_draft, tiny_target
from draft_models import MLA
from tiny_models import tiny_model, words
from torch import Tensor

from sparksmith.draft.checkpoint import load_draft, save_draft
from sparksmith.draft.convert import PARITY_FILE, convert_draft
from sparksmith.draft.errors import UserError
from sparksmith.draft.model import DSparkDraft
from sparksmith.verify.parity import (
    read_parity,
    record_parity,
    replay_parity,
    texts_of,
    write_parity,
)
from sparksmith.verify.target import TransformersTarget

PROMPTS = [words(5, seed=1), words(8, seed=2)]
TARGET = tiny_target()
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "latent": MLA,
    "reduced": {"draft_vocab_size": 30},
    "fill-in": {"sample_from_anchor": False},
    "rnn": {"markov_head_type": "rnn"},
    "no markov": {"markov_rank": 0, "enable_confidence_head": False},
}


def recorded(draft: DSparkDraft) -> dict[str, Tensor]:
    texts, accepted = texts_of(TARGET, draft, PROMPTS, new_tokens=20)
    return record_parity(draft, texts, accepted)


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_draft_agrees_with_itself(kind: str, tmp_path: Path) -> None:
    draft = fitting_draft(TARGET, **KINDS[kind])
    stored = recorded(draft)
    save_draft(draft, tmp_path / "draft")
    write_parity(stored, tmp_path / "draft")
    # Another layout computes the same, and the record goes with it.
    there = tmp_path / "draft"
    if kind not in ("latent", "reduced"):
        convert_draft(tmp_path / "draft", tmp_path / "there", "speculators")
        there = tmp_path / "there"
    loaded = load_draft(there)
    loaded.bind(TARGET.embed_weight, TARGET.head_weight)
    assert replay_parity(loaded, read_parity(there), TARGET) == []
    assert replay_parity(loaded, read_parity(there)) == []


def scaled(name: str) -> Callable[[DSparkDraft], None]:
    def change(draft: DSparkDraft) -> None:
        with torch.no_grad():
            dict(draft.named_parameters())[name].mul_(1.01)

    return change


def new_head(draft: DSparkDraft) -> None:
    head = draft.bound.head.clone()
    head[:, 0] += 0.5
    draft.bind(draft.bound.embed, head)


CHANGES: list[tuple[str, Callable[[DSparkDraft], None]]] = [
    ("context", scaled("fc.weight")),
    ("context", scaled("hidden_norm.weight")),
    ("block", scaled("layers.1.mlp.up_proj.weight")),
    ("block", scaled("norm.weight")),
    ("markov", scaled("markov_head.markov_w1.weight")),
    ("markov", scaled("markov_head.markov_w2.weight")),
    ("base", new_head),
]


@pytest.mark.parametrize(("stage", "change"), CHANGES)
def test_the_first_stage_that_differs_is_named(
    stage: str, change: Callable[[DSparkDraft], None]
) -> None:
    # The norm of the fused features undoes a factor of the projection: all but one row.
    draft = fitting_draft(TARGET)
    stored = recorded(draft)
    if stage == "context":
        with torch.no_grad():
            draft.fc.weight[:3].mul_(1.5)
    change(draft)
    found = replay_parity(draft, stored)
    assert [difference.stage for difference in found] == [stage] * len(PROMPTS)


def test_positions_are_told_apart_from_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    draft = fitting_draft(TARGET)
    stored = recorded(draft)
    original = DSparkDraft.rotary

    def one_late(self: DSparkDraft, positions: Tensor) -> tuple[Tensor, Tensor]:
        return original(self, positions + (positions.ndim == 2))

    monkeypatch.setattr(DSparkDraft, "rotary", one_late)
    found = replay_parity(draft, stored)
    assert {difference.stage for difference in found} == {"block"}
    assert all(d.meaning == "positions: those recorded are -1 from the ones here" for d in found)


def test_another_target_and_another_loop() -> None:
    draft = fitting_draft(TARGET)
    stored = recorded(draft)
    other = TransformersTarget(tiny_model("qwen3", seed=3), TAPS)
    assert {d.stage for d in replay_parity(draft, stored, other)} == {"features"}
    changed = {
        name: tensor + 1 if name.endswith("accepted") else tensor for name, tensor in stored.items()
    }
    assert {d.stage for d in replay_parity(draft, changed, TARGET)} == {"accepted"}
    changed = {
        name: tensor.flip(1) if name.endswith("drafted") else tensor
        for name, tensor in stored.items()
    }
    assert {d.stage for d in replay_parity(draft, changed)} == {"drafted"}


def test_a_missing_or_broken_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no parity/parity\.safetensors"):
        read_parity(tmp_path)
    (tmp_path / PARITY_FILE).parent.mkdir()
    (tmp_path / PARITY_FILE).write_bytes(b"123")
    with pytest.raises(UserError, match="cannot be read"):
        read_parity(tmp_path)


def without(name: str) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.__delitem__(name)


def replaced(name: str, value: Tensor) -> Callable[[dict[str, Tensor]], None]:
    return lambda stored: stored.__setitem__(name, value)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda stored: stored.clear(), "holds no text"),
        (without("1.anchors"), r"1\.anchors"),
        (without("0.log_norm"), r"0\.log_norm"),
        (lambda stored: stored.update({"9.tokens": torch.zeros(3).long()}), "texts 0, 1, 9"),
        (replaced("0.tokens", torch.zeros(2, 3).long()), r"0\.tokens"),
        (replaced("0.hidden", torch.zeros(3, 7)), r"0\.hidden"),
        (replaced("0.context", torch.zeros(3, 7)), r"0\.context"),
        (replaced("0.previous", torch.zeros(0, 4).long()), r"0\.previous"),
        (replaced("0.drafted", torch.tensor(3)), r"0\.drafted"),
        (replaced("0.prompt_length", torch.tensor([9_999])), "prompt_length 9999"),
        (replaced("0.prompt_length", torch.tensor([0.5])), "prompt_length"),
        (replaced("0.accepted", torch.tensor([0.5])), "accepted"),
    ],
)
def test_an_incomplete_record_names_what_is_missing(
    change: Callable[[dict[str, Tensor]], None], named: str, tmp_path: Path
) -> None:
    stored = recorded(fitting_draft(TARGET))
    assert read_parity(write_parity(stored, tmp_path).parent.parent).keys() == stored.keys()
    change(stored)
    write_parity(stored, tmp_path)
    with pytest.raises(UserError, match=named):
        read_parity(tmp_path)


def test_a_record_of_other_sizes_or_words_is_refused() -> None:
    draft = fitting_draft(TARGET)
    stored = recorded(draft)
    with pytest.raises(UserError, match=r"0\.features"):
        replay_parity(fitting_draft(TARGET, target_layer_ids=TAPS[:1]), stored)
    beyond = {**stored, "1.top": stored["1.top"] + draft.config.vocab_size}
    with pytest.raises(UserError, match=r"1\.top"):
        replay_parity(draft, beyond)
