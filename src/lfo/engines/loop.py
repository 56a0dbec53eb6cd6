"""The loop around the steps of a training: what is evaluated, written down and kept, and when. Both engines run it.

    run_steps(steps, run, environment, resume=False)        -> a summary

It knows neither a model nor where the work is done: `Steps` does that, in one process or in many.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from lfo.config import RunConfig
from lfo.engines.progress import Progress
from lfo.engines.recipe import Recipe
from lfo.engines.trackers import open_trackers
from lfo.env.interface import EnvironmentFactory
from lfo.errors import UsageError
from lfo.evaluation.runs import DATA_FILE, describe_data
from lfo.evaluation.success import evaluated_tasks, far_below
from lfo.rundir import Checkpoint, RunDirectory, read_metrics

logger = logging.getLogger(__name__)

SAMPLE_ROLLOUTS = 4  # kept from each evaluation, for a person to read
SUCCESS_LOST = "success on val is far below its best, whose checkpoint is kept; if it stays so, ask lfo advise"


class Steps(Protocol):
    """Who does the work of a run."""

    @property
    def config(self) -> RunConfig: ...

    @property
    def recipe(self) -> Recipe: ...

    def step(self, step: int) -> dict[str, Any]:
        """One step of training; answers its row of metrics."""
        ...

    def evaluate(self, run: RunDirectory, splits: Sequence[str]) -> dict[str, Any]:
        """What the policy can do on these splits, and the world model, as metrics; samples go into the run's folder."""
        ...

    def save(self, folder: Path) -> None:
        """Everything that is needed to go on exactly."""
        ...

    def load(self, checkpoint: Checkpoint) -> None:
        """Take up what `save` wrote."""
        ...

    def save_agent(self, folder: Path) -> None:
        """What acting needs; a checkpoint holds more."""
        ...


def run_steps(steps: Steps, run: RunDirectory, environment: EnvironmentFactory, *, resume: bool) -> dict[str, Any]:
    """Train to the last step; answers a summary."""
    config = steps.config
    with Progress(config) as progress:
        for split in config.eval.final_splits:
            steps.recipe.known_tasks(split)  # a split that there is not is better found now than after the last step
        first_row = _restore(steps, run) if resume else 0
        data = describe_data(config, environment)
        for split in _changed_splits(run, data) if resume else ():
            logger.warning(
                f"the tasks of {split} are not those that {run.path} began with: its environment has changed"
            )
        run.write_data(data)
        with open_trackers(config, run.path, first_step=first_row) as track:
            if config.eval.every and first_row == 0:
                # The untrained policy is the first point of every curve.
                row = {"step": 0, "tasks_seen": 0, **steps.evaluate(run, config.eval.splits)}
                run.append_metrics(row)
                track(row)
            state = steps.recipe.state
            for step in range(state.step, config.steps):
                row = steps.step(step)
                done = state.step = step + 1
                if config.eval.every and (done % config.eval.every == 0 or done == config.steps):
                    final = config.eval.final_splits if done == config.steps else ()
                    row |= steps.evaluate(run, (*config.eval.splits, *final))
                    steps.recipe.control_weight(row)
                    tasks = evaluated_tasks(row, at_most=config.eval.tasks)
                    if state.best is not None and far_below(
                        state.best, row.get("eval/val/success", state.best), tasks=tasks
                    ):
                        row["warnings"] = [*row.get("warnings", ()), SUCCESS_LOST]
                run.append_metrics(row)
                track(row)
                progress.show(row)
                success = row.get("eval/val/success")
                best = success is not None and (state.best is None or success > state.best)
                if best:
                    state.best = success
                if best or done % config.checkpoint_every == 0 or done == config.steps:
                    run.write_checkpoint(done, steps.save, best=best)
        run.write_adapters(steps.save_agent)
        return _summary(run, steps.recipe)


def _restore(steps: Steps, run: RunDirectory) -> int:
    """Take up the last checkpoint and forget the rows behind it; answers the step of the next row."""
    checkpoint = run.latest_checkpoint()
    if checkpoint is None and run.adapters.exists():
        raise UsageError(f"{run.path} has ended and its checkpoints are gone, so there is nothing to go on from")
    run.truncate_metrics(checkpoint.step if checkpoint else 0)
    if checkpoint is None:  # killed before the first one: begin again, but for the untrained policy's evaluation
        return 1 if run.metrics.exists() and read_metrics(run.metrics) else 0
    steps.load(checkpoint)
    return checkpoint.step + 1


def _changed_splits(run: RunDirectory, data: Mapping[str, Any]) -> list[str]:
    """The splits that hold other tasks than the run's folder says."""
    try:
        before = json.loads((run.path / DATA_FILE).read_text(encoding="utf-8"))["splits"]
        return [split for split in data["splits"] if data["splits"][split] != before.get(split, data["splits"][split])]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return []  # of an older version, or damaged: there is nothing to compare with


def _summary(run: RunDirectory, recipe: Recipe) -> dict[str, Any]:
    best = run.best_checkpoint()
    return {
        "run": str(run.path),
        "steps": recipe.state.step,
        "tasks_seen": recipe.state.tasks_seen,
        "best_success": recipe.state.best if best else None,
        "best_step": best.step if best else None,
    }


class Clock:
    """Seconds spent in named phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started
