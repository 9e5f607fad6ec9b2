"""`sparksmith decode` on a tiny target: the answer on stdout, the figures on stderr."""

from pathlib import Path
from typing import Any

import pytest
from tiny_targets import byte_tokenizer, save_tiny_target

from sparksmith.cli.answer import AnswerPrinter
from sparksmith.cli.main import main
from sparksmith.draft.sampling import Sampling
from sparksmith.verify.decode import DecodeSettings
from sparksmith.verify.decode import decode as run_decode
from sparksmith.verify.loading import load_target, render_prompt


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("target"))


def options(target: Path, *more: str) -> list[str]:
    common = ["--dtype", "float32", "--threads", "1", "--max-new-tokens", "24"]
    return ["decode", "hello", "--target", str(target), *common, *more]


@pytest.mark.parametrize("draft", ["ngram", "none"])
def test_the_answer_is_the_targets_own(
    target: Path, draft: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(target, "--draft", draft, "--temperature", "0")) == 0
    captured = capsys.readouterr()
    loaded, _ = load_target(target, dtype="float32")
    prompt = render_prompt(byte_tokenizer(), [{"role": "user", "content": "hello"}])
    settings = DecodeSettings(sampling=Sampling(temperature=0), max_new_tokens=24, num_tokens=0)
    result = run_decode(loaded, None, prompt, settings)
    text = byte_tokenizer().decode(result.token_ids, skip_special_tokens=True)
    assert captured.out == text + "\n"
    assert f"{len(result.token_ids)} tokens in" in captured.err
    assert "tokens/s" in captured.err
    assert "\x1b" not in captured.out + captured.err


def test_ctrl_c_ends_with_the_figures_so_far(
    target: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    add, calls = AnswerPrinter.add, 0

    def interrupted(printer: AnswerPrinter, *arguments: Any) -> None:
        nonlocal calls
        calls += 1
        add(printer, *arguments)
        if calls == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(AnswerPrinter, "add", interrupted)
    assert main(options(target, "--draft", "none", "--temperature", "0")) == 130
    captured = capsys.readouterr()
    assert "4 tokens in 3 steps (interrupted)" in captured.err
    assert captured.out.endswith("\n")
    assert "Traceback" not in captured.err


def test_a_context_longer_than_the_model_is_named_before_work(
    target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(options(target, "--max-new-tokens", "5000")) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "max_new_tokens: 5000" in captured.err
    assert "512 positions" in captured.err
