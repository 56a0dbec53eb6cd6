"""`lfo play`: play a task in the terminal, with short commands instead of tool calls.

Reads commands from the terminal or from a pipe. Shows exactly what an agent would see, until the end.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lfo.cli.common import option
from lfo.errors import UsageError

if TYPE_CHECKING:
    from lfo.env.worlds.phone.environment import PhoneCalls
    from lfo.env.worlds.phone.tasks import Task

HELP = """\
  search NAME               look a company up
  form FIELD, FIELD, ...    ask your user for details; once
  call NUMBER FIELD ...     call a department and give it these details (FIELD=VALUE gives another value)
  fields                    the names of all fields
  history                   everything so far
  help                      this text
  quit                      give up
A whole tool call in JSON works too: {"name": "search_company", "arguments": {"name": "Acme"}}"""


def play(
    task: Annotated[str | None, option("The id of the task.", "ID")] = None,
    level: Annotated[int | None, option("A task of this level, 1 to 6.")] = None,
    data: Annotated[Path | None, option("A folder of lfo generate; the default is the world of seed 0.", "DIR")] = None,
    seed: Annotated[int | None, option("The seed of the drawn task; the default is random.")] = None,
) -> None:
    """Play a task yourself: lfo play --level 2"""
    from lfo.env.worlds.phone.environment import PhoneCalls

    environment = PhoneCalls(data=data, levels=None if level is None else (level,))
    chosen = _choose(environment, task, seed)
    _play(environment, chosen, _typed_lines())


def _choose(environment: PhoneCalls, task_id: str | None, seed: int | None) -> Task:
    from lfo.env.worlds.phone.tasks import SPLITS

    if task_id is None:
        return random.Random(seed).choice(environment.tasks("val"))
    for split in SPLITS:
        for each in environment.tasks(split):
            if each.id == task_id:
                return each
    raise UsageError(f"task {task_id} does not exist; ids look like {environment.tasks('val')[0].id}")


def _typed_lines() -> Iterator[str]:
    while True:
        if sys.stdin.isatty():
            typer.echo("> ", nl=False)
        line = sys.stdin.readline()
        if not line:
            return
        yield line.strip()


def _play(environment: PhoneCalls, task: Task, lines: Iterable[str]) -> None:
    from lfo.env.worlds.phone.fields import FIELDS, REFERENCE

    *_, opening = environment.reset(task)
    history = [f"user: {opening.content}"]
    typer.echo(f"Task {task.id}. Your user says:\n  {opening.content}\nType help for the commands.")
    known: dict[str, str] = {}  # values from the user and the reps, by field
    for line in filter(None, lines):
        command = line.partition(" ")[0]
        if command.lower() in ("quit", "exit"):
            break
        texts = {"help": HELP, "?": HELP, "history": "\n".join(history), "fields": ", ".join((*FIELDS, REFERENCE))}
        message = to_message(line, known)
        if message is None:
            unknown = f"There is no command {command!r}; type help for those that exist."
            typer.echo(texts.get(command.lower(), unknown))
            continue
        result = environment.step(message)
        history += [f"you: {line}", f"answer: {result.observation}"]
        typer.echo(result.observation)
        known |= values_in(result.observation)
        if result.done:
            break
    _verdict(environment, task)


def to_message(line: str, known: dict[str, str]) -> str | None:
    """Return a typed command as a message of an agent; None for an unknown command."""
    from lfo.protocol.hermes import format_tool_call
    from lfo.types import ToolCall

    command, _, rest = line.partition(" ")
    words = [word for word in re.split(r"[,\s]+", rest) if word]
    match command.lower():
        case "search":
            call = ToolCall(name="search_company", arguments={"name": rest.strip()})
        case "form":
            call = ToolCall(name="auth_info_form", arguments={"fields": words})
        case "call":
            number, details = words[0] if words else "", {}
            for word in words[1:]:
                name, equals, value = word.partition("=")
                details[name] = value if equals else known.get(name, "")
            call = ToolCall(name="make_phone_call", arguments={"phone_number": number, "auth_info": details})
        case _:
            return f"<tool_call>{line}</tool_call>" if line.startswith("{") else None
    return format_tool_call(call)


def values_in(observation: str) -> dict[str, str]:
    """Return the values in an observation: those of a form, or the reference number of a rep."""
    from lfo.env.worlds.phone.fields import FIELDS, REFERENCE

    if reference := re.search(r"Your reference number is (\w+)\.", observation):
        return {REFERENCE: reference[1]}
    try:
        answers = json.loads(observation)
    except ValueError:
        return {}
    return {name: answers[name] for name in FIELDS if name in answers} if isinstance(answers, dict) else {}


def _verdict(environment: PhoneCalls, task: Task) -> None:
    done, all_errands = environment.done_errands, len(task.errands)
    typer.echo("")
    typer.echo("Success: your user is happy." if environment.reward() else f"Failed: {done} of {all_errands} done.")
    typer.echo(f"{environment.calls} of {task.limits.calls} calls, {environment.mistakes} mistakes. What was wanted:")
    for errand in task.errands:
        typer.echo(f"  {errand.service} ({errand.kind}): {', '.join(errand.requires)}")
