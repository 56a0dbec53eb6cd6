"""Draw the learning curves of runs as one SVG: success on val against tasks seen, a thin line a seed, a thick mean.

python scripts/plot_curves.py docs/level2.svg "dual-LoRA=results/level2/dual-*" "plain DAPO=results/level2/dapo-*"
"""

from __future__ import annotations

import glob
import sys
from pathlib import Path

from lfo.env.ceiling import mean_ceiling
from lfo.env.phone_calls import PhoneCalls
from lfo.evaluation.sample_efficiency import curve
from lfo.report.picture import draw_curves
from lfo.rundir import read_metrics


def main(output: str, groups: list[str]) -> None:
    named = {
        name: [curve(read_metrics(run)) for run in sorted(glob.glob(pattern))]
        for name, pattern in (group.split("=", 1) for group in groups)
    }
    ceiling = mean_ceiling(PhoneCalls(levels=(2,)).tasks("val"))
    title = "Success on new tasks of known companies, level 2"
    Path(output).write_text(draw_curves(named, title=title, ceiling=ceiling), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
