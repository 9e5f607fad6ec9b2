"""The loop by hand, on targets whose law is a table; on real models see test_verify_greedy."""

import itertools

import pytest
import torch
from table_target import TableDrafter, TableTarget, counting_table

from sparksmith.draft.errors import UserError
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.decode import DecodeSettings, collect, decode, stream_decode

COUNTING = TableTarget(counting_table(10))
SAMPLED = Sampling(temperature=1.0, top_p=1.0)


def settings(**changes):
    return DecodeSettings(**{"sampling": Sampling(temperature=0.0), **changes})


def perfect():
    return TableDrafter(counting_table(10))


def test_stop_token_inside_an_accepted_block_ends_the_response_there():
    result = decode(COUNTING, perfect(), [0], settings(num_tokens=4, stop_token_ids=frozenset({3})))
    # 1 from the prefill; the step drafts 2 3 4 5, all right, and the text ends at 3.
    assert result.token_ids == [1, 2, 3]
    assert result.draft_kept == [False, True, True]
    assert (result.drafted, result.accepted) == ([4], [2])
    assert result.finish_reason == "stop"


def test_stop_token_as_the_targets_own_token():
    result = decode(COUNTING, perfect(), [0], settings(num_tokens=2, stop_token_ids=frozenset({4})))
    assert result.token_ids == [1, 2, 3, 4]
    assert result.draft_kept == [False, True, True, False]
    assert (result.drafted, result.accepted) == ([2], [2])


def test_first_token_may_end_the_response():
    drafter = perfect()
    result = decode(COUNTING, drafter, [0], settings(stop_token_ids=frozenset({1})))
    assert (result.token_ids, result.finish_reason) == ([1], "stop")
    assert (result.drafted, result.decode_seconds, drafter.asked) == ([], 0.0, [])


def test_targets_own_stop_tokens_are_the_default():
    target = TableTarget(counting_table(10))
    target.eos_token_ids = frozenset({2, 5})
    assert decode(target, None, [3], settings()).token_ids == [4, 5]
    kept_on = decode(target, None, [3], settings(stop_token_ids=frozenset(), max_new_tokens=3))
    assert kept_on.token_ids == [4, 5, 6]


def test_cap_in_the_middle_of_a_block():
    drafter = perfect()
    result = decode(COUNTING, drafter, [0], settings(num_tokens=4, max_new_tokens=8))
    assert result.token_ids == [1, 2, 3, 4, 5, 6, 7, 8]
    assert result.finish_reason == "length"
    # 1, then 4 + 1, then two left: one drafted and the target's.
    assert drafter.asked == [4, 1]
    assert result.accepted == [4, 1]


def test_one_token_to_go_is_not_drafted():
    drafter = perfect()
    result = decode(COUNTING, drafter, [0], settings(num_tokens=4, max_new_tokens=7))
    assert (result.drafted, result.accepted, drafter.asked) == ([4, 0], [4, 0], [4])
    assert len(result.token_ids) == 7


def test_stop_token_at_the_cap_is_a_stop():
    result = decode(COUNTING, None, [0], settings(max_new_tokens=3, stop_token_ids=frozenset({3})))
    assert (result.token_ids, result.finish_reason) == ([1, 2, 3], "stop")


def test_drafting_nothing_is_the_baseline():
    baseline = decode(COUNTING, None, [7], settings(max_new_tokens=12))
    drafted = decode(COUNTING, perfect(), [7], settings(num_tokens=0, max_new_tokens=12))
    assert drafted.token_ids == baseline.token_ids
    assert drafted.drafted == baseline.drafted == [0] * 11
    assert not any(baseline.draft_kept)


def half_right():
    """Right every other time."""
    return TableDrafter(0.5 * counting_table(10) + 0.05, seed=3)


def test_drafter_is_told_what_was_committed_and_nothing_else():
    drafter = half_right()
    result = decode(COUNTING, drafter, [4, 5], settings(num_tokens=3, max_new_tokens=30))
    text = [4, 5, *result.token_ids]
    assert 0 < sum(result.accepted) < sum(result.drafted)
    # All but the last step's tokens and its anchor.
    assert drafter.told == text[: len(drafter.told)]
    assert len(text) - len(drafter.told) <= 5


def test_callback_hears_the_output_in_order():
    heard: list[tuple[int, bool]] = []
    result = decode(
        COUNTING,
        half_right(),
        [0],
        settings(max_new_tokens=40),
        on_tokens=lambda tokens, flags: heard.extend(zip(tokens, flags, strict=True)),
    )
    assert heard == list(zip(result.token_ids, result.draft_kept, strict=True))
    assert sum(result.draft_kept) == sum(result.accepted)


