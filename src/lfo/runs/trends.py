"""What `lfo advise` looks at in a run: the first third of its rows, the last third, and its evaluations."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from lfo.config import RunConfig
from lfo.runs.correlation import VAL
from lfo.runs.costs import MetricsRows

GAIN = 0.02  # in success on val: the least that 100 tasks can show
MOST_RATIO = 10.0  # largest ratio of the adapters' gradient norms without a warning
FAR = 0.2  # least distance to the best evaluation; smaller ones also occur in healthy runs
LATELY = 3  # evaluations that must all be far below the best one (`far_below`): one may be bad luck


@dataclass(frozen=True, kw_only=True, slots=True)
class Trends:
    """A run, for one look after the other; `early` and `lately` are its first third and its last."""

    rows: MetricsRows
    training: MetricsRows
    config: RunConfig
    gate: Mapping[str, Any] | None  # what `lfo check-env --run` measured

    def early(self, key: str) -> list[float]:
        return numbers(self.training[: len(self.training) // 3], key)

    def lately(self, key: str) -> list[float]:
        return numbers(self.training[-(len(self.training) // 3) :], key)

    def stopped_lately(self, reasons: Collection[str]) -> tuple[int, int]:
        """Return how many recent rollouts ended for one of these reasons, and for any."""
        rows = self.training[-(len(self.training) // 3) :]
        stops = [row["stops"] for row in rows if isinstance(row.get("stops"), Mapping)]
        return sum(each.get(name, 0) for each in stops for name in reasons), sum(sum(each.values()) for each in stops)

    @property
    def judged_by(self) -> str:
        """The metric of success on val, as the trained policy acts: with look-ahead or alone."""
        return f"{VAL}_blind" if self.config.leaves_policy_alone else VAL

    @property
    def val(self) -> list[float]:
        return numbers(self.rows, self.judged_by)

    def both_ways(self) -> tuple[list[float], list[float]]:
        """Return success on val with look-ahead and without it, of the last evaluations that have both."""
        both = [row for row in self.training if numbers([row], VAL) and numbers([row], f"{VAL}_blind")][-LATELY:]
        return numbers(both, VAL), numbers(both, f"{VAL}_blind")

    @property
    def success(self) -> float:
        """The success of the policy now: on val, or in training if nothing was evaluated."""
        lately = self.lately("success")
        return self.val[-1] if self.val else fmean(lately) if lately else 0.0

    @property
    def gains(self) -> bool:
        """Whether success rises from the first third to the last."""
        values = self.val if len(self.val) >= 3 else numbers(self.training, "success")
        third = max(1, len(values) // 3)
        return len(values) >= 2 and fmean(values[-third:]) - fmean(values[:third]) >= GAIN

    @property
    def learns_policy(self) -> bool:
        return not self.config.policy.frozen

    @property
    def learns_world_model(self) -> bool:
        return self.config.world_model.weight > 0 and self.config.world_model.predict != "none"


def numbers(rows: MetricsRows, key: str) -> list[float]:
    """Return the values of a metric, in order, of the rows that have it."""
    return [row[key] for row in rows if isinstance(row.get(key), int | float) and math.isfinite(row[key])]


def far_below(best: float, value: float, *, tasks: int) -> bool:
    """Whether an evaluation on `tasks` tasks is below the best one by `FAR` and by three standard errors.

    >>> far_below(0.76, 0.5, tasks=100), far_below(0.76, 0.6, tasks=100), far_below(0.76, 0.5, tasks=20)
    (True, False, False)
    """
    return best - value >= max(FAR, 3 * math.sqrt(2 * 0.25 / tasks))


def evaluated_tasks(row: Mapping[str, Any], *, at_most: int) -> int:
    """Return the number of val tasks behind a row's success; an environment may have fewer than `eval.tasks`."""
    stops = row.get("eval/val/stops")
    return sum(stops.values()) if isinstance(stops, Mapping) and stops else at_most
