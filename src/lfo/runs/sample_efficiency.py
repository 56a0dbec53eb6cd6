"""Compare how many tasks groups of runs need, relative to plain DAPO, from their run folders.

    comparison = compare([read_run(path) for path in paths])
    lfo compare runs/level2/* --json

Runs with the same config except for the seed are one group. The tasks to a target are the tasks seen at the first of
two consecutive evaluations on val at or above it. So the resolution is the evaluation interval, and one lucky
evaluation does not count. `ratio_to_baseline` is the baseline's tasks over the group's tasks to 70 % of the information
ceiling, paired by seed: the geometric mean over seeds, with a t-interval on the logarithm. Other costs (rollouts,
sampled tokens, seconds) are those spent when these tasks were seen.

A run that ended before it reached the target is censored; so is a run that reached it only at its last evaluation,
without confirmation. Then only a bound is known: it needs more tasks than it saw. Its ratio is a bound, and the ratio
of the group, the mean of such bounds, is marked as a bound. Mean and deviation cannot be estimated from bounds, but a
bound on the median holds for any distribution (for the log-normal ratios that the t-interval assumes, the median is the
geometric mean): with n seeds, the smallest bound is below the median except with probability 1 in 2 ** n. So a censored
ratio needs at least five seeds for a one-sided 95 % bound, and one seed gives no interval at all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from lfo.errors import DataError, UsageError
from lfo.runs.correlation import VAL, Correlation, correlation
from lfo.runs.costs import spent
from lfo.runs.grouping import baseline_name, config_of, group_names, grouped, notes_of, refuse_different_data
from lfo.runs.intervals import median_bound, t_interval
from lfo.runs.reading import NO_METRICS, RunRecord

SHARES = (0.5, 0.7, 0.9)  # of 1 and of the ceiling: the targets
TARGET_SHARE = 0.7  # of the ceiling: the target at which groups are compared
LEVELS = "eval/val/success_by_level"
BLIND = f"{VAL}_blind"

Curve = Mapping[int, float]  # tasks seen -> success, at each evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """The tasks to a target: `Reached(tasks=320, censored=False)`; if censored, more tasks than this."""

    tasks: float
    censored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """How many times fewer tasks than the baseline, or how many times less of another cost.

    `bound` is "at least" or "at most" if some runs are censored; None with `censored` means that the ratio has no
    bound. An interval has None on an unknown side.
    """

    value: float | None = None
    interval: tuple[float | None, float | None] | None = None
    censored: bool = False
    bound: str | None = None
    seeds: tuple[int, ...] = ()  # common to both
    note: str = ""  # why there is no ratio


@dataclass(frozen=True, kw_only=True, slots=True)
class Needed:
    """The geometric mean over seeds, and its t-interval on the logarithm.

    If a seed never reached the target, the result is censored: `mean` is then a lower bound. With five seeds or more,
    the interval is then a lower bound of the median, and its upper end is None.
    """

    mean: float
    interval: tuple[float, float | None] | None
    censored: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """The cost to the target of the comparison: tasks, rollouts, sampled tokens or seconds."""

    by_seed: Mapping[int, float]  # at the target, or at the end of a censored run
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
        return self.success / self.baseline if self.baseline else None  # no ratio to 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A value of each seed, their mean and its t-interval; None with one seed or no deviation."""

    mean: float
    interval: tuple[float, float] | None
    by_seed: Mapping[int, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """Success on val minus the baseline's, at the last common evaluation, after `tasks` tasks."""

    tasks: int
    points: Spread


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Runs that differ only by seed, and their results relative to the baseline."""

    name: str
    runs: tuple[RunRecord, ...]
    tasks_to: Mapping[str, Mapping[float, Reached]]  # "success" and "ceiling" -> share -> tasks
    by_seed: Mapping[int, Reached]  # tasks of each run to the target of the comparison
    success: float  # on val at the last evaluation of each run
    at_the_end: Mapping[str, Spread]  # split -> success at the last evaluation on it
    blind: Mapping[str, Spread]  # the same without look-ahead, for runs with look-ahead
    by_level: Mapping[str, Spread]  # level -> success on its part of val at the last evaluation; empty for one level
    tasks_seen: int  # of the shortest run
    ratio: Ratio
    costs: Mapping[str, Cost]  # those of COSTS that all runs of the group record
    difference: Difference | None
    zero_shot: ZeroShot | None
    correlation: Correlation | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    groups: tuple[Group, ...]
    baseline: str | None
    ceiling: float | None
    target: float  # the success to which ratios count tasks
    notes: tuple[str, ...]  # notes for the reader: runs that have not ended, no baseline


# Comparing


def compare(runs: Sequence[RunRecord], *, baseline: str | None = None) -> Comparison:
    """Group runs and compare the groups; raise if runs cannot be compared. A run without metrics is left out and
    noted."""
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
        notes.append("there are no ratios without plain DAPO; --baseline names another baseline")
    if any(config_of(run).leaves_policy_alone and any(BLIND in row for row in run.rows) for run in runs):
        notes.append(
            "runs that leave the policy alone are measured with look-ahead; --blind measures their policies alone"
        )
    notes += notes_of(runs)
    notes += [
        f"{run.path} reached {target:.0%} only at its last evaluation, which a second one must confirm, so it does not "
        "count"
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
        ratio=costs["tasks"].ratio if "tasks" in costs else Ratio(note="not every run has seen a task"),
        costs=costs,
        difference=None if base is None or base is runs else _difference(_curves(runs), _curves(base)),
        zero_shot=_zero_shot(runs, base),
        correlation=correlation([run.rows for run in runs]),
    )


# Tasks to a target


def curve(rows: Sequence[Mapping[str, Any]], key: str = VAL) -> dict[int, float]:
    """Return tasks seen -> metric, for every row with the metric."""
    return {
        row["tasks_seen"]: row[key]
        for row in rows
        if isinstance(row.get("tasks_seen"), int) and isinstance(row.get(key), int | float)
    }


def tasks_to(points: Curve, success: float) -> Reached:
    """Return the tasks seen at the first of two consecutive evaluations that reached `success`, else a censored number.

    >>> tasks_to({80: 0.6, 160: 0.4, 240: 0.5, 320: 0.7}, 0.5), tasks_to({80: 0.4, 160: 0.7}, 0.5)
    (Reached(tasks=240, censored=False), Reached(tasks=160, censored=True))
    """
    there = [tasks for tasks, next_ in pairwise(sorted(points)) if min(points[tasks], points[next_]) >= success]
    return Reached(tasks=there[0]) if there else Reached(tasks=max(points), censored=True)


def unconfirmed(runs: Sequence[RunRecord], success: float) -> list[RunRecord]:
    """Return the runs that reached a target only at their last evaluation."""
    curves = {run.path: curve(run.rows) for run in runs}
    return [
        run
        for run in runs
        if (points := curves[run.path])[max(points)] >= success and tasks_to(points, success).censored
    ]


def _typical(each: Sequence[Reached]) -> Reached:
    """Return the geometric mean over seeds; censored if one of them is."""
    tasks = [reached.tasks for reached in each]
    mean = math.exp(fmean(map(math.log, tasks))) if min(tasks) > 0 else 0.0
    return Reached(tasks=round(mean, 1), censored=any(reached.censored for reached in each))


def _curves(runs: Sequence[RunRecord], key: str = VAL) -> dict[int, Curve]:
    """Return the curve of each seed."""
    return {config_of(run).seed: curve(run.rows, key) for run in runs}


def _reached(runs: Sequence[RunRecord], target: float) -> dict[int, Reached]:
    return {seed: tasks_to(each, target) for seed, each in _curves(runs).items()}


# Ratios


def _costs(runs: Sequence[RunRecord], base: Sequence[RunRecord] | None, target: float) -> dict[str, Cost]:
    own, reached = _spent(runs, target), _reached(runs, target)
    if base is None or base is runs:
        itself = Ratio(note="there is no baseline" if base is None else "the baseline itself")
        return {
            cost: Cost(by_seed=amounts, needed=needed(amounts, reached), ratio=itself) for cost, amounts in own.items()
        }
    others, theirs = _spent(base, target), _reached(base, target)
    unknown = Ratio(note="not every run of the two records it")
    return {
        cost: Cost(
            by_seed=amounts,
            needed=needed(amounts, reached),
            ratio=ratio_to_baseline(theirs, reached, (others[cost], amounts)) if cost in others else unknown,
        )
        for cost, amounts in own.items()
    }


def _spent(runs: Sequence[RunRecord], target: float) -> dict[str, dict[int, float]]:
    """Return cost -> seed -> amount to a target, for the costs that all runs record."""
    reached, found = _reached(runs, target), {}
    for run in runs:
        config = config_of(run)
        tasks = int(reached[config.seed].tasks)
        for cost, amounts in spent(run.rows, group_size=config.rollout.group_size).items():
            if amounts[tasks] or not tasks:  # a cost of 0 was not measured
                found.setdefault(cost, {})[config.seed] = amounts[tasks]
    return {cost: by_seed for cost, by_seed in found.items() if len(by_seed) == len(runs)}


def needed(by_seed: Mapping[int, float], reached: Mapping[int, Reached]) -> Needed:
    """Return what a target cost over seeds.

    >>> needed({0: 200, 1: 800}, {0: Reached(tasks=1), 1: Reached(tasks=2, censored=True)})
    Needed(mean=400.0, interval=None, censored=True)
    """
    censored = any(reached[seed].censored for seed in by_seed)
    if min(by_seed.values()) <= 0:  # reached before any training
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
    """Return the ratio of the baseline's tasks to the group's, paired by seed; with `spent`, the ratio of another cost.

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


# Success on every split, with intervals over seeds


def spread(by_seed: Mapping[int, float]) -> Spread:
    """Return the mean over seeds and its interval.

    >>> spread({0: 0.5, 1: 0.5}).interval is None
    True
    """
    mean, low, high = t_interval(list(by_seed.values()))
    interval = None if math.isnan(low) else (float(low), float(high))
    return Spread(by_seed=by_seed, mean=float(mean), interval=interval)


def _at_the_end(runs: Sequence[RunRecord], metric: str) -> dict[str, Spread]:
    evaluation = config_of(runs[0]).eval
    found = {}
    for split in (*evaluation.splits, *evaluation.final_splits):
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
    if not any(shared):  # before training there is no difference
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
    """Return the value at the last evaluation with at most `tasks` tasks seen."""
    before = [seen for seen in points if seen <= tasks]
    return points[max(before) if before else min(points)]


def _refuse_unusable(runs: Sequence[RunRecord]) -> None:
    if not runs:
        raise UsageError("there are no runs to compare")
    for run in runs:
        if run.problem:
            raise DataError(run.problem)
        if not curve(run.rows):
            raise DataError(f"{run.path} contains no evaluation on val yet")
        if run.data is None or "val" not in run.data["splits"]:
            raise DataError(f"the tasks of the evaluation of {run.path} are unknown, because it has no data.json")
