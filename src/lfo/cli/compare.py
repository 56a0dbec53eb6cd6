"""`lfo compare`: compare groups of runs to a baseline, from their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from lfo.cli.common import Json, figures_table, flag, option

if TYPE_CHECKING:
    from lfo.runs.sample_efficiency import Comparison


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders that contain them.")],
    baseline: Annotated[
        str | None, option("The baseline group of the ratios; the default is plain DAPO.", "NAME")
    ] = None,
    blind: Annotated[bool, flag("--blind", "Count success without look-ahead: what the policies do alone.")] = False,
    as_json: Json = False,
) -> None:
    """Compare how many tasks runs needed to a target, grouped by their config: lfo compare runs/level2/*

    A target counts as reached at the first of two consecutive evaluations at or above it.
    """
    from lfo.runs.alone import without_lookahead
    from lfo.runs.comparison_text import as_json as all_of
    from lfo.runs.reading import find_runs, read_run
    from lfo.runs.sample_efficiency import compare as compare_runs

    records = [read_run(path) for path in find_runs(runs)]
    if blind:
        records = [without_lookahead(run) for run in records]
    comparison = compare_runs(records, baseline=baseline)
    if as_json:
        typer.echo(json.dumps({"blind": blind, **all_of(comparison)}, indent=2))
        return
    print_comparison(comparison)


def print_comparison(comparison: Comparison) -> None:
    from lfo.runs.comparison_text import sentences, tables

    console = Console()
    for title, rows in tables(comparison).items():
        console.print(figures_table(title, rows, min_width=12, overflow="fold"), crop=False)
    for line in sentences(comparison):
        console.print(line, highlight=False, markup=False)
