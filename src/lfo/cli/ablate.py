"""`lfo ablate`: a grid of ordinary runs, several in parallel, which can be stopped and resumed.

Each cell is an `lfo train` in its own process. A finished cell is not run again, a started one is resumed from its last
checkpoint, and a failed one is reported while the others continue.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from lfo.cli.children import ChildRun, train_all
from lfo.cli.common import Json, bars, figures_table, option
from lfo.errors import DataError, WorkError

if TYPE_CHECKING:
    from lfo.runs.ablation import Cell

SETTINGS = ("preset=tiny", "steps=60", "eval.every=10")
PHONE_CALLS = ("levels=2", "eval.splits=val,test_unseen_companies")  # defaults that other environments do not have
MAX_ERROR = 300  # characters of the error of a failed run


def ablate(
    study: Annotated[
        Literal["weight", "predict", "rank", "schedule", "coupling"], typer.Argument(help="What is varied.")
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE", help="Config overrides for every cell, such as levels=3 exploration.blind_share=0.25."
        ),
    ] = None,
    values: Annotated[str | None, option("Values to try instead of all: 0,0.5,1", "A,B,...")] = None,
    seeds: Annotated[int, option("Runs of each value, with seeds 0, 1, ...", min=1)] = 3,
    jobs: Annotated[int, option("Runs in parallel.", min=1)] = 2,
    steps: Annotated[int | None, option("Steps of each run; else those of config=, or 60.", min=1)] = None,
    output_dir: Annotated[Path, option("Folder of all studies.", "DIR")] = Path("runs/ablations"),
    as_json: Json = False,
) -> None:
    """Vary one option and compare the runs: lfo ablate weight --values 0,0.5 --seeds 3"""
    from lfo.runs import ablation

    folder = output_dir / study
    cells = ablation.grid(study, None if values is None else values.split(","), seeds)
    cells += ablation.done_before(folder, cells)
    given = (*(() if steps is None else (f"steps={steps}",)), *(overrides or ()))
    grid = _Grid(study, folder, cells, (*_defaults(given), *given))
    try:
        grid.train(jobs)
    except KeyboardInterrupt:
        done = sum(cell.status == "done" for cell in grid.cells.values())
        raise KeyboardInterrupt(
            f"interrupted after {done} of {len(cells)} cells; the same command resumes from the last checkpoints"
        ) from None
    cells = list(grid.cells.values())
    _show(study, folder, cells, as_json)
    failed = [cell for cell in cells if cell.status == "failed"]
    if failed:
        raise WorkError(
            f"{len(failed)} of {len(cells)} cells failed, {folder / failed[0].run} with: {failed[0].error} "
            "(the same command tries them again)"
        )


def _defaults(overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the default overrides of a cell, for what neither the command line nor a file of `config=` sets."""
    from lfo.config import load_config
    from lfo.settings import dotted, read_yaml

    given: set[str] = set()
    for name, _, value in (each.partition("=") for each in overrides):
        given |= {key for key, _ in dotted(read_yaml(Path(value)))} if name == "config" else {name}
    given |= {name.removeprefix("env_args.") for name in given}  # `levels` is short for `env_args.levels`

    def missing(defaults: Sequence[str]) -> tuple[str, ...]:
        return tuple(each for each in defaults if each.partition("=")[0] not in given)

    settings = missing(SETTINGS)
    is_phone_calls = load_config((*settings, *overrides)).env == "phone-calls"
    return (*settings, *missing(PHONE_CALLS)) if is_phone_calls else settings


class _Grid:
    """The cells of a study and their processes; writes every change to `ablation.json`.

    Shows one bar over the steps of all cells on a terminal, and one plain line for each cell that ends.
    """

    def __init__(self, study: str, folder: Path, cells: Sequence[Cell], overrides: Sequence[str]) -> None:
        """Validate the run of every cell before any starts."""
        from lfo.runs.ablation import overrides_of

        self._study, self._folder, self._runs = study, folder, {}
        self.cells: dict[str, Cell] = {}  # by the names of their runs
        for cell in cells:
            name = f"{study} {cell.value}, seed {cell.seed}"
            self._runs[name] = ChildRun.wanted(name, folder / cell.run, overrides_of(study, cell, overrides))
            self.cells[name] = replace(cell, status="done" if self._runs[name].finished else "missing")
        self._steps = {name: run.config.steps * (name not in self._waiting()) for name, run in self._runs.items()}
        columns = ("steps", TextColumn("{task.fields[words]}", markup=False), TimeRemainingColumn())
        self._bar = bars(BarColumn(bar_width=20), MofNCompleteColumn(), *columns)

    def train(self, jobs: int) -> None:
        """Run all unfinished cells, `jobs` in parallel; a failed cell does not stop the others."""
        self._write()
        total = sum(run.config.steps for run in self._runs.values())
        self._task = self._bar.add_task("", total=total, completed=sum(self._steps.values()), words="starting")
        with self._bar:
            train_all([self._runs[name] for name in self._waiting()], jobs=jobs, look=self._look)

    def _waiting(self) -> list[str]:
        return [name for name, cell in self.cells.items() if cell.status == "missing"]

    def _look(self, run: ChildRun, code: int | None, running: Sequence[str]) -> None:
        from lfo.runs.folder import read_metrics

        with suppress(DataError):  # no metrics yet; the run itself reports a damaged file
            rows = read_metrics(run.folder)
            self._steps[run.name] = rows[-1]["step"] if rows else 0
            self._bar.update(self._task, completed=sum(self._steps.values()), words="; ".join(running))
        if code is None:
            return
        cell = replace(self.cells[run.name], status="done")
        if code or not run.finished:
            error = f"it was killed by {signal.Signals(-code).name}" if code < 0 else run.last_words()
            cell = replace(cell, status="failed", error=error[:MAX_ERROR])
        self.cells[run.name] = cell
        self._write()
        words = "done" if cell.status == "done" else f"failed: {cell.error}"
        ended = f"{len(self.cells) - len(self._waiting())} of {len(self.cells)}"
        self._bar.console.print(f"{ended}: {run.name}: {words}", highlight=False, markup=False, soft_wrap=True)

    def _write(self) -> None:
        from lfo.runs.ablation import write_ablation

        write_ablation(self._folder, self._study, list(self.cells.values()))


def _show(study: str, folder: Path, cells: Sequence[Cell], as_json: bool) -> None:
    from lfo.atomic import write_text_atomic
    from lfo.report.picture import draw_curves
    from lfo.runs import ablation
    from lfo.runs.sample_efficiency import curve

    found = ablation.results(folder, cells)
    setting = ablation.STUDIES[study].setting
    data = next((group.runs[0].data for group in found.values()), None)
    ceiling = data["splits"]["val"]["ceiling"] if data else None
    plot = folder / "ablation.svg"
    drawn = {value: [curve(run.rows) for run in group.runs] for value, group in found.items()}
    write_text_atomic(plot, draw_curves(drawn, title=f"Success on val by {setting}", ceiling=ceiling))
    if as_json:
        typer.echo(json.dumps({**ablation.as_json(study, cells, found), "plot": str(plot)}, indent=2))
        return
    of = "success" if ceiling is None else f"the ceiling ({ceiling:.1%})"
    Console().print(figures_table(f"Tasks to a share of {of}", ablation.table(study, cells, found)))
    typer.echo(f"The curves are in {plot}, next to the runs and ablation.json.")
