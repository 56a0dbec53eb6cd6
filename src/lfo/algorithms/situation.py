"""What a plan depends on besides config and step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """The state of a run when a step begins: `Situation(success_tasks=30, train_tasks=None)`."""

    success_tasks: int = 0  # tasks with a success that could be imitated
    train_tasks: int | None = None  # None: an endless stream
