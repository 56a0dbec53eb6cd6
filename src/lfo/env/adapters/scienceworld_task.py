"""Tasks of ScienceWorld: `env=scienceworld:boil`. Needs Java.

Each variation of a ScienceWorld task is one of our tasks, in ScienceWorld's own splits. The only tool is `act(action)`;
the opening lists the forms of actions. The reward is the score of 0 to 100 as 0 to 1; a failed task gives 0.
`env_args.simplifications=easy` passes ScienceWorld's simplifications. All rollouts share one Java process.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from scienceworld import ScienceWorldEnv  # pyright: ignore[reportMissingImports]

from lfo.env.adapters.foreign import ForeignEnvironment, Reaction, one_text_tool, system_message
from lfo.errors import ConfigError
from lfo.types import Message, ToolCall

WHOLE = 100.0  # the score of a finished task
_TOOL = one_text_tool("Do one thing in the world.", "such as: look around; open door to kitchen")


@dataclass(frozen=True, slots=True)
class Variation:
    id: str
    number: int


class LibraryEnvironment(ForeignEnvironment):
    word = "scienceworld"

    def __init__(
        self,
        name: str,
        *,
        max_mistakes: int = 8,
        reward_range: Sequence[float] | None = (0.0, WHOLE),
        simplifications: str = "",
    ) -> None:
        super().__init__(name, max_mistakes=max_mistakes, reward_range=reward_range)
        if shutil.which("java") is None:
            raise ConfigError(f"env={self.spec} needs Java, which is not installed: Debian has default-jre-headless")
        known = _java().get_task_names()
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.0)[0]
            raise ConfigError(f"env={self.spec}: ScienceWorld has no task {name}; the nearest is {near}")
        self._simplifications = simplifications

    def tools(self) -> list[dict[str, Any]]:
        return _TOOL

    def splits(self) -> Mapping[str, Sequence[Variation]]:
        return _splits(self.name)

    def open(self, task: Variation) -> Sequence[Message]:
        self._world = _world(_java())
        self._world.load(self.name, task.number, self._simplifications)
        observation, _ = self._world.reset()
        forms = ", ".join(self._world.get_possible_actions())
        goal = self._world.get_task_description()
        rules = f"Forms of actions, OBJ being any object in sight: {forms}"
        return system_message(self.name, rules), Message(role="user", content=f"{goal}\n\n{observation}")

    def act(self, call: ToolCall) -> Reaction:
        observation, reward, done, _ = self._world.step(call.arguments["action"])
        return Reaction(observation=observation, reward=float(reward), done=bool(done))

    def moves(self) -> list[ToolCall]:
        valid = self._world.get_valid_action_object_combinations()
        return [ToolCall(name="act", arguments={"action": action}) for action in sorted(valid)]


@functools.cache
def _splits(task: str) -> dict[str, list[Variation]]:
    world = _world(_java())
    world.load(task, 0, "")
    numbers = {
        "train": world.get_variations_train(),
        "val": world.get_variations_dev(),
        "test": world.get_variations_test(),
    }
    return {split: [Variation(f"{split}-{number}", number) for number in each] for split, each in numbers.items()}


_lock = threading.Lock()
_started: list[Any] = []


def _java() -> Any:
    """Return the shared Java process; start it on first use."""
    with _lock:
        if not _started:
            _started.append(ScienceWorldEnv(""))
            atexit.register(_stop)
        return _started[0]


def _world(java: Any) -> Any:
    """Return a separate world in the shared Java process; the library would start a process for each."""
    world = _World.__new__(_World)
    world.__dict__.update(java.__dict__)
    world.server = java._gateway.jvm.scienceworld.runtime.pythonapi.PythonInterface()
    world.lastStepScore = 0
    world.clear_run_histories()
    return world


class _World(ScienceWorldEnv):
    def __del__(self) -> None:
        """Keep the process running, because other worlds use it."""


def _stop() -> None:
    for each in _started:
        each.close()
    _started.clear()
