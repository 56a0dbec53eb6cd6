"""`lfo compare`: groups of runs against a baseline, from their folders alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.table import Table


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Folders of runs, or folders that hold them.")],
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="The group that ratios refer to; plain DAPO unless named.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Compare how many tasks runs needed, grouped by their settings: lfo compare runs/level2/*"""
    from lfo.evaluation import comparison_text
    from lfo.evaluation.runs import find_runs, read_run
    from lfo.evaluation.sample_efficiency import compare as compare_runs

    comparison = compare_runs([read_run(path) for path in find_runs(runs)], baseline=baseline)
    if as_json:
        typer.echo(json.dumps(comparison_text.as_json(comparison), indent=2))
        return
    from rich.console import Console

    console = Console()
    of = "success" if comparison.ceiling is None else f"the ceiling ({comparison.ceiling:.1%})"
    console.print(_table(f"Tasks to a share of {of}", comparison_text.table(comparison)))
    splits = comparison_text.split_table(comparison)
    console.print(_table("Success at the end: mean and 95 % interval, or the seeds", splits))
    if by_level := comparison_text.level_table(comparison):
        console.print(_table("Success on val at the end, by level", by_level))
    for line in (*comparison_text.conclusions(comparison), *comparison.notes):
        console.print(line, highlight=False, markup=False)


def _table(title: str, rows: Sequence[Sequence[str]]) -> Table:
    from rich.table import Column, Table
    from rich.text import Text

    group, *figures = rows[0]
    table = Table(
        Column(group, min_width=16, overflow="fold"),
        *(Column(name, justify="right") for name in figures),
        title=title,
    )
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    return table
