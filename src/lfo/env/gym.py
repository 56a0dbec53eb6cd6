"""Our environments with Gymnasium's API: text in, text out.

    import gymnasium
    import lfo.env.gym  # registers the names; Gymnasium 1.x does not load plug-ins by itself

    game = gymnasium.make("lfo/OracleCodes-v0", split="val", max_turns=8)
    observation, info = game.reset(seed=3)
    observation, reward, terminated, truncated, info = game.step("<tool_call>...</tool_call>")

`gymnasium.make("lfo.env.gym:lfo/PhoneCalls-v0")` imports and makes in one call. Other options than those of
`TextEnvironment` go to the environment. Training does not use this module: it calls `Environment` directly.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import gymnasium
from gymnasium import spaces

from lfo.env.by_name import environment_named
from lfo.env.interface import Environment, EnvironmentFactory
from lfo.errors import UsageError
from lfo.protocol.hermes import MAX_MESSAGE_CHARS, one_by_one
from lfo.types import StepResult

MAX_TEXT_CHARS = MAX_MESSAGE_CHARS
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"
_BLOCKS = (range(0x0530), range(0x2010, 0x2045), range(0x20A0, 0x20C0))  # Latin, Greek, Cyrillic; signs
CHARSET = frozenset(
    character for block in _BLOCKS for character in map(chr, block) if character.isprintable() or character in "\n\t"
) | {_UNKNOWN}

_ENVIRONMENTS = {
    "lfo/PhoneCalls-v0": "lfo.env.worlds.phone.environment:PhoneCalls",
    "lfo/OracleCodes-v0": "lfo.env.worlds.oracle:OracleCodes",
}


class TextEnvironment(gymnasium.Env[str, str]):
    """Any `Environment` as a Gymnasium environment: an action is a message, an observation is the reply.

    `reset` draws a task of the split by its seed, or takes the one that `options={"task_id": ..., "split": ...}`
    names. The calls of a message are made one by one, as in training: the observation has all replies, the reward is
    their sum, and `info` is that of the last. A rollout is terminated when the environment is done and truncated after
    `max_turns` messages.
    """

    def __init__(self, factory: EnvironmentFactory, *, split: str = "train", max_turns: int = 16) -> None:
        if max_turns < 1:
            raise UsageError("max_turns must be at least 1.")
        self.observation_space = spaces.Text(MAX_TEXT_CHARS, min_length=0, charset=CHARSET)
        self.action_space = spaces.Text(MAX_TEXT_CHARS, min_length=0, charset=CHARSET)
        self.factory = factory
        self.split = split
        self.max_turns = max_turns
        self.environment: Environment | None = None
        self._tasks: dict[str, Sequence[Any]] = {}  # cached: drawing a split may be slow
        self.turns = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        options = dict(options or {})
        split = options.pop("split", self.split)
        task_id = options.pop("task_id", None)
        if options:
            raise UsageError(f"reset() knows the options split and task_id, not {', '.join(map(str, options))}.")
        environment = self.factory()
        if split not in self._tasks:
            self._tasks[split] = environment.tasks(split)
        tasks = self._tasks[split]
        if task_id is None:
            task = tasks[int(self.np_random.integers(len(tasks)))]
        else:
            task = next((task for task in tasks if task.id == task_id), None)
            if task is None:
                raise UsageError(f"Split {split} has no task {task_id}.")
        messages = environment.reset(task)
        self.environment, self.turns = environment, 0
        info = {
            "task_id": task.id,
            "split": split,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "tools": list(environment.tools()),
        }
        return _into_space("\n\n".join(message.content for message in messages)), info

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        if self.environment is None:
            raise UsageError("step() needs a reset() before it.")
        results: list[StepResult] = []
        for message in one_by_one(action):
            results.append(self.environment.step(message))
            if results[-1].done:
                break
        done, info = results[-1].done, dict(results[-1].info)
        self.turns += 1
        truncated = not done and self.turns >= self.max_turns
        if done or truncated:
            self.environment = None
        observation = "\n\n".join(result.observation for result in results)
        return _into_space(observation), sum(result.reward for result in results), done, truncated, info


def make(factory: str, *, split: str = "train", max_turns: int = 16, **options: Any) -> TextEnvironment:
    """Return a `TextEnvironment` of the class at `package.module:Class`; `options` go to the class."""
    made_by = environment_named(factory, setting="factory")  # the config of a run may name it too: env_args.factory
    return TextEnvironment(functools.partial(made_by, **options), split=split, max_turns=max_turns)


def register() -> None:
    """Register the names with Gymnasium; called on import."""
    for name, factory in _ENVIRONMENTS.items():
        if name not in gymnasium.registry:
            gymnasium.register(name, entry_point="lfo.env.gym:make", kwargs={"factory": factory})


def _into_space(text: str) -> str:
    if not CHARSET.issuperset(text):
        text = "".join(character if character in CHARSET else _UNKNOWN for character in text)
    return text[:MAX_TEXT_CHARS]


register()
