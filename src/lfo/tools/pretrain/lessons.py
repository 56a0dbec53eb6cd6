"""What is found out by playing: lessons of single tasks, and what all of them together cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from lfo.tools.pretrain.values import Names
from lfo.types import Message, ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """A call that was made, and its reply."""

    call: ToolCall
    reply: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lesson:
    """What may be learned from one task: look-ups, refused calls, and the call that the last refusal asks for."""

    opening: tuple[Message, ...]
    looked: tuple[Step, ...]
    refused: tuple[Step, ...]  # each made after the look-ups; the later ones use what the earlier ones were told
    success: ToolCall | None  # None: unknown, so only the calls before are worth anything
    verified: bool = False  # the environment rewarded it; else the reply only names its values
    goes_on: bool = False  # a refused call does not end the task


@dataclass(kw_only=True, slots=True)
class Experience:
    """All that was found out, and what it cost."""

    names: Names
    schemas: Mapping[str, Mapping[str, Any]]
    lessons: list[Lesson] = field(default_factory=list)
    used: set[str] = field(default_factory=set)  # ids of tasks
    rollouts: int = 0
    fragile: set[str] = field(default_factory=set)  # tools that do not understand any value that fits the schema
    solved: int = 0  # tasks with a verified success
    broken: int = 0  # tasks in which the environment failed

    @property
    def tasks(self) -> int:
        return len(self.used)

    @property
    def explained(self) -> list[Lesson]:
        """The lessons that say what to do."""
        return [lesson for lesson in self.lessons if lesson.success is not None]

    @property
    def looks(self) -> list[str]:
        """The tools that tell something."""
        return sorted({step.call.name for lesson in self.lessons for step in lesson.looked})
