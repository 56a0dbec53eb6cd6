"""Find the tools whose calls end tasks: these are worth imagining if the environment names no tools itself."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from lfo.checkpoints import reading
from lfo.config import RunConfig
from lfo.env.interface import Environment, EnvironmentFactory, imagined_tools
from lfo.env.random_play import play_randomly
from lfo.errors import EnvironmentFailed
from lfo.play.runner import RunnerConfig
from lfo.types import Rollout, StopReason

FILE = "ending_tools.json"  # next to the adapters
GUESSES = 4  # random rollouts of each task
OFTEN = 0.1  # least share of a tool's calls that end a task; a look-up ends a task only as the last allowed mistake


def learns_tools(environment: Environment, config: RunConfig) -> bool:
    """Whether a run must find out which calls may be imagined, because neither config nor environment names them."""
    unnamed = imagined_tools(environment, config.world_model.predict) is None
    # A run from logs rolls nothing out, so it would never find a tool.
    return config.lookahead == "policy" and unnamed and config.world_model.from_logs is None


def guess_ending_tools(make_environment: EnvironmentFactory, tasks: Sequence[Any], config: RunConfig) -> EndingTools:
    """Find the tools by random play of these tasks, for the time before the policy has made a call."""
    found, runner = EndingTools(), RunnerConfig.of_run(config)

    def play(task: Any, seed: int) -> tuple[list[str], bool]:
        limits = {"max_turns": runner.max_turns, "most_chars": runner.most_chars}
        return play_randomly(make_environment(), task, seed=seed, **limits)

    games = [partial(play, task, seed) for task in tasks for seed in range(GUESSES)]
    for outcome in runner.call_all(games, what="random play"):
        if not isinstance(outcome, EnvironmentFailed):  # a failure is reported when the policy meets it
            found.count(outcome[0], ended=outcome[1])
    return found


class EndingTools:
    """The names of the tools whose calls often ended a training task so far.

    A look-up costs nothing, so the policy should make it for real; a predicted reply would only mislead it. A call that
    ends the task cannot be undone, so it is worth imagining. If there is no such tool, nothing may be imagined, unless
    tasks end without a call or there is only one tool: then all tools may be.
    """

    def __init__(self) -> None:
        self._calls: Counter[str] = Counter()
        self._ends: Counter[str] = Counter()  # key "": tasks that ended without a call
        self.first_guess: EndingTools | None = None  # what answers until the policy has made a call

    def __contains__(self, name: object) -> bool:
        return self.names is None or name in self.names

    @property
    def names(self) -> list[str] | None:
        """The sorted names; None: all tools."""
        if self.first_guess is not None and not self._calls:
            return self.first_guess.names
        often = sorted(name for name, ends in self._ends.items() if name and ends >= OFTEN * self._calls[name])
        tools = self._calls.keys() - {""}
        return None if not often and (self._ends[""] or len(tools) == 1) else often

    def observe(self, rollouts: Iterable[Rollout]) -> None:
        """Count the calls and the ends of these rollouts."""
        for rollout in rollouts:
            made = [turn.call.name if turn.call else "" for turn in rollout.turns if not turn.predicted]
            self.count(made, ended=rollout.stop == StopReason.DONE)

    def count(self, made: Sequence[str], *, ended: bool) -> None:
        """Count the tools that one rollout called, "" for a message without a call, and whether its task ended."""
        self._calls.update(made)
        if made and ended:
            self._ends[made[-1]] += 1

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"calls": self._calls, "ends": self._ends}), encoding="utf-8")

    def load(self, path: Path) -> None:
        """Load what `save` wrote. A run from before this file could imagine every call."""
        with reading(path):
            seen = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {"calls": {}, "ends": {"": 1}}
            self._calls, self._ends = Counter(seen["calls"]), Counter(seen["ends"])
