"""What a failed run tells its user: one message with the field, the value and the remedy."""

import errno
import sys

import typer
from rich.console import Console
from rich.text import Text

from sparksmith.draft.errors import UserError

FAILED, MISTAKE, INTERRUPTED = 1, 2, 130

# Usage errors of the command-line parser; the base class has no public name.
USAGE_ERRORS: tuple[type[BaseException], ...] = (typer.BadParameter.__mro__[1],)

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REMEDIES = {
    errno.EACCES: "Check the path and its permissions.",
    errno.EPERM: "Check the path and its permissions.",
    errno.EROFS: "Give a path on a disk that can be written to.",
    errno.ENOENT: "Check the path.",
    errno.ENOTDIR: "Check the path: a file stands where a folder is meant.",
    errno.EEXIST: "Give another path, or move what is there.",
    errno.EISDIR: "Give a file in place of the folder.",
}


def report(error: BaseException) -> int:
    """Print `error` to stderr as one message and return the exit code it stands for."""
    if isinstance(error, typer.Abort | KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, USAGE_ERRORS):
        _print(_usage(error))
        return MISTAKE
    mistake = error if isinstance(error, UserError) else from_system(error)
    if mistake is not None:
        _print(_message(mistake))
        return MISTAKE
    text = Text("error: ", style="bold red")
    text.append(f"{type(error).__name__}: {error}. ", style="default not bold")
    text.append("Run again with --debug for the traceback, and report it.", style="green not bold")
    _print(text)
    return FAILED


def format_warning(message: Warning | str, *_place: object, **_line: object) -> str:
    """A warning as one line, without the place in the code that --debug shows."""
    return f"warning: {message}\n"


def from_system(error: BaseException) -> UserError | None:
    """The user's side of an error of the operating system, None when it is not one.

    A full disk also arrives as a library's own error that quotes the system's words.
    """
    if isinstance(error, OSError) and error.errno is not None and error.errno not in _FULL:
        if error.errno not in _REMEDIES:
            return None
        return UserError(
            "file",
            str(error.filename or ""),
            f"cannot be used ({(error.strerror or '').lower()})",
            _REMEDIES[error.errno],
        )
    if getattr(error, "errno", None) in _FULL or "No space left on device" in str(error):
        return UserError(
            "disk",
            str(getattr(error, "filename", None) or "output folder"),
            "has no space left",
            "Free some space and run the same command again; what was finished is kept.",
        )
    return None


def _message(error: UserError) -> Text:
    text = Text("error: ", style="bold red")
    missing = error.value is None
    text.append(f"{error.field} " if missing else f"{error.field}: ", style="default bold")
    seen = "" if missing else f"{_shown(error.value)} "
    text.append(f"{seen}{error.problem}. ", style="default not bold")
    text.append(error.remedy, style="green not bold")
    return text


def _shown(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 200 else f"{shown[:200]}..."


def _usage(error: BaseException) -> Text:
    message = getattr(error, "format_message", error.__str__)().rstrip(".")
    context = getattr(error, "ctx", None)
    command = context.command_path if context else "sparksmith"
    text = Text("error: ", style="bold red")
    text.append(f"{message}. ", style="default not bold")
    text.append(f"Run `{command} --help` for the options.", style="green not bold")
    return text


def _print(text: Text) -> None:
    # Soft wrap keeps the message one line where nobody's terminal bounds it.
    console = Console(stderr=True)
    console.print(text, soft_wrap=not console.is_terminal)
    sys.stderr.flush()
