"""How many tasks does a way of training need, and how many times fewer than plain DAPO? From run folders alone.

    comparison = compare([read_run(path) for path in paths])
    lfo compare runs/level2/* --json

Runs that agree in every setting but the seed are one group. A run needs as many tasks to a target as it had seen at
the first of two evaluations on val in a row that were at or above it, so answers are as fine as evaluations are
frequent, and one lucky evaluation does not count. `ratio_to_baseline` is the baseline's tasks over the group's tasks to
70 % of the information ceiling, paired by seed: the geometric mean over seeds, with a t-interval on the logarithm.
The other costs, rollouts, sampled tokens and seconds, are those that had been spent when these tasks had been seen.

A run that ended before it reached the target is censored, also one that met it at its very last evaluation, which no
second one confirms: all that is known is that it needs more tasks than it saw.
Its ratio is then a bound, the ratio of the group the mean of such bounds, itself a bound and marked so. No mean and no
deviation can be estimated from bounds; what holds whatever the distribution is a bound on the median (which for the
log-normal ratios that the t-interval assumes is the geometric mean): of n seeds the smallest bound lies below the
median but for a chance of 1 in 2 ** n. So five seeds are the fewest that give a censored ratio a one-sided bound at
95 %, and one seed gives no interval of any kind.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from lfo.errors import DataError, UsageError
from lfo.evaluation.correlation import VAL, Correlation, correlation
from lfo.evaluation.costs import spent
from lfo.evaluation.grouping import baseline_name, config_of, group_names, grouped, refuse_different_data
from lfo.evaluation.intervals import median_bound, t_interval
from lfo.evaluation.runs import NO_METRICS, RunRecord

SHARES = (0.5, 0.7, 0.9)  # of 1 and of the ceiling: the targets
TARGET_SHARE = 0.7  # of the ceiling: where "good" begins, and where groups are compared
LEVELS = "eval/val/success_by_level"

Curve = Mapping[int, float]  # tasks seen -> success, at each evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """How many tasks a target took: `Reached(tasks=320, censored=False)`; censored: more than so many."""

    tasks: float
    censored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """How many times fewer tasks than the baseline, or how many times less of another cost.

    `bound` is "at least" or "at most" where runs that never got there allow no more; None with `censored` means that
    they allow nothing at all. An interval has None on the side on which nothing is known.
    """

    value: float | None = None
    interval: tuple[float | None, float | None] | None = None
    censored: bool = False
    bound: str | None = None
    seeds: tuple[int, ...] = ()  # that both have
    note: str = ""  # why there is no ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """The geometric mean over seeds, and its t-interval on the logarithm.

    Censored, where a seed never got there: more than so much. From five seeds on the interval is then a lower bound on
    the median, its upper end None.
    """

    mean: float
    interval: tuple[float, float | None] | None
    censored: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """What the target of the comparison cost: tasks, rollouts, sampled tokens or seconds."""

    by_seed: Mapping[int, float]  # spent when it was reached, or by the end of a run that never got there
    needed: Needed
    ratio: Ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroShot:
    """Success on a split of unseen companies, and the baseline's, both after `tasks` tasks."""

    split: str
    tasks: int
    success: float
    baseline: float | None

    @property
    def ratio(self) -> float | None:
        return self.success / self.baseline if self.baseline else None  # nothing is a multiple of 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A figure of each seed, their mean and its t-interval; None where one seed, or no deviation, tells nothing."""

    mean: float
    interval: tuple[float, float] | None
    by_seed: Mapping[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Success on val less the baseline's, at the last evaluation that all of them had, after `tasks` tasks."""

    tasks: int
    points: Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Runs that differ by seed alone, and what they show against the baseline."""

    name: str
    runs: tuple[RunRecord, ...]
    tasks_to: Mapping[str, Mapping[float, Reached]]  # "success" and "ceiling" -> share -> tasks
    by_seed: Mapping[int, Reached]  # tasks of each run to the target of the comparison
    success: float  # on val at the last evaluation of each run
    at_the_end: Mapping[str, Spread]  # split -> success at the last evaluation on it
    blind: Mapping[str, Spread]  # the same without look-ahead, where a run looks ahead: what the policy's weights know
    by_level: Mapping[str, Spread]  # level -> success on its part of val at the last evaluation; empty for one level
    tasks_seen: int  # of the shortest run
    ratio: Ratio
    costs: Mapping[str, Cost]  # of COSTS, those that all runs of the group tell
    difference: Difference | None
    zero_shot: ZeroShot | None
    correlation: Correlation | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    groups: tuple[Group, ...]
    baseline: str | None
    ceiling: float | None
    target: float  # the success to which tasks are counted for the ratios
    notes: tuple[str, ...]  # what a reader should know: runs that have not ended, no baseline


# Comparing


def compare(runs: Sequence[RunRecord], *, baseline: str | None = None) -> Comparison:
    """Group runs and compare the groups; refuses runs that cannot be compared, with the reason. A run that has not got
    as far as its first row is left out, and noted."""
    waiting = [run for run in runs if run.problem.endswith(NO_METRICS)]
    runs = [run for run in runs if run not in waiting] or runs
    _refuse_unusable(runs)
    refuse_different_data(runs)
    members = grouped(runs)
    names = group_names([config_of(group[0]) for group in members])
    baseline = baseline_name(names, members, baseline)
    base = None if baseline is None else members[names.index(baseline)]
    assert runs[0].data is not None
    ceiling = runs[0].data["splits"]["val"]["ceiling"]
    target = TARGET_SHARE * (1.0 if ceiling is None else ceiling)
    notes = [run.note for run in runs if run.note] + [f"{run.problem} and is left out" for run in waiting]
    if baseline is None:
        notes.append("there is no plain DAPO among these runs, so there is nothing to be a multiple of")
    if len(often := sorted({config_of(run).eval.every for run in runs})) > 1:
        *others, last = map(str, often)
        notes.append(
            f"runs were evaluated every {', '.join(others)} or {last} steps: no finer is known what each of them needed"
        )
    notes += [
        f"{run.path} met {target:.0%} at its last evaluation only: a second one would have to confirm it, so it does "
        "not count as reached"
        for run in unconfirmed(runs, target)
    ]
    return Comparison(
        groups=tuple(_group(name, group, base, ceiling, target) for name, group in zip(names, members, strict=True)),
        baseline=baseline,
        ceiling=ceiling,
        target=target,
        notes=tuple(notes),
    )


def _group(
    name: str, runs: Sequence[RunRecord], base: Sequence[RunRecord] | None, ceiling: float | None, target: float
) -> Group:
    by_seed = _reached(runs, target)
    curves = list(_curves(runs).values())
    tops = {"success": 1.0} if ceiling is None else {"success": 1.0, "ceiling": ceiling}
    costs = _costs(runs, base, target)
    return Group(
        name=name,
        runs=tuple(runs),
        tasks_to={
            of: {share: _typical([tasks_to(each, share * top) for each in curves]) for share in SHARES}
            for of, top in tops.items()
        },
        by_seed=by_seed,
        success=fmean(each[max(each)] for each in curves),
        at_the_end=_at_the_end(runs, "success"),
        blind=_at_the_end(runs, "success_blind"),
        by_level=_by_level(runs),
        tasks_seen=min(max(each) for each in curves),
        ratio=costs["tasks"].ratio if costs else Ratio(note="no task has been seen yet"),
        costs=costs,
        difference=None if base is None or base is runs else _difference(_curves(runs), _curves(base)),
        zero_shot=_zero_shot(runs, base),
        correlation=correlation([run.rows for run in runs]),
    )


# Tasks to a target


def curve(rows: Sequence[Mapping[str, Any]], key: str = VAL) -> dict[int, float]:
    """Tasks seen -> a metric, at every row that has it."""
    return {
        row["tasks_seen"]: row[key]
        for row in rows
        if isinstance(row.get("tasks_seen"), int) and isinstance(row.get(key), int | float)
    }


def tasks_to(points: Curve, success: float) -> Reached:
    """Tasks seen at the first of two evaluations in a row that reached `success`, or how many were not enough.

    >>> tasks_to({80: 0.6, 160: 0.4, 240: 0.5, 320: 0.7}, 0.5), tasks_to({80: 0.4, 160: 0.7}, 0.5)
    (Reached(tasks=240, censored=False), Reached(tasks=160, censored=True))
    """
    there = [tasks for tasks, next_ in pairwise(sorted(points)) if min(points[tasks], points[next_]) >= success]
    return Reached(tasks=there[0]) if there else Reached(tasks=max(points), censored=True)


def unconfirmed(runs: Sequence[RunRecord], success: float) -> list[RunRecord]:
    """Runs that met a target at their last evaluation and never before for good."""
    curves = {run.path: curve(run.rows) for run in runs}
    return [
        run
        for run in runs
        if (points := curves[run.path])[max(points)] >= success and tasks_to(points, success).censored
    ]


def _typical(each: Sequence[Reached]) -> Reached:
    """The geometric mean over seeds, a bound as soon as one of them is."""
    tasks = [reached.tasks for reached in each]
    mean = math.exp(fmean(map(math.log, tasks))) if min(tasks) > 0 else 0.0
    return Reached(tasks=round(mean, 1), censored=any(reached.censored for reached in each))


def _curves(runs: Sequence[RunRecord], key: str = VAL) -> dict[int, Curve]:
    """The curve of each seed."""
    return {config_of(run).seed: curve(run.rows, key) for run in runs}


def _reached(runs: Sequence[RunRecord], target: float) -> dict[int, Reached]:
    return {seed: tasks_to(each, target) for seed, each in _curves(runs).items()}


# The ratio and what is known about it


def _costs(runs: Sequence[RunRecord], base: Sequence[RunRecord] | None, target: float) -> dict[str, Cost]:
    own, reached = _spent(runs, target), _reached(runs, target)
    if base is None or base is runs:
        itself = Ratio(note="there is no baseline" if base is None else "the baseline itself")
        return {
            cost: Cost(by_seed=amounts, needed=needed(amounts, reached), ratio=itself) for cost, amounts in own.items()
        }
    others, theirs = _spent(base, target), _reached(base, target)
    unknown = Ratio(note="not every run of the two tells it")
    return {
        cost: Cost(
            by_seed=amounts,
            needed=needed(amounts, reached),
            ratio=ratio_to_baseline(theirs, reached, (others[cost], amounts)) if cost in others else unknown,
        )
        for cost, amounts in own.items()
    }


def _spent(runs: Sequence[RunRecord], target: float) -> dict[str, dict[int, float]]:
    """Cost -> seed -> how much of it a run needed to a target; only those costs that all runs tell."""
    reached, found = _reached(runs, target), {}
    for run in runs:
        config = config_of(run)
        tasks = int(reached[config.seed].tasks)
        for cost, amounts in spent(run.rows, group_size=config.rollout.group_size).items():
            if amounts[tasks] or not tasks:  # tasks that cost nothing were not measured
                found.setdefault(cost, {})[config.seed] = amounts[tasks]
    return {cost: by_seed for cost, by_seed in found.items() if len(by_seed) == len(runs)}


def needed(by_seed: Mapping[int, float], reached: Mapping[int, Reached]) -> Needed:
    """
    >>> needed({0: 200, 1: 800}, {0: Reached(tasks=1), 1: Reached(tasks=2, censored=True)})
    Needed(mean=400.0, interval=None, censored=True)
    """
    censored = any(reached[seed].censored for seed in by_seed)
    if min(by_seed.values()) <= 0:  # there before any training
        return Needed(mean=0.0, interval=None, censored=censored)
    logs = [math.log(amount) for amount in by_seed.values()]
    mean, low, high = t_interval(logs)
    if censored:
        low, high = median_bound(logs), math.inf
    known = math.isfinite(low)
    interval = (math.exp(low), None if censored else math.exp(high)) if known else None
    return Needed(mean=round(math.exp(mean), 1), interval=interval, censored=censored)


def ratio_to_baseline(
    baseline: Mapping[int, Reached],
    group: Mapping[int, Reached],
    spent: tuple[Mapping[int, float], Mapping[int, float]] | None = None,
) -> Ratio:
    """The baseline's tasks over the group's, paired by seed; with `spent`, what each seed of the two had spent of
    another cost by then.

    >>> ratio_to_baseline({0: Reached(tasks=800)}, {0: Reached(tasks=200)}).value
    4.0
    >>> ratio_to_baseline({0: Reached(tasks=1600, censored=True)}, {0: Reached(tasks=320)}).bound
    'at least'
    """
    seeds = tuple(sorted(set(baseline) & set(group)))
    if not seeds:
        return Ratio(note="the two have no seed in common")
    pairs = [(baseline[seed], group[seed]) for seed in seeds]
    if any(reached.tasks == 0 for pair in pairs for reached in pair):
        return Ratio(seeds=seeds, note="the target was reached before any training")
    theirs, ours = spent or (
        {seed: baseline[seed].tasks for seed in seeds},
        {seed: group[seed].tasks for seed in seeds},
    )
    logs = [math.log(theirs[seed] / ours[seed]) for seed in seeds]
    at_least = any(base.censored for base, _ in pairs)
    at_most = any(own.censored for _, own in pairs)
    if not (at_least or at_most):
        mean, low, high = t_interval(logs)
        interval = None if math.isnan(low) else (math.exp(low), math.exp(high))
        return Ratio(value=math.exp(mean), interval=interval, seeds=seeds)
    if at_least and at_most:
        note = "neither side can be bounded: each has runs that never reached the target"
        return Ratio(censored=True, seeds=seeds, note=note)
    sign = 1 if at_least else -1  # an upper bound is a lower bound of the inverse
    known = median_bound([sign * log for log in logs])
    limit = math.exp(sign * known) if math.isfinite(known) else None
    return Ratio(
        value=math.exp(fmean(logs)),
        interval=None if limit is None else (limit, None) if at_least else (None, limit),
        censored=True,
        bound="at least" if at_least else "at most",
        seeds=seeds,
    )


# Success on every split, with how far seeds agree


def spread(by_seed: Mapping[int, float]) -> Spread:
    """
    >>> spread({0: 0.5, 1: 0.5}).interval is None
    True
    """
    mean, low, high = t_interval(list(by_seed.values()))
    interval = None if math.isnan(low) else (float(low), float(high))
    return Spread(by_seed=by_seed, mean=float(mean), interval=interval)


def _at_the_end(runs: Sequence[RunRecord], metric: str) -> dict[str, Spread]:
    settings = config_of(runs[0]).eval
    found = {}
    for split in (*settings.splits, *settings.final_splits):
        curves = _curves(runs, f"eval/{split}/{metric}")
        if all(curves.values()):
            found[split] = spread({seed: points[max(points)] for seed, points in curves.items()})
    return found


def _by_level(runs: Sequence[RunRecord]) -> dict[str, Spread]:
    last = {
        config_of(run).seed: next((row[LEVELS] for row in reversed(run.rows) if isinstance(row.get(LEVELS), dict)), {})
        for run in runs
    }
    levels = set.intersection(*(set(levels) for levels in last.values()))
    if len(levels) < 2:
        return {}
    return {level: spread({seed: each[level] for seed, each in last.items()}) for level in sorted(levels)}


def _difference(own: Mapping[int, Curve], others: Mapping[int, Curve]) -> Difference | None:
    seeds = sorted(own.keys() & others.keys())
    if not seeds:
        return None
    shared = set.intersection(*({*own[seed]} & {*others[seed]} for seed in seeds))
    if not any(shared):  # before training there is no difference to look for
        return None
    tasks = max(shared)
    points = {seed: own[seed][tasks] - others[seed][tasks] for seed in seeds}
    return Difference(tasks=tasks, points=spread(points))


# Unseen companies


def _zero_shot(runs: Sequence[RunRecord], base: Sequence[RunRecord] | None) -> ZeroShot | None:
    splits = config_of(runs[0]).eval.splits
    split = next((split for split in splits if split.startswith("test_unseen")), None)
    if split is None:
        return None
    own, others = (list(_curves(each, f"eval/{split}/success").values()) for each in (runs, base or ()))
    if not all(own):
        return None
    others = others if all(others) else []
    tasks = min(max(each) for each in (*own, *others))
    return ZeroShot(
        split=split,
        tasks=tasks,
        success=fmean(_at(each, tasks) for each in own),
        baseline=fmean(_at(each, tasks) for each in others) if others else None,
    )


def _at(points: Curve, tasks: int) -> float:
    """At the last evaluation that had seen no more than `tasks`."""
    before = [seen for seen in points if seen <= tasks]
    return points[max(before) if before else min(points)]


def _refuse_unusable(runs: Sequence[RunRecord]) -> None:
    if not runs:
        raise UsageError("there are no runs to compare")
    for run in runs:
        if run.problem:
            raise DataError(run.problem)
        if not curve(run.rows):
            raise DataError(f"{run.path} holds no evaluation on val yet")
        if run.data is None or "val" not in run.data["splits"]:
            raise DataError(f"nobody can tell on which tasks {run.path} was evaluated: it has no data.json")
