"""What a step does: one file an algorithm. Their names and settings: `lfo.config.algorithms`.

    plan_of(config, step, Situation(success_tasks=30)) -> StepPlan

The plan follows from the settings of a run, not from `algo=`, so runs may combine algorithms: feedback with look-ahead,
imitation with either. Every plan begins as that of plain DAPO; each algorithm changes what its settings ask for, in the
order below. Pure functions: a resumed run makes the same plans.
"""

from __future__ import annotations

from dataclasses import replace

from lfo.algorithms import dapo, dual_lora, feedback, internalise
from lfo.algorithms.situation import Situation
from lfo.config import RunConfig
from lfo.types import StepPlan

BEGINNING = Situation()


def plan_of(config: RunConfig, step: int, situation: Situation = BEGINNING) -> StepPlan:
    """Return what a step does; `situation` is that of the run when the step begins."""
    plan = dapo.plan(config, step)
    plan = dual_lora.adapt(plan, config)
    plan = feedback.adapt(plan, config)
    plan = internalise.adapt(plan, config, situation)
    if plan.reinforces or config.policy.frozen:
        return plan
    return replace(plan, draws=min(1, plan.draws), selects=False)  # nobody learns from another draw
