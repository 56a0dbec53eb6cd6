"""`lfo demo`: train plain DAPO and dual-LoRA in parallel on the same tasks, in a few minutes on two cores.

Each run is an ordinary `lfo train` in its own process. This command only reads their folders and prints the address of
a live page. It can be stopped at any time; the same command resumes. It ends with what `lfo compare` prints and the
report page of both runs (`lfo report`).
"""

from __future__ import annotations

import json
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TimeElapsedColumn

from lfo.cli.children import ChildRun, train_all
from lfo.cli.common import Json, bars, option
from lfo.cli.compare import print_comparison
from lfo.cli.report import write_report
from lfo.cli.watch import has_display
from lfo.errors import WorkError

ARMS = {"dapo": "plain DAPO", "dual-lora": "dual-LoRA"}  # `algo`, also the name of the folder -> name of its bar
# Half of the default tasks in an evaluation, to save time.
OVERRIDES = ("preset=tiny", "levels=2", "eval.every=10", "eval.tasks=100", "eval.splits=val,test_unseen_companies")
ONE_SEED = "This is one seed of one level with a tiny base: it does not show how large the difference is elsewhere."
ON_ANOTHER_CPU = (
    "Figures depend on the CPU. On one, this ended at 74 % on val and 77 % on unseen companies; on another, five seeds "
    "of a longer run had 79 to 87 % on val after as many tasks."
)


def demo(
    overrides: Annotated[list[str] | None, typer.Argument(metavar="NAME=VALUE", hidden=True)] = None,
    steps: Annotated[int, option("Training steps of each run, with 8 tasks each.")] = 40,
    output_dir: Annotated[Path, option("Folder of both runs.", "DIR")] = Path("runs/demo"),
    seed: Annotated[int, option("The seed of tasks and random numbers of both runs.")] = 0,
    as_json: Json = False,
) -> None:
    """Train plain DAPO and dual-LoRA on the same tasks, compare them and write a report page: lfo demo"""
    own = (*OVERRIDES, f"steps={steps}", f"seed={seed}", *(overrides or ()))
    runs = [ChildRun.wanted(name, output_dir / algo, (*own, f"algo={algo}")) for algo, name in ARMS.items()]
    unfinished = [run for run in runs if not run.finished]
    try:
        if unfinished:
            _train(unfinished, output_dir)
    except KeyboardInterrupt:
        raise KeyboardInterrupt("interrupted; the same command resumes from the last checkpoints") from None
    _show(runs, output_dir / "report.html", as_json)
    if not unfinished:
        typer.echo(
            f"Both runs were finished already; to train again, remove {output_dir} or choose another --output-dir.",
            err=True,
        )


def _train(runs: Sequence[ChildRun], folder: Path) -> None:
    """Train all runs in parallel until all have ended or one has failed, and serve a live page.

    Shows one bar for each run on a terminal, else one plain line for each evaluation. Writes to stderr.
    """
    from lfo.report.watch import LivePage
    from lfo.runs.folder import read_metrics
    from lfo.runs.sample_efficiency import VAL

    printed = dict.fromkeys((run.name for run in runs), -1)  # the last step that was printed
    columns = (BarColumn(bar_width=20), MofNCompleteColumn(), "{task.fields[words]}", TimeElapsedColumn())
    with LivePage([folder]).serving() as address, bars("{task.description}", *columns) as shown:
        typer.echo(f"Watch at {address}  (until the demo ends)", err=True)
        if has_display():
            webbrowser.open(address)
        tasks = {run.name: shown.add_task(run.name, total=run.config.steps, words="starting") for run in runs}

        def look(run: ChildRun, code: int | None, running: Sequence[str]) -> None:
            rows = read_metrics(run.folder) if (run.folder / "metrics.jsonl").is_file() else []
            evaluated = [row for row in rows if VAL in row]
            if rows:
                val = f"val {evaluated[-1][VAL]:.0%}" if evaluated else "val -"
                words = f"{rows[-1]['tasks_seen']} tasks, {val}"
                shown.update(tasks[run.name], completed=rows[-1]["step"], words=words)
            for row in evaluated:
                if not shown.console.is_terminal and row["step"] > printed[run.name]:
                    printed[run.name] = row["step"]
                    words = f"step {row['step']} of {run.config.steps}, {row['tasks_seen']} tasks, val {row[VAL]:.0%}"
                    shown.console.print(f"{run.name}: {words}", highlight=False)
            if code:
                raise WorkError(f"{run.name} failed: {run.last_words()}")

        train_all(runs, jobs=len(runs), look=look)


def _show(runs: Sequence[ChildRun], page: Path, as_json: bool) -> None:
    from lfo.report.words import headline, page_names, renamed
    from lfo.runs.comparison_text import as_json as all_of
    from lfo.runs.reading import read_run
    from lfo.runs.sample_efficiency import compare

    comparison = compare([read_run(run.folder) for run in runs])
    comparison = renamed(comparison, page_names([group.name for group in comparison.groups]))
    words = " ".join(headline(comparison))
    write_report([run.folder for run in runs], page)
    if as_json:
        typer.echo(json.dumps({**all_of(comparison), "conclusion": words, "report": str(page)}))
        return
    print_comparison(comparison)
    for line in (words, ONE_SEED, ON_ANOTHER_CPU):
        Console().print(line, highlight=False, markup=False)
    typer.echo(f"Curves and rollouts are on one page; open it in a browser: {page}")
