"""Acceptance figures of traces worked by hand."""

from dataclasses import replace

import numpy as np
import pytest
from eval_traces import baseline_trace, simple_trace

from sparksmith.draft.errors import UserError
from sparksmith.eval.acceptance import (
    acceptance,
    by_position,
    entropy_curve,
    judged_tokens,
    steps_of,
)
from sparksmith.eval.pairing import by_prompt
from sparksmith.eval.trace import Trace


def values(rows: list[dict[str, dict[str, float]]], name: str) -> list[float]:
    return [row[name]["value"] for row in rows]


def test_length_counts_the_bonus_and_keeps_raw_counters() -> None:
    found = acceptance(by_prompt([simple_trace()]))
    assert found is not None
    # Three steps keep 2, 0 and 1 drafted tokens.
    assert found["acceptance_length"]["value"] == 1 + 3 / 3
    assert found["accepted_per_step"]["value"] == 3 / 3
    assert found["acceptance_rate"]["value"] == 3 / 6
    assert (found["steps"], found["drafted"], found["accepted"]) == (3, 6, 3)
    assert (found["tokens"], found["prompts"], found["cut_steps"]) == (7, 1, 0)


def test_length_is_pooled_over_steps_not_a_mean_of_means() -> None:
    hopeless = simple_trace(
        prompt_id="long", token_ids=list(range(11)), drafted=[2] * 10, accepted=[0] * 10
    )
    perfect = simple_trace(prompt_id="short", token_ids=list(range(4)), drafted=[2], accepted=[2])
    found = acceptance(by_prompt([hopeless, perfect]))
    assert found is not None
    # The mean of the prompts' lengths would be (1 + 3) / 2 = 2.
    assert found["acceptance_length"]["value"] == pytest.approx(1 + 2 / 11)


def test_the_baseline_arm_does_not_count() -> None:
    found = acceptance(by_prompt([simple_trace(), baseline_trace()]))
    assert found is not None
    assert found["steps"] == 3
    assert acceptance(by_prompt([baseline_trace()])) is None


def test_positions_joint_and_conditional() -> None:
    rows = by_position(by_prompt([simple_trace()]))
    # Position 1: 3 reached, 2 kept. Position 2: reached by the steps that kept 2 and 1, 1 kept.
    assert values(rows, "conditional") == pytest.approx([2 / 3, 1 / 2])
    # Plain quotients: 2 of 3 steps keep at least one, 1 of 3 keeps two.
    assert values(rows, "joint") == pytest.approx([2 / 3, 1 / 3])
    assert [row["steps_reached"] for row in rows] == [3, 2]
    assert [row["steps_accepted"] for row in rows] == [2, 1]
    assert [row["steps_drafted"] for row in rows] == [3, 3]


def test_joint_rates_sum_to_the_length_when_nothing_is_cut() -> None:
    prompts = by_prompt([simple_trace()])
    found = acceptance(prompts)
    assert found is not None
    total = 1 + sum(values(by_position(prompts), "joint"))
    assert total == pytest.approx(found["acceptance_length"]["value"])


def test_a_cut_step_is_no_rejection_after_its_last_token() -> None:
    # The cap fell after the last step's first accepted token: 1 + 3 + 1 + 1 tokens, no bonus.
    cut = simple_trace(token_ids=[10, 11, 12, 13, 14, 15], finish_reason="length")
    assert [step.cut for step in steps_of(cut) or ()] == [False, False, True]
    rows = by_position(by_prompt([cut]))
    # Position 2 was reached by the first step alone, which kept it.
    assert values(rows, "conditional") == pytest.approx([2 / 3, 1.0])
    assert values(rows, "joint") == pytest.approx([2 / 3, 2 / 3])
    assert [row["steps_reached"] for row in rows] == [3, 1]
    found = acceptance(by_prompt([cut]))
    assert found is not None
    assert (found["cut_steps"], found["steps"], found["accepted"]) == (1, 3, 3)


def test_a_stop_token_from_the_target_ends_a_step_whose_rejection_counts() -> None:
    # Same counts, but the last step emitted its own token after one accepted draft.
    assert [step.reached for step in steps_of(simple_trace()) or ()] == [2, 1, 2]


def test_drafts_of_different_length() -> None:
    trace = simple_trace(token_ids=list(range(7)), drafted=[3, 0, 1], accepted=[2, 0, 1])
    rows = by_position(by_prompt([trace]))
    # Position 1: two steps drafted, both kept; position 2: one drafted and kept; 3: rejected.
    assert values(rows, "conditional") == [1.0, 1.0, 0.0]
    # Of three steps, two keep at least one token, one keeps two: not drafting counts as an end.
    assert values(rows, "joint") == pytest.approx([2 / 3, 1 / 3, 0.0])
    assert [row["steps_drafted"] for row in rows] == [2, 1, 1]


