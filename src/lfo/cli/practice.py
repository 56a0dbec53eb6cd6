"""The practice of a base as commands show it: bars, or plain lines without a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from lfo.cli.common import bars

if TYPE_CHECKING:
    from lfo.config import RunConfig

PLAIN_SECONDS = 20.0  # between two lines of progress without a terminal


def practised(config: RunConfig) -> RunConfig:
    """Return the config with a base that knows the tools of the environment: the embedded one may have to practise."""
    from lfo.loading import EMBEDDED, environment_factory

    make_environment = environment_factory(config)  # a wrong name is refused before seconds of imports
    if config.model != EMBEDDED:
        return config
    from lfo.tools.pretrain.own_base import with_practised_base

    try:
        with practice_bars() as progress:
            say = partial(typer.echo, err=True)
            return with_practised_base(config, make_environment, progress=progress, say=say)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted during practice; the same command goes on with it") from None


@contextmanager
def practice_bars() -> Iterator[Callable[[str, int, int, str], None]]:
    """Show a bar for each phase; yield a function that updates them."""
    columns = (BarColumn(), MofNCompleteColumn(), "{task.fields[words]}", TimeElapsedColumn())
    with bars("{task.description}", *columns) as shown:
        tasks: dict[str, Any] = {}
        last = {"": time.monotonic()}

        def progress(phase: str, done: int, of: int, words: str) -> None:
            ended = done == of and phase not in last
            if shown.disable and (ended or time.monotonic() - last[""] >= PLAIN_SECONDS):
                last[""] = time.monotonic()
                if ended:
                    last[phase] = last[""]
                typer.echo(f"{phase}: {done:,} of {of:,}{', ' * bool(words)}{words}", err=True)
            if phase not in tasks:
                tasks[phase] = shown.add_task(phase, total=of, words=words)
            shown.update(tasks[phase], completed=done, words=words)

        yield progress
