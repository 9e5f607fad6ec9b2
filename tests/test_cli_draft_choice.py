"""The draft that a command was given: where it runs, and which targets it fits."""

from dataclasses import dataclass, replace

import pytest
import torch
from distill_samples import TAPS, tiny_target
from draft_models import tiny_draft
from tiny_models import HIDDEN, VOCABULARY

from sparksmith.cli.draft_choice import (
    MIN_SURVIVAL,
    bind_draft,
    check_fit,
    min_survival_of,
    num_tokens_of,
)
from sparksmith.distill.new_draft import DraftShape, new_draft
from sparksmith.draft.errors import UserError
from sparksmith.draft.model import DSparkDraft


@dataclass(frozen=True, kw_only=True)
class Sizes:
    num_layers: int = 4
    hidden_size: int = HIDDEN
    vocab_size: int = VOCABULARY


def draft() -> DSparkDraft:
    return tiny_draft(
        bind=False,
        hidden_size=HIDDEN,
        target_hidden_size=HIDDEN,
        vocab_size=VOCABULARY,
        draft_vocab_size=20,
        target_layer_ids=TAPS,
    )


def devices(made: DSparkDraft) -> set[str]:
    tensors = [*made.parameters(), *made.buffers(), made.bound.embed, made.bound.head]
    return {tensor.device.type for tensor in tensors}


def test_a_draft_goes_where_its_target_is() -> None:
    """The meta device stands for any that is not the CPU."""
    target = tiny_target()
    target.model.to("meta")
    made = draft()
    bind_draft(made, target, "made")
    assert devices(made) == {"meta"}
    shape = DraftShape(num_layers=1, draft_vocab_size=20, markov_rank=4)
    assert devices(new_draft(target, shape, 3, torch.ones(VOCABULARY))) == {"meta"}


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        ({"num_layers": 3}, r"target_layer_ids: \[0, 2\]"),
        ({"hidden_size": 48}, "target_hidden_size: 32 of draft made is not the target's 48"),
        ({"vocab_size": 99}, "vocab_size: 67"),
    ],
)
def test_drafts_of_other_targets_are_refused(change: dict[str, int], wanted: str) -> None:
    config = draft().config
    check_fit(config, Sizes(), "made")
    with pytest.raises(UserError, match=wanted):
        check_fit(config, replace(Sizes(), **change), "made")


def test_as_many_tokens_as_asked_for() -> None:
    config = draft().config
    assert num_tokens_of(None, config) == config.block_size == 4
    assert num_tokens_of(None, None) == 4
    assert num_tokens_of(1, config) == 1
    assert num_tokens_of(9, None) == 9


def test_least_survival_is_for_drafts_that_can_tell_it() -> None:
    config = draft().config
    without = replace(config, enable_confidence_head=False, confidence_head_with_markov=False)
    assert min_survival_of(None, config) == MIN_SURVIVAL
    assert min_survival_of(None, config, "cuda") == 0.0  # a few tokens more cost a GPU nothing
    assert min_survival_of(None, without) == min_survival_of(None, None) == 0.0
    assert min_survival_of(0.2, config) == 0.2
    assert min_survival_of(0.0, without) == 0.0
    for unfit in (without, None):
        with pytest.raises(UserError, match="confidence head"):
            min_survival_of(0.2, unfit)
    with pytest.raises(UserError, match="is not a probability"):
        min_survival_of(1.5, config)
