#!/usr/bin/env python3
"""Print a short table of runs: scripts/gpu/table.py RUN ...

It shows medians over all steps but the first, the success of the last evaluation, and the largest and the mean log-prob
gap between servers and trainer; below, for each run that did not finish, the last line of its log (RUN.log).
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import median
from typing import Any

from lfo.errors import LfoError
from lfo.runs.folder import read_metrics

COLUMNS = {
    "rollout s": "seconds/rollout",
    "tokens/s": "tokens_per_second",
    "update s": "seconds/update",
    "sync s": "seconds/sync",
    "GiB rest": "gpu_gib/rest",
    "GiB update": "gpu_gib/update",
    "gap": "logprob_gap",
    "gap mean": "logprob_gap_mean",
}


def figures(rows: list[dict[str, Any]]) -> list[str]:
    """Return the columns of one run, with a dash for missing values."""
    steps = [row for row in rows if "seconds/rollout" in row]
    warm = steps[1:] or steps
    found = []
    for words, name in COLUMNS.items():
        values = [row[name] for row in warm if name in row]
        value = (max if words == "gap" else median)(values) if values else None
        found.append("-" if value is None else f"{value:.4f}" if "gap" in words else f"{value:,.2f}")
    first = f"{steps[0]['seconds/rollout']:.1f}" if steps else "-"
    success = [row["eval/val/success"] for row in rows if "eval/val/success" in row]
    return [str(len(steps)), first, *found, f"{success[-1]:.1%}" if success else "-"]


def last_words(run: Path) -> str:
    """What a run that did not finish said last."""
    log = run.with_name(f"{run.name}.log")
    lines = log.read_text(errors="replace").split("\n") if log.exists() else []
    return next((line.strip() for line in reversed(lines) if line.strip()), "nothing")


def main() -> None:
    lines = [["run", "steps", "first rollout s", *COLUMNS, "val"]]
    for run in map(Path, sys.argv[1:]):
        try:
            lines.append([run.name, *figures(read_metrics(run))])
        except (LfoError, OSError, ValueError):  # none, or a line that was cut off
            lines.append([run.name, *"-" * (len(lines[0]) - 1)])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print(
            "  ".join(
                cell.rjust(width) if index else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
        )
    for run in map(Path, sys.argv[1:]):
        if not (run / "adapters").is_dir():
            print(f"{run.name} did not finish: {last_words(run)}")


if __name__ == "__main__":
    main()
