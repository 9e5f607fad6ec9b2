"""The command `sparksmith`: which commands there are, and which exit code a run ends with.

Exit codes: 0 fine; 1 a check failed, or sparksmith did; 2 something that the user can put right;
130 stopped with Ctrl-C. Only command functions import torch and its like, so help is instant.
"""

import sys
import warnings
from collections.abc import Callable
from typing import Annotated, Any

import typer

from sparksmith.cli import (
    capture,
    check,
    convert,
    decode,
    demo,
    errors,
    evaluate,
    export,
    generate,
    train,
    vllm,
)

START, PATH = "Start here", "The path of work, in order"
EXCHANGE = "Drafts of others, and for engines"

HELP = """
Distil a small DSpark draft from a target model, and measure what it gains.

The draft proposes tokens and the target verifies them: the text stays the target's.
"""

EPILOG = """
[bold]generate[/] -> [bold]train[/] -> [bold]eval[/] -> [bold]decode[/] -> [bold]export[/]

the target's answers -> a draft -> acceptance and tokens/s -> one answer, watched -> an engine

[bold]Example:[/] sparksmith demo runs the whole path on a small real model.
"""

app = typer.Typer(
    name="sparksmith",
    help=HELP,
    epilog=EPILOG,
    rich_markup_mode="rich",
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def add(name: str, command: Callable[..., Any], *, panel: str, example: str) -> None:
    """Register a command; its help ends with the example."""
    app.command(name, rich_help_panel=panel, epilog=f"[bold]Example:[/] {example}")(command)


add("demo", demo.demo, panel=START, example=demo.EXAMPLE)
add("generate", generate.generate, panel=PATH, example=generate.EXAMPLE)
add("capture", capture.capture, panel=PATH, example=capture.EXAMPLE)
add("train", train.train, panel=PATH, example=train.EXAMPLE)
add("eval", evaluate.evaluate, panel=PATH, example=evaluate.EXAMPLE)
add("decode", decode.decode, panel=PATH, example=decode.EXAMPLE)
add("export", export.export, panel=PATH, example=export.EXAMPLE)
add("check", check.check, panel=EXCHANGE, example=check.EXAMPLE)
add("vllm", vllm.vllm, panel=EXCHANGE, example=vllm.EXAMPLE)
add("convert", convert.convert, panel=EXCHANGE, example=convert.EXAMPLE)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"sparksmith {version('sparksmith')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def _globals(
    context: typer.Context,
    show_version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    del show_version, debug  # --version has exited; main() has read --debug
    if context.invoked_subcommand is None:
        print(context.get_help())


def main(arguments: list[str] | None = None) -> int:
    """Run the command line `arguments` (by default the process's own) and return the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = _take_debug(arguments)
    if not debug:
        warnings.formatwarning = errors.format_warning
    try:
        code = app(args=arguments, prog_name="sparksmith", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except Exception as error:
        if debug and not isinstance(error, errors.USAGE_ERRORS):
            raise
        return errors.report(error)
    except KeyboardInterrupt:
        return errors.INTERRUPTED


def _take_debug(arguments: list[str]) -> bool:
    """Remove --debug, which is understood wherever it stands before a `--`."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    if "--debug" not in arguments[:end]:
        return False
    arguments.remove("--debug")
    return True
