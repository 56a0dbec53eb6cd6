"""Whether the policy of a run can be served alone: its success without and with look-ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from lfo.evaluation.runs import RunRecord

NEAR = 0.05  # how much lower the success without look-ahead may be


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """Greedy success on the same tasks of val."""

    blind: float
    sighted: float

    @property
    def suffices(self) -> bool:
        """Whether the policy alone is good enough; never if it has no success.

        >>> [Alone(blind=blind, sighted=0.8).suffices for blind in (0.7, 0.75, 0.9)], Alone(blind=0, sighted=0).suffices
        ([False, True, True], False)
        """
        return self.blind > 0 and self.blind >= round(self.sighted - NEAR, 9)

    @property
    def words(self) -> str:
        verdict = "suffices" if self.suffices else "does not suffice"
        return f"The policy alone {verdict}: {self.blind:.1%} of val without look-ahead, {self.sighted:.1%} with it" + (
            "." if self.suffices else "; serve it with look-ahead."
        )


def policy_alone(rows: Sequence[Mapping[str, Any]], *, step: int | None = None) -> Alone | None:
    """Return the result of the evaluation at this step, or of the last one; None if there was none with both.

    If look-ahead had ended by then, use its last evaluation before.
    """
    judged = [row for row in rows if isinstance(row.get("eval/val/success_blind"), int | float)]
    judged = [row for row in judged if step is None or row["step"] <= step]
    sighted = [row["eval/val/success"] for row in judged if row.get("phase") != "reinforce"]
    return Alone(blind=judged[-1]["eval/val/success_blind"], sighted=sighted[-1]) if sighted else None


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