def test_positions_never_reached_are_null_and_jointly_zero() -> None:
    trace = simple_trace(token_ids=[1, 2, 3], drafted=[2, 2], accepted=[0, 0])
    rows = by_position(by_prompt([trace]))
    assert values(rows, "conditional") == [0.0, None]
    assert values(rows, "joint") == [0.0, 0.0]


def test_product_limit_is_unbiased_where_a_plain_quotient_is_not() -> None:
    """Every draft is accepted with probability 0.7, so P(first k accepted) is 0.7 ** k.

    With a cap of 6 tokens a good step is often the one that is cut, and leaving it out of both
    sides of a plain quotient would lose exactly the good ones.
    """
    generator = np.random.default_rng(1)
    traces = [capped_trace(generator, index) for index in range(3000)]
    joint = values(by_position(by_prompt(traces)), "joint")
    assert joint == pytest.approx([0.7**k for k in range(1, 5)], abs=0.02)
    whole = [s for t in traces for s in steps_of(t) or () if not s.cut]
    plain = sum(step.accepted >= 3 for step in whole) / len(whole)
    assert plain < 0.7**3 - 0.05


def capped_trace(generator: np.random.Generator, index: int) -> Trace:
    emitted, accepted = 1, []
    while emitted < 6:
        kept = 0
        while kept < 4 and emitted + kept < 6 and generator.random() < 0.7:
            kept += 1
        accepted.append(kept)
        emitted += kept + 1
    return simple_trace(
        prompt_id=str(index), token_ids=list(range(6)), accepted=accepted,
        drafted=[4] * len(accepted),
    )  # fmt: skip


@pytest.mark.parametrize(
    "changes",
    [
        {"token_ids": [1, 2, 3, 4]},
        {"token_ids": list(range(9))},
        {"accepted": [2, 0]},
        {"accepted": [3, 0, 0], "drafted": [2, 2, 2]},
        {"accepted": [2, 2, 0], "token_ids": [1, 2, 3, 4, 5, 6]},
    ],
)
def test_counts_that_contradict_the_tokens_are_refused(changes: dict[str, list[int]]) -> None:
    with pytest.raises(UserError, match="code/p0"):
        steps_of(replace(simple_trace(), **changes))


def test_a_response_of_one_token_has_no_steps() -> None:
    trace = simple_trace(token_ids=[1], drafted=[], accepted=[])
    assert steps_of(trace) == []
    found = acceptance(by_prompt([trace]))
    assert found is not None
    assert found["acceptance_length"]["value"] is None
    assert by_position(by_prompt([trace])) == []


def test_judged_tokens_include_the_rejected_one_and_no_bonus() -> None:
    bits = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    trace = simple_trace(entropy_lower=bits, entropy_upper=bits)
    # Tokens 1, 2 accepted, 3 is the bonus; 4 replaces a rejected draft; 5 accepted, 6 replaces.
    assert [(token.lower, token.accepted) for token in judged_tokens(trace)] == [
        (0.1, True), (0.2, True), (0.4, False), (0.5, True), (0.6, False),
    ]  # fmt: skip


def test_the_token_after_a_cut_is_not_judged() -> None:
    bits = [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    cut = simple_trace(token_ids=list(range(6)), entropy_lower=bits, entropy_upper=bits)
    assert [token.lower for token in judged_tokens(cut)] == [0.1, 0.2, 0.4, 0.5]


def test_entropy_curve_counts_bands_and_bounds_that_straddle_them() -> None:
    lower = [0.0, 0.05, 0.3, 0.0, 0.3, 0.4, 5.0]
    upper = [0.0, 0.05, 0.3, 0.0, 0.3, 0.6, 9.0]
    curve = entropy_curve(by_prompt([simple_trace(entropy_lower=lower, entropy_upper=upper)]))
    assert curve is not None
    by_band = {band["band"]: (band["accepted"], band["tokens"]) for band in curve["bands"]}
    # 0.05 accepted; 0.3 accepted and 0.3 rejected; 0.4 to 0.6 lies in two bands; 5 to 9 rejected.
    assert by_band["0-0.1"] == (1, 1)
    assert by_band["0.25-0.5"] == (1, 2)
    assert by_band["4+"] == (0, 1)
    assert (curve["tokens"], curve["undetermined_tokens"]) == (4, 1)
    assert entropy_curve(by_prompt([simple_trace()])) is None
