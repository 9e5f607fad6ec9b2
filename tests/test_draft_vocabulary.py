"""The reduced vocabulary: which words, in what form, and which forms are refused."""

import pytest
import torch

from sparksmith.draft.errors import UserError
from sparksmith.draft.vocabulary import frequent_words, offsets_of, target_ids_of


def test_the_most_frequent_words_ascending_with_the_special_ones() -> None:
    counts = torch.tensor([5, 0, 9, 1, 7, 0, 3])
    assert frequent_words(counts, 3).tolist() == [0, 2, 4]
    assert frequent_words(counts, 3, always=[5]).tolist() == [2, 4, 5]
    assert frequent_words(counts, 3, always=[4, 2]).tolist() == [0, 2, 4]
    assert frequent_words(counts, 7).tolist() == list(range(7))


def test_ties_go_to_the_smaller_id() -> None:
    assert frequent_words(torch.ones(6), 2).tolist() == [0, 1]


def test_offsets_are_those_of_the_layout() -> None:
    ids = torch.tensor([0, 3, 4, 9])
    offsets = offsets_of(ids)
    # Target id = draft id + offset.
    assert offsets.tolist() == [0, 2, 2, 6]
    assert offsets.dtype == torch.int64
    assert target_ids_of(offsets, 10).tolist() == ids.tolist()


@pytest.mark.parametrize(
    ("offsets", "problem"),
    [
        (torch.tensor([0, 2, 1]), "ascending"),  # ids 0, 3, 3
        (torch.tensor([5, 3, 1]), "ascending"),  # ids 5, 4, 3
        (torch.tensor([0, 2, 8]), "vocabulary"),  # ids 0, 3, 10
        (torch.tensor([-1, 2, 3]), "vocabulary"),  # ids -1, 3, 5
        (torch.tensor([0.0, 2.0]), "int64"),
        (torch.tensor([0, 2], dtype=torch.int32), "int64"),
    ],
)
def test_unfit_offsets_are_refused(offsets: torch.Tensor, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as caught:
        target_ids_of(offsets, 10)
    assert caught.value.field == "d2t"


@pytest.mark.parametrize(
    ("num_words", "always"), [(0, []), (8, []), (1, [2, 3]), (3, [7]), (3, [-1])]
)
def test_unfit_requests_are_refused(num_words: int, always: list[int]) -> None:
    with pytest.raises(UserError):
        frequent_words(torch.ones(7), num_words, always)
