"""The trials of `scripts/break_it.py`, one module for each kind of damage.

A module has one function, `trials(folder, *, short)`, which yields an `Outcome` for each trial as it ends. `short`
selects the few trials that the test suite runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """`Outcome(trial="state.json cut to 0 bytes, two checkpoints", held=True, said="lfo: ...")`"""

    trial: str
    held: bool  # whether the product behaved as it promises
    said: str = ""  # its sentence, or what went wrong
    figures: Mapping[str, float] = field(default_factory=dict)  # what was measured: seconds, megabytes, ...
