"""Whether a run's policy can be served alone: its success without look-ahead beside its success with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

NEAR = 0.05  # of the success with look-ahead: what a policy alone may lack


@dataclass(frozen=True, kw_only=True, slots=True)
class Alone:
    """Success on val, greedy, of the same tasks."""

    blind: float
    sighted: float

    @property
    def suffices(self) -> bool:
        """A policy that succeeds nowhere is near to nothing.

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
    """As the evaluation of this step tells it, or the last one; None where look-ahead was never compared with none.

    Where look-ahead had ended by then, its last evaluation before counts.
    """
    judged = [row for row in rows if isinstance(row.get("eval/val/success_blind"), int | float)]
    judged = [row for row in judged if step is None or row["step"] <= step]
    sighted = [row["eval/val/success"] for row in judged if row.get("phase") != "reinforce"]
    return Alone(blind=judged[-1]["eval/val/success_blind"], sighted=sighted[-1]) if sighted else None
