"""Packaged workloads by name, and files of public sets reported by category."""

import json
from pathlib import Path

import pytest

from sparksmith.draft.errors import UserError
from sparksmith.eval.prompt_sets import known_workloads, load_file, load_workloads


def test_packaged_workloads_load_and_their_ids_are_unique() -> None:
    names = known_workloads()
    assert {"code", "creative", "chat", "maths", "extraction"} <= set(names)
    prompts = load_workloads(names)
    assert len({(prompt.workload, prompt.prompt_id) for prompt in prompts}) == len(prompts)
    for name in names:
        assert sum(prompt.workload == name for prompt in prompts) >= 40


def test_limit_is_for_each_workload() -> None:
    prompts = load_workloads(["code", "chat"], limit=3)
    assert [prompt.workload for prompt in prompts] == ["code"] * 3 + ["chat"] * 3


def test_unknown_workload_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"poetry.*not a packaged workload.*code.*creative"):
        load_workloads(["poetry"])
    with pytest.raises(UserError, match="named twice"):
        load_workloads(["code", "code"])
    with pytest.raises(UserError, match="limit"):
        load_workloads(["code"], limit=0)


def test_file_rows_are_reported_by_category(tmp_path: Path) -> None:
    path = tmp_path / "mt-bench.turns.jsonl"
    rows = [
        {"question_id": 1, "category": "writing", "turns": ["a", "b"]},
        {"question_id": 2, "category": "writing", "turns": ["c"]},
        {"question_id": 3, "turns": ["d"]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [prompt.workload for prompt in load_file(path)] == ["writing", "writing", "mt-bench"]
    assert [prompt.prompt_id for prompt in load_file(path, limit=1)] == ["1", "3"]
    assert {prompt.workload for prompt in load_file(path, workload="all")} == {"all"}
