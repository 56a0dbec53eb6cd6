"""Who predicts the replies of look-ahead: a row for each `lookahead_source`.

What others must know of a predictor is a question to its row. The predictors themselves: `lfo.play.predictors`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

SourceName = Literal["world_model", "memory_first", "truth", "shuffled", "memory"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    sentence: str  # in a model card
    spoken: str = ""  # in the name of a group on the page
    is_learned: bool = False  # the world model that the run trains answers, at least in the end
    remembers: bool = False  # real replies of earlier rollouts answer, at least at first
    is_control: bool = False  # shows what is possible and not what was learned; needs the environment's own tasks
    is_true: bool = False  # its replies are the real ones
    needs_whole_step: bool = False  # in one process: all rollouts of a step


SOURCES: Mapping[SourceName, Source] = {
    "world_model": Source(sentence="The world model predicts the replies", is_learned=True),
    "memory_first": Source(
        sentence="A memory of real replies predicts, until the world model predicts as well",
        spoken="look-ahead from a memory first",
        is_learned=True,
        remembers=True,
        needs_whole_step=True,
    ),
    "memory": Source(
        sentence="A memory of real replies predicts",
        spoken="look-ahead from a plain memory",
        remembers=True,
        needs_whole_step=True,
    ),
    "truth": Source(
        sentence="The environment tells its real replies, as a control",
        spoken="true look-ahead",
        is_control=True,
        is_true=True,
    ),
    "shuffled": Source(
        sentence="The world model predicts the replies to another task, as a control",
        spoken="shuffled look-ahead",
        is_control=True,
        needs_whole_step=True,
    ),
}
