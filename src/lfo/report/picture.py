"""Learning curves as one SVG file: success on val by tasks seen, with thin lines for seeds and a thick mean.

For READMEs and folders; the report page draws its own interactive charts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean

Curve = Mapping[int, float]  # tasks seen -> success

COLOURS = ("#1b6ca8", "#c2571a", "#5b8c3a", "#7a4e9c", "#b03060", "#8a6d1a", "#2a8c86", "#555555")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 64, 150, 48, 52
LINE = 16  # between two labels


def draw_curves(groups: Mapping[str, Sequence[Curve]], *, title: str, ceiling: float | None = None) -> str:
    """Return the SVG of named groups of runs, with one curve for each seed."""
    named = {name: [dict(sorted(each.items())) for each in curves if each] for name, curves in groups.items()}
    named = {name: curves for name, curves in named.items() if curves}
    longest = max((max(each) for curves in named.values() for each in curves), default=0) or 1

    def x(tasks: float) -> float:
        return LEFT + tasks / longest * (WIDTH - LEFT - RIGHT)

    def y(success: float) -> float:
        return HEIGHT - BOTTOM - success * (HEIGHT - TOP - BOTTOM)

    def line(points: Curve, colour: str, width: float, opacity: float) -> str:
        path = " ".join(f"{x(tasks):.1f},{y(success):.1f}" for tasks, success in points.items())
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"/>'

    def text(
        left: float, top: float, words: str, *, anchor: str = "start", colour: str = "#444", size: int = 13
    ) -> str:
        position = f'x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}"'
        halo = 'paint-order="stroke" stroke="white" stroke-width="4"'  # readable over curves too
        return f'<text {position} {halo} fill="{colour}" font-size="{size}">{escape(words)}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 24, title, colour="#111", size=16),
        text((x(0) + x(longest)) / 2, HEIGHT - 12, "tasks seen in training", anchor="middle"),
    ]
    for percent in range(0, 101, 20):
        parts.append(line({0: percent / 100, longest: percent / 100}, "#ddd", 1, 1))
        parts.append(text(LEFT - 8, y(percent / 100) + 4, f"{percent} %", anchor="end"))
    for tasks in range(0, longest + 1, _tick(longest)):
        parts.append(text(x(tasks), HEIGHT - BOTTOM + 18, str(tasks), anchor="middle"))
    if ceiling is not None:
        dashed = line({0: ceiling, longest: ceiling}, "#999", 1, 1).replace("/>", ' stroke-dasharray="5 4"/>')
        parts += [dashed, text(x(longest) + 8, y(ceiling) + 4, "information ceiling", colour="#777", size=12)]
    labels = []
    for index, (name, curves) in enumerate(named.items()):
        colour = COLOURS[index % len(COLOURS)]
        parts += [line(each, colour, 1.2, 0.45) for each in curves]
        mean = mean_curve(curves)
        parts.append(line(mean, colour, 3, 1))
        last = max(mean)
        seeds = f"{len(curves)} seed{'s' if len(curves) > 1 else ''}"
        labels.append((y(mean[last]) + 4, x(last) + 8, f"{name} ({seeds})", colour))
    labels.sort()
    tops = spread_out([top for top, *_ in labels], gap=LINE, last=y(0) + 4)
    parts += [text(left, top, words, colour=colour) for top, (_, left, words, colour) in zip(tops, labels, strict=True)]
    return "\n".join([*parts, "</svg>"]) + "\n"


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Return the mean over runs at common evaluations; the first run if there are none."""
    shared = set.intersection(*(set(each) for each in curves))
    return {tasks: fmean(each[tasks] for each in curves) for tasks in sorted(shared)} or curves[0]


def spread_out(positions: Sequence[float], *, gap: float, last: float) -> list[float]:
    """Move increasing positions apart by at least `gap`, then back so that none exceeds `last`.

    >>> spread_out([10, 12, 50], gap=5, last=100), spread_out([94, 98, 100], gap=5, last=100)
    ([10, 15, 50], [90, 95, 100])
    """
    apart = list(positions)
    for index in range(1, len(apart)):
        apart[index] = max(apart[index], apart[index - 1] + gap)
    for index in reversed(range(len(apart))):
        apart[index] = min(apart[index], last - gap * (len(apart) - 1 - index))
    return apart


def _tick(longest: int) -> int:
    """Return a round step that divides the axis into at most eight parts."""
    size = 1
    while True:
        for step in (size, 2 * size, 5 * size):
            if longest / step <= 8:
                return step
        size *= 10
