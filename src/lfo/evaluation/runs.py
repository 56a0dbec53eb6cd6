"""What a run's folder holds, for whoever compares, judges or shows runs; and what it was evaluated on.

    record = read_run("runs/x")
    record.problem or record.rows[-1]["eval/val/success"]

Reading never fails: a folder that cannot be used says why in `problem`, one sentence. Two runs can be compared when
their `data` agree, which is why every run keeps its own description (`data.json`); a run without one is described
from its config, where the environment ships with the package. Nothing here plays, trains or writes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from lfo.config import RunConfig, from_yaml
from lfo.env.ceiling import mean_ceiling
from lfo.env.interface import EnvironmentFactory, tasks_of
from lfo.env.shipped import SHIPPED
from lfo.env.tasks import Task
from lfo.errors import EnvironmentFailed, LfoError
from lfo.rollout.runner import RunnerSettings
from lfo.rundir import read_metrics
from lfo.types import Message

logger = logging.getLogger(__name__)

DATA_FILE = "data.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run as it lies on disk; `config` is None and `rows` are empty where they cannot be read."""

    path: Path
    config: RunConfig | None
    rows: tuple[Mapping[str, Any], ...]  # of metrics.jsonl, in order
    data: Mapping[str, Any] | None  # None: nobody can tell on what it was evaluated
    finished: bool
    problem: str = ""  # why this run cannot be used, in one sentence

    @property
    def name(self) -> str:
        return self.path.name or str(self.path)

    @property
    def note(self) -> str:
        """A word on a run that has not ended, which may be in progress or may have been stopped."""
        if self.problem or self.finished or not self.rows or self.config is None:
            return ""
        return f"{self.path} has not ended: step {self.rows[-1]['step']} of {self.config.steps}"


NO_METRICS = "has no metrics yet"


def read_run(path: str | Path) -> RunRecord:
    """The run in a folder, whatever state it is in."""
    path = Path(path)
    config, rows, data, problem = None, [], None, ""
    try:
        if not (path / "config.yaml").is_file():
            problem = f"{path} holds no run: there is no config.yaml in it"
        else:
            config = from_yaml(path / "config.yaml", known_only=True)
            if not (path / "metrics.jsonl").is_file():
                problem = f"{path} {NO_METRICS}"
            else:
                rows = read_metrics(path)
                problem = "" if rows else f"{path} {NO_METRICS}"
            data = _data_of(path, config)
    except (LfoError, OSError) as error:
        problem = str(error)
    return RunRecord(
        path=path,
        config=config,
        rows=tuple(rows),
        data=data,
        # Adapters do not tell: a copy may have come without them, and a run that was given more steps has old ones.
        finished=bool(config and rows and rows[-1]["step"] >= config.steps),
        problem=problem,
    )


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """The runs in these folders and in the folders below them; a folder without any stands for itself."""
    found: list[Path] = []
    for path in paths:
        found += [folder for folder in folders(path) if holds_run(folder)] or [path]
    return list(dict.fromkeys(found))


def folders(path: Path) -> Iterator[Path]:
    """A folder and those below it, without the insides of runs."""
    yield path
    if path.is_dir() and not holds_run(path):
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from folders(child)


def holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or (folder / "metrics.jsonl").is_file()


def describe_data(config: RunConfig, environment: EnvironmentFactory) -> dict[str, Any]:
    """What runs of this config are evaluated on: `data.json`.

    {"environment": "phone-calls", "levels": [2],
     "splits": {"val": {"tasks": 100, "fingerprint": "0f3a...", "ceiling": 0.908}}}

    Two splits with one fingerprint hold the same tasks with the same openings, in the same order. `ceiling` is the
    information ceiling of these tasks, or null in worlds that have none.
    """
    splits = (*config.eval.splits, *config.eval.final_splits) if config.eval.every else ()
    return {
        "environment": config.env,
        "levels": list(config.env_args.get("levels", ())) if config.env in SHIPPED else [],
        "splits": {split: _describe_split(config, environment, split) for split in splits},
    }


def warn_of_changed_data(run: Path, data: Mapping[str, Any]) -> None:
    """Warn of splits that hold other tasks now than when the run in this folder began."""
    try:
        before = json.loads((run / DATA_FILE).read_text(encoding="utf-8"))["splits"]
        changed = [split for split, told in data["splits"].items() if told != before.get(split, told)]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return  # a new run, one of an older version, or a damaged file: there is nothing to compare with
    for split in changed:
        logger.warning(f"the tasks of {split} are not those that {run} began with: its environment has changed")


def _describe_split(config: RunConfig, environment: EnvironmentFactory, split: str) -> dict[str, Any]:
    tasks = tasks_of(environment(), split)[: config.eval.tasks]
    openings = _openings(config, environment, tasks)
    identity = [[str(task.id), opening] for task, opening in zip(tasks, openings, strict=True)]
    bounded = [task for task in tasks if isinstance(task, Task)]
    return {
        "tasks": len(tasks),
        "fingerprint": hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16],
        "ceiling": mean_ceiling(bounded) if bounded and len(bounded) == len(tasks) else None,
    }


def _openings(config: RunConfig, environment: EnvironmentFactory, tasks: Sequence[Any]) -> list[list[dict[str, Any]]]:
    """The first messages of each task; none where the environment fails, which training will tell better."""

    def opening(task: Any) -> Callable[[], Sequence[Message]]:
        return lambda: environment().reset(task)

    answers = RunnerSettings.of_run(config).call_all([opening(task) for task in tasks])
    return [
        [] if isinstance(answer, EnvironmentFailed) else [asdict(message) for message in answer] for answer in answers
    ]


def _data_of(path: Path, config: RunConfig) -> Mapping[str, Any] | None:
    """The description that the run wrote, else one made from its config where its environment ships with us."""
    try:
        data = json.loads((path / DATA_FILE).read_bytes())
        if isinstance(data, dict) and isinstance(data.get("splits"), dict):
            return data
    except (OSError, ValueError):
        pass  # an older run, or a damaged file
    factory = _shipped_environment(config)
    return None if factory is None else describe_data(config, factory)


def _shipped_environment(config: RunConfig) -> EnvironmentFactory | None:
    """Environments of the package alone: reading a run must not import somebody's code."""
    if config.env not in SHIPPED:
        return None
    factory = cast(EnvironmentFactory, partial(SHIPPED[config.env].made_by, **config.env_args))
    try:
        factory()
    except (TypeError, ValueError, LfoError):
        return None  # its folder of tasks is not on this machine
    return factory
