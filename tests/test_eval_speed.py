"""Speed figures of traces worked by hand."""

from itertools import pairwise

import pytest
from eval_traces import baseline_trace, simple_trace

from sparksmith.eval.bands import LABELS, band_index, prompt_band
from sparksmith.eval.degeneracy import Loop, distinct_n, is_degenerate, longest_loop
from sparksmith.eval.pairing import by_prompt
from sparksmith.eval.speed import responses, speed, time_split


def test_tokens_per_second_leave_the_first_token_out() -> None:
    found = speed(by_prompt([simple_trace(), baseline_trace()]))
    assert found["speculative"]["tokens_per_second"]["value"] == pytest.approx(6 / 0.18)
    assert found["autoregressive"]["tokens_per_second"]["value"] == pytest.approx(6 / 0.3)
    assert found["ratio"]["value"] == pytest.approx(0.3 / 0.18)


def test_responses_of_different_length_are_compared_per_token() -> None:
    longer = baseline_trace(
        token_ids=list(range(13)), drafted=[0] * 12, accepted=[0] * 12, decode_seconds=0.6
    )
    found = speed(by_prompt([simple_trace(), longer]))
    assert found["ratio"]["value"] == pytest.approx((0.6 / 12) / (0.18 / 6))


def test_only_pairs_count_and_the_rest_is_said() -> None:
    pair = [simple_trace(), baseline_trace()]
    alone = simple_trace(prompt_id="alone", decode_seconds=99.0)
    found = speed(by_prompt([*pair, alone]))
    assert found["ratio"]["value"] == pytest.approx(0.3 / 0.18)
    assert found["speculative"]["prompts"] == 1
    assert (found["paired_prompts"], found["unpaired_prompts"]) == (1, 1)


def test_without_a_baseline_there_is_speed_but_no_ratio() -> None:
    found = speed(by_prompt([simple_trace()]))
    assert found["speculative"]["tokens_per_second"]["value"] == pytest.approx(6 / 0.18)
    assert found["autoregressive"] is None
    assert found["ratio"]["value"] is None


def test_pairs_are_resampled_together() -> None:
    # Every prompt is exactly twice as fast, though prompts differ tenfold in speed.
    traces = []
    for index in range(10):
        slow = 1.0 + index
        traces.append(simple_trace(prompt_id=str(index), decode_seconds=slow))
        traces.append(baseline_trace(prompt_id=str(index), decode_seconds=2 * slow))
    ratio = speed(by_prompt(traces))["ratio"]
    assert ratio == {"value": 2.0, "low": pytest.approx(2.0), "high": pytest.approx(2.0)}


def test_time_split_adds_up() -> None:
    found = time_split(by_prompt([simple_trace(), baseline_trace()]))
    assert found is not None
    # 3 steps of 10 ms draft and 40 ms verify in 180 ms.
    assert found["share"] == pytest.approx({"draft": 1 / 6, "verify": 2 / 3, "other": 1 / 6})
    assert found["milliseconds_per_step"]["total"] == pytest.approx(60.0)
    assert found["tokens_per_step"] == 2.0
    assert found["plain_milliseconds_per_token"] == pytest.approx(50.0)
    assert time_split(by_prompt([simple_trace(draft_seconds=None)])) is None


def test_response_counts_and_first_token() -> None:
    traces = [
        simple_trace(prompt_id=str(i), first_token_seconds=0.1 * (i + 1),
                     finish_reason="length" if i else "stop")
        for i in range(3)
    ]  # fmt: skip
    found = responses(by_prompt(traces), "speculative")
    assert found is not None
    assert found["first_token_seconds"]["median"] == pytest.approx(0.2)
    assert found["first_token_seconds"]["p90"] == pytest.approx(0.28)
    assert found["finish_reasons"] == {"length": 2, "stop": 1}
    assert (found["tokens"], found["mean_tokens"]) == (21, 7.0)
    assert responses(by_prompt(traces), "autoregressive") is None


def test_bands_hold_their_lower_edge() -> None:
    assert LABELS[0] == "0-0.1"
    assert LABELS[-1] == "4+"
    assert [band_index(b, b) for b in (-1e-17, 0.0, 0.0999, 0.1, 3.999, 4.0, 17.0)] == [
        0, 0, 0, 1, 7, 8, 8,
    ]  # fmt: skip
    assert band_index(0.05, 0.15) is None
    for before, after in pairwise(LABELS[:-1]):
        assert before.split("-")[1] == after.split("-")[0]


def test_a_prompt_is_banded_by_its_baseline_alone() -> None:
    bits = [0.6] * 7
    assert prompt_band([baseline_trace(entropy_lower=bits, entropy_upper=bits)]) == "0.5-1"
    upper = [1.2] * 7
    assert prompt_band([baseline_trace(entropy_lower=bits, entropy_upper=upper)]) == "undetermined"
    assert prompt_band([baseline_trace()]) == "undetermined"
    assert prompt_band([]) == "no baseline"


def test_distinct_n_grams() -> None:
    assert distinct_n([1, 2, 1, 2, 1], 1) == 2 / 5
    assert distinct_n([1, 2, 1, 2, 1], 2) == 2 / 4
    assert distinct_n([1, 2, 1, 2, 1], 4) == 1.0
    assert distinct_n([1, 2], 3) is None


def test_longest_loop() -> None:
    assert longest_loop([1, 2, 3, 4, 5, 6]) == Loop(0, 0)
    # Twice is not a loop, three times is.
    assert longest_loop([9, 1, 2, 1, 2, 8]) == Loop(0, 0)
    assert longest_loop([9, 1, 2, 1, 2, 1, 2, 8]) == Loop(6, 2)
    assert longest_loop([7, 7, 7, 7]) == Loop(4, 1)
    assert longest_loop([]) == Loop(0, 0)


def test_degenerate_needs_a_long_loop_or_few_distinct_words() -> None:
    plain = list(range(100))
    assert not is_degenerate(simple_trace(token_ids=plain))
    assert is_degenerate(simple_trace(token_ids=plain + [1, 2, 3, 4, 5] * 8))
    # The same loop in a text five times as long is a quirk, not the text.
    assert not is_degenerate(simple_trace(token_ids=list(range(500)) + [1, 2, 3, 4, 5] * 8))
    # Long lines repeated with small changes: no exact loop, few 4-grams.
    line = list(range(40))
    assert is_degenerate(simple_trace(token_ids=[*line, 90, *line, 91, *line, 92, *line]))
    assert not is_degenerate(simple_trace(token_ids=[5] * 10))
