"""Counts, times and findings of live runs, by hand."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparksmith.draft.errors import UserError
from sparksmith.eval.bench_serve import read_bench
from sparksmith.eval.live import Account, kept_steps
from sparksmith.eval.live_findings import live_notes, live_warnings
from sparksmith.eval.trace import Trace
from sparksmith.verify.endpoint import Counters, read_counters, read_sglang


def trace(number: int, accepted: list[int], prompt: str = "p", **changes: Any) -> Trace:
    tokens = 1 + sum(count + 1 for count in accepted)
    values: dict[str, Any] = {
        "prompt_id": prompt,
        "workload": "code",
        "arm": "speculative",
        "engine": "vllm",
        "prompt_tokens": 3,
        "token_ids": list(range(tokens)),
        "text": str(number),
        "finish_reason": "stop",
        "drafted": [4] * len(accepted),
        "accepted": accepted,
        "draft_seconds": None,
        "verify_seconds": None,
        "first_token_seconds": 0.1,
        "decode_seconds": 1.0,
    }
    return Trace(**{**values, **changes})


@pytest.mark.parametrize(
    ("tokens", "accepted", "kept"),
    [
        (6, [1, 2], [1, 2]),  # 1 + 2 + 3
        (5, [1, 2], [1, 2]),  # the bonus of the last step is beyond the cap
        (4, [1, 2], [1, 1]),  # and one of its drafted tokens
        (3, [1, 2], [1]),  # the whole last step is behind the stop
        (7, [1, 2], None),  # a token that no step emitted
        (1, [], []),
    ],
)
def test_what_lies_behind_the_end_is_left_out(
    tokens: int, accepted: list[int], kept: list[int] | None
) -> None:
    made = kept_steps(tokens, accepted, [4] * len(accepted))
    assert (None if made is None else made[0]) == kept


def counters(drafts: int, accepted: int) -> Counters:
    return Counters(drafts=drafts, draft_tokens=4 * drafts, accepted=accepted, by_position=(1, 0))


def test_two_sources_that_agree_and_two_that_do_not() -> None:
    account = Account(drafts=5, drafted=20, accepted=7, counters=counters(5, 7))
    assert "agree: 5 steps, 20 drafted and 7 accepted" in live_notes(account)[0]
    assert live_warnings([], account) == []
    account.counters = counters(6, 7)
    assert live_notes(account) == []
    assert "another user was on the server" in live_warnings([], account)[0]


def test_a_steady_decline_is_flagged_and_chance_is_not() -> None:
    falling = [trace(n, [3 - n // 4] * 6, f"p{n % 2}") for n in range(16)]
    assert any("falls steadily" in w for w in live_warnings(falling, Account()))
    level = [trace(n, [(n * 7) % 4, 2, 1], f"p{n % 2}") for n in range(16)]
    assert not any("falls steadily" in w for w in live_warnings(level, Account()))


def test_a_draft_that_stops_working_is_flagged() -> None:
    dead = [trace(0, [2] * 20), *(trace(n, [0] * 20, f"p{n}") for n in range(1, 4))]
    (warning,) = [w for w in live_warnings(dead, Account()) if "nothing was accepted" in w]
    assert "After 20 steps" in warning
    assert "60 steps" in warning
    alive = [trace(n, [0, 0, 1, 0], f"p{n}") for n in range(20)]
    assert not any("nothing was accepted" in w for w in live_warnings(alive, Account()))


def test_prefix_hits_failures_and_truncation_are_said() -> None:
    account = Account(cached_prompt_tokens=48, failed=["code/p1 (speculative): HTTP 500"])
    cut = [trace(n, [1], f"p{n}", finish_reason="length") for n in range(3)]
    said = " ".join(live_warnings(cut, account))
    assert "48 prompt tokens came from the prefix cache" in said
    assert "code/p1 (speculative): HTTP 500" in said
    assert "3 of 3 responses were cut by the cap" in said


METRICS = """# HELP vllm:spec_decode_num_drafts_total drafts
vllm:spec_decode_num_drafts_total{engine="0",model_name="t"} 10.0
vllm:spec_decode_num_drafts_total{engine="1",model_name="t"} 2.0
vllm:spec_decode_num_drafts_created{engine="0",model_name="t"} 1.79e+09
vllm:spec_decode_num_draft_tokens_total{engine="0",model_name="t"} 40.0
vllm:spec_decode_num_accepted_tokens_total{engine="0",model_name="t"} 9.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="t",position="0"} 6.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="t",position="1"} 3.0
"""


def test_counters_are_read_over_all_engines() -> None:
    found = read_counters(METRICS)
    assert found == Counters(drafts=12, draft_tokens=40, accepted=9, by_position=(6, 3))
    assert read_counters("vllm:num_requests_running 1.0\n") is None
    with pytest.raises(ValueError, match="went back"):
        counters(1, 1).since(found)


def test_sglangs_gauge_is_read() -> None:
    text = (
        "# TYPE sglang:spec_accept_length gauge\n"
        'sglang:spec_accept_length{model_name="m",tp_rank="0"} 3.0\n'
        'sglang:spec_accept_length{model_name="m",tp_rank="1"} 4.0\n'
    )
    assert read_sglang(text) == 3.5
    assert read_sglang(METRICS) is None


def test_a_result_of_vllm_bench_serve_is_read(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    found = {
        "num_prompts": 10,
        "completed": 9,
        "max_concurrency": 4,
        "output_throughput": 80.0,
        "mean_tpot_ms": 40.0,
        "spec_decode_num_drafts": 100,
        "spec_decode_accepted_tokens": 150,
        "spec_decode_acceptance_length": 2.5,
    }
    path.write_text(json.dumps(found), encoding="utf-8")
    row, note = read_bench(path)
    assert row == {
        "users": 4,
        "requests": 10,
        "failed": 1,
        "tokens_per_second_user": 25.0,
        "tokens_per_second_total": 80.0,
    }
    assert "acceptance length 2.50 (100 steps, 150 accepted)" in note
    path.write_text(json.dumps({**found, "mean_tpot_ms": "fast"}), encoding="utf-8")
    with pytest.raises(UserError, match="mean_tpot_ms 'fast'"):
        read_bench(path)
