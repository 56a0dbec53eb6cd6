"""The reliability diagram of the world model's certainty for each group, and its calibration error.

It uses the predictions at the last evaluation of each counted run. A diagram contains all seeds; the error is the mean
over seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from lfo.evaluation.certainty import Bin, together
from lfo.evaluation.costs import number
from lfo.report.curves import Member
from lfo.report.text import shown
from lfo.statistics import wilson

ERROR, DIAGRAM = "world_model_eval/calibration_error", "world_model_eval/reliability"


def reliability_of(members: Sequence[Member], names: Sequence[str]) -> list[dict[str, Any]]:
    """Return an entry for each group that has a diagram.

    `{"group": 0, "words": "...", "bins": [{"certainty": 0.5, "right": 0.4, ...}]}`
    """
    found = []
    for group in sorted({member.group for member in members}):
        last = [_last(member) for member in members if member.group == group and member.counts]
        known = [each for each in last if each is not None]
        if known:
            diagram = together(bins for _, bins in known)
            error, count = fmean(error for error, _ in known), sum(each.count for each in diagram)
            seeds = f"{len(known)} {'seed' if len(known) == 1 else 'seeds'}"
            words = f"{names[group]}: certainty and truth lie {100 * error:.0f} points apart on average (expected "
            words += f"calibration error; {count:,} predictions, {seeds})."
            found.append({"group": group, "words": shown(words), "bins": [_drawn(each) for each in diagram]})
    return found


def _last(member: Member) -> tuple[float, list[Bin]] | None:
    """Return error and diagram of the last evaluation that has them; invalid values are ignored."""
    for row in reversed(member.rows):
        error, diagram = number(row.get(ERROR)), row.get(DIAGRAM)
        if error is not None and isinstance(diagram, list) and diagram:
            bins = [_bin(each) for each in diagram]
            return None if None in bins else (error, [each for each in bins if each is not None])
    return None


def _bin(found: Any) -> Bin | None:
    if not isinstance(found, dict):
        return None
    sure, right, count = (number(found.get(name)) for name in ("certainty", "right", "count"))
    if sure is None or right is None or count is None or not (0 <= sure <= 1 and 0 <= right <= 1 and count >= 1):
        return None
    return Bin(certainty=sure, right=right, count=int(count))


def _drawn(each: Bin) -> dict[str, Any]:
    low, high = wilson(each.right, each.count)
    figures = {"certainty": each.certainty, "right": each.right, "low": low, "high": high}
    return {**{name: round(value, 4) for name, value in figures.items()}, "count": each.count}
