"""`lfo rollouts`: sample rollouts of a trained agent, to read or to save."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from lfo.cli import common
from lfo.errors import UsageError

if TYPE_CHECKING:
    from lfo.types import Rollout


def rollouts(
    run: common.Run,
    num: Annotated[int, common.option("How many rollouts, each of a different task.", min=1)] = 10,
    split: common.Split = "val",
    output: Annotated[Path | None, common.option("New file for the rollouts, as JSON lines.", "FILE")] = None,
    adapter: common.Adapter = "last",
    greedy: Annotated[bool, common.flag("--greedy", "Always take the likeliest token, as in evaluations.")] = False,
    seed: Annotated[int, common.option("The seed of the random numbers.", min=0)] = 0,
    no_lookahead: common.NoLookahead = False,
    device: common.Device = "auto",
    as_json: Annotated[bool, common.flag("--json", "Print the rollouts as JSON lines.")] = False,
) -> None:
    """Let a trained agent play some tasks; show or save the rollouts: lfo rollouts runs/x --num 10

    The file has the format of a run's own rollouts: `lfo inspect --rollout FILE`, `lfo check-env --logs
    FILE` and training from logs (world_model.from_logs=FILE) read it.
    """
    if output is not None and output.exists():
        raise UsageError(f"{output} already exists; choose another --output")
    agent = common.open_agent(run, adapter=adapter, device=device, split=split)
    from lfo.play.records import rollout_record

    tasks = agent.tasks(split)
    if num > len(tasks):
        raise UsageError(f"the split {split} has only {len(tasks)} tasks; lower --num from {num}")
    with common.progress_bar(f"{num} tasks of {split}", num, hidden=as_json) as advance:
        played = agent.roll_out(tasks[:num], greedy=greedy, lookahead=not no_lookahead, seed=seed, on_batch=advance)
    lines = "".join(json.dumps({"split": split, **rollout_record(rollout)}) + "\n" for rollout in played)
    if output is not None:
        common.write_file(output, lines)
    if as_json:
        typer.echo(lines, nl=False)
        return
    _show(played, f"{run} on {split}, {common.weights_in_words(agent)}", output)


def _show(played: list[Rollout], title: str, output: Path | None) -> None:
    from lfo.play.records import in_order

    console = common.titled(title)
    for number, rollout in enumerate(played, start=1):
        common.print_rule(console, f"{number} of {len(played)}: {rollout.task_id}")
        common.print_opening(console, rollout.opening)
        for turn in in_order(rollout):
            common.print_turn(console, turn)
        common.print_outcome(console, rollout)
    saved = f"; saved in {output}" if output else ""
    console.print(
        Text(f"\n{sum(rollout.succeeded for rollout in played)} of {len(played)} succeeded{saved}."), soft_wrap=True
    )
