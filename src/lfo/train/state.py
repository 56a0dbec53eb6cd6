"""What a run knows besides its adapters and buffers, and what a step of it holds."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from lfo.algorithms.auto import outcomes_of, seat_metrics
from lfo.objectives.advantages import DynamicSamplingReport
from lfo.runs.rule_change import Watch
from lfo.types import Rollout, RolloutGroup, StepPlan


@dataclass(slots=True)
class State:
    """The training state besides the adapters; part of every checkpoint."""

    step: int = 0
    tasks_seen: int = 0
    weight: float = 0.0  # the factor of the world-model loss
    best: float | None = None  # best success on val so far
    rollouts: int = 0  # this and the next two: the cost of the run so far, besides tasks
    sampled_tokens: int = 0
    seconds: float = 0.0
    watch: Watch = field(default_factory=Watch)  # over the predictions: are they still right?
    outcomes: list[dict[str, Any]] = field(default_factory=list)  # of seats with names, for each step

    def record(self, plan: StepPlan, groups: Sequence[RolloutGroup]) -> dict[str, Any]:
        """Record the outcomes of a step, if its plan names its seats; return their metrics."""
        if not plan.kinds:
            return {}
        seen = outcomes_of(plan, groups)
        self.outcomes = [*self.outcomes, seen]  # a new list: the state of before the step may be written
        return seat_metrics(seen)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def load(self, path: Path) -> None:
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            setattr(self, name, Watch(**value) if name == "watch" else value)


class Clock:
    """Measures the seconds spent in named phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


class Collected(NamedTuple):
    """The rollouts of a step."""

    groups: Sequence[RolloutGroup]  # all groups of the step
    kept: Mapping[int, RolloutGroup]  # groups that train the policy, by index in `groups`, with shaped rewards
    report: DynamicSamplingReport

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]
