"""The command line of this bench."""

from __future__ import annotations

import json
from typing import Annotated

import typer
from rich.console import Console

from benchmarks.__main__ import Overrides, numbers_in
from lfo.cli import main
from lfo.cli.common import Json, figures_table, working

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def bench_world_model(
    overrides: Overrides = None,
    seeds: Annotated[int, typer.Option(min=1, help="Trials, each with its own tasks and initial weights.")] = 1,
    tasks: Annotated[
        str, typer.Option(help="Numbers of tasks after which to measure, separated by commas.")
    ] = "40,80,160,320",
    calls: Annotated[int, typer.Option(min=1, help="Held-out tasks of each split.")] = 200,
    variant: Annotated[str, typer.Option(help="An experimental variant: retrieve-1, again-2, ...")] = "none",
    rivals_only: Annotated[
        bool, typer.Option("--rivals-only", help="Measure the baselines alone, in seconds.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure how many replies the world model needs, beside a lookup table, three memories and a linear classifier."""
    points = numbers_in(tasks, "--tasks")
    from research.world_model_bench import bench

    def say(words: str) -> None:
        typer.echo(words, err=True)

    with working("fitting baselines" if rivals_only else "training world models"):
        result = bench.bench_world_model(
            overrides or [], seeds=seeds, points=points, calls=calls, variant=variant, rivals_only=rivals_only, say=say
        )
    if as_json:
        typer.echo(json.dumps(result))
        return
    for split in result["calls"]:
        rows = [(name, *map(bench.percent, shares[split])) for name, shares in result["mean"].items()]
        title = f"Right predictions on {split} by number of tasks, percent, mean of {seeds}"
        Console().print(figures_table(title, [("", *map(str, points)), *rows]))
    if rivals_only:
        return
    typer.echo(f"the updates of one step take {result['seconds_a_step']:.2f} s of processor time")


if __name__ == "__main__":
    main(app, "python -m research.world_model_bench")
