"""Two runs on the same tasks -> one small table and a few plain words. Reads run folders; trains and plays nothing.

Says what these two runs did and no more: no interval, because one run each has none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfo.errors import DataError
from lfo.evaluation.sample_efficiency import TARGET_SHARE, VAL, curve
from lfo.rundir import read_metrics

SEEN, UNSEEN = VAL, "eval/test_unseen_companies/success"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arm:
    """What one run showed: `Arm(name="dual-LoRA", curve={0: 0.0, 80: 0.4}, unseen=0.3, seconds=61.5)`."""

    name: str
    curve: Mapping[int, float]  # tasks seen -> success on val, at each evaluation
    unseen: float | None  # success on companies that no training task was about, at the last evaluation of it
    seconds: float  # of rollouts, updates and evaluations

    @property
    def tasks_seen(self) -> int:
        return max(self.curve)

    @property
    def success(self) -> float:
        return self.curve[self.tasks_seen]

    def tasks_to(self, success: float) -> int | None:
        """Tasks seen at the first evaluation that reached `success`; None when none did."""
        return min((tasks for tasks, reached in self.curve.items() if reached >= success), default=None)


def read_arm(name: str, run: str | Path) -> Arm:
    """An arm from the metrics of a run, finished or not."""
    rows = read_metrics(run)
    points = curve(rows, SEEN)
    if not points:
        raise DataError(f"{run} holds no evaluation on val yet")
    seconds = sum(value for row in rows for key, value in row.items() if key.startswith("seconds/"))
    return Arm(
        name=name,
        curve=points,
        unseen=next((row[UNSEEN] for row in reversed(rows) if UNSEEN in row), None),
        seconds=seconds,
    )


def table(arms: Sequence[Arm], ceiling: float) -> list[tuple[str, ...]]:
    """The rows to show, each a label and one cell for each arm."""
    target = TARGET_SHARE * ceiling
    rows = [
        (f"val after {tasks} tasks", *(_percent(arm.curve.get(tasks)) for arm in arms))
        for tasks in sorted({tasks for arm in arms for tasks in arm.curve})
    ]
    rows.append(("unseen companies, zero-shot", *(_percent(arm.unseen) for arm in arms)))
    rows.append(("information ceiling", *(f"{ceiling:.1%}" for _ in arms)))
    rows.append((f"tasks to {TARGET_SHARE:.0%} of the ceiling", *(_tasks(arm, target) for arm in arms)))
    rows.append(("seconds", *(f"{arm.seconds:.0f}" for arm in arms)))
    return rows


def conclusion(baseline: Arm, other: Arm, ceiling: float) -> str:
    """In plain words what two runs show, and what they do not."""
    target = TARGET_SHARE * ceiling
    return (
        f"To get to {TARGET_SHARE:.0%} of the ceiling {other.name} needed {_needed(other, target)} tasks and "
        f"{baseline.name} {_needed(baseline, target)}; they ended at {other.success:.0%} and {baseline.success:.0%} "
        f"success on val, {_percent(other.unseen)} and {_percent(baseline.unseen)} on unseen companies. This is one "
        "seed of one level with a tiny base: it does not show how large the difference is elsewhere."
    )


def as_json(arms: Mapping[str, Arm], ceiling: float) -> dict[str, Any]:
    """The same for programs; `tasks_to_target` is null where it was not reached in `tasks_seen`."""
    target = TARGET_SHARE * ceiling
    return {
        "ceiling": ceiling,
        "target": target,
        "arms": {
            key: {
                "val": [{"tasks_seen": tasks, "success": arm.curve[tasks]} for tasks in sorted(arm.curve)],
                "test_unseen_companies": arm.unseen,
                "tasks_to_target": arm.tasks_to(target),
                "tasks_seen": arm.tasks_seen,
                "seconds": arm.seconds,
            }
            for key, arm in arms.items()
        },
    }


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _tasks(arm: Arm, target: float) -> str:
    tasks = arm.tasks_to(target)
    return f"not reached in {arm.tasks_seen} tasks" if tasks is None else str(tasks)


def _needed(arm: Arm, target: float) -> str:
    tasks = arm.tasks_to(target)
    return f"more than {arm.tasks_seen}" if tasks is None else str(tasks)
