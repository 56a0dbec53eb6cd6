"""How many tasks does a way of training need, and how many times fewer than plain DAPO? From run folders alone.

    comparison = compare([read_run(path) for path in paths])
    lfo compare runs/level2/* --json

Runs that agree in every setting but the seed are one group. A run needs as many tasks to a target as it had seen at
the first evaluation on val that reached it, so answers are as fine as evaluations are frequent, and reaching it once
counts. `ratio_to_baseline` is the baseline's tasks over the group's tasks to 70 % of the information ceiling, paired by
seed: the geometric mean over seeds, with a t-interval on the logarithm.

A run that ended before it reached the target is censored: all that is known is that it needs more tasks than it saw.
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
from statistics import fmean
from typing import Any

import numpy as np

from lfo.errors import DataError, UsageError
from lfo.evaluation.grouping import baseline_name, config_of, group_names, grouped, refuse_different_data
from lfo.evaluation.intervals import median_bound, t_interval
from lfo.evaluation.runs import NO_METRICS, RunRecord

SHARES = (0.5, 0.7, 0.9)  # of 1 and of the ceiling: the targets
TARGET_SHARE = 0.7  # of the ceiling: where "good" begins, and where groups are compared
GAIN_STEPS = 50  # how much later the policy's gain is looked at
VAL, LEVELS = "eval/val/success", "eval/val/success_by_level"
LOOKAHEAD = "eval/val/lookahead_accuracy"
# What tells how good the world model was at an evaluation, the best witness first.
ACCURACY_KEYS = ("world_model_eval/semantic_accuracy", LOOKAHEAD)

Curve = Mapping[int, float]  # tasks seen -> success, at each evaluation


@dataclass(frozen=True, kw_only=True, slots=True)
class Reached:
    """How many tasks a target took: `Reached(tasks=320, censored=False)`; censored: more than so many."""

    tasks: float
    censored: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Ratio:
    """How many times fewer tasks than the baseline.

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
class Correlation:
    """World-model accuracy at a step against what the policy did in the `steps` after it, over `n` pairs."""

    accuracy: str  # the metric that was taken
    steps: int
    n: int
    with_gain: float | None  # in success on val
    with_success: float | None  # on val, `steps` later


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
    by_level: Mapping[str, Spread]  # level -> success on its part of val at the last evaluation; empty for one level
    tasks_seen: int  # of the shortest run
    ratio: Ratio
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
    by_seed = {seed: tasks_to(each, target) for seed, each in _curves(runs).items()}
    curves = list(_curves(runs).values())
    tops = {"success": 1.0} if ceiling is None else {"success": 1.0, "ceiling": ceiling}
    ratio, difference = Ratio(note="there is no baseline" if base is None else "the baseline itself"), None
    if base is not None and base is not runs:
        ratio = ratio_to_baseline({seed: tasks_to(each, target) for seed, each in _curves(base).items()}, by_seed)
        difference = _difference(_curves(runs), _curves(base))
    return Group(
        name=name,
        runs=tuple(runs),
        tasks_to={
            of: {share: _typical([tasks_to(each, share * top) for each in curves]) for share in SHARES}
            for of, top in tops.items()
        },
        by_seed=by_seed,
        success=fmean(each[max(each)] for each in curves),
        at_the_end=_at_the_end(runs),
        by_level=_by_level(runs),
        tasks_seen=min(max(each) for each in curves),
        ratio=ratio,
        difference=difference,
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
    """Tasks seen at the first evaluation that reached `success`, or how many were not enough."""
    tasks = min((tasks for tasks, reached in points.items() if reached >= success), default=None)
    return Reached(tasks=max(points), censored=True) if tasks is None else Reached(tasks=tasks)


def _typical(each: Sequence[Reached]) -> Reached:
    """The geometric mean over seeds, a bound as soon as one of them is."""
    tasks = [reached.tasks for reached in each]
    mean = math.exp(fmean(map(math.log, tasks))) if min(tasks) > 0 else 0.0
    return Reached(tasks=round(mean, 1), censored=any(reached.censored for reached in each))


def _curves(runs: Sequence[RunRecord], key: str = VAL) -> dict[int, Curve]:
    """The curve of each seed."""
    return {config_of(run).seed: curve(run.rows, key) for run in runs}


# The ratio and what is known about it


def ratio_to_baseline(baseline: Mapping[int, Reached], group: Mapping[int, Reached]) -> Ratio:
    """The baseline's tasks over the group's, paired by seed.

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
    logs = [math.log(base.tasks / own.tasks) for base, own in pairs]
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


def _at_the_end(runs: Sequence[RunRecord]) -> dict[str, Spread]:
    settings = config_of(runs[0]).eval
    found = {}
    for split in (*settings.splits, *settings.final_splits):
        curves = _curves(runs, f"eval/{split}/success")
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


# Unseen companies, and what prediction has to do with it


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


def correlation(runs: Sequence[Sequence[Mapping[str, Any]]]) -> Correlation | None:
    """Does a world model that predicts well come before a policy that gains? Pearson, over all evaluations of all runs.

    The gain is looked at 50 steps later, or in shorter runs half a run later. Evaluations of one run are not
    independent, so there is a number of points and no significance. A policy that has reached the ceiling gains
    nothing more however well its world model predicts, which is why the correlation with success itself stands beside.
    """
    key = next((key for key in ACCURACY_KEYS if all(any(key in row for row in rows) for rows in runs)), None)
    if key is None:
        return None
    steps = min(GAIN_STEPS, min(rows[-1]["step"] for rows in runs) // 2)
    pairs = []
    for rows in runs:
        points = [row for row in rows if isinstance(row.get(VAL), int | float)]
        for row in points:
            later = next((other for other in points if other["step"] >= row["step"] + steps), None)
            if later is not None and isinstance(row.get(key), int | float):
                pairs.append((row[key], later[VAL] - row[VAL], later[VAL]))
    columns = list(zip(*pairs, strict=True)) or [(), (), ()]
    return Correlation(
        accuracy=key,
        steps=steps,
        n=len(pairs),
        with_gain=pearson(columns[0], columns[1]),
        with_success=pearson(columns[0], columns[2]),
    )


def pearson(one: Sequence[float], other: Sequence[float]) -> float | None:
    """None where it says nothing: fewer than three points, or one side that does not vary."""
    if len(one) < 3 or np.ptp(one) < 1e-12 or np.ptp(other) < 1e-12:
        return None
    return float(np.corrcoef(one, other)[0, 1])


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