def test_records_of_the_steps_add_up():
    result = decode(COUNTING, half_right(), [0], settings(max_new_tokens=50))
    assert 1 + len(result.accepted) + sum(result.accepted) == len(result.token_ids) == 50
    assert all(a <= d for a, d in zip(result.accepted, result.drafted, strict=True))
    seconds = [*result.draft_seconds, *result.verify_seconds]
    assert len(seconds) == 2 * len(result.accepted)
    assert min(seconds) >= 0.0
    assert result.decode_seconds == pytest.approx(sum(seconds))
    assert result.first_token_seconds > 0.0


def test_leaving_early_still_gives_figures():
    steps = []
    for step in stream_decode(COUNTING, perfect(), [0], settings(num_tokens=2)):
        steps.append(step)
        if step.number == 2:
            break
    result = collect(steps)
    assert result.token_ids == [1, 2, 3, 4, 5, 6, 7]
    assert (result.finish_reason, result.accepted) == ("interrupted", [2, 2])
    assert collect([]).finish_reason == "interrupted"


def test_same_seed_same_text():
    table = torch.softmax(torch.randn(10, 10, generator=torch.Generator().manual_seed(0)), -1)
    target = TableTarget(table)
    texts = [
        decode(
            target,
            TableDrafter(table, seed=5),
            [0],
            settings(sampling=SAMPLED, seed=seed, max_new_tokens=40),
        ).token_ids
        for seed in (1, 1, 2)
    ]
    assert texts[0] == texts[1] != texts[2]


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_a_draft_that_equals_the_target_is_always_accepted(rule):
    table = torch.softmax(torch.randn(10, 10, generator=torch.Generator().manual_seed(1)), -1)
    result = decode(
        TableTarget(table),
        # As the loop computes it from the logits, to the last bit.
        TableDrafter(table.log().softmax(-1)),
        [0],
        settings(sampling=SAMPLED, num_tokens=4, max_new_tokens=201, accept_rule=rule),
    )
    assert result.accepted == result.drafted == [4] * 40


@pytest.mark.parametrize("rule", ["block", "standard"])
def test_response_has_the_targets_law(rule):
    """Chi-square over all responses of three words, from a draft that is often wrong."""
    generator = torch.Generator().manual_seed(2)
    table = torch.softmax(torch.randn(3, 3, generator=generator), -1)
    drafting = torch.softmax(1.5 * torch.randn(3, 3, generator=generator), -1)
    target, runs = TableTarget(table), 3000
    counts = dict.fromkeys(itertools.product(range(3), repeat=3), 0)
    accepted = drafted = 0
    for seed in range(runs):
        result = decode(
            target,
            TableDrafter(drafting, seed=10_000 + seed),
            [0],
            settings(sampling=SAMPLED, num_tokens=2, max_new_tokens=3, accept_rule=rule, seed=seed),
        )
        counts[tuple(result.token_ids)] += 1
        accepted, drafted = accepted + sum(result.accepted), drafted + sum(result.drafted)
    assert 0.3 < accepted / drafted < 0.9
    chi_square = 0.0
    for (a, b, c), count in counts.items():
        expected = runs * float(table[0, a] * table[a, b] * table[b, c])
        chi_square += (count - expected) ** 2 / expected
    # 26 degrees of freedom: exceeded once in ten thousand.
    assert chi_square < 58.0


def test_context_limit_is_found_before_any_work():
    target = TableTarget(counting_table(10), max_length=8)
    assert len(decode(target, None, [0, 1, 2], settings(max_new_tokens=5)).token_ids) == 5
    with pytest.raises(UserError, match=r"max_new_tokens: 6 .* 3 tokens .* 8 .*at most 5") as error:
        stream_decode(target, None, [0, 1, 2], settings(max_new_tokens=6))
    assert (error.value.field, error.value.value) == ("max_new_tokens", 6)
    with pytest.raises(UserError, match="shorter prompt"):
        stream_decode(target, None, [0] * 9, settings(max_new_tokens=1))


@pytest.mark.parametrize(
    ("prompt", "problem"), [([], "no tokens"), ([3, 10], "vocabulary of 10"), ([-1], "vocabulary")]
)
def test_prompt_that_does_not_fit(prompt, problem):
    with pytest.raises(UserError, match=problem):
        stream_decode(COUNTING, None, prompt, settings())


def test_drafter_that_wants_other_taps():
    drafter = perfect()
    drafter.taps = (1, 2)
    with pytest.raises(UserError, match="target_layer_ids"):
        decode(COUNTING, drafter, [0], settings())


@pytest.mark.parametrize(
    ("field", "value"), [("max_new_tokens", 0), ("num_tokens", -1), ("accept_rule", "greedy")]
)
def test_bad_settings_name_the_field(field, value):
    with pytest.raises(UserError) as error:
        DecodeSettings(**{field: value})
    assert (error.value.field, error.value.value) == (field, value)
