"""Orders, learning rates and budgets, by hand."""

import itertools
import math

import pytest

from sparksmith.distill.schedule import Budget, batches, learning_rate_factor
from sparksmith.draft.errors import UserError


def lengths(index: int) -> int:
    return 10 + 7 * index % 13


@pytest.mark.parametrize(("count", "size"), [(1, 4), (10, 3), (200, 4), (7, 7)])
def test_each_epoch_visits_each_sample_once_in_an_order_of_its_own(count: int, size: int) -> None:
    per_epoch = math.ceil(count / size)
    stream = batches(count, size, lengths, 0, 0)
    epochs = [list(itertools.islice(stream, per_epoch)) for _ in range(3)]
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == list(range(count))
        assert all(len(batch) <= size for batch in epoch)
    if count > size:
        assert epochs[0] != epochs[1] != epochs[2] != epochs[0]
        sets = [{frozenset(batch) for batch in epoch} for epoch in epochs]
        assert sets[0] != sets[1]  # not only the order of the batches


@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 11, 40])
def test_resuming_goes_on_with_the_same_batches(start: int) -> None:
    whole = list(itertools.islice(batches(10, 3, lengths, 5, 0), 60))
    assert (
        list(itertools.islice(batches(10, 3, lengths, 5, start), 20)) == whole[start : start + 20]
    )


def test_seeds_differ() -> None:
    first = list(itertools.islice(batches(50, 3, lengths, 0, 0), 10))
    assert first == list(itertools.islice(batches(50, 3, lengths, 0, 0), 10))
    assert first != list(itertools.islice(batches(50, 3, lengths, 1, 0), 10))


def test_batches_hold_samples_of_similar_length() -> None:
    spread = [
        max(map(lengths, batch)) - min(map(lengths, batch))
        for batch in itertools.islice(batches(640, 4, lengths, 0, 0), 160)
    ]
    assert sum(spread) / len(spread) < 1.0  # random batches of four spread over 7


def test_learning_rate_by_hand() -> None:
    # Warm-up over the first tenth, then half a cosine over the rest.
    at = [0.0, 0.001, 0.05, 0.1, 0.325, 0.55, 0.775, 1.0]
    expected = [0.05, 0.05, 0.5, 1.0, 0.853553, 0.5, 0.146447, 0.0]
    assert [learning_rate_factor(f, 0.1) for f in at] == pytest.approx(expected, abs=1e-6)
    assert learning_rate_factor(0.0, 0.0) == 1.0


def test_budget() -> None:
    assert Budget(steps=10).fraction(4, 1e6) == 0.4
    assert Budget(minutes=2.0).fraction(10**6, 30.0) == 0.25
    both = Budget(steps=10, minutes=1.0)
    assert both.fraction(5, 45.0) == 0.75
    assert both.fraction(9, 45.0) == 0.9
    assert both.fraction(20, 0.0) == 1.0


@pytest.mark.parametrize(
    "values",
    [{}, {"steps": 0}, {"minutes": -1.0}, {"minutes": math.nan}, {"steps": 5, "minutes": 0}],
)
def test_unfit_budgets_are_refused(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match=r"budget|unset"):
        Budget(**values)  # type: ignore[arg-type]
