"""`lfo watch`: the live report page of runs."""

from __future__ import annotations

import os
import sys
import threading
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from lfo.cli.common import flag, option
from lfo.errors import UsageError


def watch(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders that contain them.")],
    host: Annotated[str, option("Where to listen.", "ADDRESS")] = "127.0.0.1",
    port: Annotated[int, option("0 takes a free one.", min=0, max=65535)] = 0,
    open_page: Annotated[bool, flag("--open", "Open the page in a browser.")] = False,
) -> None:
    """Watch runs in a browser during training: lfo watch runs/x runs/y

    It only reads the folders: you can stop it at any time, and the runs continue.
    """
    for path in runs:
        if not path.is_dir():
            raise UsageError(f"the folder {path} does not exist")
    from lfo.report.watch import LivePage

    with LivePage(runs).serving(host, port) as address:
        typer.echo(f"Watch at {address}  (Ctrl-C ends this page; the runs continue)")
        if open_page:
            webbrowser.open(address)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            typer.echo("The page has ended; the runs continue.", err=True)


def has_display(environment: Mapping[str, str] = os.environ, platform: str = sys.platform) -> bool:
    """Whether this machine has a display for a browser."""
    remote = "SSH_CONNECTION" in environment
    screen = platform in ("darwin", "win32") or bool(environment.get("DISPLAY") or environment.get("WAYLAND_DISPLAY"))
    return screen and not remote
