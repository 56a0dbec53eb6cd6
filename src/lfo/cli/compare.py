"""`lfo compare`: compare groups of runs to a baseline, from their folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from lfo.cli.common import Json, figures_table


def compare(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS...", help="Run folders, or folders that contain them.")],
    baseline: Annotated[
        str | None, typer.Option(metavar="NAME", help="The baseline group of the ratios; the default is plain DAPO.")
    ] = None,
    blind: Annotated[
        bool, typer.Option("--blind", help="Count success without look-ahead: what the policies do alone.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare how many tasks runs needed to a target, grouped by their config: lfo compare runs/level2/*

    A target counts as reached at the first of two consecutive evaluations at or above it.
    """
    from lfo.evaluation import comparison_text
    from lfo.evaluation.alone import without_lookahead
    from lfo.evaluation.runs import find_runs, read_run
    from lfo.evaluation.sample_efficiency import compare as compare_runs

    records = [read_run(path) for path in find_runs(runs)]
    if blind:
        records = [without_lookahead(run) for run in records]
    comparison = compare_runs(records, baseline=baseline)
    if as_json:
        typer.echo(json.dumps({"blind": blind, **comparison_text.as_json(comparison)}, indent=2))
        return
    console = Console()
    of = "success" if comparison.ceiling is None else f"the ceiling ({comparison.ceiling:.1%})"
    tables = {
        f"Tasks to a share of {of}": comparison_text.table(comparison),
        f"What {comparison.target:.0%} on val took: geometric mean and 95 % interval": comparison_text.needed_table(
            comparison
        ),
        f"Times less than {comparison.baseline} to {comparison.target:.0%} on val": comparison_text.cost_table(
            comparison
        ),
        "Success at the end: mean and 95 % interval, or the seeds": comparison_text.split_table(comparison),
        "Success on val at the end, by level": comparison_text.level_table(comparison),
    }
    for title, rows in tables.items():
        if rows:
            console.print(figures_table(title, rows, min_width=12, overflow="fold"), crop=False)
    about_blind = [comparison_text.BLIND] if any(group.blind for group in comparison.groups) else []
    for line in (*about_blind, *comparison_text.conclusions(comparison), *comparison.notes):
        console.print(line, highlight=False, markup=False)
