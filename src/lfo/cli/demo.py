"""`lfo demo`: plain DAPO and dual-LoRA on the same tasks, side by side, in a few minutes on two cores.

Each arm is an ordinary `lfo train` in a process of its own; this only watches their folders. Stop it at any moment:
the same command goes on. It ends with a table and with the page of both runs (`lfo report`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer

from lfo.cli.children import ChildRun, stop
from lfo.errors import WorkError

ARMS = {"dapo": "plain DAPO", "dual-lora": "dual-LoRA"}  # `algo`, which also names the folder -> name in the table
SETTINGS = ("preset=tiny", "levels=2", "eval.every=10", "eval.splits=val,test_unseen_companies")
LOOK_EVERY = 0.5  # seconds
ON_ANOTHER_CPU = (
    "Figures depend on the CPU: on two kinds of it, 60 steps of dual-LoRA with seed 0 ended at 83 to 85 % on val and "
    "80 to 87 % on unseen companies."
)


def demo(
    settings: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", hidden=True)] = None,
    steps: Annotated[int, typer.Option(help="Steps of 8 tasks for each of the two.")] = 60,
    output_dir: Annotated[Path, typer.Option(metavar="DIR", help="Folder of both runs.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Names tasks and all random numbers, the same for both.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Answer in JSON.")] = False,
) -> None:
    """Train plain DAPO and dual-LoRA on the same tasks, compare them and write a page: lfo demo"""
    runs = _runs((*SETTINGS, f"steps={steps}", f"seed={seed}", *(settings or ())), output_dir)
    unfinished = [run for run in runs if not run.finished]
    try:
        if unfinished:
            _train(unfinished)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command goes on from the last checkpoints") from None
    _show(runs, output_dir / "report.html", as_json)
    if not unfinished:
        typer.echo(
            f"Both runs were there already; to train anew, remove {output_dir} or choose another --output-dir.",
            err=True,
        )


def _runs(settings: Sequence[str], output_dir: Path) -> list[ChildRun]:
    """Both runs, checked before anything starts; what lies there already must be what is wanted."""
    from lfo.config import load_config

    runs = []
    for algo, name in ARMS.items():
        folder = output_dir / algo
        own = (*settings, f"algo={algo}", f"output_dir={folder}")
        runs.append(ChildRun(name=name, folder=folder, settings=own, config=load_config(own)))
    for run in runs:
        run.refuse_other_settings()
    return runs


def _train(runs: Sequence[ChildRun]) -> None:
    """Run all at the same time, until the last has ended or one has failed."""
    with ExitStack() as stack:
        progress = stack.enter_context(_Progress(runs))
        processes = []
        for run in runs:
            processes.append(run.start())
            stack.callback(stop, processes[-1])
        codes: list[int | None] = [None]
        while None in codes:
            time.sleep(LOOK_EVERY)
            codes = [process.poll() for process in processes]
            for run, code in zip(runs, codes, strict=True):
                progress.look(run)
                if code:
                    raise WorkError(f"{run.name} failed: {run.last_words()}")


class _Progress:
    """One bar a run on a terminal; one plain line for each evaluation elsewhere. Everything goes to stderr."""

    def __init__(self, runs: Sequence[ChildRun]) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks = {
            run.name: self._bars.add_task(run.name, total=run.config.steps, words="starting") for run in runs
        }
        self._told = {run.name: -1 for run in runs}  # the last step that was printed

    def __enter__(self) -> _Progress:
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def look(self, run: ChildRun) -> None:
        from lfo.evaluation.sample_efficiency import VAL
        from lfo.rundir import read_metrics

        rows = read_metrics(run.folder) if (run.folder / "metrics.jsonl").is_file() else []
        if not rows:
            return
        evaluated = [row for row in rows if VAL in row]
        val = f"val {evaluated[-1][VAL]:.0%}" if evaluated else "val -"
        words = f"{rows[-1]['tasks_seen']} tasks, {val}"
        self._bars.update(self._tasks[run.name], completed=rows[-1]["step"], words=words)
        if not self._console.is_terminal:
            for row in evaluated:
                if row["step"] > self._told[run.name]:
                    self._told[run.name] = row["step"]
                    self._console.print(
                        f"{run.name}: step {row['step']} of {run.config.steps}, {row['tasks_seen']} tasks, "
                        f"val {row[VAL]:.0%}",
                        highlight=False,
                    )


def _show(runs: Sequence[ChildRun], page: Path, as_json: bool) -> None:
    from lfo.cli.report import write_report
    from lfo.evaluation import side_by_side
    from lfo.evaluation.runs import read_run
    from lfo.evaluation.sample_efficiency import compare

    comparison = compare([read_run(run.folder) for run in runs])
    words = side_by_side.conclusion(comparison, ARMS)
    write_report([run.folder for run in runs], page)
    if as_json:
        result = {**side_by_side.as_json(comparison), "conclusion": words, "report": str(page)}
        typer.echo(json.dumps(result))
        return
    _print_table([run.name for run in runs], side_by_side.table(comparison), words)
    typer.echo(f"Curves and rollouts are on one page; open it in a browser: {page}")


def _print_table(names: Sequence[str], rows: Sequence[Sequence[str]], words: str) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    table = Table(Column("success", no_wrap=True), *names, title="Both on the same tasks")
    for row in rows:
        table.add_row(*row)
    console = Console()
    console.print(table)
    console.print(words, highlight=False, markup=False)
    console.print(ON_ANOTHER_CPU, highlight=False, markup=False)
