"""Report each row of metrics during a run: to the terminal and, on request, to TensorBoard or Weights & Biases.

    trackers=tensorboard,wandb          tensorboard --logdir runs/x/tensorboard

`metrics.jsonl` is the reference; a tracker receives a copy. Metrics keep their names; entries of a nested metric get
both names (`success_by_level/2`). W&B writes into the run folder and stays offline unless WANDB_MODE is set.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress
from rich.table import Column

from lfo.config import RunConfig, flatten
from lfo.errors import ConfigError
from lfo.streams import lossy

logger = logging.getLogger(__name__)

MetricsRow = Mapping[str, Any]
Log = Callable[[MetricsRow], None]


def require_trackers(config: RunConfig) -> None:
    """Raise a `ConfigError` if the package of a tracker is not installed."""
    for name in config.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"trackers={name} needs the package {name}: pip install {name}")


@contextmanager
def open_trackers(config: RunConfig, folder: Path, *, first_step: int) -> Iterator[Log]:
    """Yield a function that logs one row to all trackers. Rows from `first_step` on are logged (again)."""
    with ExitStack() as stack:
        logs = {name: stack.enter_context(TRACKERS[name](config, folder, first_step)) for name in config.trackers}

        def log(row: MetricsRow) -> None:
            for name, each in list(logs.items()):
                try:
                    each(row)
                except Exception as error:  # whatever a tracker raises, the run does not need it
                    logger.warning(f"trackers={name} failed and gets no more rows: {type(error).__name__}: {error}")
                    del logs[name]

        yield log


@contextmanager
def _tensorboard(config: RunConfig, folder: Path, first_step: int) -> Iterator[Log]:
    from torch.utils.tensorboard.writer import SummaryWriter

    # A resumed run logs some rows again: readers drop what they have from the purge step on.
    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step if first_step else None)

    def log(row: MetricsRow) -> None:
        for name, value in scalars(row):
            writer.add_scalar(name, value, row["step"])
        writer.flush()

    try:
        yield log
    finally:
        writer.close()


@contextmanager
def _wandb(config: RunConfig, folder: Path, first_step: int) -> Iterator[Log]:
    import wandb  # type: ignore[import-not-found]

    mode: Any = os.environ.get("WANDB_MODE", "offline")
    run = wandb.init(
        project="lfo",
        name=folder.name,
        # A resumed run in the same folder is the same W&B run.
        id=hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:16],
        resume="allow",
        dir=str(folder),
        config=flatten(config),
        mode=mode,
    )
    try:
        yield lambda row: run.log(dict(scalars(row)), step=row["step"])
    finally:
        run.finish()


TRACKERS = {"tensorboard": _tensorboard, "wandb": _wandb}


def scalars(row: MetricsRow, prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the name and value of each finite number in a row, except the step.

    >>> list(scalars({"step": 3, "success": 0.5, "stops": {"done": 8}, "warnings": ["..."]}))
    [('success', 0.5), ('stops/done', 8.0)]
    """
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value) and name != "step":
            yield f"{prefix}{name}", float(value)


class Progress:
    """Shows a progress bar on a terminal, else one plain line for each evaluation. Writes to stderr."""

    def __init__(self, config: RunConfig) -> None:
        self._console = Console(file=lossy(sys.stderr), stderr=True)
        self._eval = "-"
        self._warned: set[str] = set()
        self._bar = RichProgress(
            # On 80 columns the last column is cut first: step, time left and success always remain.
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=10),
            TimeRemainingColumn(),
            TextColumn("left |"),
            TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
            expand=True,
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("train", total=config.steps, words="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, row: Mapping[str, Any]) -> None:
        if "eval/val/success" in row:
            blind = row.get("eval/val/success_blind")
            self._eval = f"{row['eval/val/success']:.0%}" + ("" if blind is None else f", blind {blind:.0%}")
        words = " | ".join([f"val {self._eval}", *_measured(row)])
        self._bar.update(self._task, completed=row["step"], words=words)
        if not self._console.is_terminal and "eval/val/success" in row:
            self._console.print(
                f"step {row['step']} | {row['tasks_seen']} tasks | {words}", highlight=False, soft_wrap=True
            )
        if "eval/val/success" in row and row.get("agent"):
            self._console.print(f"step {row['step']}: {row['agent']}", highlight=False, soft_wrap=True)
        for warning in row.get("warnings", ()):
            if warning not in self._warned:  # rows repeat a warning while it holds; print it once
                self._warned.add(warning)
                self._console.print(f"step {row['step']}: {warning}", style="yellow", highlight=False, soft_wrap=True)


def _measured(row: Mapping[str, Any]) -> Iterator[str]:
    """Yield the metrics of this step that the progress line shows."""
    for name, words in (
        ("success", "train {:.0%}"),
        ("policy_loss", "policy {:+.3f}"),
        ("world_model_loss", "world {:.3f}"),
        ("imitation_loss", "imitation {:.3f}"),
        ("tokens_per_second", "{:.0f} tok/s"),
    ):
        if row.get(name) is not None:
            yield words.format(row[name])
