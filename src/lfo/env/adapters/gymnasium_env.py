"""Environments of Gymnasium with text or small spaces: `env=gymnasium:FrozenLake-v1`.

The only tool is `act`: the action space becomes its schema, and observations become text. If an environment names the
legal actions (`action_mask`), each reply lists them. `env_args` go to `gymnasium.make`: `env_args.is_slippery=false`.
An ID may name the module that registers it, also one in the current folder: `env=gymnasium:my_module:Name-v0`.
With `env_args.render=true` the reply also contains the picture of `render_mode="ansi"`; it may show more than the
observation, so it is off by default.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from lfo.env.adapters.foreign import ForeignEnvironment, Reaction, SeededTask, one_tool, own_options, system_message
from lfo.env.by_name import find_modules_here, refuse_pythons_own
from lfo.errors import ConfigError, first_line
from lfo.protocol.hermes import Mistake
from lfo.types import Message, ToolCall

MOST_CHOICES = 64  # of an enumeration in a schema; above it, a range
MOST_NUMBERS = 64  # of an array that is written as text
_ABOUT_ACTIONS = re.compile(r"##\s*Action Space\s*\n(.+?)(?:\n\s*##|\Z)", re.DOTALL)


class LibraryEnvironment(ForeignEnvironment):
    word = "gymnasium"
    shares_global_state = True  # most do not, but this cannot be detected

    def __init__(self, name: str, *, render: bool = False, **options: Any) -> None:
        super().__init__(name, **own_options(options))
        find_modules_here()  # an ID may name its module, as in `module:Name-v0`
        if render:
            options["render_mode"] = "ansi"
        try:
            if ":" in name:
                refuse_pythons_own(name.partition(":")[0])
            self._game = gymnasium.make(name, **options)
        except Exception as error:
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise ConfigError(f"env={self.spec} cannot be made with env_args={options}: {reason}") from error
        self._render = render
        self._actions, self._observations = self._game.action_space, self._game.observation_space
        self._meanings = _meanings(self._game.unwrapped, self._actions)
        try:
            self._tools = self._tool()
            refuse_wordless(self._observations)
        except ValueError as error:
            raise ConfigError(f"env={self.spec} cannot be used as text: {error}") from error

    def tools(self) -> list[dict[str, Any]]:
        return self._tools

    def open(self, task: SeededTask) -> Sequence[Message]:
        observation, info = self._game.reset(seed=task.seed)
        return system_message(self.name), Message(role="user", content=self._words(observation, info))

    def act(self, call: ToolCall) -> Reaction:
        if isinstance(self._actions, spaces.Dict):
            action = value_of(self._actions, call.arguments)
        elif self._meanings:
            action = self._meanings[call.arguments["action"]]
        else:
            action = value_of(self._actions, call.arguments["action"])
        if not self._actions.contains(action):
            raise Mistake(f"The action is outside of the action space {self._actions}.")
        observation, reward, terminated, truncated, info = self._game.step(action)
        return Reaction(
            observation=self._words(observation, info), reward=float(reward), done=bool(terminated or truncated)
        )

    def moves(self) -> list[ToolCall]:
        names = {number: name for name, number in self._meanings.items()}
        return [ToolCall(name="act", arguments={"action": names.get(each, each)}) for each in self._legal]

    def _tool(self) -> list[dict[str, Any]]:
        about = _ABOUT_ACTIONS.search(type(self._game.unwrapped).__doc__ or "")
        meaning = " ".join(about[1].split())[:600] if about and not self._meanings else ""
        description = " ".join(filter(None, ["Take one action.", meaning]))
        if isinstance(self._actions, spaces.Dict):
            return one_tool("act", description, schema_of(self._actions))
        action = {"type": "string", "enum": list(self._meanings)} if self._meanings else schema_of(self._actions)
        return one_tool(
            "act", description, {"type": "object", "properties": {"action": action}, "required": ["action"]}
        )

    def _words(self, observation: Any, info: Mapping[str, Any]) -> str:
        words = words_of(self._observations, observation)
        self._legal: list[int] = []
        lines = [words if isinstance(self._observations, spaces.Text | spaces.Dict) else f"Observation: {words}"]
        if self._render:
            lines.append(_plain(str(self._game.render())))
        if (mask := info.get("action_mask")) is not None and isinstance(self._actions, spaces.Discrete):
            names = {number: name for name, number in self._meanings.items()}
            first = int(self._actions.start)
            self._legal = [first + index for index, allowed in enumerate(mask) if allowed]
            lines.append("Legal actions: " + ", ".join(names.get(each, str(each)) for each in self._legal))
        return "\n".join(lines)


def schema_of(space: spaces.Space[Any]) -> dict[str, Any]:
    """Return the JSON schema of an action space; raise a ValueError if a policy could not write its actions.

    >>> schema_of(spaces.Discrete(3))
    {'type': 'integer', 'enum': [0, 1, 2]}
    """
    if isinstance(space, spaces.Discrete):
        first, last = int(space.start), int(space.start + space.n - 1)
        if space.n <= MOST_CHOICES:
            return {"type": "integer", "enum": list(range(first, last + 1))}
        return {"type": "integer", "minimum": first, "maximum": last}
    if isinstance(space, spaces.Text):
        return {"type": "string", "maxLength": space.max_length}
    if isinstance(space, spaces.Dict):
        inner = {str(name): schema_of(part) for name, part in space.spaces.items()}
        return {"type": "object", "properties": inner, "required": list(inner)}
    if isinstance(space, spaces.Tuple):
        parts = [schema_of(part) for part in space.spaces]
        return {"type": "array", "prefixItems": parts, "minItems": len(parts), "maxItems": len(parts)}
    kind = "number" if isinstance(space, spaces.Box) and space.dtype.kind == "f" else "integer"
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        size = _size_in_words(space)
        low, high = _bounds(space)
        limits = {"minimum": low, "maximum": high} if np.isfinite([low, high]).all() else {}
        return {
            "type": "array",
            "items": {"type": kind, **limits},
            "minItems": size,
            "maxItems": size,
            "description": f"{size} numbers from {low:.4g} to {high:.4g}",
        }
    raise ValueError(f"the space {space} has no schema")


def value_of(space: spaces.Space[Any], argument: Any) -> Any:
    """Convert an argument of the policy to an action of the space."""
    if isinstance(space, spaces.Dict):
        return {name: value_of(part, argument[str(name)]) for name, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return tuple(value_of(part, each) for part, each in zip(space.spaces, argument, strict=True))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return np.array(argument, dtype=space.dtype).reshape(space.shape)
    return argument


def words_of(space: spaces.Space[Any], value: Any) -> str:
    """Return an observation as text.

    >>> words_of(spaces.Tuple((spaces.Discrete(32), spaces.Discrete(2))), (14, 0))
    '14, 0'
    """
    if isinstance(space, spaces.Dict):
        return "\n".join(f"{name}: {words_of(part, value[name])}" for name, part in space.spaces.items())
    if isinstance(space, spaces.Tuple):
        return ", ".join(words_of(part, each) for part, each in zip(space.spaces, value, strict=True))
    if isinstance(space, spaces.Text):
        return str(value)
    if isinstance(space, spaces.Discrete):
        return str(int(value))
    return ", ".join(f"{each:.4g}" for each in np.asarray(value).ravel().tolist())


def refuse_wordless(space: spaces.Space[Any]) -> None:
    """Raise a ValueError for observations that cannot be written as text."""
    for part in space.spaces.values() if isinstance(space, spaces.Dict) else getattr(space, "spaces", ()):
        refuse_wordless(part)
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        _size_in_words(space)
    elif not isinstance(space, spaces.Discrete | spaces.Text | spaces.Dict | spaces.Tuple):
        raise ValueError(f"observations of {space} cannot be written as text")


def _size_in_words(space: spaces.Space[Any]) -> int:
    size = int(np.prod(space.shape or ()))
    if size > MOST_NUMBERS:
        raise ValueError(f"{space} has {size} numbers, and at most {MOST_NUMBERS} can be written as text")
    return size


def _bounds(space: spaces.Space[Any]) -> tuple[Any, Any]:
    """Return the lowest and the highest number in a space."""
    if isinstance(space, spaces.Box):
        return space.low.min().item(), space.high.max().item()
    return 0, int(space.nvec.max()) - 1 if isinstance(space, spaces.MultiDiscrete) else 1


def _meanings(game: Any, actions: spaces.Space[Any]) -> dict[str, int]:
    """Return the names of the actions, if the environment names all of them in one of the two usual ways."""
    if not isinstance(actions, spaces.Discrete):
        return {}
    meanings, kinds = getattr(game, "get_action_meanings", None), getattr(game, "actions", None)
    named: dict[str, Any] = {}
    if callable(meanings):
        words: Any = meanings()
        named = {str(word).lower(): int(actions.start) + index for index, word in enumerate(words)}
    elif isinstance(kinds, type) and issubclass(kinds, Enum):
        named = {each.name: each.value for each in kinds}
    named = {name: int(number) for name, number in named.items() if actions.contains(number)}
    return named if len(set(named.values())) == actions.n else {}


def _plain(text: str) -> str:
    """Return a picture without terminal colours; coloured text is put in brackets."""
    return re.sub(r"\x1b\[[0-9;]*m", "", re.sub(r"\x1b\[41m(.)\x1b\[0m", r"[\1]", text)).strip("\n")
