"""A comparison as tables and sentences: what `lfo compare` prints, what its JSON has and what the page shows.

tables(comparison)       {"Tasks to a share of success": [("group", "seeds", ...), ("dapo", "3", ...)], ...}
sentences(comparison)    ["dapo needed 4.0 times as many tasks as dual-lora ...", ...]
as_json(comparison)      both, and all figures
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from lfo.runs.costs import COSTS
from lfo.runs.intervals import CONFIDENCE
from lfo.runs.sample_efficiency import SHARES, Comparison, Cost, Difference, Group, Ratio, Spread

FEWEST_SEEDS = 3  # for an interval, and to say that two groups cannot be distinguished
TELLS_NOTHING = 50  # points: with a larger half-width of the interval, show the seeds instead
BLIND = "Blind, without look-ahead, is what the policy's weights know."
SIGNS = {"at least": "≥ ", "at most": "≤ ", None: ""}  # before a ratio that is a bound

Rows = list[tuple[str, ...]]  # of a table: the headings, and a row for each group that begins with its name


def tables(comparison: Comparison) -> dict[str, Rows]:
    """Return title -> rows of all tables that have any."""
    of = "success" if comparison.ceiling is None else f"the ceiling ({comparison.ceiling:.1%})"
    target = f"{comparison.target:.0%} on val"
    found = {
        f"Tasks to a share of {of}": table(comparison),
        f"What {target} took: geometric mean and 95 % interval": needed_table(comparison),
        f"Times less than {comparison.baseline} to {target}": cost_table(comparison),
        "Success at the end: mean and 95 % interval, or the seeds": split_table(comparison),
        "Success on val at the end, by level": level_table(comparison),
    }
    return {title: rows for title, rows in found.items() if rows}


def sentences(comparison: Comparison) -> list[str]:
    """Return what the tables do not say."""
    words = [BLIND] if any(group.blind for group in comparison.groups) else []
    if controls := [group.name for group in comparison.groups if is_control(group)]:
        words.append(f"Controls, which show what is possible and not what was learned: {', '.join(controls)}.")
    return [*words, *conclusions(comparison), *comparison.notes]


def is_control(group: Group) -> bool:
    """Whether a group is a control: look-ahead is true or shuffled by design, or the policy is frozen."""
    config = group.runs[0].config
    if config is None:
        return False
    return config.source.is_control or config.feedback == "other_task" or config.policy.frozen


def as_json(comparison: Comparison) -> dict[str, Any]:
    """Return the comparison as JSON, with null for unknown values."""
    return {
        "baseline": comparison.baseline,
        "ceiling": comparison.ceiling,
        "target": comparison.target,
        "confidence": CONFIDENCE,
        "groups": list(map(group_as_json, comparison.groups)),
        "notes": list(comparison.notes),
        "tables": tables(comparison),
        "sentences": sentences(comparison),
    }


def group_as_json(group: Group) -> dict[str, Any]:
    return {
        "name": group.name,
        "runs": [str(run.path) for run in group.runs],
        "by_seed": {seed: asdict(reached) for seed, reached in group.by_seed.items()},
        "tasks_to": {
            of: {f"{share:.0%}".rstrip("%"): asdict(reached) for share, reached in shares.items()}
            for of, shares in group.tasks_to.items()
        },
        "success": group.success,
        "at_the_end": {split: asdict(each) for split, each in group.at_the_end.items()},
        "blind": {split: asdict(each) for split, each in group.blind.items()},
        "by_level": {level: asdict(each) for level, each in group.by_level.items()},
        "difference_to_baseline": group.difference
        and {"tasks": group.difference.tasks, **asdict(group.difference.points)},
        "tasks_seen": group.tasks_seen,
        "ratio_to_baseline": group.ratio.value,
        "interval": group.ratio.interval,
        "censored": group.ratio.censored,
        "bound": group.ratio.bound,
        "paired_seeds": list(group.ratio.seeds),
        "note": group.ratio.note,
        "costs": {
            cost: {"by_seed": each.by_seed, "needed": asdict(each.needed), **asdict(each.ratio)}
            for cost, each in group.costs.items()
        },
        "zero_shot": group.zero_shot.success if group.zero_shot else None,
        "zero_shot_tasks": group.zero_shot.tasks if group.zero_shot else None,
        "zero_shot_baseline": group.zero_shot.baseline if group.zero_shot else None,
        "zero_shot_ratio": group.zero_shot.ratio if group.zero_shot else None,
        "correlation": asdict(group.correlation) if group.correlation else None,
    }


def split_table(comparison: Comparison) -> Rows:
    """Return the table of success at the last evaluation on each split, also blind for runs with look-ahead."""
    rows = _spread_table(
        [
            (group.name, {**group.at_the_end, **{f"{split} blind": each for split, each in group.blind.items()}})
            for group in comparison.groups
        ]
    )
    return [tuple(heading.removeprefix("test_unseen_") for heading in rows[0]), *rows[1:]]


def level_table(comparison: Comparison) -> Rows:
    """Return the table of success at the last evaluation on each level of val; empty if no run has several."""
    rows = _spread_table([(group.name, group.by_level) for group in comparison.groups])
    return rows if len(rows[0]) > 1 else []


def _spread_table(groups: Sequence[tuple[str, Mapping[str, Spread]]]) -> Rows:
    columns = list(dict.fromkeys(column for _, spreads in groups for column in spreads))
    cells = [(name, *(_spread_in_words(spreads.get(column)) for column in columns)) for name, spreads in groups]
    return [("group", *columns), *cells]


def _spread_in_words(each: Spread | None) -> str:
    if each is None:
        return "-"
    if each.interval is None:
        return f"{each.mean:.0%}"
    half = 100 * (each.interval[1] - each.mean)
    if half > TELLS_NOTHING or len(each.by_seed) < FEWEST_SEEDS:
        seeds = each.by_seed.values()
        return f"{each.mean:.0%} (seeds {100 * min(seeds):.0f}-{100 * max(seeds):.0f})"
    return f"{each.mean:.0%} ±{half:.0f}"


def table(comparison: Comparison) -> Rows:
    """Return the rows of the table; the first has the headings."""
    of = "success" if comparison.ceiling is None else "ceiling"
    rows = [("group", "seeds", *(f"{share:.0%}" for share in SHARES), "ratio", "val", "unseen")]
    for group in comparison.groups:
        ratio = _ratio_in_words(group.ratio)
        rows.append((group.name, str(len(group.runs)), *reached_cells(group, of), ratio, *success_cells(group)))
    return rows


def reached_cells(group: Group, of: str) -> list[str]:
    """Return the tasks to each of `SHARES` of "success" or "ceiling"."""
    reached = (group.tasks_to[of][share] for share in SHARES)
    return [f"{'> ' if each.censored else ''}{each.tasks:.0f}" for each in reached]


def success_cells(group: Group) -> tuple[str, str]:
    """Return success on val and on unseen companies."""
    return f"{group.success:.0%}", "-" if group.zero_shot is None else f"{group.zero_shot.success:.0%}"


def needed_table(comparison: Comparison) -> Rows:
    """Return the table of each cost to the target, and of how many seeds reached it."""
    rows = [("group", "there", *(cost.removeprefix("sampled_") for cost in COSTS))]
    for group in comparison.groups:
        there = sum(not reached.censored for reached in group.by_seed.values())
        cells = (_needed_in_words(group.costs.get(cost)) for cost in COSTS)
        rows.append((group.name, f"{there}/{len(group.runs)}", *cells))
    return rows


def _needed_in_words(cost: Cost | None) -> str:
    if cost is None:
        return "-"
    words = f"{'> ' if cost.needed.censored else ''}{_rounded(cost.needed.mean)}"
    if cost.needed.interval is None:
        return words
    low, high = cost.needed.interval
    return f"{words} (above {_rounded(low)})" if high is None else f"{words} ({_rounded(low)}-{_rounded(high)})"


def _rounded(amount: float) -> str:
    """Format a number with three significant digits.

    >>> _rounded(336.2), _rounded(53_412), _rounded(1_999_999), _rounded(7.25)
    ('336', '53.4k', '2M', '7.25')
    """
    if amount >= 999_500:
        return f"{amount / 1e6:.3g}M"
    if amount >= 9_995:
        return f"{amount / 1e3:.3g}k"
    return f"{amount:.0f}" if amount >= 100 else f"{amount:.3g}"


def cost_table(comparison: Comparison) -> Rows:
    """Return the table of how many times less each group spent to the target; empty without a comparison."""
    others = [group for group in comparison.groups if group.name != comparison.baseline]
    if comparison.baseline is None or not others:
        return []
    rows = [("group", *(cost.replace("_", " ") for cost in COSTS))]
    for group in others:
        ratios = [group.costs[cost].ratio if cost in group.costs else Ratio() for cost in COSTS]
        rows.append((group.name, *map(_ratio_in_words, ratios)))
    return rows


def conclusions(comparison: Comparison) -> list[str]:
    """Return sentences about the groups and the baseline, and about what is unknown."""
    words = []
    for group in comparison.groups:
        ratio, seeds = group.ratio, len(group.ratio.seeds)
        over = f"over {seeds} paired seed{'s' if seeds > 1 else ''}"
        if ratio.value is not None:
            words.append(
                f"{comparison.baseline} needed {ratio.bound + ' ' if ratio.bound else ''}{ratio.value:.1f} times as "
                f"many tasks as {group.name} to reach {comparison.target:.0%} on val, {over}{_interval_note(ratio)}."
            )
        elif comparison.baseline not in (None, group.name):
            words.append(f"{group.name} against {comparison.baseline}: {ratio.note}.")
        gap = group.difference
        if gap is not None and (sentence := _no_difference(group.name, str(comparison.baseline), gap)):
            words.append(sentence)
        shot = group.zero_shot
        if shot is not None and shot.baseline is not None and group.name != comparison.baseline:
            words.append(
                f"On {shot.split} after {shot.tasks} tasks: {group.name} {shot.success:.0%}, "
                f"{comparison.baseline} {shot.baseline:.0%}."
            )
        link = group.correlation
        if link is not None and link.with_gain is not None:
            success = "-" if link.with_success is None else f"{link.with_success:+.2f}"
            words.append(
                f"{group.name}: {link.accuracy} correlates {link.with_gain:+.2f} with the gain of the next "
                f"{link.steps} steps and {success} with success after them (n = {link.n})."
            )
    return words


def _no_difference(name: str, baseline: str, gap: Difference) -> str:
    """Return a sentence if the two cannot be distinguished; "" if they can, or with too few seeds."""
    if len(gap.points.by_seed) < FEWEST_SEEDS:
        return ""
    if gap.points.interval is None:
        same = not any(gap.points.by_seed.values())
        return f"{name} equals {baseline} exactly on val after {gap.tasks} tasks, for every seed." if same else ""
    # A t-interval may exceed the possible range.
    low, high = max(gap.points.interval[0], -1.0), min(gap.points.interval[1], 1.0)
    if low > 0 or high < 0:
        return ""
    return (
        f"{name} cannot be distinguished from {baseline} on val after {gap.tasks} tasks: "
        f"{100 * gap.points.mean:+.1f} points ("
        f"{CONFIDENCE:.0%}: {100 * low:+.1f} to {100 * high:+.1f})."
    )


def _ratio_in_words(ratio: Ratio) -> str:
    value = "-" if ratio.value is None else f"{SIGNS[ratio.bound]}{ratio.value:.1f}"
    return value if ratio.interval is None else f"{value} ({interval_in_words(ratio.interval)})"


def interval_in_words(interval: tuple[float | None, float | None]) -> str:
    """Return an interval as text; None is an unknown side.

    >>> interval_in_words((None, 0.3))
    'below 0.3'
    """
    low, high = interval
    if high is None:
        return f"above {low:.1f}"
    return f"below {high:.1f}" if low is None else f"{low:.1f} to {high:.1f}"


def _interval_note(ratio: Ratio) -> str:
    if ratio.interval is not None:
        return f" ({CONFIDENCE:.0%}: {interval_in_words(ratio.interval)})"
    if len(ratio.seeds) == 1:
        return "; one seed has no interval"
    if ratio.censored:
        return "; with runs that never reached the target, fewer than five seeds have no interval"
    return "; all seeds agree to the evaluation, so their spread is unknown"
