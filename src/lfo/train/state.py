"""What a run knows besides its adapters and buffers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from lfo.algorithms.auto import outcomes_of, seat_metrics
from lfo.runs.rule_change import Watch
from lfo.types import RolloutGroup, StepPlan


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
        """Record the outcomes of a step whose plan names its seats; return their metrics."""
        seen = outcomes_of(plan, groups)
        self.outcomes = [*self.outcomes, seen]  # a new list: the state of before the step may be written
        return seat_metrics(seen)

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    def load(self, path: Path) -> None:
        for name, value in json.loads(path.read_text(encoding="utf-8")).items():
            setattr(self, name, Watch(**value) if name == "watch" else value)
