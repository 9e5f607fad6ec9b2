"""Prompt files in every layout they come in, and what is said of a broken one."""

import json
from pathlib import Path
from typing import Any

import pytest

from sparksmith.draft.errors import UserError
from sparksmith.verify.prompts import Prompt, read_prompts


def written(folder: Path, *rows: object) -> Path:
    path = folder / "set.jsonl"
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def user(text: str) -> tuple[dict[str, str], ...]:
    return ({"role": "user", "content": text},)


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"prompt": "Hi"}, Prompt(prompt_id="set:1", messages=user("Hi"))),
        (
            {"question": "1+1?", "answer": "#### 2"},
            Prompt(prompt_id="set:1", messages=user("1+1?")),
        ),
        (
            {"problem": "Find x.", "solution": "2", "subject": "Algebra", "unique_id": "test/1"},
            Prompt(prompt_id="test/1", messages=user("Find x.")),
        ),
        (
            {"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]},
            Prompt(prompt_id="81", messages=user("Write."), category="writing"),
        ),
        (
            {"task_id": 2, "text": "Add two numbers.", "test_list": ["assert f(1, 2) == 3"]},
            Prompt(
                prompt_id="2",
                messages=user(
                    "Add two numbers.\nYour code should pass these tests:\n\nassert f(1, 2) == 3"
                ),
            ),
        ),
        (
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f"},
            Prompt(
                prompt_id="HumanEval/0",
                messages=user(
                    "Complete the following Python function. Answer with the whole function.\n"
                    "```python\ndef f():\n```"
                ),
            ),
        ),
        (
            {"messages": [{"role": "system", "content": "Be brief."},
                          {"role": "user", "content": [{"type": "text", "text": "Hi"}]},
                          {"role": "assistant", "content": "Hello"},
                          {"role": "user", "content": "Bye"}],
             "prompt_id": "m", "workload": "chat"},
            Prompt(
                prompt_id="m",
                messages=({"role": "system", "content": "Be brief."}, *user("Hi")),
                category="chat",
            ),
        ),
        (
            {"conversations": [{"from": "gpt", "value": "cut off"},
                               {"from": "human", "value": "Hi"},
                               {"from": "gpt", "value": "Hello"}], "id": "s"},
            Prompt(prompt_id="s", messages=user("Hi")),
        ),
    ],
)  # fmt: skip
def test_layouts(tmp_path: Path, row: dict[str, Any], expected: Prompt) -> None:
    assert read_prompts(written(tmp_path, row)) == [expected]


def test_layouts_may_mix_and_blank_lines_are_skipped(tmp_path: Path) -> None:
    path = written(tmp_path, {"prompt": "a"}, "", {"turns": ["b"]})
    assert [prompt.prompt_id for prompt in read_prompts(path)] == ["set:1", "set:3"]
    assert len(read_prompts(path, limit=1)) == 1


def test_all_turns_keep_the_replies_between_them(tmp_path: Path) -> None:
    talk = [("user", "a"), ("assistant", "b"), ("user", "c")]
    row = {"id": "x", "messages": [{"role": r, "content": c} for r, c in talk]}
    found = read_prompts(written(tmp_path, row), turns="all")
    assert [prompt.prompt_id for prompt in found] == ["x#1", "x#2"]
    assert [[m["content"] for m in prompt.messages] for prompt in found] == [["a"], ["a", "b", "c"]]


PLACEHOLDER = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ('{"prompt": "a"', r"not JSON .* column"),
        ("[1, 2]", "not a JSON object"),
        ({"input": "a"}, "not a known layout"),
        ({"prompt": "  "}, "empty or not text"),
        ({"prompt": 3}, "empty or not text"),
        ({"turns": []}, "not a list of user turns"),
        ({"turns": [None]}, "empty or not text"),
        ({"messages": "hello"}, "not a list of messages"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "not a role"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "no user turn"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "not text"),
        ({"question_id": "q", "category": "coding", "turns": [PLACEHOLDER]}, "placeholder"),
        ({"messages": [{"role": "user", "content": PLACEHOLDER}]}, "placeholder"),
        ({"prompt_id": "first", "prompt": "again"}, "repeats the id of line 1"),
    ],
)
def test_a_broken_line_is_named_with_its_remedy(tmp_path: Path, row: object, problem: str) -> None:
    path = written(tmp_path, {"prompt_id": "first", "prompt": "fine"}, row)
    with pytest.raises(UserError, match=problem) as caught:
        read_prompts(path)
    assert caught.value.field == f"{path}:2"
    assert caught.value.remedy


def test_turns_without_replies_cannot_all_be_prompts(tmp_path: Path) -> None:
    path = written(tmp_path, {"turns": ["a", "b"]})
    with pytest.raises(UserError, match="no recorded replies"):
        read_prompts(path, turns="all")


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot be read"):
        read_prompts(tmp_path / "absent.jsonl")
    with pytest.raises(UserError, match="holds no prompts"):
        read_prompts(written(tmp_path, ""))
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}\n')
    with pytest.raises(UserError, match="not UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
