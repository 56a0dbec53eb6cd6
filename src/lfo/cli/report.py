"""`lfo report`: write a web page about runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from lfo.cli.common import Json, bars, counted, write_file
from lfo.errors import UsageError, WorkError


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders that contain them.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    as_json: Json = False,
) -> None:
    """Write one self-contained web page about runs: lfo report runs/level2 -o report.html"""
    result = write_report(runs, output)
    for words in result["problems"]:
        typer.echo(f"lfo: {words}", err=True)
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(result["headline"])
    typer.echo(
        f"{output}: {counted(result['runs'], 'run')}, {counted(result['rollouts'], 'rollout')}, "
        f"{result['bytes'] / 1e6:.1f} MB; open it in a browser"
    )


def write_report(runs: Sequence[Path], output: Path) -> dict[str, Any]:
    """Write the page and return a summary."""
    from lfo.report.page import render
    from lfo.report.payload import build, find_runs_and_studies
    from lfo.runs.reading import read_run

    found = find_runs_and_studies(runs)
    with bars(transient=True) as shown:
        records = [read_run(path) for path in shown.track(found.runs, description="reading runs")]
    if not found.studies and all(record.problem for record in records):
        named = (f"{record.path}: {record.problem}" for record in records)
        raise WorkError(f"there is nothing to report: {'; '.join(named)}")
    payload = build(found, records)
    page = render(payload)
    if output.is_dir():
        raise UsageError(f"{output} is a folder; name a file, such as -o {output / 'report.html'}")
    write_file(output, page)
    return {
        "path": str(output),
        "bytes": len(page.encode()),
        "runs": len(payload["runs"]),
        "groups": [group["name"] for group in payload["groups"]],
        "rollouts": len(payload["rollouts"]["items"]),
        "headline": payload["headline"],
        "problems": payload["problems"],
        "notes": payload["notes"],
    }
