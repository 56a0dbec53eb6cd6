"""`lfo report`: runs as one page for a browser."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer


def report(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that hold some.")],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Show runs on one self-contained page: lfo report runs/level2 -o report.html"""
    result = write_report(runs, output)
    for words in result["problems"]:
        typer.echo(f"lfo: {words}", err=True)
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(result["headline"])
    typer.echo(
        f"{output}: {_count(result['runs'], 'run')}, {_count(result['rollouts'], 'rollout')}, "
        f"{result['bytes'] / 1e6:.1f} MB; open it in a browser"
    )


def write_report(runs: Sequence[Path], output: Path) -> dict[str, Any]:
    """Write the page; what it is about, for people and programs."""
    from rich.console import Console
    from rich.progress import track

    from lfo.report.page import render, write
    from lfo.report.payload import build, find_runs_and_studies

    console = Console(stderr=True)

    def progress(paths: Sequence[Path]) -> Iterable[Path]:
        return track(paths, "reading runs", console=console, transient=True, disable=not console.is_terminal)

    payload = build(find_runs_and_studies(runs), progress)
    page = render(payload)
    write(output, page)
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


def _count(n: int, what: str) -> str:
    return f"{n:,} {what}{'' if n == 1 else 's'}"
