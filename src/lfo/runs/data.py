"""What a run is evaluated on: the content of its `data.json`, by which runs can be compared without its environment."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from lfo.config import RunConfig
from lfo.env.answers import id_of, opening_of
from lfo.env.interface import EnvironmentFactory, predicted_tools, tasks_of
from lfo.env.worlds.phone.ceiling import mean_ceiling
from lfo.env.worlds.phone.tasks import Task
from lfo.env.worlds.shipped import SHIPPED
from lfo.errors import EnvironmentFailed
from lfo.model.catalog import practice_of
from lfo.play.runner import RunnerConfig
from lfo.runs.reading import DATA_FILE
from lfo.types import Message

logger = logging.getLogger(__name__)


def describe_data(config: RunConfig, make_environment: EnvironmentFactory) -> dict[str, Any]:
    """Return the content of `data.json`: the tasks of the evaluation of this config.

    {"environment": "phone-calls", "levels": [2], "predicted_tools": ["make_phone_call"],
     "splits": {"val": {"tasks": 100, "fingerprint": "0f3a...", "ceiling": 0.908}}}

    Splits with the same fingerprint have the same tasks with the same openings, in the same order. `ceiling` is the
    information ceiling of these tasks, or null if the environment has none. `predicted_tools` are those whose
    replies the world model learns, or null for all. `practice` is there if the base practised in an environment first.
    """
    splits = (*config.eval.splits, *config.eval.final_splits) if config.eval.every else ()
    tools = predicted_tools(make_environment(), config.world_model.predict)
    practice = {name: count for name, count in practice_of(config.model).items() if name in ("tasks", "rollouts")}
    return {
        **({"practice": practice} if len(practice) == 2 else {}),
        "environment": config.env,
        "levels": list(config.env_args.get("levels", ())) if config.env in SHIPPED else [],
        "predicted_tools": None if tools is None else sorted(tools),
        "splits": {split: _describe_split(config, make_environment, split) for split in splits},
    }


def continued_data(run: Path, data: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return `data` for a run that goes on in this folder; warn of splits that have other tasks than before.

    Their fingerprint becomes "BEFORE, then NOW", so that the run is not compared with runs on either tasks.
    """
    try:
        saved = json.loads((run / DATA_FILE).read_text(encoding="utf-8"))["splits"]
        before = {split: str(each["fingerprint"]) for split, each in saved.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return data  # a new run, an old version or a damaged file: nothing to compare with
    splits = {}
    for split, described in data["splits"].items():
        now = str(described["fingerprint"])
        fingerprint = before.get(split, now)
        if not fingerprint.endswith(now):
            logger.warning(f"the tasks of {split} have changed since {run} began, because its environment has changed")
            fingerprint = f"{fingerprint}, then {now}"
        splits[split] = {**described, "fingerprint": fingerprint}
    return {**data, "splits": splits}


def predicted_by(config: RunConfig, data: Mapping[str, Any] | None) -> Collection[str] | None:
    """Return the tools whose replies a saved run predicts, without making its environment; None: all, or unknown."""
    named, setting = (data or {}).get("predicted_tools"), config.world_model.predict
    if isinstance(named, list) or setting in ("all", "none"):
        return named if isinstance(named, list) else None
    if setting != "default":
        return [name.strip() for name in setting.split(",")]
    shipped = SHIPPED.get(config.env)
    return None if shipped is None else getattr(shipped.made_by, "predicted_tools", None)


def _describe_split(config: RunConfig, make_environment: EnvironmentFactory, split: str) -> dict[str, Any]:
    runner_config = RunnerConfig.of_run(config)
    tasks = runner_config.ask(lambda: tasks_of(make_environment(), split)[: config.eval.tasks])
    openings = _openings(runner_config, make_environment, tasks)
    named = runner_config.call_all([partial(id_of, task) for task in tasks])
    names = ["" if isinstance(name, EnvironmentFailed) else name for name in named]
    identity = [[name, opening] for name, opening in zip(names, openings, strict=True)]
    bounded = [task for task in tasks if isinstance(task, Task)]
    return {
        "tasks": len(tasks),
        "fingerprint": hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16],
        "ceiling": mean_ceiling(bounded) if bounded and len(bounded) == len(tasks) else None,
    }


def _openings(
    runner_config: RunnerConfig, make_environment: EnvironmentFactory, tasks: Sequence[Any]
) -> list[list[dict[str, Any]]]:
    """Return the opening of each task; empty if the environment fails, which training reports."""

    def opening(task: Any) -> Callable[[], Sequence[Message]]:
        return lambda: opening_of(make_environment(), task)

    answers = runner_config.call_all([opening(task) for task in tasks])
    return [
        [] if isinstance(answer, EnvironmentFailed) else [asdict(message) for message in answer] for answer in answers
    ]
