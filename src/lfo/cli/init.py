"""`lfo init` writes a new project: an environment, its test, a config and a README."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from lfo.atomic import new_folder
from lfo.cli.common import Json, answer, visible, write_file
from lfo.errors import UsageError

FILES = ("world.py", "test_world.py", "config.yaml", "README.md")


def init(
    name: Annotated[str, typer.Argument(metavar="NAME", help="New folder for the project.")], as_json: Json = False
) -> None:
    """Start a project with a small environment of your own: lfo init my_world"""
    if not name.strip() or not name.isprintable():
        raise UsageError("lfo init needs the name of a new folder")
    folder = new_folder(Path(name))
    for file in FILES:
        text = (resources.files("lfo") / "assets" / "project" / f"{file}.txt").read_text(encoding="utf-8")
        write_file(folder / file, Template(text).safe_substitute(name=folder.absolute().name))
    words = (
        f"Wrote {visible(str(folder))}: {', '.join(FILES)}. Now:\n\n    cd {visible(str(folder))}\n"
        "    lfo check-env env=world:World\n    lfo train config=config.yaml"
    )
    answer({"folder": str(folder), "files": list(FILES)}, lambda: typer.echo(words), as_json=as_json)
