"""The command line `lfo`: one small function for each command.

A command imports heavy modules inside its function, so that `--help` is fast. The modules of commands do not import the
application; each command is a word of `COMMANDS`.

Only this module turns exceptions into one sentence on stderr and an exit code: 2 for mistakes of the
user, 1 for work that failed, 130 for Ctrl-C.
"""

from __future__ import annotations

import errno
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from types import FrameType
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from lfo import __version__
from lfo.cli import bench, models
from lfo.cli.usage import one_sentence
from lfo.errors import LfoError, first_line
from lfo.streams import flush_stdout, protect_standard_streams


class _Commands(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        with one_sentence(args):
            return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        with _remembered_interrupts() as interrupts, one_sentence(sys.argv[1:]):
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt as error:  # caught here because Typer would exit without a message
                typer.echo(f"lfo: {str(error) or 'interrupted'}", err=True)
                raise typer.Exit(130) from error
            except ImportError as error:
                if not interrupts:
                    raise
                # A package that swallows Ctrl-C while it is imported cannot be imported afterwards.
                typer.echo("lfo: interrupted", err=True)
                raise typer.Exit(130) from error


@contextmanager
def _remembered_interrupts() -> Iterator[list[int]]:
    """Yield a list to which each Ctrl-C is added, besides what it does anyway."""
    seen: list[int] = []
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield seen
        return

    def remember(number: int, frame: FrameType | None) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    signal.signal(signal.SIGINT, remember)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


# In the order of `lfo --help`: each is the function of the name of its module, or the one named behind it.
COMMANDS = """
    init train train.config demo compare advise ablate report watch evaluate run rollouts inspect probe export serve
    record environment.generate environment.check_env play pretrain plan
"""
NAMES = {"evaluate": "eval"}  # of commands that are not named like their functions
# Of a command whose options are read elsewhere.
PASSED_ON = {"allow_extra_args": True, "ignore_unknown_options": True}

app = typer.Typer(name="lfo", cls=_Commands, add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)
for place in COMMANDS.split():
    module, _, function = place.partition(".")
    command = getattr(import_module(f"lfo.cli.{module}"), function or module)
    app.command(NAMES.get(place))(command)
app.command("bench", add_help_option=False, context_settings=PASSED_ON)(bench.bench)
app.add_typer(models.app, name="models")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"lfo {__version__}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error; allowed anywhere.")] = False,
    version: Annotated[
        bool, typer.Option("--version", help="Show the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Train tool-calling agents that learn from every reply of their environment."""


def main(commands: typer.Typer = app, name: str = "lfo") -> None:
    """The entry point `lfo`, and of other command lines that end with the same sentences and exit codes."""
    protect_standard_streams()
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    try:
        try:
            commands(arguments, prog_name=name)
        finally:
            flush_stdout()
    except LfoError as error:
        _fail(str(error), error.exit_code, debug)
    except Exception as error:
        if type(error).__name__ == "OutOfMemoryError":  # of torch, which may not be imported
            _fail("the GPU is out of memory; wait until it is free, or run `lfo plan` to see what fits", 1, debug)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            _fail(f"cannot write {error.filename or 'the output'}: {error.strerror}", 1, debug)
        hint = "" if debug else "; run again with --debug for the traceback"
        _fail(f"unexpected {type(error).__name__}: {first_line(error)}{hint}", 1, debug)


def _fail(sentence: str, code: int, debug: bool) -> NoReturn:
    if debug:
        traceback.print_exc()
    typer.echo(f"lfo: {sentence}", err=True)
    sys.exit(code)
