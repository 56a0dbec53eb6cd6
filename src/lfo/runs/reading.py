"""Read run folders, for comparisons and reports.

    record = read_run("runs/x")
    record.problem or record.rows[-1]["eval/val/success"]

Reading never fails: `problem` says in one sentence why a folder cannot be used. Two runs can be compared if their
`data` agree; every run writes it as `data.json`. Reading a run makes no environment. Nothing here plays, trains or
writes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfo.config import RunConfig, from_yaml
from lfo.config.older import refuse_retired
from lfo.env.by_name import hold_as_data
from lfo.errors import LfoError, UsageError
from lfo.runs.folder import metrics_file, read_metrics
from lfo.settings import dotted

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
    def agent(self) -> str:
        """Who acts, and what the run has given up and why, as its last step says; "" if the settings say it all."""
        return next((str(row["agent"]) for row in reversed(self.rows) if "agent" in row), "")

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


def saved_config(run: Path) -> RunConfig:
    """Return the config of a run that is to act; from now on nothing in its folder is run as code."""
    if not (run / "config.yaml").is_file():
        raise UsageError(f"{run} is not a run folder: it has no config.yaml")
    hold_as_data(run)
    config = from_yaml(run / "config.yaml", known_only=True)
    refuse_retired(dotted(config.older), f"{run}: ")
    return config


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


def read_data(run: Path) -> Mapping[str, Any] | None:
    """Return the content of `data.json`; None for a very old run, or if the file is damaged."""
    try:
        data = json.loads((run / DATA_FILE).read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) and isinstance(data.get("splits"), dict) else None
