"""Whether the policy of a run can be served alone: its success without and with look-ahead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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


def blind_rows(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return rows of metrics in which success is that without look-ahead; runs without look-ahead stay as they are.

    >>> blind_rows([{"eval/val/success": 0.8, "eval/val/success_blind": 0.1}, {"eval/val/success": 0.3}])
    [{'eval/val/success': 0.1}, {'eval/val/success': 0.3}]
    """
    return [
        {name: row.get(f"{name}_blind", value) for name, value in row.items() if not name.endswith("_blind")}
        for row in rows
    ]
