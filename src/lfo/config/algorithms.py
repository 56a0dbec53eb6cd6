"""What `algo=` names: one row an algorithm. What it does in a step is the file of its name in `lfo.algorithms`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lfo.config.knobs import RunConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class Algorithm:
    settings: Mapping[str, Any]  # what `algo=` stands for, whatever the preset says
    takes_part: Callable[[RunConfig], bool]  # whether a run has it, whatever its `algo=`: runs may combine algorithms
    has_world_model: bool = True
    local: Mapping[str, Any] = field(default_factory=dict)  # more settings, with engine=local


_DAPO: Mapping[str, Any] = {
    "lookahead": "off",
    "world_model.weight": 0.0,
    "world_model.replay": False,
    "exploration.blind_share": 0.0,
}

# Plans are made in this order: each algorithm changes what those before it have planned.
ALGORITHMS: Mapping[str, Algorithm] = {
    "dapo": Algorithm(settings=_DAPO, takes_part=lambda config: True, has_world_model=False),
    "dual-lora": Algorithm(settings={}, takes_part=lambda config: ALGORITHMS[config.algo].has_world_model),
    # One adapter, and an observation loss on the policy's own samples. A weight of 0.2 collapsed.
    "echo": Algorithm(
        settings={
            **_DAPO,
            "coupling": "shared",
            "world_model.input": "inline",
            "world_model.weight": 0.05,
            "world_model.predict": "all",
            "world_model.user_turns": 1.0,
            "world_model.other_replies": 1.0,
        },
        takes_part=lambda config: config.world_model.input == "inline",
    ),
    # Half of each group is shown a real reply of the other half; what succeeds is imitated without it.
    "feedback": Algorithm(
        settings={**_DAPO, "feedback": "own", "internalise.rows": 8},
        takes_part=lambda config: config.feedback != "off",
        has_world_model=False,
    ),
    # What look-ahead achieves becomes part of the policy's weights. Imitation goes on to the end: after
    # 120 steps of it, 40 more beat 40 of DAPO on five seeds, 90.0 against 88.5 % on val.
    "internalise": Algorithm(
        settings={
            "lookahead": "policy",
            "internalise.rows": 8,
            "steps": 160,
            "imagine.drafts": 4,  # the first draft of the base misses the informative question in 10-20 % of the tasks
        },
        takes_part=lambda config: config.internalise.rows > 0 or config.internalise.until > 0,
    ),
    # Nobody has to choose: what succeeds decides.
    "auto": Algorithm(
        settings={
            "lookahead": "policy",
            "feedback": "own",
            "internalise.rows": 8,
            "internalise.swap_names": 0.4,  # the policy alone ends 9 points higher on unseen companies (LOG 43)
            "imagine.drafts": 4,
        },
        local={"lookahead_source": "memory_first"},  # a memory needs all rollouts of a step in one process
        takes_part=lambda config: config.algo == "auto",
    ),
}
