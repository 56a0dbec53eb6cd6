"""A small table and a summary of two runs on the same tasks.

Without intervals, because one run each has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lfo.evaluation.costs import all_seconds
from lfo.evaluation.sample_efficiency import TARGET_SHARE, Comparison, Group, Reached, curve


def table(comparison: Comparison) -> list[tuple[str, ...]]:
    """Return the rows of the table: a label and one cell for each run."""
    arms = comparison.groups
    curves = [curve(arm.runs[0].rows) for arm in arms]
    ceiling = "-" if comparison.ceiling is None else f"{comparison.ceiling:.1%}"
    rows = [
        (f"val after {tasks} tasks", *(_percent(points.get(tasks)) for points in curves))
        for tasks in sorted({tasks for points in curves for tasks in points})
    ]
    rows.append(("unseen companies, zero-shot", *(_percent(_unseen(arm)) for arm in arms)))
    rows.append(("information ceiling", *(ceiling for _ in arms)))
    rows.append((f"tasks to {TARGET_SHARE:.0%} of the ceiling", *(_tasks(_reached(arm)) for arm in arms)))
    rows.append(("seconds", *(f"{all_seconds(arm.runs[0].rows):.0f}" for arm in arms)))
    return rows


def conclusion(comparison: Comparison, names: Mapping[str, str]) -> str:
    """Return a summary of two runs; `names` are the display names of the groups."""
    baseline, other = comparison.groups
    return (
        f"To get to {TARGET_SHARE:.0%} of the ceiling {names[other.name]} needed {_needed(_reached(other))} tasks and "
        f"{names[baseline.name]} {_needed(_reached(baseline))}; they ended at {other.success:.0%} and "
        f"{baseline.success:.0%} success on val, {_percent(_unseen(other))} and {_percent(_unseen(baseline))} on "
        "unseen companies. This is one seed of one level with a tiny base: it does not show how large the difference "
        "is elsewhere."
    )


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON; `tasks_to_target` is null if it was not reached in `tasks_seen`."""
    return {
        "ceiling": comparison.ceiling,
        "target": comparison.target,
        "arms": {
            arm.name: {
                "val": [
                    {"tasks_seen": tasks, "success": success}
                    for tasks, success in sorted(curve(arm.runs[0].rows).items())
                ],
                "test_unseen_companies": _unseen(arm),
                "tasks_to_target": None if _reached(arm).censored else _reached(arm).tasks,
                "tasks_seen": arm.tasks_seen,
                "seconds": all_seconds(arm.runs[0].rows),
            }
            for arm in comparison.groups
        },
    }


def _reached(arm: Group) -> Reached:
    (reached,) = arm.by_seed.values()
    return reached


def _unseen(arm: Group) -> float | None:
    """Return the success on unseen companies at the last evaluation."""
    found = arm.at_the_end.get("test_unseen_companies")
    return None if found is None else found.mean


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0%}"


def _tasks(reached: Reached) -> str:
    return f"not reached in {reached.tasks} tasks" if reached.censored else str(reached.tasks)


def _needed(reached: Reached) -> str:
    return f"more than {reached.tasks}" if reached.censored else str(reached.tasks)
