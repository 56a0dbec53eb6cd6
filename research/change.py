#!/usr/bin/env python3
"""Parts of research/change.sh: an `lfo train` that takes over old replies, logs of an agent under other rules, what is
left of the old rules, and the tables.

    research/change.py train ...                        `lfo train` with the replies of a base under other rules;
                                                        FORGETS=no: nothing is forgotten at the alarm
    research/change.py logs RUN OUT --tasks 320 env_args.law=1     one rollout of each task, as a served agent plays
    research/change.py old RUN BASE                     success of a recovered run by the rules of its base
    research/change.py table FOLDER                     what each arm needed, and when the alarm rang
    research/change.py wolf FOLDER...                   false alarms, had the test seen the success of kept runs
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NoReturn

from lfo.config import RunConfig, from_yaml, load_config
from lfo.runs.folder import read_metrics
from lfo.runs.rule_change import Watch, noticed_in

SHARE, ROW = 0.9, "eval/val/success"
TASKS = 100


def carrying() -> NoReturn:
    """Run `lfo` so that a run takes over what its base has heard under other rules; with FORGETS=no for good."""
    from lfo.cli import main
    from lfo.train import changed_rules, loop

    changed_rules.same_world = lambda *_: True
    if os.environ.get("FORGETS") == "no":
        loop.forget = lambda *_: None
    main()
    sys.exit()


def write_logs(run: Path, out: Path, tasks: int, settings: list[str]) -> None:
    from lfo.agent import load_agent
    from lfo.algorithms import draw_tasks
    from lfo.loading import environment_factory
    from lfo.play.records import rollout_record

    config = load_config(settings, run=run)
    agent = load_agent(run, environment=environment_factory(config))
    made, steps = agent.make_environment(), -(-tasks // config.rollout.prompts)
    drawn = [task for step in range(steps) for task in draw_tasks(config, made, step, 0)]  # as a run of this seed does
    rollouts = agent.roll_out(drawn[:tasks], greedy=False, seed=config.seed)
    partial = out.with_suffix(".unfinished")
    partial.write_text("".join(json.dumps(rollout_record(rollout)) + "\n" for rollout in rollouts))
    partial.rename(out)


def old_rules(run: Path, base: Path) -> None:
    """Write the success of a recovered run by the rules of its base, on val."""
    from lfo.agent import load_agent
    from lfo.loading import environment_factory

    agent = load_agent(run, environment=environment_factory(from_yaml(base / "config.yaml")))
    tasks = agent.tasks("val")[:TASKS]
    ways = {"blind": False, **({"sighted": True} if agent.config.looks_ahead else {})}
    played = {name: agent.roll_out(tasks, greedy=True, lookahead=sighted) for name, sighted in ways.items()}
    result = {name: fmean(rollout.reward for rollout in rollouts) for name, rollouts in played.items()}
    (run / "old_rules.json").write_text(json.dumps(result))


# --- tables ----------------------------------------------------------------------------------------------------------


def judged_by(config: RunConfig, split: str) -> str:
    return f"eval/{split}/success" + ("_blind" if config.leaves_policy_alone else "")


def recovery(run: Path, base: Path, split: str) -> dict[str, Any]:
    """Return what a run needed until two evaluations in a row reached 90 % of its base's last success."""
    config = from_yaml(run / "config.yaml")
    key, rows = judged_by(config, split), read_metrics(run)
    old = [row[key] for row in read_metrics(base) if key in row][-1]
    evaluated = [row for row in rows if key in row]
    both = ((one, min(one[key], two[key])) for one, two in pairwise(evaluated))
    there = next((one for one, lower in both if lower >= SHARE * old), None)
    until = rows if there is None else [row for row in rows if row["step"] <= there["step"]]
    last = until[-1]
    calls = sum(row.get("calls", 0.0) * sum(row["stops"].values()) for row in until if "stops" in row)
    return {
        "there": there is not None,
        "old": old,
        "start": evaluated[0][key],
        "end": evaluated[-1][key],
        "steps": last["step"],
        "tasks": last["tasks_seen"],
        "rollouts": last.get("rollouts_seen", 0),
        "replies": round(calls) or last.get("replay_size", 0),
        "seconds": last.get("seconds/seen", 0.0),
    }


def of_seeds(values: list[float], form: str = "{:.0f}") -> str:
    return ", ".join(form.format(value) for value in values)


