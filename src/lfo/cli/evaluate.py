"""`lfo eval`: evaluate a trained agent on a split, with confidence intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Column, Table

from lfo.cli import common
from lfo.errors import UsageError

# Metric -> label; shares are shown in percent.
BEHAVIOUR = {
    "calls": "calls per task",
    "turns": "turns per task",
    "mistakes": "mistakes per task",
    "excess_fields": "unneeded fields asked for",
    "form_before_call": "form before the first call",
    "department_order": "departments in the right order",
    "lookahead_accuracy": "look-ahead was right",
    "replies_cut": "replies cut, in all rollouts",
}
SHARES = frozenset({"form_before_call", "department_order", "lookahead_accuracy"})


def evaluate(
    run: common.Run,
    split: common.Split = "val",
    adapter: common.Adapter = "last",
    k: Annotated[int, common.option("Sampled rollouts of each task, for pass^1 to pass^k.", min=1)] = 4,
    tasks: Annotated[
        int | None, common.option("How many tasks of the split; the default is eval.tasks.", min=1)
    ] = None,
    seed: Annotated[int, common.option("The seed of the sampled rollouts.", min=0)] = 0,
    no_lookahead: common.NoLookahead = False,
    written_queries: Annotated[
        bool, common.flag("--written-queries", "A control: the environment names the calls to imagine.")
    ] = False,
    against: Annotated[
        Path | None, common.option("A second run: the difference in greedy success, paired task by task.", "RUN")
    ] = None,
    device: common.Device = "auto",
    as_json: common.Json = False,
) -> None:
    """Measure success, pass^k and behaviour on a split: lfo eval runs/x --split test_unseen_companies

    Each task is played once greedily and k times at the temperature of the run.

    pass^j is the probability that j tries at a task all succeed, estimated
    without bias: C(c, j) / C(k, j) if c of k sampled rollouts succeeded, then
    the mean over tasks. Intervals are Wilson's (95 %), over tasks.
    """
    if written_queries and no_lookahead:
        raise UsageError("--written-queries and --no-lookahead exclude each other; choose one")
    agent = common.open_agent(run, adapter=adapter, device=device, split=split)
    from lfo.measure import fixed_tasks

    agent = agent.on_written_queries() if written_queries else agent
    chosen = agent.tasks(split)[: tasks or agent.config.eval.tasks]
    other = common.open_agent(against, adapter=adapter, device=device) if against else None
    if other and [task.id for task in other.tasks(split)[: len(chosen)]] != [task.id for task in chosen]:
        raise UsageError(f"{run} and {against} have different tasks in {split}: compare runs of one environment")
    lookahead = agent.lookahead is not None and not no_lookahead
    with common.progress_bar(f"{len(chosen)} tasks of {split}", len(chosen) * (1 + k), hidden=as_json) as advance:
        figures = fixed_tasks.evaluate(agent, chosen, k=k, lookahead=lookahead, seed=seed, on_rollouts=advance)
    result = {
        "run": str(run),
        "weights": str(agent.adapters_folder) if agent.adapters_folder else None,
        "split": split,
        "tasks": len(chosen),
        "k": k,
        "seed": seed,
        "temperature": agent.runner_config.temperature,
        "lookahead": lookahead,
        "queries": agent.lookahead.proposed_by if lookahead and agent.lookahead else None,
        "acts": "base" if lookahead and agent.config.looks_ahead_untrained else "policy",
        **figures,
    }
    if other:
        sighted = other.lookahead is not None and not no_lookahead
        with common.progress_bar(f"{against} on the same tasks", len(chosen), hidden=as_json) as advance:
            paired = fixed_tasks.evaluate_paired(
                other, chosen, figures["greedy"]["solved"], lookahead=sighted, on_rollouts=advance
            )
        result["against"] = {"run": str(against), "lookahead": sighted, **paired}
    if as_json:
        typer.echo(json.dumps(result))
        return
    _show(result, f"{run} on {split}: {len(chosen)} tasks, {common.weights_in_words(agent)}")
    if adapter == "best" and split == "val":
        typer.echo(
            "The best weights were chosen on val, so their success on val is too high; other splits are unbiased."
        )


def _show(result: dict[str, Any], title: str) -> None:
    greedy, sampled = result["greedy"], result["sampled"]
    table = Table(
        Column("", no_wrap=True),
        Column("greedy", justify="right", no_wrap=True),
        Column(f"sampled, {result['k']} a task", justify="right", no_wrap=True),
        box=None,
        header_style="bold",
    )
    table.add_row("success", _share(greedy["success"]), _share(sampled["success"]), style="bold")
    for level in greedy["by_level"]:
        name = f"  level {level}, {greedy['by_level'][level]['tasks']} tasks"
        table.add_row(name, _share(greedy["by_level"][level]), _share(sampled["by_level"][level]))
    for k, share in list(sampled.get("pass_k", {}).items())[1:]:  # pass^1 is success
        table.add_row(f"pass^{k}", "", _share(share))
    for name, words in BEHAVIOUR.items():
        cells = [_figure(name, half["behaviour"].get(name)) for half in (greedy, sampled)]
        if any(cells):
            table.add_row(words, *cells)
    console = common.titled(title)
    look = "with look-ahead" if result["lookahead"] else "without look-ahead"
    look += " that asks what the environment names" if result["queries"] == "environment" else ""
    look += " by the base, as in training; --blind plays the policy" if result["acts"] == "base" else ""
    console.print(f"Played {look}; sampled at temperature {result['temperature']:g}.", style="dim", highlight=False)
    console.print()
    console.print(table)
    ends = [f"{name} {_stops(half['behaviour']['stops'])}" for name, half in (("Greedy", greedy), ("sampled", sampled))]
    console.print(f"\n{'; '.join(ends)}.", style="dim", highlight=False)
    console.print("95 % intervals over tasks. pass^k: k tries at a task all succeed.", style="dim", highlight=False)
    if "against" in result:
        console.print(f"\n{_difference(result['against'])}", highlight=False)


def _share(share: dict[str, Any]) -> str:
    low, high = share["interval"]
    return f"{share['rate']:.1%} ({low:.1%} - {high:.1%})"


def _difference(paired: dict[str, Any]) -> str:
    """Return one sentence: which run solves more of the same tasks, with the interval."""
    low, high = paired["interval"]
    points = f"{100 * paired['difference']:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
    look = "with" if paired["lookahead"] else "without"
    return (
        f"Against {common.visible(paired['run'])} ({paired['rate']:.1%}, {look} look-ahead), greedy, the same tasks: "
        f"{points}; "
        f"{paired['only_first']} tasks are solved by this run only, {paired['only_second']} by the other only."
    )


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1%}" if name in SHARES else f"{value:.2f}"


def _stops(stops: dict[str, int]) -> str:
    """`{"done": 49, "max_turns": 1}` -> "rollouts were ended by the world (49), the limit of turns (1)"."""
    ends = (f"{common.END_IN_WORDS[name]} ({count})" for name, count in stops.items())
    return f"rollouts were ended by {', '.join(ends)}"
