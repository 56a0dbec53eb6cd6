"""The warnings of training that send to `lfo advise` and are no trouble any more: each is explained too."""

from __future__ import annotations

from collections.abc import Sequence

from lfo.runs.advice import EXPLAINED_BY, MIN_STEPS, SOLVED, Trouble
from lfo.runs.costs import MetricsRows

ASKS = "run lfo advise"  # how such warnings end


def passed_warnings(rows: MetricsRows, troubles: Sequence[Trouble]) -> list[str]:
    """Return a sentence for each warning of a run that says "run lfo advise" and is no trouble now: why it is none."""
    told = {trouble.name for trouble in troubles}
    steps: dict[str, list[int]] = {}
    for row in rows:
        for warning in row.get("warnings", ()):
            if isinstance(warning, str) and warning.endswith(ASKS):
                steps.setdefault(warning.rpartition(";")[0], []).append(row["step"])
    sentences = []
    for warning, warned in steps.items():
        name = "gradient imbalance" if warning.startswith("gradient_ratio") else "success lost"
        causes = sorted(told & EXPLAINED_BY.get(name, set()))
        if name in told:
            continue
        if causes:
            why = f"explained by: {', '.join(causes)}"
        elif rows[-1]["step"] < MIN_STEPS:
            why = f"too early to tell, at least {MIN_STEPS} steps are needed"
        else:
            why = (
                f"single steps are noisy: the last third of the run does not show it, or success is {SOLVED:.0%} anyway"
            )
        sentences.append(
            f"warned at {len(warned)} of {rows[-1]['step']} steps, last at step {warned[-1]}: {warning} ({why})"
        )
    return sentences
