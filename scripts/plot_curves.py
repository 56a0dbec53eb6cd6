"""Draw the learning curves of runs as one SVG: success on val against tasks seen, a thin line a seed, a thick mean.

python scripts/plot_curves.py docs/level2.svg "dual-LoRA=results/level2/dual-*" "plain DAPO=results/level2/dapo-*"
"""

from __future__ import annotations

import glob
import sys
from pathlib import Path
from statistics import fmean

from lfo.env.ceiling import mean_ceiling
from lfo.env.phone_calls import PhoneCalls
from lfo.rundir import read_metrics

KEY = "eval/val/success"
COLOURS = ("#1b6ca8", "#c2571a", "#5b8c3a", "#7a4e9c")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 400, 64, 150, 48, 52
Curve = list[tuple[int, float]]


def curve(run: str) -> Curve:
    return [(row["tasks_seen"], row[KEY]) for row in read_metrics(run) if KEY in row]


def mean_curve(curves: list[Curve]) -> Curve:
    """The mean over runs, as far as all of them go."""
    shared = set.intersection(*({tasks for tasks, _ in each} for each in curves))
    return [(tasks, fmean(dict(each)[tasks] for each in curves)) for tasks in sorted(shared)]


def main(output: str, groups: list[str]) -> None:
    named = [
        (name, [curve(run) for run in sorted(glob.glob(pattern))])
        for name, pattern in (g.split("=", 1) for g in groups)
    ]
    ceiling = mean_ceiling(PhoneCalls(levels=(2,)).tasks("val"))
    longest = max(tasks for _, curves in named for each in curves for tasks, _ in each)

    def x(tasks: float) -> float:
        return LEFT + tasks / longest * (WIDTH - LEFT - RIGHT)

    def y(success: float) -> float:
        return HEIGHT - BOTTOM - success * (HEIGHT - TOP - BOTTOM)

    def line(points: Curve, colour: str, width: float, opacity: float) -> str:
        path = " ".join(f"{x(tasks):.1f},{y(success):.1f}" for tasks, success in points)
        return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" opacity="{opacity}"/>'

    def text(
        left: float, top: float, words: str, *, anchor: str = "start", colour: str = "#444", size: int = 13
    ) -> str:
        place = f'x="{left:.1f}" y="{top:.1f}" text-anchor="{anchor}"'
        return f'<text {place} fill="{colour}" font-size="{size}">{words}</text>'

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        text(LEFT, 24, "Success on new tasks of known companies, level 2", colour="#111", size=16),
        text((x(0) + x(longest)) / 2, HEIGHT - 12, "tasks seen in training", anchor="middle"),
    ]
    for percent in range(0, 101, 20):
        parts.append(line([(0, percent / 100), (longest, percent / 100)], "#ddd", 1, 1))
        parts.append(text(LEFT - 8, y(percent / 100) + 4, f"{percent} %", anchor="end"))
    for tasks in range(0, longest + 1, 200):
        parts.append(text(x(tasks), HEIGHT - BOTTOM + 18, str(tasks), anchor="middle"))
    parts.append(line([(0, ceiling), (longest, ceiling)], "#999", 1, 1).replace("/>", ' stroke-dasharray="5 4"/>'))
    parts.append(text(x(longest) + 8, y(ceiling) + 4, "information ceiling", colour="#777", size=12))
    for (name, curves), colour in zip(named, COLOURS, strict=False):
        parts += [line(each, colour, 1.2, 0.45) for each in curves]
        mean = mean_curve(curves)
        parts.append(line(mean, colour, 3, 1))
        parts.append(text(x(mean[-1][0]) + 8, y(mean[-1][1]) + 4, f"{name} ({len(curves)} seeds)", colour=colour))
    Path(output).write_text("\n".join([*parts, "</svg>"]) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
