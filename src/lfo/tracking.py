"""Who is told of each row of metrics while a run goes on: the terminal, and TensorBoard or Weights & Biases if asked.

    trackers=tensorboard,wandb          tensorboard --logdir runs/x/tensorboard

`metrics.jsonl` stays the truth; a tracker is a copy for other people's tools. Numbers keep their names, those inside a
number's table (`success_by_level`) are named after both. W&B writes into the run's folder and stays offline
unless WANDB_MODE says otherwise.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress

from lfo.config import RunConfig, flatten
from lfo.errors import ConfigError

MetricsRow = Mapping[str, Any]
Log = Callable[[MetricsRow], None]


def require_trackers(config: RunConfig) -> None:
    """Say at once that a package is missing, before a run begins."""
    for name in config.trackers:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(f"trackers={name} needs a package that is not installed: pip install {name}")


@contextmanager
def open_trackers(config: RunConfig, folder: Path, *, first_step: int) -> Iterator[Log]:
    """A function that tells one row to all trackers of a run. Rows from `first_step` on will be told (again)."""
    with ExitStack() as stack:
        logs = [stack.enter_context(TRACKERS[name](config, folder, first_step)) for name in config.trackers]

        def log(row: MetricsRow) -> None:
            for each in logs:
                each(row)

        yield log


@contextmanager
def _tensorboard(config: RunConfig, folder: Path, first_step: int) -> Iterator[Log]:
    from torch.utils.tensorboard.writer import SummaryWriter

    # Rows that a kill took back are told again: readers forget what they had from the purge step on.
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
        # The same folder is the same run, however often it is taken up again.
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
    """The finite numbers of a row with their names; the step itself is where they stand.

    >>> list(scalars({"step": 3, "success": 0.5, "stops": {"done": 8}, "warnings": ["..."]}))
    [('success', 0.5), ('stops/done', 8.0)]
    """
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and math.isfinite(value) and name != "step":
            yield f"{prefix}{name}", float(value)


class Clock:
    """Seconds spent in named phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


class Progress:
    """A bar on a terminal; one plain line for each evaluation elsewhere. Everything goes to stderr."""

    def __init__(self, config: RunConfig) -> None:
        self._console = Console(stderr=True)
        self._eval = "-"
        self._warned: set[str] = set()
        self._bar = RichProgress(
            TextColumn(config.output_dir),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
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
        for warning in row.get("warnings", ()):
            if warning not in self._warned:  # the rows repeat it as long as it holds; a person needs it once
                self._warned.add(warning)
                self._console.print(f"step {row['step']}: {warning}", style="yellow", highlight=False, soft_wrap=True)


def _measured(row: Mapping[str, Any]) -> Iterator[str]:
    """What this step measured, of what is worth a place in one line."""
    for name, words in (
        ("success", "train {:.0%}"),
        ("policy_loss", "policy {:+.3f}"),
        ("world_model_loss", "world {:.3f}"),
        ("imitation_loss", "imitation {:.3f}"),
        ("tokens_per_second", "{:.0f} tok/s"),
    ):
        if row.get(name) is not None:
            yield words.format(row[name])
