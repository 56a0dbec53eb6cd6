"""Learning curves: one line for each run, and for each group the mean over seeds with its t-interval.

Seeds are averaged step by step, because at the same step runs may have seen different numbers of tasks and spent
different times. There is a mean where all counted runs of a group have a value, at their mean tasks and mean time. Pure
functions of rows; the caller decides which runs count.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean
from typing import Any

from lfo.runs.costs import MetricsRows, number
from lfo.runs.intervals import t_interval

POINTS = 200  # of one line; more points are drawn as means of neighbouring steps
SMALL_CHART_POINTS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Member:
    """A run in a group: `Member(run=3, group=0, rows=rows, seconds=training_seconds(rows), counts=True)`."""

    run: int
    group: int
    rows: MetricsRows
    seconds: Sequence[float]  # spent until each row
    counts: bool  # in the mean of its group


@dataclass(frozen=True, slots=True)
class Point:
    step: float
    tasks: float
    seconds: float
    value: float


def points(rows: MetricsRows, times: Sequence[float], key: str, limit: int = POINTS) -> list[Point]:
    """Return the values of one metric; means of neighbouring steps if there are more than `limit`."""
    found = []  # plain tuples until few are left: a run may have many rows
    for row, seconds in zip(rows, times, strict=True):
        value = number(row.get(key))
        tasks = None if value is None else number(row.get("tasks_seen"))
        if tasks is not None:
            found.append((row["step"], tasks, seconds, value))
    spacing = min((later[0] - one[0] for one, later in pairwise(found)), default=0) or 1
    steps = (found[-1][0] - found[0][0]) / spacing + 1 if found else 0
    if steps <= limit:
        return [Point(*each) for each in found]
    # By step and in powers of two, so that runs of one group are cut at the same steps.
    together = spacing * 2 ** math.ceil(math.log2(steps / limit))
    buckets: dict[int, list[tuple[Any, ...]]] = {}
    for each in found:
        buckets.setdefault(math.ceil(each[0] / together), []).append(each)
    return [
        Point(
            step=index * together,
            tasks=bucket[-1][1],
            seconds=bucket[-1][2],
            value=fmean(value for *_, value in bucket),
        )
        for index, bucket in buckets.items()
    ]


def curve(
    title: str, key: str, members: Sequence[Member], form: str, *, ceiling: float | None = None, limit: int = POINTS
) -> dict[str, Any]:
    """Return one chart; it has no lines if no run has the metric.

    `form` is how values are written: a "share" of 1 on an axis up to 100 %, a "fraction" in % on an axis that fits, or
    a "number".
    """
    lines = []
    for group in sorted({member.group for member in members}):
        own = [(member, points(member.rows, member.seconds, key, limit)) for member in members if member.group == group]
        own = [(member, found) for member, found in own if found]
        if own:
            counted = [found for member, found in own if member.counts] or [found for _, found in own]
            runs = [{"run": member.run, "open": not member.counts, **_stream(found)} for member, found in own]
            lines.append({"group": group, "runs": runs, "mean": mean_line(counted, form)})
    return {"title": title, "format": form, "ceiling": _rounded(ceiling), "lines": lines}


def mean_line(runs: Sequence[Sequence[Point]], form: str) -> dict[str, list[Any]]:
    """Return mean and interval at the common steps; the interval of a share is limited to 0 and 1."""
    by_step = [{point.step: point for point in run} for run in runs]
    steps = sorted(set.intersection(*(set(each) for each in by_step)))
    line: dict[str, list[Any]] = {"tasks": [], "seconds": [], "y": [], "low": [], "high": []}
    for step in steps:
        together = [each[step] for each in by_step]
        tasks, seconds = fmean(point.tasks for point in together), fmean(point.seconds for point in together)
        found = (_rounded(tasks), _rounded(seconds), *interval([point.value for point in together], form))
        for stream, value in zip(line.values(), found, strict=True):
            stream.append(value)
    return line


def interval(values: Sequence[float], form: str) -> tuple[Any, Any, Any]:
    """Return mean and t-interval; None without a deviation between seeds.

    >>> interval([0.7, 0.8, 0.9], "share")
    (0.8, 0.55159, 1)
    >>> interval([0.5], "share")
    (0.5, None, None)
    """
    mean, low, high = (float(each) for each in t_interval(list(values)))
    if math.isnan(low):
        return _rounded(mean), None, None
    if form == "share":
        low, high = max(low, 0.0), min(high, 1.0)
    return _rounded(mean), _rounded(low), _rounded(high)


def mark(group: int | None, values: Sequence[float], form: str) -> dict[str, Any]:
    """Return a dot with its seeds, for charts without a time axis."""
    mean, low, high = interval(values, form)
    return {"group": group, "values": [_rounded(value) for value in values], "mean": mean, "low": low, "high": high}


def _stream(found: Sequence[Point]) -> dict[str, list[Any]]:
    return {
        "tasks": [_rounded(point.tasks) for point in found],
        "seconds": [_rounded(point.seconds) for point in found],
        "y": [_rounded(point.value) for point in found],
    }


def _rounded(value: float | None) -> float | int | None:
    """Round to five digits: enough for the eye, and half of the size of the page."""
    if value is None:
        return None
    short = float(f"{value:.5g}") if abs(value) < 10_000 else round(value)
    return int(short) if short == int(short) else short
