"""Drafts of every layout, served by vLLM's own DSpark: the same text, and in every step the same
number of accepted tokens, as in-process.

The targets and drafts are random, over twelve words: about every tenth drafted token is right by
chance, so that a slot, a feature or a rotation out of place shows in the accepted counts.
"""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_targets import save_tiny_target
from transformers import PreTrainedTokenizerBase
from vllm_drafts import TARGET, save_random_draft, save_target, speculative
from vllm_engine import Answer, answers, in_vllm

from sparksmith import distill
from sparksmith.cli.main import main
from sparksmith.draft.checkpoint import load_draft
from sparksmith.draft.convert import TargetRows, convert_draft
from sparksmith.draft.drafter import DSparkDrafter
from sparksmith.draft.layouts import Layout
from sparksmith.draft.rotary import Yarn
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.decode import DecodeSettings, decode
from sparksmith.verify.embedded import embedded_model
from sparksmith.verify.loading import load_target, render_prompt
from sparksmith.verify.target import TransformersTarget

pytestmark = pytest.mark.vllm

PROMPTS = [[3, 1, 4, 1, 5], [2, 7, 1, 8, 2, 8, 1, 8]]
TOKENS = 48

FORMS: dict[str, tuple[dict[str, Any], Layout]] = {
    "plain": ({}, "vllm"),
    "causal": ({"is_causal": True}, "vllm"),
    "fill-in": ({"sample_from_anchor": False, "block_size": 5}, "vllm"),
    "reduced vocabulary": ({"draft_vocab_size": 6}, "vllm"),
    "window": ({"sliding_window": 6}, "vllm"),
    "yarn": ({"yarn": Yarn(factor=4.0, original_max_position_embeddings=16)}, "vllm"),
    "no confidence head": ({"enable_confidence_head": False}, "vllm"),
    "head without Markov state": ({"confidence_head_with_markov": False}, "vllm"),
    "speculators": ({}, "speculators"),
    "speculators, fill-in": ({"sample_from_anchor": False, "block_size": 5}, "speculators"),
    "speculators, reduced vocabulary": ({"draft_vocab_size": 6}, "speculators"),
    "deepspec": ({}, "deepspec"),
    "specforge": ({}, "specforge"),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"))


def ours(
    folder: Path,
    target: TransformersTarget,
    num_tokens: int,
    tokens: int,
    prompts: list[list[int]],
) -> list[Answer]:
    """The same draft, from the same files, in-process."""
    draft = load_draft(folder)
    draft.bind(target.embed_weight, target.head_weight)
    greedy = Sampling(temperature=0.0)
    settings = DecodeSettings(sampling=greedy, max_new_tokens=tokens, num_tokens=num_tokens)
    made = []
    for prompt in prompts:
        result = decode(target, DSparkDrafter(draft, greedy, None), prompt, settings)
        # The first token is the prefill's, which drafts nothing.
        made.append(Answer(tokens=result.token_ids, accepted=result.accepted))
    return made


def rows(target: TransformersTarget) -> TargetRows:
    embed, head = (w.detach().clone() for w in (target.embed_weight, target.head_weight))
    return TargetRows(embed=embed, head=head)


@pytest.mark.parametrize("form", FORMS)
def test_a_draft_accepts_in_vllm_what_it_accepts_here(
    form: str, target: Path, tmp_path: Path
) -> None:
    changes, layout = FORMS[form]
    own = TransformersTarget(tiny_model("llama", **TARGET), (0, 2))
    folder = tmp_path / "draft"
    draft = save_random_draft(folder, **changes)
    if layout != "vllm":
        source, folder = folder, tmp_path / layout
        convert_draft(source, folder, layout, rows=rows(own), target="org/target")
    num_tokens = draft.config.num_drafts
    config = speculative(folder, num_tokens)
    theirs = in_vllm(answers, target, config, PROMPTS, TOKENS, skip_tokenizer_init=True)
    expected = ours(folder, own, num_tokens, TOKENS, PROMPTS)
    same(theirs, expected)
    accepted = [count for answer in expected for count in answer.accepted]
    assert sum(accepted) >= 4, accepted


def same(theirs: list[Answer], expected: list[Answer]) -> None:
    assert [answer.tokens for answer in theirs] == [answer.tokens for answer in expected]
    assert all(len(answer.tokens) > TOKENS / 2 for answer in expected)
    for one, other in zip(theirs, expected, strict=True):
        # The last step drafts beyond the end, or here does not draft at all.
        steps = min(len(one.accepted), len(other.accepted)) - 1
        assert steps > TOKENS / 8
        assert one.accepted[:steps] == other.accepted[:steps]


def encoded(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[list[int]]:
    return [render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in prompts]


def command(*arguments: str | Path) -> None:
    assert main([str(argument) for argument in arguments]) == 0


def test_a_trained_draft_accepts_in_vllm_what_it_accepts_here(tmp_path: Path) -> None:
    """Generate, train, export, serve: the commands of the README, and vLLM at their end."""
    sizes = {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
    folder = save_tiny_target(tmp_path / "target", "llama", **sizes)
    own = tmp_path / "own.jsonl"
    prompts = [f"say {number}" for number in range(32)]
    lines = [json.dumps({"prompt_id": text, "prompt": text}) + "\n" for text in prompts]
    own.write_text("".join(lines), encoding="utf-8")
    cold = ["--temperature", "0.2"]
    there = ["--target", folder, "--dtype", "float32"]
    responses, made, served = (tmp_path / name for name in ("responses", "made", "served"))
    command("generate", *there, *cold, "--prompts", own, "--out", responses)
    shape = ["--taps", "0,2", "--markov-rank", "16", "--head-dim", "32", "--steps", "900"]
    command("train", *there, *cold, "--responses", responses, "--out", made, *shape)
    command("export", made / "last", served, *there)
    target, tokenizer = load_target(folder, dtype="float32", taps=(0, 2))
    alike(folder, served, target, encoded(tokenizer, prompts[:4]))


@pytest.mark.embedded
def test_the_packaged_draft_accepts_in_vllm_what_it_accepts_here(tmp_path: Path) -> None:
    served = tmp_path / "served"
    packaged = Path(distill.__path__[0]) / "pretrained" / "smollm2-135m"
    command("export", packaged, served, "--target", "embedded", "--dtype", "float32")
    taps = load_draft(served).config.target_layer_ids
    target, tokenizer = load_target(embedded_model(), dtype="float32", taps=taps)
    prompts = ["Write a Python function that reverses a list.", "Tell me about the sea."]
    alike(embedded_model(), served, target, encoded(tokenizer, prompts))


def alike(folder: Path, served: Path, target: TransformersTarget, prompts: list[list[int]]) -> None:
    num_tokens = load_draft(served).config.num_drafts
    theirs = in_vllm(answers, folder, speculative(served, num_tokens), prompts, TOKENS)
    expected = ours(served, target, num_tokens, TOKENS, prompts)
    same(theirs, expected)
    accepted = [count for answer in expected for count in answer.accepted]
    assert sum(accepted) > len(accepted) / 4, accepted
