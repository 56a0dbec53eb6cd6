"""`lfo run`: show a trained agent working on one task, with look-ahead."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lfo.cli import common
from lfo.errors import EnvironmentFailed, UsageError

if TYPE_CHECKING:
    from lfo.agent import Agent


def run(
    run: common.Run,
    task: Annotated[str | None, common.option("The id of the task.", "ID")] = None,
    level: Annotated[int | None, common.option("A task of this level, which need not be trained.")] = None,
    split: common.Split = "val",
    seed: Annotated[int | None, common.option("The seed of the drawn task; the default is random.", min=0)] = None,
    adapter: common.Adapter = "last",
    sample: Annotated[bool, common.flag("--sample", "Sample tokens instead of taking the likeliest ones.")] = False,
    no_lookahead: common.NoLookahead = False,
    device: common.Device = "auto",
    as_json: common.Json = False,
) -> None:
    """Show a trained agent working on one task: lfo run runs/x --level 2

    An imagined call is not made: its world model predicts the reply. If that does
    not change the call of the agent, the imagined exchange is taken back. All other
    replies are real.
    """
    from lfo.env.answers import opening_of

    agent = common.open_agent(run, adapter=adapter, device=device, levels=None if level is None else (level,))
    chosen = _choose(agent, split, task, level, seed)
    play = {"greedy": not sample, "lookahead": not no_lookahead, "seed": seed or 0}
    if as_json:
        from lfo.play.records import rollout_record

        (rollout,) = agent.roll_out([chosen], **play)
        typer.echo(json.dumps({"split": split, "success": rollout.succeeded, **rollout_record(rollout)}))
        return

    title = f"{run} at work on {common.visible(str(chosen.id))}, {common.weights_in_words(agent)}\n"
    console = Console()
    console.print(Text(title, style="bold"))
    if play["lookahead"] and agent.config.looks_ahead_untrained:
        console.print("The base acts with look-ahead, as in training; --blind plays the policy alone.\n")
    (opening,) = agent.runner_config.call_all([lambda: opening_of(agent.make_environment(), chosen)])
    if not isinstance(opening, EnvironmentFailed):  # else the rollout reports the failure
        common.print_opening(console, opening)
    (rollout,) = agent.roll_out([chosen], on_turn=lambda turn: common.print_turn(console, turn), **play)
    console.print()
    common.print_outcome(console, rollout)
    of_level = "" if level is None else f" --level {level}"
    typer.echo(f"The same task again: lfo run {run} --split {split}{of_level} --task {chosen.id}", err=True)


def _choose(agent: Agent, split: str, task_id: str | None, level: int | None, seed: int | None) -> Any:
    tasks: Sequence[Any] = agent.tasks(split)
    if level is not None:
        tasks = [each for each in tasks if getattr(each, "level", None) == level]
        if not tasks:
            raise UsageError(f"the split {split} of {agent.config.env} has no tasks of level {level}")
    if task_id is None:
        return random.Random(seed).choice(tasks)
    for each in tasks:
        if str(each.id) == task_id:
            return each
    raise UsageError(
        f"task {task_id} is not among the {len(tasks)} tasks of {split}, whose ids look like {tasks[0].id}; "
        "choose another split or level with --split or --level"
    )
