"""Prompt lookup, worked by hand."""

import pytest
import torch

from sparksmith.draft.errors import UserError
from sparksmith.draft.ngram import NgramDrafter


def drafter(text: list[int], max_ngram: int = 3, min_ngram: int = 1) -> NgramDrafter:
    made = NgramDrafter(100, max_ngram=max_ngram, min_ngram=min_ngram)
    made.update(torch.tensor(text), None)
    return made


def draft(
    text: list[int], anchor: int, num_tokens: int = 4, max_ngram: int = 3, min_ngram: int = 1
) -> list[int]:
    return drafter(text, max_ngram, min_ngram).propose(anchor, num_tokens).tokens.tolist()


def test_drafts_what_followed() -> None:
    # ... 1 2 3 4 5 6 ... 1 2 [3]: the text went on with 4 5 6 9.
    assert draft([1, 2, 3, 4, 5, 6, 9, 1, 2], 3) == [4, 5, 6, 9]


def test_the_longest_suffix_wins_over_a_later_shorter_one() -> None:
    # (1, 2) was followed by 5; a later 2 alone by 7.
    assert draft([1, 2, 5, 6, 2, 7, 8, 1], 2, num_tokens=2) == [5, 6]
    assert draft([1, 2, 5, 6, 2, 7, 8, 1], 2, num_tokens=2, max_ngram=1) == [7, 8]


def test_the_most_recent_occurrence_wins() -> None:
    assert draft([4, 10, 4, 20, 4, 30, 0], 4, num_tokens=1) == [30]


def test_the_anchor_ends_the_known_text() -> None:
    # 8 was last seen just before the anchor: what followed is the anchor itself.
    assert draft([7, 8], 8) == [8]
    assert draft([5, 6], 5) == [6, 5]


def test_nothing_to_say() -> None:
    assert draft([1, 2, 3], 9) == []
    assert draft([], 9) == []
    assert draft([1, 2, 1], 2, num_tokens=0) == []
    # 2 occurred, but not after 1, and single tokens are not looked up.
    assert draft([2, 5, 1], 2, min_ngram=2) == []


def test_committed_in_pieces_equals_at_once() -> None:
    text = [1, 2, 3, 1, 2, 4, 1, 2]
    pieces = NgramDrafter(100, max_ngram=3, min_ngram=1)
    for token in text:
        pieces.update(torch.tensor([token]), None)
    assert pieces.propose(3, 5).tokens.tolist() == draft(text, 3, num_tokens=5) == [1, 2, 4, 1, 2]


def test_proposing_changes_nothing() -> None:
    made = drafter([1, 2, 3, 1])
    first = made.propose(2, 2)
    assert made.propose(2, 2).tokens.tolist() == first.tokens.tolist() == [3, 1]


def test_probs_are_one_hot_and_there_are_no_taps() -> None:
    made = drafter([1, 2, 3, 1])
    proposal = made.propose(2, 2)
    assert proposal.probs.shape == (2, 100)
    assert proposal.probs.sum() == 2
    assert proposal.probs[[0, 1], [3, 1]].tolist() == [1.0, 1.0]
    assert proposal.confidences is None
    assert made.taps == ()


def test_unfit_sizes_are_named() -> None:
    with pytest.raises(UserError, match="min_ngram"):
        NgramDrafter(100, max_ngram=2, min_ngram=3)
