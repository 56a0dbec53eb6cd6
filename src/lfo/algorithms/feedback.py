"""Feedback: a part of each group is shown a real reply that another rollout of its task has received.

What succeeds with it can be imitated without it. It needs no world model. How exchanges are chosen and shown:
`lfo.play.feedback`.
"""

from __future__ import annotations

from dataclasses import replace

from lfo.config import RunConfig
from lfo.types import Situation, StepPlan


def adapt(plan: StepPlan, config: RunConfig, situation: Situation) -> StepPlan:
    """Return the plan with a second wave."""
    return replace(plan, first_wave=config.first_wave, feedback=config.feedback)
