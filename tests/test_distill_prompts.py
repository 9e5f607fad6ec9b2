"""The composed training prompts: many, varied, repeatable, and apart from the evaluation sets."""

import json
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.resources import files
from itertools import islice
from typing import Any

import pytest

from sparksmith.distill.prompts import KINDS, TrainingPrompt, compose, template_ids

NUM_DRAWN = 20_000
WORKLOADS = ("code", "creative", "chat", "maths", "extraction")

# Eight words in a row that ordinary requests have in common; empty as long as none is needed.
STOCK_PHRASES: frozenset[tuple[str, ...]] = frozenset()

Gram = tuple[str, ...]


@pytest.fixture(scope="module")
def drawn() -> list[TrainingPrompt]:
    return list(compose(NUM_DRAWN, seed=0))


@pytest.fixture(scope="module")
def evaluation() -> list[tuple[str, str]]:
    """Id and text of every evaluation prompt."""
    folder = files("sparksmith.eval").joinpath("workloads")
    prompts = []
    for workload in WORKLOADS:
        for line in folder.joinpath(f"{workload}.jsonl").read_text(encoding="utf-8").splitlines():
            prompt = json.loads(line)
            assert prompt["workload"] == workload
            (turn,) = prompt["messages"]
            assert turn["role"] == "user"
            prompts.append((prompt["prompt_id"], turn["content"]))
    return prompts


def grams(text: str, length: int) -> set[Gram]:
    """Return the runs of `length` words; a shorter text is one run of all its words."""
    words = re.findall(r"\w+", text.lower())
    return {tuple(words[i : i + length]) for i in range(max(1, len(words) - length + 1))}


def parsed(kind: str) -> dict[str, Any]:
    source = files("sparksmith.distill").joinpath("prompt_templates", f"{kind}.toml")
    return tomllib.loads(source.read_text(encoding="utf-8"))


def strings(node: object) -> Iterator[str]:
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        yield from (text for value in node.values() for text in strings(value))
    elif isinstance(node, list):
        yield from (text for value in node for text in strings(value))


def test_there_are_at_least_300_templates() -> None:
    ids = template_ids()
    assert set(ids) == set(KINDS)
    assert sum(len(of_kind) for of_kind in ids.values()) >= 300


def test_code_has_at_least_150_named_tasks() -> None:
    tasks = parsed("code")["records"]["fn"]["rows"]
    assert len({do for do, *_ in tasks}) == len(tasks)
    assert len({name for _, name, *_ in tasks}) >= 150


def test_prompts_are_distinct_and_well_formed(drawn: list[TrainingPrompt]) -> None:
    assert len(drawn) == NUM_DRAWN
    assert len({p.text for p in drawn}) == NUM_DRAWN
    assert len({p.prompt_id for p in drawn}) == NUM_DRAWN
    assert {p.kind for p in drawn} == set(KINDS)
    for p in drawn:
        assert re.fullmatch(r"train-\d{6}-[0-9a-f]{8}", p.prompt_id)
        assert p.text.isascii()
        assert p.text == p.text.strip()
        assert not re.search(r"\{\{|\}\}", p.text)


def test_articles_fit_the_next_word(drawn: list[TrainingPrompt]) -> None:
    # Code and maths are left out: there "a" is also the name of a variable.
    for p in drawn:
        if p.kind not in ("code", "maths"):
            assert not re.search(r"\ba (?!one\b|eu)[aeio]\w+|\ban [bcdfgjklmnpqrstvwxz]", p.text)


def test_no_template_gives_more_than_one_percent(drawn: list[TrainingPrompt]) -> None:
    ((template, most),) = Counter(p.template for p in drawn).most_common(1)
    assert most <= 0.01 * NUM_DRAWN, template


def test_at_most_five_percent_are_near_duplicates(drawn: list[TrainingPrompt]) -> None:
    """Exact over all pairs: pairs without a common 5-gram have Jaccard 0 and are never met."""
    near: set[int] = set()
    sizes: list[int] = []
    holders: dict[Gram, list[int]] = defaultdict(list)
    for index, prompt in enumerate(drawn):
        own = grams(prompt.text, 5)
        shared: Counter[int] = Counter()
        for gram in own:
            shared.update(holders[gram])
            holders[gram].append(index)
        for other, num_shared in shared.items():
            if num_shared > 0.7 * (len(own) + sizes[other] - num_shared):
                near |= {index, other}
        sizes.append(len(own))
    assert len(near) <= 0.05 * NUM_DRAWN


def test_no_eight_words_are_shared_with_an_evaluation_prompt(
    drawn: list[TrainingPrompt], evaluation: list[tuple[str, str]]
) -> None:
    held_out = {gram: name for name, text in evaluation for gram in grams(text, 8)}
    raw = (text for kind in (*KINDS, "shared") for text in strings(parsed(kind)))
    clashes = [
        (held_out[gram], text)
        for text in (*(p.text for p in drawn), *raw)
        for gram in (grams(text, 8) & held_out.keys()) - STOCK_PHRASES
    ]
    assert clashes == []


def test_no_evaluation_prompt_is_a_near_duplicate_of_a_training_prompt(
    drawn: list[TrainingPrompt], evaluation: list[tuple[str, str]]
) -> None:
    held_out = {name: grams(text, 5) for name, text in evaluation}
    holders: dict[Gram, list[str]] = defaultdict(list)
    for name, own in held_out.items():
        for gram in own:
            holders[gram].append(name)
    for prompt in drawn:
        own = grams(prompt.text, 5)
        shared = Counter(name for gram in own for name in holders.get(gram, ()))
        for name, num_shared in shared.items():
            union = len(own) + len(held_out[name]) - num_shared
            assert num_shared <= 0.5 * union, (name, prompt.text)


def test_every_workload_has_48_distinct_prompts(evaluation: list[tuple[str, str]]) -> None:
    per_workload = Counter(name.rsplit("-", 1)[0] for name, _ in evaluation)
    assert set(per_workload) == set(WORKLOADS)
    assert min(per_workload.values()) >= 48
    assert len({name for name, _ in evaluation}) == len(evaluation)
    assert len({text for _, text in evaluation}) == len(evaluation)


def test_a_draw_repeats_for_its_seed_and_extends_a_shorter_one(
    drawn: list[TrainingPrompt],
) -> None:
    assert list(compose(200, seed=0)) == drawn[:200]
    assert list(islice(compose(10**9, seed=0), 50)) == drawn[:50]
    assert [p.text for p in compose(50, seed=1)] != [p.text for p in drawn[:50]]


def test_mix_sets_the_share_of_each_kind() -> None:
    kinds = Counter(p.kind for p in compose(2000, seed=3, mix={"code": 3, "maths": 1}))
    assert set(kinds) == {"code", "maths"}
    assert 1400 <= kinds["code"] <= 1600


@pytest.mark.parametrize(
    ("mix", "message"),
    [
        ({"prose": 1.0}, r"mix names the kind 'prose'; use only code, creative"),
        ({"code": -0.5}, r"mix\['code'\] is -0.5; give a finite weight of 0 or more"),
        ({"code": float("nan")}, r"mix\['code'\] is nan"),
        ({"code": 0.0}, r"mix is \{'code': 0.0\}; give at least one kind a weight above 0"),
        ({}, r"mix is \{\}; give at least one kind"),
    ],
)
def test_a_bad_mix_is_refused_at_the_call(mix: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        compose(1, mix=mix)


def test_a_negative_count_is_refused_and_zero_gives_nothing() -> None:
    with pytest.raises(ValueError, match=r"count is -1; give a number of prompts"):
        compose(-1)
    assert list(compose(0)) == []
