"""Draw the learning curves of runs as one SVG: success on val by tasks seen, thin lines for seeds, a thick mean.

python research/plot_curves.py docs/level2.svg "with look-ahead=research/results/level2-preset/dual-*" \
    "look-ahead, policy frozen=research/results/level2-preset/frozen-*" \
    "policy alone, blind=research/results/internalise/lookahead-*" \
    "feedback instead=research/results/internalise/feedback-*" \
    "plain DAPO=research/results/level2-groups-64/dapo-*"

A group whose name ends in "blind" shows its success without look-ahead.
"""

from __future__ import annotations

import glob
import sys
from pathlib import Path

from lfo.report.picture import draw_curves
from lfo.runs.reading import read_run
from lfo.runs.sample_efficiency import VAL, curve

BLIND = f"{VAL}_blind"
MODELS = {"tiny": "the embedded base", "smollm2-135m-warm": "SmolLM2-135M"}


def main(output: str, groups: list[str]) -> None:
    named = {
        name: [read_run(run) for run in sorted(glob.glob(pattern))]
        for name, pattern in (group.split("=", 1) for group in groups)
    }
    for name, runs in named.items():
        if not runs:
            sys.exit(f"no run matches the pattern of {name}")
        for run in runs:
            if run.problem or run.data is None:
                sys.exit(run.problem or f"the tasks of the evaluation of {run.path} are unknown")
    first = next(iter(named.values()))[0]
    assert first.config is not None
    assert first.data is not None
    levels = ", ".join(map(str, first.data["levels"]))
    title = f"Success on new tasks of known companies, level{'s' * (', ' in levels)} {levels}"
    title += f", {MODELS.get(first.config.model, first.config.model)}"
    keys = {name: BLIND if name.endswith("blind") else VAL for name in named}
    curves = {name: [curve(run.rows, keys[name]) for run in runs] for name, runs in named.items()}
    picture = draw_curves(curves, title=title, ceiling=first.data["splits"]["val"]["ceiling"])
    Path(output).write_text(picture, encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
