"""An engine's accepted counts against a record: the fault that leads to them is named.

The engines here are the decode loop with a draft that has the fault, or its counts by hand.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from distill_samples import TAPS, fitting_draft, tiny_target
from tiny_models import tiny_model, words
from torch import Tensor

from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.engine_parity import Served, compare_engine
from sparksmith.verify.parity import record_parity, texts_of
from sparksmith.verify.target import TransformersTarget

GREEDY = Sampling(temperature=0.0)
PROMPTS = [words(5, seed=1), words(8, seed=2), words(6, seed=3)]
NEW_TOKENS = 80
TARGET = tiny_target()


def record(draft: DSparkDraft, target: TransformersTarget = TARGET) -> dict[str, Tensor]:
    texts, accepted = texts_of(target, draft, PROMPTS, new_tokens=NEW_TOKENS)
    return record_parity(draft, texts, accepted)


def served_by(draft: DSparkDraft, target: TransformersTarget = TARGET) -> list[Served]:
    settings = DecodeSettings(
        sampling=GREEDY, max_new_tokens=NEW_TOKENS, num_tokens=draft.config.num_drafts
    )
    made = []
    for prompt in PROMPTS:
        result = decode(target, DSparkDrafter(draft, GREEDY, None), prompt, settings)
        made.append(Served(tokens=result.token_ids, accepted=result.accepted))
    return made


def without_markov(draft: DSparkDraft) -> None:
    assert draft.markov_head is not None
    torch.nn.init.zeros_(draft.markov_head.markov_w2.weight)


def turned(draft: DSparkDraft) -> None:
    with torch.no_grad():
        halves = draft.fc.weight.chunk(len(draft.config.target_layer_ids), 1)
        draft.fc.weight.copy_(torch.cat(list(reversed(halves)), 1))


def plain_norm(draft: DSparkDraft) -> None:
    torch.nn.init.ones_(draft.hidden_norm.weight)


FAULTS: dict[str, Callable[[DSparkDraft], None]] = {
    "no Markov head": without_markov,
    "the taps in descending order": turned,
    "no weights in the norm of the context": plain_norm,
}


@pytest.mark.parametrize("kind", [{}, {"draft_vocab_size": 30}, {"sample_from_anchor": False}])
def test_the_same_draft_has_no_difference(kind: dict[str, Any]) -> None:
    draft = fitting_draft(TARGET, **kind)
    assert compare_engine(record(draft), served_by(draft), draft, TARGET) == []


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_engine_is_named(fault: str) -> None:
    draft, faulty = fitting_draft(TARGET), fitting_draft(TARGET)
    for one in (draft, faulty):
        assert one.markov_head is not None
        # As much as the base logits, so that it decides some words.
        one.markov_head.markov_w2.weight.data.mul_(8.0)
    FAULTS[fault](faulty)
    found = compare_engine(record(draft), served_by(faulty), draft, TARGET)
    assert found
    assert all(one.stage == "accepted" for one in found)
    assert fault in found[0].meaning


def test_features_of_the_layers_before_are_named() -> None:
    taps, before = (1, 2), (0, 1)
    here, there = (TransformersTarget(TARGET.model, layers) for layers in (taps, before))
    draft = fitting_draft(here, target_layer_ids=taps)
    faulty = fitting_draft(there, target_layer_ids=before)
    found = compare_engine(record(draft, here), served_by(faulty, there), draft, here)
    assert found
    assert "features of the layers -1 from the taps" in found[0].meaning


def test_another_text_is_the_targets_matter() -> None:
    draft = fitting_draft(TARGET)
    stored = record(draft)
    other = TransformersTarget(tiny_model("qwen3", seed=9), TAPS)
    found = compare_engine(stored, served_by(fitting_draft(other), other), draft, TARGET)
    assert len(found) == len(PROMPTS)
    assert all(one.stage.startswith("text, at token") for one in found)
    assert "the target there" in found[0].meaning


def test_counts_that_no_known_fault_explains() -> None:
    draft = fitting_draft(TARGET)
    served = [
        Served(tokens=one.tokens, accepted=[4] * len(one.accepted or []))
        for one in served_by(draft)
    ]
    found = compare_engine(record(draft), served, draft, TARGET)
    assert "no fault known here" in found[0].meaning


def test_an_engine_that_tells_no_counts() -> None:
    draft = fitting_draft(TARGET)
    served = [Served(tokens=one.tokens, accepted=None) for one in served_by(draft)]
    found = compare_engine(record(draft), served, draft, TARGET)
    assert "--per-request-spec-decode-metrics detailed" in found[0].meaning
