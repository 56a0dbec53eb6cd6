"""Mistakes in the words of a command, each as one sentence that names the right form.

Settings are written name=value everywhere: `lfo train --steps 10` is told `lfo train steps=10`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer

from lfo.config import familiar
from lfo.errors import UsageError

OVERRIDES = "NAME=VALUE"  # the metavar of settings
_MISTAKE: Any = typer.BadParameter.__base__  # of click, which Typer may carry itself


@contextmanager
def one_sentence(arguments: Sequence[str]) -> Iterator[None]:
    """Raise click's usage errors as our own; `arguments` is what was typed."""
    try:
        yield
    except _MISTAKE as error:
        if type(error).__name__ == "NoArgsIsHelpError":  # its message is the whole help
            raise
        raise UsageError(_sentence(error, arguments)) from error


def _sentence(error: Any, arguments: Sequence[str]) -> str:
    context = error.ctx
    command = context.command_path if context else "lfo"
    option = getattr(error, "option_name", "")
    if context and option and any(each.metavar == OVERRIDES for each in context.command.params):
        name, value = _as_setting(option, arguments)
        if name is not None:
            return f"settings are written name=value, without dashes: {command} {name}={shlex.quote(value)}"
    words = " ".join(error.format_message().rstrip(".").split())
    return f"{words[:1].lower()}{words[1:]}; {command} --help shows the right form"


def _as_setting(option: str, arguments: Sequence[str]) -> tuple[str | None, str]:
    """Return the setting that an option stands for, and its value: `steps` and `10` for `--steps 10`."""
    bare = option.lstrip("-")
    name = familiar(bare) or familiar(bare.replace("-", "_"))
    for word, after in zip(arguments, (*arguments[1:], ""), strict=True):
        if word == option:
            return name, after if after and not after.startswith("--") else "VALUE"
        if word.startswith(f"{option}="):
            return name, word.partition("=")[2]
    return name, "VALUE"
