"""The streamed answer: whole characters only, and marks that say who wrote what."""

import io

import pytest
from rich.console import Console
from tiny_targets import EOS, byte_tokenizer

from sparksmith.cli.answer import AnswerPrinter, Detokenizer, Marks, marks_for
from sparksmith.cli.decode import figures
from sparksmith.verify.response import DecodeResult

TEXTS = ["plain", "na\u00efve \u4f60\u597d", "\U0001f468\u200d\U0001f4bb code\n\ttab", "e\u0301"]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_none_is_half_a_character(text: str) -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    tokens = tokenizer(text)["input_ids"]
    assert len(tokens) == len(text.encode())
    pieces = [detokenizer.add(token) for token in tokens]
    assert "".join(pieces) + detokenizer.finish() == text
    assert not any("\ufffd" in piece for piece in pieces)
    # One piece a character, at the character's last byte.
    assert [piece for piece in pieces if piece] == list(text)


def test_bytes_that_are_no_character_come_at_the_end() -> None:
    tokenizer = byte_tokenizer()
    detokenizer = Detokenizer(tokenizer)
    tokens = [*tokenizer("ok \u4f60")["input_ids"][:-1], EOS]
    text = "".join(detokenizer.add(token) for token in tokens) + detokenizer.finish()
    assert text == tokenizer.decode(tokens, skip_special_tokens=True)
    assert detokenizer.finish() == ""


def printed(marks: Marks, text: str, drafted: list[bool]) -> str:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, color_system="standard", width=40)
    tokenizer = byte_tokenizer()
    printer = AnswerPrinter(console, tokenizer, marks)
    for token, was_drafted in zip(tokenizer(text)["input_ids"], drafted, strict=True):
        printer.add([token], [was_drafted])
    printer.finish()
    return file.getvalue()


def test_each_mark_shows_the_drafted_tokens() -> None:
    drafted = [False, True, True, False]
    assert printed(Marks.NONE, "abcd", drafted) == "abcd\n"
    assert printed(Marks.BRACKETS, "abcd", drafted) == "a[bc]d\n"
    assert printed(Marks.BRACKETS, "abcd", [True] * 4) == "[abcd]\n"
    green = printed(Marks.COLOR, "abcd", drafted)
    assert green == "a\x1b[32mb\x1b[0m\x1b[32mc\x1b[0md\n"
    assert "\x1b[4mb" in printed(Marks.UNDERLINE, "abcd", drafted)


def test_a_character_is_marked_as_its_last_token() -> None:
    assert printed(Marks.BRACKETS, "\u00e9x", [True, False, False]) == "\u00e9x\n"
    assert printed(Marks.BRACKETS, "\u00e9x", [False, True, False]) == "[\u00e9]x\n"


def test_the_model_cannot_steer_the_terminal() -> None:
    text = "a\x1b[2Jb"
    assert printed(Marks.BRACKETS, text, [False] * len(text)) == "a\u241b[2Jb\n"


def test_marks_follow_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert marks_for(Console(file=io.StringIO())) is Marks.NONE
    assert marks_for(Console(force_terminal=True)) is Marks.COLOR
    monkeypatch.setenv("NO_COLOR", "1")
    assert marks_for(Console(force_terminal=True)) is Marks.UNDERLINE
    monkeypatch.setenv("TERM", "dumb")
    assert marks_for(Console(force_terminal=True)) is Marks.BRACKETS


def result(**changes: object) -> DecodeResult:
    values: dict[str, object] = {
        "token_ids": list(range(9)),
        "draft_kept": [False] * 9,
        "finish_reason": "stop",
        "drafted": [4, 4, 4],
        "accepted": [2, 0, 3],
        "draft_seconds": [0.1, 0.1, 0.2],
        "verify_seconds": [0.5, 0.5, 0.6],
        "first_token_seconds": 0.25,
        "decode_seconds": 2.0,
    }
    return DecodeResult(**(values | changes))  # type: ignore[arg-type]


def test_figures_by_hand() -> None:
    line = figures(result(), 2.3)
    # 5 accepted in 3 steps; 8 tokens after the first in 2 s; 0.4 s of 2 s spent drafting.
    assert "9 tokens in 3 steps (stop)" in line
    assert "acceptance length 2.67 with the bonus, 1.67 without" in line
    assert "drafting 20% of the time" in line
    assert "4.0 tokens/s" in line
    assert "first token after 0.25 s" in line


def test_figures_of_plain_decoding_and_of_nothing() -> None:
    plain = figures(result(drafted=[0] * 8, accepted=[0] * 8), 2.3)
    assert "acceptance" not in plain
    assert "4.0 tokens/s" in plain
    nothing = result(
        token_ids=[], drafted=[], accepted=[], finish_reason="interrupted", decode_seconds=0.0
    )
    assert figures(nothing, 0.1) == "0 tokens, interrupted, 0.1 s"
