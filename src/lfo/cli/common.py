"""Shared parts of commands: options, progress bars, tables, and the display of text from models and environments.

Such text is not trusted: control characters are escaped before it reaches a terminal.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer
from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.rule import Rule
from rich.status import Status
from rich.table import Column, Table
from rich.text import Text

from lfo.errors import WorkError

if TYPE_CHECKING:
    from lfo.agent import Agent
    from lfo.types import Message, Rollout, ToolCall, Turn


def flag(name: str, text: str) -> Any:
    """Declare an option without a value: `as_json: Annotated[bool, flag("--json", "Answer in JSON.")]`."""
    return typer.Option(name, help=text)


def option(text: str, metavar: str | None = None, **others: Any) -> Any:
    """Declare an option named like its parameter."""
    return typer.Option(help=text, metavar=metavar, **others)


Run = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, or one of its checkpoints.")]
Split = Annotated[str, option("The split of the environment.", "NAME")]
Adapter = Annotated[
    Literal["best", "last", "none"], option("Adapters: best by evaluation on val, last, or none (the untrained base).")
]
NoLookahead = Annotated[
    bool, typer.Option("--blind", "--no-lookahead", help="Act without look-ahead: the policy alone.")
]
Device = Annotated[Literal["auto", "cpu", "cuda"], option("Where to compute.")]
Json = Annotated[bool, flag("--json", "Answer in JSON.")]

END_IN_WORDS = {
    "done": "the world",
    "max_turns": "the limit of turns",
    "context_overflow": "a full context",
    "turn_overflow": "a message without end",
    "environment_error": "an error of the environment",
    "environment_timeout": "an environment that did not answer",
}


def open_agent(
    run: Path, *, adapter: str, device: str, levels: Sequence[int] | None = None, split: str | None = None
) -> Agent:
    """`load_agent`, with a message on stderr meanwhile.

    What is no run and a `split` that its environment has not are refused first: the rest takes seconds to import.
    """
    with working(f"Loading {visible(str(run))}"):
        from lfo.env.interface import tasks_of
        from lfo.env.patience import ask, name_of
        from lfo.loading import environment_of_run
        from lfo.runs.folder import run_folder
        from lfo.runs.reading import saved_config

        config = saved_config(run_folder(run))
        if split is not None:
            make = environment_of_run(config)
            timeout = config.rollout.environment_timeout
            ask(lambda: tasks_of(make(), split), timeout=timeout, what=f"tasks of {name_of(make)}")
        from lfo.agent import load_agent

        return load_agent(run, adapter=cast(Any, adapter), device=device, levels=levels)


def open_models(run: Path, *, adapter: str, device: str) -> Agent:
    """`load_models`: the models of a run alone, without making its environment."""
    with working(f"Loading {visible(str(run))}"):
        from lfo.runs.folder import run_folder
        from lfo.runs.reading import saved_config

        saved_config(run_folder(run))  # what is no run is refused before seconds of imports
        from lfo.agent import load_models

        return load_models(run, adapter=cast(Any, adapter), device=device)


def working(words: str) -> Status:
    return Console(stderr=True).status(words)


def bars(*columns: str | ProgressColumn, hidden: bool = False, transient: bool = False) -> Progress:
    """Return progress bars on stderr; nothing is shown if stderr is not a terminal."""
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=transient, disable=hidden or not console.is_terminal)


@contextmanager
def progress_bar(words: str, total: int | None, *, hidden: bool = False) -> Iterator[Callable[[int], None]]:
    """Show a bar that disappears when it is full; yield a function that advances it."""
    with bars(hidden=hidden, transient=True) as progress:
        bar = progress.add_task(words, total=total)
        yield lambda steps: progress.advance(bar, steps)


def figures_table(title: str, rows: Sequence[Sequence[str]], **first: Any) -> Table:
    """Return a table; the first row has the headings, and `first` sets the first column."""
    name, *figures = rows[0]
    table = Table(Column(name, **first), *(Column(each, justify="right") for each in figures), title=title)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table


def write_file(path: Path, text: str) -> None:
    """Write a file atomically, replacing one of that name."""
    from lfo.atomic import write_text_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)
    except OSError as error:
        raise WorkError(f"cannot write {path}: {error.strerror}") from error


def answer(result: Any, show: Callable[[], object], *, as_json: bool) -> None:
    """Print a result as JSON or as text."""
    if as_json:
        typer.echo(json.dumps(result))
    else:
        show()


def visible(text: str) -> str:
    r"""Return untrusted text with escaped control characters.

    >>> visible("ring\x07 \x1b[31mred")
    'ring\\x07 \\x1b[31mred'
    """
    return "".join(each if each.isprintable() or each == "\n" else repr(each)[1:-1] for each in text)


def weights_in_words(agent: Agent) -> str:
    return "untrained" if agent.adapters_folder is None else f"weights of {agent.adapters_folder.name}"


def call_in_words(call: ToolCall) -> str:
    """Return a call as text: `make_phone_call(phone_number="555-0100", auth_info={})`."""
    arguments = (f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in call.arguments.items())
    return f"{call.name}({', '.join(arguments)})"


def counted(number: int, thing: str) -> str:
    """`1 call`, `2 calls`."""
    return f"{number:,} {thing}{'' if number == 1 else 's'}"


def titled(title: str) -> Console:
    """Print a title and return the console."""
    console = Console()
    console.print(Text(title, style="bold"), soft_wrap=True)
    return console


def print_rule(console: Console, words: str) -> None:
    console.print()
    console.print(Rule(Text(visible(words)), align="left", style="dim"))


def print_opening(console: Console, opening: Sequence[Message]) -> None:
    """Print the user message, which is the task."""
    for message in opening:
        if message.role == "user":
            print_lines(console, ("user", message.content, "bold"))


def print_turn(console: Console, turn: Turn) -> None:
    """Print one exchange; mark one that was not made, and whether it was taken back."""
    said = call_in_words(turn.call) if turn.call else turn.action
    if turn.predicted:
        back = [("", "taken back" if turn.checked else "imagined and taken back", "dim")] if turn.taken_back else []
        style = "dim italic" if turn.taken_back else "italic magenta"
        what, told = ("checked", "flaw") if turn.checked else ("imagined", "expects")
        print_lines(console, (what, said, "dim"), (told, turn.observation, style), *back)
    else:
        reply = [("world", turn.observation, "green")] if turn.observation else []
        print_lines(console, ("agent", said, "cyan"), *reply)


def print_outcome(console: Console, rollout: Rollout) -> None:
    """Print success or failure, and why the rollout ended."""

    facts = [counted(sum(not turn.predicted for turn in rollout.turns), "turn")]
    for turns, what in ((rollout.turns, "imagined"), (rollout.taken_back, "imagined and taken back")):
        if count := sum(turn.imagined for turn in turns):
            facts.append(f"{count} {what}")
    if checked := sum(turn.checked for turn in (*rollout.turns, *rollout.taken_back)):
        facts.append(f"{checked} checked")
    facts += [counted(rollout.info[f"{name}s"], name) for name in ("call", "mistake") if f"{name}s" in rollout.info]
    if rollout.cut:
        facts.append(f"replies cut: {rollout.cut}")
    facts.append(f"ended by {END_IN_WORDS[rollout.stop.value]}")
    line = Text("Success" if rollout.succeeded else "Failed", style="bold green" if rollout.succeeded else "bold red")
    console.print(line.append(f": {', '.join(facts)}.", style="default not bold"), soft_wrap=True)
    if rollout.error:
        console.print(Text(visible(rollout.error)), style="red", soft_wrap=True)


def print_lines(console: Console, *lines: tuple[str, str | Text, str]) -> None:
    """Print labels on the left and styled text, wrapped, on the right."""
    grid = Table.grid(Column(width=8, justify="right", style="dim"), Column(overflow="fold"), padding=(0, 2, 0, 0))
    for label, text, style in lines:
        grid.add_row(label, Text(visible(text), style=style) if isinstance(text, str) else text)
    console.print(grid)