def table(folder: Path) -> None:
    """Print what every arm needed; figures by seed, `>` where 90 % of the old success was not reached."""
    for recovered in sorted(folder.glob("*-law*")):
        world = recovered.name.rpartition("-law")[0]
        arms: dict[str, list[Path]] = defaultdict(list)
        for file in sorted(recovered.glob("*-*/config.yaml")):
            arms[file.parent.name.rpartition("-")[0]].append(file.parent)
        configs = [from_yaml(run / "config.yaml") for runs in arms.values() for run in runs]
        splits = {split for config in configs for split in config.eval.splits}
        for split in sorted(splits, key=lambda each: each != "val"):
            print(f"\n{recovered.name}, to {SHARE:.0%} of the old success on {split}, by seed")
            heads = "arm|before|at first|at last|tasks|rollouts|replies|seconds|old rules, after|alarm after rollouts"
            print(f"| {heads.replace('|', ' | ')} |\n|{'---|' * 10}")
            for arm, runs in arms.items():
                print(_line(arm, runs, folder / f"{world}-base", split))
    quiet = sorted((folder / "quiet").glob("quiet-*"))
    if quiet:
        _quiet(quiet)


KINDS = {"memory": "memory", "internalised": "internalise", "rl": "rl"}


def _line(arm: str, runs: list[Path], bases: Path, split: str) -> str:
    kind = KINDS.get(arm.partition("-")[0], "dual")
    found = [recovery(run, bases / f"{kind}-{run.name.rpartition('-')[2]}", split) for run in runs]
    left = [json.loads((run / "old_rules.json").read_text()) for run in runs if (run / "old_rules.json").is_file()]
    alarms = [noticed_in(read_metrics(run)) for run in runs]
    rows = [{row["step"]: row.get("rollouts_seen", 0) for row in read_metrics(run)} for run in runs]
    rang = [str(by_step[each[0][0]]) if each else "-" for by_step, each in zip(rows, alarms, strict=True)]
    cells = [arm, *(of_seeds([each[name] for each in found], "{:.2f}") for name in ("old", "start", "end"))]
    for name in ("tasks", "rollouts", "replies", "seconds"):
        cells.append(", ".join(f"{'' if each['there'] else '> '}{each[name]:.0f}" for each in found))
    cells.append(of_seeds([each.get("sighted", each["blind"]) for each in left], "{:.2f}"))
    cells.append(", ".join(rang))
    return "| " + " | ".join(cells) + " |"


def _quiet(runs: list[Path]) -> None:
    alarms = {run.name: noticed_in(read_metrics(run)) for run in runs}
    rows = [row for run in runs for row in read_metrics(run) if "fresh_tasks" in row]
    tested, doubt = sum(row["fresh_tasks"] for row in rows), max(row["fresh_doubt"] for row in rows)
    print(f"\n{len(runs)} runs in which nothing changed, {len(rows)} steps, predictions tested in {tested} tasks:")
    print(f"{sum(map(len, alarms.values()))} alarms, highest doubt {doubt:.1f}")
    for name, each in alarms.items():
        for step, noticed in each:
            print(f"  {name}, step {step}: {noticed.words}")


def wolf(folders: list[Path]) -> None:
    """Give the test the success of sighted rollouts, eight tasks a step, in place of predictions; then let it fall."""
    runs = steps = 0
    late: list[int] = []
    for path in sorted({file.parent for folder in folders for file in folder.rglob("metrics.jsonl*")}):
        rows = [row for row in read_metrics(path) if isinstance(row.get("success_sighted"), float)]
        runs, steps, watch, alarms = runs + bool(rows), steps + len(rows), Watch(), 0
        for row in rows:
            right = 8 * min(1.0, max(0.0, row["success_sighted"]))
            if (noticed := watch.hear(step=row["step"], tasks=8, right=right)) is not None:
                alarms += 1
                print(f"{path}, step {row['step']}: {dataclasses.asdict(noticed)}")
        if not alarms and rows and fmean(row["success_sighted"] for row in rows[-5:]) > 0.6:
            late.append(next(step for step in range(1, 1000) if watch.hear(step=step, tasks=8, right=0.25) is not None))
    print(f"{runs} runs, {steps} steps")
    if late:
        print(f"a fall to 3 %, in {len(late)} of them: noticed after {median(late):g} steps, {max(late)} at most")


def main() -> None:
    if sys.argv[1:2] == ["train"]:
        carrying()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    logs = commands.add_parser("logs")
    logs.add_argument("run", type=Path)
    logs.add_argument("out", type=Path)
    logs.add_argument("--tasks", type=int, default=320)
    logs.add_argument("settings", nargs="*")
    old = commands.add_parser("old")
    old.add_argument("run", type=Path)
    old.add_argument("base", type=Path)
    commands.add_parser("table").add_argument("folder", type=Path)
    commands.add_parser("wolf").add_argument("folders", type=Path, nargs="+")
    given = parser.parse_args()
    if given.command == "logs":
        write_logs(given.run, given.out, given.tasks, given.settings)
    elif given.command == "old":
        old_rules(given.run, given.base)
    elif given.command == "table":
        table(given.folder)
    else:
        wolf(given.folders)


if __name__ == "__main__":
    main()
