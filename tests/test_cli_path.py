"""The whole path on a tiny target: generate, train, eval; and what each command refuses."""

import hashlib
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_targets import save_tiny_target

from sparksmith.cli.main import main
from sparksmith.distill.optimizers import OptimizerSettings
from sparksmith.draft.checkpoint import load_draft
from sparksmith.draft.manifest import read_manifest
from sparksmith.eval.trace import read_traces
from sparksmith.verify import loading
from sparksmith.verify.run_record import fingerprint


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "own.jsonl"
    rows = [{"prompt_id": f"p{n}", "prompt": f"say {n}"} for n in range(24)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def responses(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "responses"
    assert generate(target, prompts, out) == 0
    return out


def generate(target: Path, prompts: Path, out: Path, *more: str) -> int:
    arguments = ["generate", "--target", str(target), "--prompts", str(prompts)]
    arguments += ["--out", str(out), "--max-new-tokens", "24", "--dtype", "float32"]
    return main([*arguments, *more])


@pytest.fixture(scope="module")
def greedy(target: Path, prompts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "greedy"
    assert generate(target, prompts, out, "--temperature", "0") == 0
    return out


def train(target: Path, responses: Path, out: Path, *more: str) -> int:
    arguments = ["train", "--target", str(target), "--responses", str(responses)]
    arguments += ["--out", str(out), "--layers", "1", "--block-size", "3", "--markov-rank", "8"]
    arguments += ["--draft-vocab", "128", "--taps", "0,1", "--steps", "6", "--held-out", "4"]
    return main([*arguments, "--dtype", "float32", *more])


@pytest.fixture(scope="module")
def draft(target: Path, responses: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("run") / "draft"
    assert train(target, responses, out) == 0
    return out


def evaluate(target: Path, draft: str, out: Path, *more: str) -> int:
    arguments = ["eval", "--target", str(target), "--draft", draft, "--out", str(out)]
    return main([*arguments, "--dtype", "float32", "--max-new-tokens", "16", *more])


def record(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return content


def message(capsys: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"\s+", " ", capsys.readouterr().err)


def message_out(capsys: pytest.CaptureFixture[str]) -> str:
    return re.sub(r"\s+", " ", capsys.readouterr().out)


def test_train_leaves_a_draft_and_its_record(draft: Path) -> None:
    config = load_draft(draft / "best").config
    assert (config.block_size, config.target_layer_ids) == (3, (0, 1))
    assert config.draft_vocab_size == 128
    run = record(draft)
    assert run["outcome"] == "complete"
    assert run["results"]["steps"] == 6
    assert run["results"]["expected_acceptance_length"] >= 1.0
    assert run["inputs"]["responses"]["sha256"]
    best = fingerprint(draft / "best")
    assert run["results"]["best"]["sha256"] == best["sha256"]
    assert (run["settings"]["temperature"], run["settings"]["top_p"]) == (0.7, 0.95)


def test_train_says_what_the_draft_was_made_for(target: Path, draft: Path) -> None:
    loaded = load_draft(draft / "best")
    manifest = read_manifest(draft / "best", loaded.config, loaded.target_ids)
    assert manifest.target.name == str(target)
    assert manifest.assumed == ()
    _, tokenizer = loading.load_target(target, dtype="float32")
    template = hashlib.sha256(tokenizer.chat_template.encode()).hexdigest()
    assert manifest.target.chat_template_sha256 == template
    (figure,) = manifest.figures
    assert figure.value == record(draft)["results"]["expected_acceptance_length"]
    assert "temperature 0.7" in figure.on


def test_train_leaves_a_record_that_check_replays(
    target: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = draft / "best"
    command = ["check", str(best), "--target", str(target), "--parity", "--no-probe"]
    main(command)
    assert "every stage agrees" in message_out(capsys)
    broken = Path(shutil.copytree(best, tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    tensors["norm.weight"] *= 1.5
    save_file(tensors, broken / "model.safetensors")
    assert main([*command[:1], str(broken), *command[2:]]) == 1
    assert "error parity: text 0 first differs in its block" in message_out(capsys)
    assert main(["check", str(best), "--parity"]) == 2


def test_a_latent_draft_trains_and_decodes_losslessly(
    target: Path, responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target, responses, tmp_path / "reduced", "--mla") == 2
    assert "--draft-vocab: 128" in message(capsys)
    # The last of two values holds.
    assert train(target, responses, tmp_path / "mla", "--mla", "--draft-vocab", "0") == 0
    best = tmp_path / "mla" / "best"
    assert json.loads((best / "config.json").read_text())["architectures"] == ["K3DSparkModel"]
    options = ("--workload", "code", "--limit", "1", "--lossless", "1")
    assert evaluate(target, str(best), tmp_path / "report", *options) == 0
    summary = json.loads((tmp_path / "report" / "report.json").read_text(encoding="utf-8"))
    assert summary["losslessness"]["differences"] == 0


def test_generate_records_a_digest_of_its_prompts(responses: Path) -> None:
    """By hand, from the definition: a line of id and messages for each prompt."""
    digest = hashlib.sha256()
    for n in range(24):
        row = [f"p{n}", [{"role": "user", "content": f"say {n}"}]]
        digest.update((json.dumps(row) + "\n").encode())
    (attempt,) = record(responses)["attempts"]
    assert attempt["conditions"]["prompts_sha256"] == digest.hexdigest()


def test_a_draft_for_greedy_serving_learns_from_greedy_responses(
    target: Path, greedy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target, greedy, tmp_path / "draft") == 2
    assert "--temperature 0.2" in message(capsys)
    more = ("--temperature", "0.2", "--top-p", "0.8")
    assert train(target, greedy, tmp_path / "draft", *more) == 0
    settings = record(tmp_path / "draft")["settings"]
    assert (settings["temperature"], settings["top_p"]) == (0.2, 0.8)
    assert settings["greedy_rollouts"]
    assert "held-out greedy responses" in capsys.readouterr().out


@pytest.mark.parametrize("option", [("--temperature", "0.5"), ("--top-p", "1")])
def test_sampled_responses_validate_only_their_own_sampling(
    target: Path,
    responses: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    option: tuple[str, str],
) -> None:
    assert train(target, responses, tmp_path / "draft", *option) == 2
    assert f"{option[0]}: {float(option[1])} is not what" in message(capsys)
    assert not (tmp_path / "draft").exists()
    assert train(target, responses, tmp_path / "draft", *option, "--held-out", "0") == 0


def test_nothing_held_out_leaves_the_last_draft_and_no_figure(
    target: Path, responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target, responses, tmp_path / "draft", "--held-out", "0") == 0
    captured = capsys.readouterr()
    assert "no held-out response" in captured.out
    assert "acceptance length" not in captured.out + captured.err
    assert "nan" not in captured.err
    results = record(tmp_path / "draft")["results"]
    assert results["expected_acceptance_length"] is None
    best, last = (tmp_path / "draft" / name / "model.safetensors" for name in ("best", "last"))
    assert best.read_bytes() == last.read_bytes()


def test_train_refuses_a_target_that_did_not_answer(
    target: Path, responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_target(tmp_path / "other", "llama")
    assert train(other, responses, tmp_path / "draft") == 2
    assert f"Use --target {target}" in message(capsys)
    assert not (tmp_path / "draft").exists()


def test_learning_rates_belong_to_their_optimizers(
    target: Path, responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target, responses, tmp_path / "draft", "--muon-lr", "0.01") == 2
    assert "--muon-lr: 0.01 has no use with adamw" in message(capsys)
    more = ("--optimizer", "muon", "--muon-lr", "0.01")
    assert train(target, responses, tmp_path / "draft", *more) == 0
    optimizer = record(tmp_path / "draft")["settings"]["optimizer"]
    assert (optimizer["lr"], optimizer["muon_lr"]) == (OptimizerSettings().lr, 0.01)


def test_eval_writes_traces_and_reports(target: Path, draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    code = evaluate(
        target, str(draft / "best"), out, "--workload", "code", "--limit", "2", "--lossless", "2"
    )
    assert code == 0
    traces = list(read_traces(out / "traces.jsonl"))
    assert [trace.arm for trace in traces].count("speculative") == 2
    assert len(traces) == 4
    for trace in traces:
        assert trace.entropy_lower is not None
        assert len(trace.entropy_lower) == len(trace.token_ids)
    summary = json.loads((out / "report.json").read_text(encoding="utf-8"))
    assert summary["losslessness"]["prompts"] == 2
    assert summary["losslessness"]["differences"] == 0
    assert "code" in summary["workloads"]
    assert (out / "report.html").stat().st_size > 10_000
    assert (out / "report.md").is_file()


def test_eval_of_the_ngram_drafter_on_a_file(target: Path, prompts: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    assert evaluate(target, "ngram", out, "--prompts", str(prompts), "--limit", "2") == 0
    assert len(list(read_traces(out / "traces.jsonl"))) == 4


def by_arm(rows: list[dict[str, Any]]) -> dict[tuple[str, str], list[int]]:
    """Tokens by prompt and arm: which arm of a prompt comes first may change on the way."""
    return {(row["prompt_id"], row["arm"]): row["token_ids"] for row in rows}


def test_a_stopped_eval_goes_on(target: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    options = ("--workload", "code", "--limit", "2", "--lossless", "0")
    assert evaluate(target, "ngram", out, *options) == 0
    lines = (out / "traces.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    # As a kill in the second prompt leaves it: one arm of it, and half a line of the other.
    (out / "traces.partial.jsonl").write_text("".join(lines[:3]) + lines[3][:40], encoding="utf-8")
    (out / "traces.jsonl").unlink()
    assert evaluate(target, "ngram", out, *options) == 0
    resumed = [json.loads(line) for line in (out / "traces.jsonl").read_text().splitlines()]
    before = [json.loads(line) for line in lines]
    assert by_arm(resumed) == by_arm(before)
    assert resumed[:2] == before[:2], "the finished prompt was measured again"


def test_train_refuses_another_runs_folder(
    target: Path, responses: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best = (draft / "best" / "model.safetensors").read_bytes()
    assert train(target, responses, draft, "--lr", "0.5") == 2
    assert "already holds another run" in message(capsys)
    assert (draft / "best" / "model.safetensors").read_bytes() == best


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--workload", "cooking"), "choose from"),
        (("--max-new-tokens", "100000"), "max_new_tokens"),
        (("--temperature", "-1"), "temperature"),
        (("--accept-rule", "typical"), "--accept-rule"),
    ],
)
def test_eval_refuses(
    target: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: tuple[str, ...],
    wanted: str,
) -> None:
    assert evaluate(target, "ngram", tmp_path / "report", *options) == 2
    assert wanted in message(capsys).lower()
    assert not (tmp_path / "report").exists()


def test_eval_refuses_a_broken_prompt_line(
    target: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.jsonl"
    broken.write_text('{"prompt": "fine"}\n{"prompt": \n', encoding="utf-8")
    assert evaluate(target, "ngram", tmp_path / "report", "--prompts", str(broken)) == 2
    assert "broken.jsonl:2" in message(capsys)


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is checked before this is checked before any weights are read."""

    def load(*_: object, **__: object) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(loading, "load_target", load)


@pytest.mark.usefixtures("no_weights")
def test_a_folder_of_another_command_costs_no_loading(
    target: Path, responses: Path, draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target, responses, responses) == 2
    assert "another run (of `generate`)" in message(capsys)
    assert evaluate(target, "ngram", draft) == 2
    assert "another run (of `train`)" in message(capsys)


@pytest.mark.usefixtures("no_weights")
def test_taps_that_do_not_exist_cost_no_loading(
    target: Path, responses: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(target, responses, tmp_path / "draft", "--taps", "0,3") == 2
    assert "from 0 to 2" in message(capsys)


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize("num_tokens", ["0", "-1", "4"])
def test_a_draft_drafts_at_most_its_block(
    target: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], num_tokens: str
) -> None:
    wanted = "block of 3" if num_tokens == "4" else "drafts nothing"
    best = str(draft / "best")
    assert evaluate(target, best, tmp_path / "report", "-k", num_tokens) == 2
    assert wanted in message(capsys)
    arguments = ["decode", "hello", "--target", str(target), "--draft", best, "-k", num_tokens]
    assert main(arguments) == 2
    assert wanted in message(capsys)


def test_fewer_tokens_than_the_block(target: Path, draft: Path, tmp_path: Path) -> None:
    out = tmp_path / "report"
    options = ("-k", "2", "--workload", "code", "--limit", "1", "--lossless", "0")
    assert evaluate(target, str(draft / "best"), out, *options) == 0
    speculative = [t for t in read_traces(out / "traces.jsonl") if t.arm == "speculative"]
    assert max(speculative[0].drafted) == 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_path_on_a_gpu(target: Path, responses: Path, tmp_path: Path) -> None:
    assert train(target, responses, tmp_path / "draft", "--device", "cuda") == 0
    best = str(tmp_path / "draft" / "best")
    more = ("--workload", "code", "--limit", "1", "--lossless", "1", "--device", "cuda")
    assert evaluate(target, best, tmp_path / "report", *more) == 0


@pytest.mark.usefixtures("no_weights")
def test_eval_refuses_a_draft_of_another_target(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = save_tiny_target(tmp_path / "other", hidden_size=48)
    assert evaluate(other, str(draft / "best"), tmp_path / "report", "--limit", "1") == 2
    assert "the target that this draft was trained for" in message(capsys).lower()


@pytest.mark.parametrize(
    ("extra", "modes"),
    [
        ({}, []),
        ({"chat_template_kwargs": {"enable": 1}}, []),
        ({"chat_template_kwargs": {"thinking": False}}, ["off"]),
        ({"chat_template_kwargs": {"thinking": True}}, ["on"]),
        ({"chat_template_kwargs": {"thinking": True, "thinking_effort": "high"}}, ["high"]),
    ],
)
def test_the_manifest_knows_how_the_target_thought(
    extra: dict[str, Any], modes: list[str], target: Path, responses: Path, tmp_path: Path
) -> None:
    """As `generate --endpoint --thinking` leaves it in run.json."""
    copy = tmp_path / "responses"
    shutil.copytree(responses, copy)
    content = record(copy)
    content["settings"]["extra"] = extra
    (copy / "run.json").write_text(json.dumps(content), encoding="utf-8")
    assert train(target, copy, tmp_path / "draft") == 0
    best = tmp_path / "draft" / "best"
    made = load_draft(best)
    assert list(read_manifest(best, made.config, made.target_ids).thinking_modes) == modes
