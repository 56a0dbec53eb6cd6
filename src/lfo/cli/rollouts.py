"""`lfo rollouts`: sample rollouts of a trained agent, to read and to keep."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lfo.cli.common import (
    Adapter,
    Device,
    NoLookahead,
    Run,
    Split,
    open_agent,
    print_opening,
    print_outcome,
    print_turn,
    progress_bar,
    visible,
    weights_in_words,
)
from lfo.errors import UsageError, WorkError

if TYPE_CHECKING:
    from lfo.types import Rollout


def rollouts(
    run: Run,
    num: Annotated[int, typer.Option("--num", min=1, help="How many rollouts, each of another task.")] = 10,
    split: Split = "val",
    output: Annotated[
        Path | None, typer.Option("--output", metavar="FILE", help="Save them here, as JSON lines; must not exist.")
    ] = None,
    adapter: Adapter = "last",
    greedy: Annotated[bool, typer.Option("--greedy", help="Always the likeliest token, as in evaluations.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Names the random numbers.")] = 0,
    no_lookahead: NoLookahead = False,
    device: Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print the JSON lines themselves.")] = False,
) -> None:
    """Let a trained agent play some tasks, and read or keep what happened: lfo rollouts runs/x --num 10

    The file is in the form of a run's own rollouts: `lfo inspect` and `lfo report` read it, and so does training
    a world model from logs (world_model.from_logs=FILE).
    """
    if output is not None and output.exists():
        raise UsageError(f"{output} exists already; choose another --output")
    agent = open_agent(run, adapter=adapter, device=device)
    from lfo.rollout.records import rollout_record

    tasks = agent.tasks(split)
    if num > len(tasks):
        raise UsageError(f"the split {split} has {len(tasks)} tasks, so --num cannot be {num}")
    with progress_bar(f"{num} tasks of {split}", num, hidden=as_json) as advance:
        played = agent.roll_out(tasks[:num], greedy=greedy, lookahead=not no_lookahead, seed=seed, on_batch=advance)
    lines = "".join(json.dumps({"split": split, **rollout_record(rollout)}) + "\n" for rollout in played)
    if output is not None:
        _save(output, lines)
    if as_json:
        typer.echo(lines, nl=False)
        return
    _show(played, f"{run} on {split}, {weights_in_words(agent)}", output)


def _save(path: Path, text: str) -> None:
    from lfo.rundir import write_text_atomic

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(path, text)
    except OSError as error:
        raise WorkError(f"cannot write {path}: {error.strerror}") from error


def _show(played: list[Rollout], title: str, output: Path | None) -> None:
    from rich.console import Console
    from rich.rule import Rule
    from rich.text import Text

    from lfo.evaluation.repeated_tasks import solved

    console = Console()
    console.print(Text(title, style="bold"), soft_wrap=True)
    for number, rollout in enumerate(played, start=1):
        console.print()
        console.print(Rule(Text(f"{number} of {len(played)}: {visible(rollout.task_id)}"), align="left", style="dim"))
        print_opening(console, rollout.opening)
        for turn in rollout.turns:
            print_turn(console, turn)
        print_outcome(console, rollout)
    saved = f"; saved in {output}" if output else ""
    console.print(Text(f"\n{sum(map(solved, played))} of {len(played)} succeeded{saved}."), soft_wrap=True)
