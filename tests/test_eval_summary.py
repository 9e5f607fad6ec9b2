"""The report's dictionary: complete, JSON-able, and honest about what it lacks."""

import json
from dataclasses import replace
from typing import Any

import pytest
from eval_traces import WORKLOADS, baseline_trace, simple_trace, synthetic_traces

from sparksmith.draft.errors import UserError
from sparksmith.eval.findings import interval, lossless_sentence
from sparksmith.eval.summary import summarise
from sparksmith.eval.trace import Trace

LOSSLESS = {"prompts": 4, "tokens": 400, "equal": 4, "ties": 0, "differences": 0}


@pytest.fixture(scope="module")
def summary() -> dict[str, Any]:
    return summarise(synthetic_traces(12), {"command": "x"}, LOSSLESS)


def test_summary_is_json_without_nan(summary: dict[str, Any]) -> None:
    again = json.loads(json.dumps(summary, allow_nan=False))
    assert again["settings"] == {"command": "x"}
    assert list(again["workloads"]) == list(WORKLOADS)


def test_overall_pools_the_workloads(summary: dict[str, Any]) -> None:
    groups = [group["acceptance"] for group in summary["workloads"].values()]
    overall = summary["overall"]["acceptance"]
    for counter in ("steps", "drafted", "accepted", "tokens", "prompts"):
        assert overall[counter] == sum(group[counter] for group in groups)
    pooled = 1 + overall["accepted"] / overall["steps"]
    assert overall["acceptance_length"]["value"] == pytest.approx(pooled)


def test_every_prompt_is_in_one_band(summary: dict[str, Any]) -> None:
    bands = summary["entropy_bands"]["bands"]
    assert sum(group["prompts"] for group in bands.values()) == 12 * len(WORKLOADS)
    assert summary["entropy_bands"]["edges_bits"] == [
        0.0, 0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, None,
    ]  # fmt: skip


def test_the_title_names_both_ends(summary: dict[str, Any]) -> None:
    code, creative = (summary["workloads"][name] for name in ("code", "creative"))
    best, worst = (group["acceptance"]["acceptance_length"]["value"] for group in (code, creative))
    assert summary["title"].startswith(f"On code, {best:.2f} tokens a step")
    assert f"on creative writing, {worst:.2f} tokens" in summary["title"]
    assert summary["headline"][0].startswith("On code: ")


def test_the_draft_cannot_move_a_prompt_to_another_band() -> None:
    low, high = [0.3] * 7, [3.5] * 7
    baseline = baseline_trace(entropy_lower=low, entropy_upper=low)
    for bits in (low, high):
        speculative = simple_trace(entropy_lower=bits, entropy_upper=bits)
        found = summarise([speculative, baseline], {}, None)
        assert list(found["entropy_bands"]["bands"]) == ["0.25-0.5"]


def test_what_an_engine_cannot_give_is_null_and_named() -> None:
    bare = replace(
        simple_trace(), engine="vllm", drafted=None, accepted=None, draft_seconds=None,
        verify_seconds=None, first_token_seconds=None, decode_seconds=None,
    )  # fmt: skip
    found = summarise([bare], {}, None)
    group = found["overall"]
    assert group["acceptance"] is None
    assert group["positions"] == []
    assert group["time_split"] is None
    assert group["speed"]["ratio"]["value"] is None
    assert found["token_entropy"]["overall"] is None
    named = {(row["field"], row["traces"]) for row in found["missing"]}
    assert {("drafted", 1), ("decode_seconds", 1), ("entropy_lower", 1)} <= named
    assert any("vllm" in row["reason"] for row in found["missing"])
    assert json.dumps(found, allow_nan=False)
    assert found["title"] == "No acceptance could be measured."


def warned(traces: list[Trace], check: dict[str, Any] | None = LOSSLESS) -> str:
    return "\n".join(summarise(traces, {}, check)["warnings"])


def test_warnings() -> None:
    pair = [simple_trace(), baseline_trace()]
    assert "only 1 prompts" in warned(pair)
    assert "no autoregressive arm" in warned([simple_trace()])
    assert "answered by one arm only" in warned([*pair, simple_trace(prompt_id="b")])
    assert "LOSSLESSNESS FAILED" in warned(pair, LOSSLESS | {"differences": 1})
    assert "not checked" in warned(pair, None)
    half = [replace(trace, settings={"dtype": "bfloat16"}) for trace in pair]
    assert "ran in bfloat16" in warned(half)
    assert "bfloat16" not in warned(pair)
    assert "slower than plain" in warned([simple_trace(decode_seconds=0.5), pair[1]])


def test_what_workloads_share_is_said_once() -> None:
    traces = []
    for workload in ("code", "creative", "chat"):
        named = {"workload": workload, "prompt_id": workload}
        traces += [simple_trace(**named), baseline_trace(**named)]
    lines = [line for line in warned(traces).splitlines() if "only 1 prompts" in line]
    assert len(lines) == 1
    assert lines[0].startswith("Code, creative writing and chat: ")


def test_a_speed_up_that_is_not_shown_is_said() -> None:
    traces = []
    for index in range(30):
        seconds = 0.2 if index % 2 else 0.4
        traces.append(simple_trace(prompt_id=str(index), decode_seconds=seconds))
        traces.append(baseline_trace(prompt_id=str(index)))
    assert "includes 1" in warned(traces)
    assert "only 30" not in warned(traces)


def test_arms_under_different_settings_are_named_but_not_the_draft_or_the_seed() -> None:
    settings = {"target": "t", "dtype": "float32", "threads": 2}
    draft = simple_trace(settings=settings | {"draft": "d"}, sampling={"seed": 1})
    plain = baseline_trace(settings=settings, sampling={"seed": 2})
    assert "one setting" not in warned([draft, plain])
    slower = replace(plain, settings=settings | {"threads": 1})
    assert "threads is 1 and 2" in warned([draft, slower])


def test_looping_text_is_called_out_with_the_figure_without_it() -> None:
    loop = [7, 8] * 40 + [7]
    looping = simple_trace(
        prompt_id="loop", token_ids=loop, drafted=[3] * 20, accepted=[3] * 20,
    )  # fmt: skip
    text = warned([looping, simple_trace(), baseline_trace()])
    assert "50% of the prompts" in text
    assert "Acceptance may look good because the text loops" in text
    assert "the acceptance length is 2.00" in text


def test_bad_traces_are_refused() -> None:
    with pytest.raises(UserError, match="nothing to report"):
        summarise([], {}, None)
    with pytest.raises(UserError, match="one entropy a token"):
        summarise([simple_trace(entropy_lower=[0.1], entropy_upper=[0.1])], {}, None)


def test_sentences() -> None:
    assert interval({"value": 1.8234, "low": 1.7, "high": 1.95}, unit="x") == "1.82x [1.70, 1.95]"
    assert interval({"value": None, "low": None, "high": None}) == "-"
    ties = lossless_sentence(LOSSLESS | {"equal": 3, "ties": 1})
    assert "3 of 4" in ties
    assert "1 parted at a tie" in ties
