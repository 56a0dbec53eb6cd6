"""ECHO (arXiv 2605.24517): an observation loss on the policy's own samples; one adapter carries both losses.

Observations have three sources, and each has a weight: replies to calls that the world model predicts, answers to
messages without a call (users, above all), and all others. When it is trained, and what is shown to whom, is as in
`dual_lora`, which comes before.
"""

from __future__ import annotations

from dataclasses import replace

from lfo.config import RunConfig
from lfo.types import Observed, Situation, StepPlan


def adapt(plan: StepPlan, config: RunConfig, situation: Situation) -> StepPlan:
    """Return the plan with an observation loss on the samples of the policy, in place of those of the world model."""
    world = config.world_model
    tools = situation.predicted_tools
    return replace(plan, observed=Observed(tools=tools, user_turns=world.user_turns, other=world.other_replies))
