"""Which calls are worth imagining where an environment names none: those that end tasks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from lfo.config import RunConfig
from lfo.env.interface import Environment, predicted_tools
from lfo.types import Rollout, StopReason

FILE = "ending_tools.json"  # beside the adapters
OFTEN = 0.1  # share of a tool's calls that end a task; a look-up does, too, where it is the last mistake allowed


def learns_tools(environment: Environment, config: RunConfig) -> bool:
    """Whether a run must find out which calls may be imagined: neither its settings nor its environment say so."""
    unnamed = predicted_tools(environment, config.world_model.predict) is None
    # With logs nothing is rolled out, so nothing would ever be found.
    return config.lookahead == "policy" and unnamed and config.world_model.from_logs is None


class EndingTools:
    """The tools whose calls often ended a task of training so far; a container of names.

    A look-up costs nothing, so it is made for real, and an expected reply in its place would only mislead. What cannot
    be taken back is worth imagining first. Where tasks end, but never with a call, or there is one tool, all calls are.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()  # under "": ends without a call

    def __contains__(self, name: object) -> bool:
        return self.names is None or name in self.names

    @property
    def names(self) -> list[str] | None:
        """None: all."""
        often = sorted(name for name, ends in self._ends.items() if name and ends >= OFTEN * self._calls[name])
        tools = self._calls.keys() - {""}
        return None if not often and (self._ends[""] or len(tools) == 1) else often

    def hear(self, rollouts: Iterable[Rollout]) -> None:
        for rollout in rollouts:
            made = [turn.call.name if turn.call else "" for turn in rollout.turns if not turn.predicted]
            self._calls.update(made)
            if made and rollout.stop == StopReason.DONE:
                self._ends[made[-1]] += 1

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"calls": self._calls, "ends": self._ends}), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Read what `save` wrote. An older run has no such file: it could imagine every call."""
        seen = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"calls": {}, "ends": {"": 1}}
        self._calls, self._ends = Counter(seen["calls"]), Counter(seen["ends"])
