"""What `algo=` names: one row an algorithm. What it does in a step is a file of `lfo.algorithms`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    settings: Mapping[str, Any]  # what `algo=` stands for, whatever the preset says
    has_world_model: bool = True


_DAPO: Mapping[str, Any] = {
    "lookahead": "off",
    "world_model.weight": 0.0,
    "world_model.replay": False,
    "exploration.blind_share": 0.0,
}

ALGORITHMS: Mapping[str, Algorithm] = {
    "dual-lora": Algorithm(settings={}),
    # What look-ahead achieves becomes part of the policy's weights. Imitation goes on to the end: after
    # 120 steps of it, 40 more beat 40 of DAPO on five seeds, 90.0 against 88.5 % on val.
    "internalise": Algorithm(
        settings={
            "lookahead": "policy",
            "internalise.rows": 8,
            "steps": 160,
            "imagine.drafts": 4,  # the first draft of the base misses the informative question in 10-20 % of the tasks
        }
    ),
    # Half of each group is shown a real reply of the other half; what succeeds is imitated without it.
    "feedback": Algorithm(settings={**_DAPO, "feedback": "own", "internalise.rows": 8}, has_world_model=False),
    # ECHO (arXiv 2605.24517): one adapter, and an observation loss on the policy's own rows. A weight of 0.2 collapsed.
    "echo": Algorithm(
        settings={
            **_DAPO,
            "coupling": "shared",
            "world_model.input": "inline",
            "world_model.weight": 0.05,
            "world_model.predict": "all",
            "world_model.user_turns": 1.0,
            "world_model.other_replies": 1.0,
        }
    ),
    "dapo": Algorithm(settings=_DAPO, has_world_model=False),
}
