"""Running a draft beside its target: a sound one passes, one misread in any way is found out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from distill_samples import fitting_draft
from draft_models import MLA, tiny_config, tiny_draft
from tiny_models import tiny_model, words
from torch import Tensor
from torch.nn import functional

from sparksmith.draft.model import DSparkDraft
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.probes import ProbeResult, probe, probe_alone
from sparksmith.verify.target import TransformersTarget

TAPS = (1, 3)
PROMPTS = [words(6, seed=seed) for seed in range(4)]
NEW = 40


@pytest.fixture(scope="module")
def target() -> TransformersTarget:
    return TransformersTarget(tiny_model("qwen3", num_hidden_layers=6), TAPS)


@pytest.fixture(scope="module")
def draft(target: TransformersTarget) -> DSparkDraft:
    return by_heart(target, fitting_draft(target, target_layer_ids=TAPS))


def by_heart(target: TransformersTarget, made: DSparkDraft) -> DSparkDraft:
    """Train a draft until it knows the target's greedy texts by heart."""
    settings = DecodeSettings(
        sampling=Sampling(temperature=0.0), max_new_tokens=NEW, stop_token_ids=frozenset()
    )
    texts, features = [], []
    for prompt in PROMPTS:
        tokens = torch.tensor([*prompt, *decode(target, None, prompt, settings).token_ids])
        found = target.begin(len(tokens)).forward(tokens, 1).features
        assert found is not None
        texts.append(tokens)
        features.append(found)
    rows, seen = torch.stack(texts), torch.stack(features)
    size = made.config.block_size
    anchors = torch.arange(6, rows.shape[1] - size - 1).expand(len(rows), -1)
    places = anchors[..., None] + torch.arange(size)
    previous, wanted = (
        rows.gather(1, (places + offset).flatten(1)).view_as(places) for offset in (0, 1)
    )
    optimizer = torch.optim.Adam(made.parameters(), lr=1e-2)
    for _ in range(120):
        hidden = made.forward_blocks(seen.clone(), rows, anchors)
        loss = functional.cross_entropy(
            made.logits(previous, hidden).flatten(0, 2), wanted.flatten()
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return made


def misread(draft: DSparkDraft, **changes: Any) -> DSparkDraft:
    """The same weights under another configuration."""
    other = DSparkDraft(replace(draft.config, **changes))
    other.load_state_dict(draft.state_dict())
    other.bind(draft.bound.embed, draft.bound.head)
    return other


def run(target: TransformersTarget, draft: DSparkDraft) -> tuple[ProbeResult, dict[str, str]]:
    result = probe(target, draft, PROMPTS, new_tokens=NEW)
    return result, {finding.check: finding.remedy for finding in result.findings}


def test_a_sound_draft_passes(target: TransformersTarget, draft: DSparkDraft) -> None:
    result, found = run(target, draft)
    assert found == {}
    assert result.positions >= 64
    assert result.accepted > 0.8
    assert result.log_probability_by_shift[0] == max(result.log_probability_by_shift.values())
    assert result.right_by_offset[0] > 0.8


@pytest.mark.parametrize("shift", [-1, 1])
def test_taps_a_layer_off(target: TransformersTarget, draft: DSparkDraft, shift: int) -> None:
    wrong = misread(draft, target_layer_ids=tuple(tap + shift for tap in TAPS))
    _, found = run(target, wrong)
    assert str(list(TAPS)) in found["probe-taps"]


def test_a_block_read_in_the_wrong_form(target: TransformersTarget, draft: DSparkDraft) -> None:
    _, found = run(target, misread(draft, sample_from_anchor=False))
    assert "sample_from_anchor true" in found["probe-offset"]


def test_a_fill_in_block_read_from_the_anchor(
    target: TransformersTarget, draft: DSparkDraft
) -> None:
    """The same blocks one slot later: what the masked slots say is for their own positions."""

    class Shifted(DSparkDraft):
        def forward_blocks(self, *args: Any, **named: Any) -> Tensor:
            hidden = super().forward_blocks(*args, **named)
            return torch.cat((hidden[:, :, :1], hidden[:, :, :-1]), dim=2)

    wrong = Shifted(draft.config)
    wrong.load_state_dict(draft.state_dict())
    wrong.bind(draft.bound.embed, draft.bound.head)
    _, found = run(target, wrong)
    assert "sample_from_anchor false" in found["probe-offset"]


def test_slots_that_are_all_alike(
    target: TransformersTarget, draft: DSparkDraft, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sparksmith.draft.rotary import rotary

    monkeypatch.setattr(
        "sparksmith.draft.model.rotary",
        lambda positions, *rest: rotary(torch.zeros_like(positions), *rest),
    )
    _, found = run(target, draft)
    assert "probe-slots" in found


def test_a_draft_of_another_target(draft: DSparkDraft) -> None:
    other = TransformersTarget(tiny_model("qwen3", seed=5, num_hidden_layers=6))
    result, found = run(other, draft)
    assert "probe-chance" in found
    assert result.accepted < 0.3


@pytest.mark.parametrize("changes", [{}, MLA, {"is_causal": True}])
@pytest.mark.parametrize("factor", [1.0, 1e-2, 1e-4])
def test_an_untrained_draft_is_not_called_broken(changes: dict[str, Any], factor: float) -> None:
    torch.manual_seed(0)
    draft = DSparkDraft(tiny_config(**changes))
    with torch.no_grad():
        for name, weight in draft.named_parameters():
            weight.mul_(1.0 if "norm" in name else factor)
    found = probe_alone(draft)
    assert {finding.level for finding in found} <= {"warning"}
    if factor == 1.0:
        assert found == []


@pytest.mark.parametrize("is_causal", [False, True])
def test_a_draft_alone(is_causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sparksmith.draft.rotary import rotary

    assert probe_alone(tiny_draft(bind=False, is_causal=is_causal)) == []
    monkeypatch.setattr(
        "sparksmith.draft.model.rotary",
        lambda positions, *rest: rotary(torch.zeros_like(positions), *rest),
    )
    found = {
        finding.check
        for finding in probe_alone(tiny_draft(bind=False, is_causal=is_causal))
        if finding.level == "error"
    }
    # A causal mask tells slots apart without positions.
    assert found == {"probe-order"} | (set() if is_causal else {"probe-slots"})
