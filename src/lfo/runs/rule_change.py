"""Notice that predictions have stopped being right: a sequential test against their own past.

    watch = Watch()
    noticed = watch.hear(step=61, tasks=8, right=0.5)      # None, or what was noticed

In each step some predictions of look-ahead meet the real reply (`lfo.play.fresh`). `right` sums over tasks which share
of these was right: predictions in one task are not independent. Two explanations compete: predictions are still right
with the share p of the past, or only half as often. Their likelihood ratio multiplies the *doubt*, which never falls
below 1 (a CUSUM test):

    doubt = max(1, doubt) * (1/2) ** right * ((1 - p/2) / (1 - p)) ** (tasks - right)

The alarm rings at a doubt of `RARE`. While predictions stay right with the share p or more, a false alarm comes on
average once in `RARE` steps or later (Lorden's bound), whatever p is. p is cautious: the lower end of the Wilson
interval over the last `PAST` tasks before the doubt arose. So an agent that has learned nothing raises no alarm, and
predictions that fall from 80 to 60 % raise none either: the alarm is for rules that changed, not for a bad day.
`research/change.py wolf` tries it on kept runs: one alarm in 309 runs, in one whose policy collapsed.

    p = 0.72: a right task halves the doubt, a wrong one multiplies it by 2.29; twelve wrong ones in a row ring
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lfo.runs.costs import MetricsRows
from lfo.statistics import wilson

RARE = 10_000  # steps between two false alarms, on average at least
PAST = 64  # tasks that say what is usual: eight steps, so that the first steps of learning do not count for long
NOTICED = "rules_changed"  # the entry of a row of metrics at an alarm


@dataclass(frozen=True, kw_only=True, slots=True)
class Noticed:
    """`Noticed(since=60, before=0.8, now=0.1, tasks=20)`: in 20 tasks since step 60 a tenth was right."""

    since: int
    before: float
    now: float
    tasks: int

    @property
    def words(self) -> str:
        return (
            f"predictions have stopped being right: {self.now:.0%} in the last {self.tasks} tasks, {self.before:.0%} "
            "before; the rules have probably changed"
        )


@dataclass(kw_only=True, slots=True)
class Watch:
    """The state of the test, as plain values: a checkpoint keeps it."""

    doubt: float = 1.0
    usual: list[list[float]] = field(default_factory=list)  # (tasks, right) of each step of the past
    doubted: list[list[float]] = field(default_factory=list)  # (step, tasks, right) since the doubt arose

    @property
    def expected(self) -> float:
        """The share p that the past promises."""
        tasks, right = _sums(self.usual)
        return wilson(right / tasks, tasks)[0] if tasks else 0.0

    def hear(self, *, step: int, tasks: int, right: float) -> Noticed | None:
        """Add the tasks of a step in which predictions were tested; `right` is the sum of their shares."""
        if not tasks:
            return None
        p = self.expected
        self.doubt *= 0.5**right * ((1 - p / 2) / (1 - p)) ** (tasks - right)
        self.doubted.append([step, tasks, right])
        if self.doubt >= RARE:
            return self._alarm()
        if self.doubt <= 1.0:
            self.settle()
        return None

    def settle(self) -> None:
        """Take all that was heard so far as the past."""
        self.usual += [each[1:] for each in self.doubted]
        while len(self.usual) > 1 and _sums(self.usual[1:])[0] >= PAST:
            del self.usual[0]
        self.doubt, self.doubted = 1.0, []

    def _alarm(self) -> Noticed:
        (usual, was_right), (tasks, right) = _sums(self.usual), _sums([each[1:] for each in self.doubted])
        since = int(self.doubted[0][0])
        self.usual = []
        self.settle()
        return Noticed(since=since, before=was_right / usual, now=right / tasks, tasks=int(tasks))


def _sums(pairs: list[list[float]]) -> tuple[float, float]:
    return sum(each[0] for each in pairs), sum(each[1] for each in pairs)


def noticed_in(rows: MetricsRows) -> list[tuple[int, Noticed]]:
    """Return the alarms in the rows of a run, each with the step at which it rang."""
    names = set(Noticed.__dataclass_fields__)
    entries = ((row["step"], row[NOTICED]) for row in rows if isinstance(row.get(NOTICED), Mapping))
    return [
        (step, Noticed(**entry))
        for step, entry in entries
        if set(entry) == names and all(isinstance(each, int | float) for each in entry.values())
    ]
