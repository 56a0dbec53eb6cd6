"""`lfo generate` writes the phone-call world to files; `lfo check-env` shows that it keeps its promises."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lfo.cli.common import Json, answer, progress_bar

Data = Annotated[Path, typer.Option("--data", metavar="DIR", help="A folder that `lfo generate` wrote.")]


def generate(
    num_companies: Annotated[int, typer.Option(help="Companies that training tasks are about.")] = 100,
    num_train_tasks: Annotated[int, typer.Option(help="Tasks in train.jsonl.")] = 500,
    num_val_tasks: Annotated[int, typer.Option(help="Tasks in val.jsonl, and in each test split.")] = 100,
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder to write.")] = Path("data"),
    seed: Annotated[int, typer.Option(help="The world: same seed, same bytes.")] = 0,
    levels: Annotated[str, typer.Option(help="Levels, as 1-5 or 2,3.")] = "1-5",
    force: Annotated[bool, typer.Option("--force", help="Replace data of other options.")] = False,
    as_json: Json = False,
) -> None:
    """Write companies and tasks: lfo generate --output-dir data --seed 0"""
    from lfo.env import generator

    manifest = generator.generate(
        output_dir,
        num_companies=num_companies,
        num_train_tasks=num_train_tasks,
        num_val_tasks=num_val_tasks,
        seed=seed,
        levels=generator.parse_levels(levels),
        force=force,
    )
    if as_json:
        typer.echo(json.dumps(manifest))
        return
    typer.echo(f"Wrote {output_dir} (seed {seed}):")
    for split, counts in manifest["counts"].items():
        ceilings = ", ".join(f"level {level} {value:.1%}" for level, value in manifest["ceilings"][split].items())
        typer.echo(f"  {split}: {sum(counts.values())} tasks; information ceiling: {ceilings}")


def check_env(data: Data = Path("data"), as_json: Json = False) -> None:
    """Let every player loose on 1,000 fresh tasks a level and check all bounds: lfo check-env --data data"""
    from lfo.env.check import check, plays
    from lfo.env.generator import load

    dataset = load(data)
    with progress_bar("players", plays(dataset.options), hidden=as_json) as advance:
        result = check(dataset, on_played=lambda: advance(1))
    answer(result, lambda: _show(result), as_json=as_json)
    if not result["ok"]:
        raise typer.Exit(1)


def _show(result: dict[str, Any]) -> None:
    levels = list(result["fresh_ceiling"])
    table = Table("player", *(f"level {level}" for level in levels), title="success on fresh tasks, 95 % interval")
    for name, scores in result["players"].items():
        cells = (scores[level] for level in levels)
        table.add_row(name, *(f"{each['success']:.1%} ({each['low']:.1%}-{each['high']:.1%})" for each in cells))
    table.add_row("information ceiling", *(f"{result['fresh_ceiling'][level]:.1%}" for level in levels))
    for name, scores in result["hostile"].items():
        table.add_row(
            f"hostile: {name}", *(f"{scores[level]['success']:.1%}" if level in scores else "-" for level in levels)
        )
    console = Console()
    console.print(table)
    for problem in result["problems"]:
        console.print(f"BROKEN: {problem}", markup=False)
    console.print("All bounds hold." if result["ok"] else f"{len(result['problems'])} bounds are broken.")
