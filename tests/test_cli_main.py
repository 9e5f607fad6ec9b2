"""The frame of the command line: quick help, exit codes, one message for a mistake."""

import errno
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from sparksmith.cli import generate, main, progress
from sparksmith.draft.errors import UserError

HEAVY = ("torch", "transformers", "vllm", "matplotlib", "datasets", "pyarrow", "numpy")
COMMANDS = [command.name for command in main.app.registered_commands]


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_no_heavy_import_before_a_command_runs(option: str) -> None:
    code = (
        "import sys; from sparksmith.cli.main import main; code = main(sys.argv[1:]);"
        f"print('HEAVY', [name for name in {HEAVY} if name in sys.modules]); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code, option], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "HEAVY []" in done.stdout


def test_help_shows_the_path_of_work_in_order(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 0
    text = capsys.readouterr().out
    places = [text.index(f"\u2502 {name} ") for name in COMMANDS if name]
    assert places == sorted(places)
    assert "generate -> train -> eval -> decode" in text


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([command, "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert f"Example: sparksmith {command}" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["--version"]) == 0
    words = capsys.readouterr().out.split()
    assert words[0] == "sparksmith"
    assert words[1][0].isdigit()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["nonsense"], "nonsense"),
        (["generate", "--out", "x", "--nonsense"], "--nonsense"),
        (["generate"], "--out"),
        (["generate", "--out", "x", "--count", "many"], "'--count'"),
        (["generate", "--out", "x", "--count", "0"], "--count: 0 is below 1"),
        (["generate", "--out", "x", "--top-p", "2"], "top_p: 2.0 is outside"),
        (["generate", "--out", "x", "--format", "csv"], "--format: 'csv'"),
        (["generate", "--out", "x", "--mix", "code"], "--mix: 'code'"),
        (["generate", "--out", "x", "--mix", "poems=1"], "poems"),
        (["generate", "--out", "x", "--prompts", "/no/such/file"], "/no/such/file"),
        (["generate", "--out", "x", "--prompts", "a", "--dataset", "b"], "both given"),
        (["generate", "--out", "x", "--dataset", ":"], "NAME:SPLIT"),
        (["generate", "--out", "x", "--target", "/no/such/model", "--count", "1"], "/no/such"),
        (["decode", "hello", "--draft", "/no/such/draft"], "/no/such/draft"),
        (["decode", "hello", "--draft", "ngram", "-k", "0"], "--num-tokens: 0 drafts nothing"),
        (["eval", "--out", "x", "--draft", "ngram", "-k", "-1"], "--num-tokens: -1"),
        (["eval", "--out", "x", "--draft", "none"], "--draft: 'none' leaves one arm"),
        (["eval", "--out", "/dev/null", "--draft", "ngram"], "--out: '/dev/null' is a file"),
        (["train", "--out", "x", "--responses", "y", "--held-out", "-1"], "--held-out: -1"),
        (["export", "/no/such/draft", "x"], "/no/such/draft"),
        (["export", "y", "x", "--dtype", "int8"], "--dtype: 'int8'"),
        (["export", "y", "/dev/null"], "OUT: '/dev/null' is a file"),
    ],
)
def test_a_mistake_is_one_message_and_exit_code_2(
    arguments: list[str],
    says: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("field", 3, "is odd", "Use 4."), 2, "error: field: 3 is odd. Use 4.\n"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), 2, "disk: '/x/y' has no space"),
        (RuntimeError("I/O error: No space left on device (os error 28)"), 2, "no space left"),
        (PermissionError(errno.EACCES, "Permission denied", "/x/y"), 2, "'/x/y' cannot be used"),
        (FileExistsError(errno.EEXIST, "File exists", "/x/y"), 2, "'/x/y' cannot be used (file ex"),
        (IsADirectoryError(errno.EISDIR, "Is a directory", "/x/y"), 2, "Give a file in place"),
        (OSError(errno.EROFS, "Read-only file system", "/x/y"), 2, "disk that can be written to"),
        (ZeroDivisionError("by [red]zero[/]"), 1, "ZeroDivisionError: by [red]zero[/]. Run again"),
        (OSError(errno.EIO, "Input/output error"), 1, "Input/output error"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(1), 1, ""),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    says: str,
    failing: Callable[[BaseException], None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    failing(error)
    assert main.main(["generate", "--out", "x"]) == code
    captured = capsys.readouterr().err
    assert says in captured
    assert "Traceback" not in captured


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Callable[[BaseException], None]:
    """Lets `generate` fail with an error once its options are parsed."""

    def arrange(error: BaseException) -> None:
        def run(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(generate, "run", run)

    return arrange


@pytest.mark.parametrize("arguments", [["--debug", "generate"], ["generate", "--debug"]])
def test_debug_lets_the_traceback_through(
    arguments: list[str], failing: Callable[[BaseException], None]
) -> None:
    failing(UserError("field", 3, "is odd", "Use 4."))
    with pytest.raises(UserError):
        main.main([*arguments, "--out", "x"])


def test_debug_after_two_dashes_is_text() -> None:
    arguments = ["decode", "--", "--debug"]
    assert not main._take_debug(arguments)
    assert arguments == ["decode", "--", "--debug"]


def test_progress_in_a_pipe_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    with progress.progress("work", total=4, unit="rows", done=1) as bar:
        bar.advance(3, tokens=12, note="loss 2.5")
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "work ..."
    assert lines[-1].startswith("work: 4/4 rows, ")
    assert "tokens/s, loss 2.5, done in 0 s" in lines[-1]


def test_the_time_left_comes_from_this_process_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("time.monotonic", lambda: now)
    meter = progress.Meter("rows", total=100, done=60)
    now += 10
    meter.done, meter.tokens = 80, 50
    assert meter.seconds_left == 10.0  # 20 rows in 10 s, and 20 are left
    assert meter.tokens_per_second == 5.0
    assert meter.line() == "80/100 rows, 5 tokens/s, 10 s left"


@pytest.mark.parametrize(
    ("seconds", "words"), [(59.4, "59 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")]
)
def test_durations(seconds: float, words: str) -> None:
    assert progress.duration(seconds) == words
