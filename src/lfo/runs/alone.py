"""Whether the policy of a run can be served alone: its success without and with look-ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lfo.runs.reading import RunRecord
from lfo.runs.trends import evaluated_tasks
from lfo.statistics import wilson

NEAR = 0.05  # how much lower the success without look-ahead may be
LUCK = 0.1  # random calls may have as much success, even if the untrained policy had none
NO_LUCK = 0.5  # success that is more than chance where nobody measured the untrained policy


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """Greedy success on the same tasks of val."""

    blind: float
    sighted: float
    start: float | None = None  # without look-ahead, before any training; None: not measured
    tasks: int = 0  # that were evaluated

    @property
    def is_chance(self) -> bool:
        """Whether the policy alone is not shown to succeed more often than before any training, or than by luck.

        >>> Alone(blind=0.067, sighted=0.07, start=0.033, tasks=30).is_chance, Alone(blind=0.2, sighted=0.2).is_chance
        (True, True)
        """
        if self.start is None:
            return self.blind < NO_LUCK
        return wilson(self.blind, self.tasks)[0] <= max(self.start, LUCK)

    @property
    def suffices(self) -> bool:
        """Whether the policy alone is good enough; never if its success may be chance.

        >>> given = {"sighted": 0.8, "start": 0.1, "tasks": 100}
        >>> [Alone(blind=blind, **given).suffices for blind in (0.7, 0.75, 0.9)], Alone(blind=0, sighted=0).suffices
        ([False, True, True], False)
        """
        return not self.is_chance and self.blind >= round(self.sighted - NEAR, 9)

    @property
    def words(self) -> str:
        figures = f"{self.blind:.1%} of val without look-ahead, {self.sighted:.1%} with it"
        if self.suffices:
            return f"The policy alone suffices: {figures}."
        if self.is_chance:
            before = "" if self.start is None else f", {self.start:.1%} before any training"
            return f"The policy alone does not suffice, it is not shown to be better than chance: {figures}{before}."
        return f"The policy alone does not suffice: {figures}; serve it with look-ahead."


def policy_alone(rows: Sequence[Mapping[str, Any]], *, at_most: int, step: int | None = None) -> Alone | None:
    """Return the result of the evaluation at this step, or of the last one; None if there was none with both.

    If look-ahead had ended by then, use its last evaluation before. `at_most`: `eval.tasks` of the run.
    """
    judged = [row for row in rows if isinstance(row.get("eval/val/success_blind"), int | float)]
    start = next((row["eval/val/success_blind"] for row in judged if row["step"] == 0), None)
    judged = [row for row in judged if step is None or row["step"] <= step]
    sighted = [row["eval/val/success"] for row in judged if row.get("phase") != "reinforce"]
    if not sighted:
        return None
    tasks = evaluated_tasks(judged[-1], at_most=at_most)
    return Alone(blind=judged[-1]["eval/val/success_blind"], sighted=sighted[-1], start=start, tasks=tasks)


def without_lookahead(run: RunRecord) -> RunRecord:
    """Return a run whose success is that without look-ahead; a run that has no look-ahead stays as it is."""
    if run.config is None or not run.config.looks_ahead:
        return run
    problem = run.problem
    if run.rows and not any("eval/val/success_blind" in row for row in run.rows):
        problem = problem or f"{run.path} was never evaluated without look-ahead"
    return replace(run, rows=tuple(map(_blind, run.rows)), problem=problem)


def _blind(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of metrics in which success is that without look-ahead, which is not known by level.

    >>> _blind({"step": 5, "eval/val/success": 0.8, "eval/val/success_by_level": {}, "eval/val/success_blind": 0.1})
    {'step': 5, 'eval/val/success': 0.1}
    """
    with_lookahead = ("/success", "/success_by_level")
    return {
        name.removesuffix("_blind") if name.endswith("/success_blind") else name: value
        for name, value in row.items()
        if not (name.startswith("eval/") and name.endswith(with_lookahead))
    }
