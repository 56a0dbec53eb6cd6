"""`lfo ablate`: a grid of ordinary runs, several at the same time, that can be stopped and goes on.

Each cell is an `lfo train` in a process of its own. A finished cell is never run again, a started one goes on from its
last checkpoint, and one that fails is shown as failed while the others run on.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from lfo.cli.children import ChildRun, stop
from lfo.errors import WorkError

if TYPE_CHECKING:
    from lfo.evaluation.ablation import Cell

SETTINGS = ("preset=tiny", "eval.every=10")
PHONE_CALLS = ("levels=2", "eval.splits=val,test_unseen_companies")  # what another world does not have
LOOK_EVERY = 0.5  # seconds
MAX_ERROR = 300  # characters of a failed run's last words


def ablate(
    study: Annotated[
        Literal["weight", "predict", "rank", "schedule", "coupling"], typer.Argument(help="What is varied.")
    ],
    settings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NAME=VALUE", help="Settings of every cell, such as levels=3 exploration.blind_share=0.25."
        ),
    ] = None,
    values: Annotated[
        str | None, typer.Option(metavar="A,B,...", help="Values to try instead of the whole grid: 0,0.5,1")
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each value, with seeds 0, 1, ...")] = 3,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at the same time.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Steps of each run.")] = 60,
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder of all studies.")] = Path("runs/ablations"),
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Vary one thing and compare: lfo ablate weight --values 0,0.5 --seeds 3"""
    from lfo.evaluation import ablation

    folder = output_dir / study
    cells = ablation.grid(study, None if values is None else values.split(","), seeds)
    cells += ablation.done_before(folder, cells)
    runs = _runs(study, cells, (*_defaults(settings or ()), f"steps={steps}", *(settings or ())), folder)
    grid = _Grid(study, folder, cells, runs)
    try:
        grid.train(jobs)
    except KeyboardInterrupt:
        done = sum(cell.status == "done" for cell in grid.cells)
        raise KeyboardInterrupt(
            f"interrupted after {done} of {len(cells)} cells; the same command goes on from the last checkpoints"
        ) from None
    _show(study, folder, grid.cells, as_json)
    failed = [cell for cell in grid.cells if cell.status == "failed"]
    if failed:
        raise WorkError(
            f"{len(failed)} of {len(cells)} cells failed, {folder / failed[0].run} with: {failed[0].error} "
            "(the same command tries them again)"
        )


def _defaults(settings: Sequence[str]) -> tuple[str, ...]:
    """What a cell has where these settings say nothing else."""
    elsewhere = any(each.startswith("env=") and each != "env=phone-calls" for each in settings)
    return SETTINGS if elsewhere else (*SETTINGS, *PHONE_CALLS)


def _runs(study: str, cells: Sequence[Cell], settings: Sequence[str], folder: Path) -> list[ChildRun]:
    """The run of every cell, checked before anything starts; what lies there already must be what is wanted."""
    from lfo.config import load_config
    from lfo.evaluation import ablation

    runs = []
    for cell in cells:
        own = (*ablation.settings_of(study, cell, settings), f"output_dir={folder / cell.run}")
        run = ChildRun(
            name=f"{study} {cell.value}, seed {cell.seed}",
            folder=folder / cell.run,
            settings=own,
            config=load_config(own),
        )
        run.refuse_other_settings()
        runs.append(run)
    return runs


class _Grid:
    """The cells of a study and their processes; every change is written to `ablation.json` at once."""

    def __init__(self, study: str, folder: Path, cells: Sequence[Cell], runs: Sequence[ChildRun]) -> None:
        self._study, self._folder, self._runs = study, folder, runs
        self.cells = [
            replace(cell, status="done" if run.finished else "missing") for cell, run in zip(cells, runs, strict=True)
        ]

    def train(self, jobs: int) -> None:
        """Run what is not finished, so many at the same time; only a person or the disk can stop it."""
        from lfo.evaluation.ablation import write_ablation

        waiting = [place for place, cell in enumerate(self.cells) if cell.status != "done"]
        running: dict[int, subprocess.Popen[bytes]] = {}
        write_ablation(self._folder, self._study, self.cells)
        with ExitStack() as stack:
            progress = stack.enter_context(_Progress(self._runs, finished=len(self.cells) - len(waiting)))
            while waiting or running:
                while waiting and len(running) < jobs:
                    place = waiting.pop(0)
                    running[place] = self._runs[place].start()
                    stack.callback(stop, running[place])
                time.sleep(LOOK_EVERY)
                for place, process in list(running.items()):
                    code = process.poll()
                    progress.look(place, [self._runs[each].name for each in running])
                    if code is not None:
                        del running[place]
                        stop(process)
                        self.cells[place] = self._ended(place, code)
                        write_ablation(self._folder, self._study, self.cells)
                        progress.tell(self._runs[place].name, self.cells[place])

    def _ended(self, place: int, code: int) -> Cell:
        run = self._runs[place]
        if code == 0 and run.finished:
            return replace(self.cells[place], status="done", error="")
        words = f"it was ended by {signal.Signals(-code).name}" if code < 0 else run.last_words()
        return replace(self.cells[place], status="failed", error=words[:MAX_ERROR])


class _Progress:
    """One bar over the steps of all cells on a terminal; one plain line for each cell that ends elsewhere."""

    def __init__(self, runs: Sequence[ChildRun], *, finished: int) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        self._runs = runs
        self._ended = finished
        self._steps = [run.config.steps if run.finished else 0 for run in runs]
        self._console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("steps"),
            TextColumn("{task.fields[words]}", markup=False),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        total = sum(run.config.steps for run in runs)
        self._task = self._bar.add_task("", total=total, completed=sum(self._steps), words="starting")

    def __enter__(self) -> _Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def look(self, place: int, running: Sequence[str]) -> None:
        from lfo.errors import DataError
        from lfo.rundir import read_metrics

        try:
            rows = read_metrics(self._runs[place].folder)
        except DataError:
            return  # none yet; a damaged file is the run's own business
        self._steps[place] = rows[-1]["step"] if rows else 0
        self._bar.update(self._task, completed=sum(self._steps), words="; ".join(running))

    def tell(self, name: str, cell: Cell) -> None:
        self._ended += 1
        words = cell.status if cell.status == "done" else f"failed: {cell.error}"
        self._console.print(
            f"{self._ended} of {len(self._runs)}: {name}: {words}", highlight=False, markup=False, soft_wrap=True
        )


def _show(study: str, folder: Path, cells: Sequence[Cell], as_json: bool) -> None:
    from lfo.evaluation import ablation
    from lfo.evaluation.sample_efficiency import curve
    from lfo.report.picture import draw_curves
    from lfo.rundir import write_text_atomic

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
    _print_table(
        "Tasks to a share of " + ("success" if ceiling is None else f"the ceiling ({ceiling:.1%})"),
        ablation.table(study, cells, found),
    )
    typer.echo(f"Drawn in {plot}; the runs and ablation.json lie beside it.")


def _print_table(title: str, rows: Sequence[Sequence[str]]) -> None:
    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

    first, *figures = rows[0]
    table = Table(first, *(Column(name, justify="right") for name in figures), title=title)
    for row in rows[1:]:
        table.add_row(*map(Text, row))
    Console().print(table)
