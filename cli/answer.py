"""An answer as it comes: whole characters, each marked as drafted or as the target's own.

A character of several tokens is shown when its last token is there, and is marked as that token.
"""

import enum
import os
from collections.abc import Sequence
from typing import Protocol

from rich.console import Console
from rich.text import Text

_REPLACEMENT = "\ufffd"
# What a model writes must not steer the terminal: control characters become their pictures.
PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"}
PICTURES |= {127: chr(0x2421)} | dict.fromkeys(range(128, 160), _REPLACEMENT)


class Marks(enum.StrEnum):
    """How drafted tokens are told from the target's."""

    COLOR = "color"
    UNDERLINE = "underline"
    BRACKETS = "brackets"
    NONE = "none"


LEGENDS = {
    Marks.COLOR: "[green]green: drafted and accepted[/]; plain: the target's own",
    Marks.UNDERLINE: "[underline]underlined: drafted and accepted[/]; plain: the target's own",
    Marks.BRACKETS: r"\[in brackets]: drafted and accepted; plain: the target's own",
}
STYLES = {Marks.COLOR: "green", Marks.UNDERLINE: "underline"}


def marks_for(console: Console) -> Marks:
    """Colour on a terminal, underlining where NO_COLOR asks for none, nothing in a pipe."""
    if not console.is_terminal:
        return Marks.NONE
    if console.is_dumb_terminal:
        return Marks.BRACKETS
    return Marks.UNDERLINE if os.environ.get("NO_COLOR") else Marks.COLOR


class Decoder(Protocol):
    """The part of a tokenizer that is used here."""

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Turns tokens into text one by one; the pieces joined are the text of all tokens at once.

    Tokens are decoded together with those before them, since many tokenizers write a word
    differently at the start of a text.
    """

    def __init__(self, tokenizer: Decoder) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        # Text up to token `_shown` is out; decoding starts at `_context`, a few tokens before.
        self._context = 0
        self._shown = 0

    def add(self, token: int) -> str:
        """The new text, "" while a character is incomplete."""
        self._tokens.append(token)
        before, text = self._decode(self._shown), self._decode(len(self._tokens))
        if len(text) <= len(before) or text.endswith(_REPLACEMENT):
            return ""
        self._context, self._shown = self._shown, len(self._tokens)
        return text[len(before) :]

    def finish(self) -> str:
        """What is left: bytes that never became a character."""
        rest = self._decode(len(self._tokens))[len(self._decode(self._shown)) :]
        self._context = self._shown = len(self._tokens)
        return rest

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._tokens[self._context : end], skip_special_tokens=True)


class AnswerPrinter:
    """Prints an answer's tokens to `console` as they come."""

    def __init__(self, console: Console, tokenizer: Decoder, marks: Marks) -> None:
        self._console = console
        self._detokenizer = Detokenizer(tokenizer)
        self._marks = marks
        self._in_bracket = False

    def add(self, tokens: Sequence[int], drafted: Sequence[bool]) -> None:
        """Print a step's tokens; `drafted` says which were drafted and accepted."""
        for token, was_drafted in zip(tokens, drafted, strict=True):
            self._print(self._detokenizer.add(token), was_drafted)

    def finish(self) -> None:
        """Print what is left, and end the line."""
        self._print(self._detokenizer.finish(), drafted=False)
        self._console.file.write("]\n" if self._in_bracket else "\n")
        self._console.file.flush()

    def _print(self, piece: str, drafted: bool) -> None:
        if not piece:
            return
        if self._marks is Marks.NONE:
            # A pipe gets every character as it is; rich would drop some.
            self._console.file.write(piece)
        else:
            self._show(piece.translate(PICTURES), drafted)
        self._console.file.flush()

    def _show(self, piece: str, drafted: bool) -> None:
        if self._marks is Marks.BRACKETS and drafted != self._in_bracket:
            piece = ("[" if drafted else "]") + piece
            self._in_bracket = drafted
        style = STYLES.get(self._marks, "") if drafted else ""
        self._console.print(Text(piece, style=style), end="", soft_wrap=True)
