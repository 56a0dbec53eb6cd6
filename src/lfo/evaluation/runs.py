"""Read run folders, for comparisons and reports, and describe the tasks of their evaluation.

    record = read_run("runs/x")
    record.problem or record.rows[-1]["eval/val/success"]

Reading never fails: `problem` says in one sentence why a folder cannot be used. Two runs can be compared if their
`data` agree; every run writes it as `data.json`. Reading a run makes no environment. Nothing here plays, trains or
writes.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from lfo.config import RunConfig, from_yaml
from lfo.env.answers import id_of, opening_of
from lfo.env.ceiling import mean_ceiling
from lfo.env.interface import EnvironmentFactory, predicted_tools, tasks_of
from lfo.env.shipped import SHIPPED
from lfo.env.tasks import Task
from lfo.errors import EnvironmentFailed, LfoError
from lfo.model.catalog import practice_of
from lfo.rollout.runner import RunnerConfig
from lfo.rundir import metrics_file, read_metrics
from lfo.types import Message

logger = logging.getLogger(__name__)

DATA_FILE = "data.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunRecord:
    """One run on disk; `config` is None and `rows` are empty if they cannot be read."""

    path: Path
    config: RunConfig | None
    rows: tuple[Mapping[str, Any], ...]  # of metrics.jsonl, in order
    data: Mapping[str, Any] | None  # None: the tasks of its evaluation are unknown
    finished: bool
    problem: str = ""  # why this run cannot be used, in one sentence

    @property
    def name(self) -> str:
        return self.path.name or str(self.path)

    @property
    def note(self) -> str:
        """A note if the run has not ended: it may be in progress or stopped."""
        if self.problem or self.finished or not self.rows or self.config is None:
            return ""
        return f"{self.path} has not ended: step {self.rows[-1]['step']} of {self.config.steps}"


NO_METRICS = "has no metrics yet"


def read_run(path: str | Path) -> RunRecord:
    """Return the run in a folder, in any state."""
    path = Path(path)
    config, rows, data, problem = None, [], None, ""
    try:
        if not (path / "config.yaml").is_file():
            problem = f"{path} is not a run folder: it has no config.yaml"
        else:
            config = from_yaml(path / "config.yaml", known_only=True)
            if not metrics_file(path).is_file():
                problem = f"{path} {NO_METRICS}"
            else:
                rows = read_metrics(path)
                problem = "" if rows else f"{path} {NO_METRICS}"
            data = read_data(path)
    except (LfoError, OSError) as error:
        problem = str(error)
    return RunRecord(
        path=path,
        config=config,
        rows=tuple(rows),
        data=data,
        # The adapters do not show it: a copy may lack them, and an extended run has old ones.
        finished=bool(config and rows and rows[-1]["step"] >= config.steps),
        problem=problem,
    )


def find_runs(paths: Iterable[Path]) -> list[Path]:
    """Return the runs in these folders and below; a folder without runs is returned itself."""
    found: list[Path] = []
    for path in paths:
        found += [folder for folder in folders(path) if holds_run(folder)] or [path]
    return list(dict.fromkeys(found))


def folders(path: Path) -> Iterator[Path]:
    """Yield a folder and those below it, but not below runs."""
    yield path
    if path.is_dir() and not holds_run(path):
        for child in sorted(path.iterdir()):
            if child.is_dir() and not child.name.startswith("."):
                yield from folders(child)


def holds_run(folder: Path) -> bool:
    return (folder / "config.yaml").is_file() or metrics_file(folder).is_file()


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


def read_data(run: Path) -> Mapping[str, Any] | None:
    """Return the content of `data.json`; None for a very old run, or if the file is damaged."""
    try:
        data = json.loads((run / DATA_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("splits"), dict) else None
