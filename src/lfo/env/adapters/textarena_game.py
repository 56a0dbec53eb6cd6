"""Games of TextArena for one player: `env=textarena:FrozenLake-v0`.

The opening contains the rules and the first board; each reply is the next output of the game, without the policy's own
text. The only tool is `act(action)`; the rules say how to write a move, and brackets may be omitted. The reward is that
of the game at its end, or 0 if it is negative. `env_args` go to `textarena.make`: `env_args.size=5`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import textarena  # pyright: ignore[reportMissingImports]
from textarena.envs.registration import ENV_REGISTRY  # pyright: ignore[reportMissingImports]

from lfo.env.adapters.foreign import (
    ForeignEnvironment,
    GlobalState,
    Reaction,
    SeededTask,
    one_text_tool,
    own_options,
    system_message,
)
from lfo.errors import ConfigError, first_line
from lfo.types import Message, ToolCall

_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]")
_played: set[str] = set()  # games that were opened with one player
_TOOL = one_text_tool("Make one move of the game.", "the move, written as the rules say")


class LibraryEnvironment(ForeignEnvironment):
    word = "textarena"
    shares_global_state = True  # games draw from `random`

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__(name, **{"reward_range": (0.0, 1.0), **own_options(options)})
        if name not in ENV_REGISTRY:
            near = get_close_matches(name, ENV_REGISTRY, n=1, cutoff=0.0)
            raise ConfigError(f"env={self.spec}: TextArena has no game {name}; the nearest is {near[0]}")
        self._options = options
        _refuse_multiplayer(name, self.spec, options)

    def tools(self) -> list[dict[str, Any]]:
        return _TOOL

    def open(self, task: SeededTask) -> Sequence[Message]:
        self._game = textarena.make(self.name, **self._options)
        self._game.reset(num_players=1, seed=task.seed)
        self._last = self._new_output()
        return system_message(self.name), Message(role="user", content=self._last)

    def act(self, call: ToolCall) -> Reaction:
        done, _ = self._game.step(action=call.arguments["action"])
        output = self._last = self._new_output()
        if not done:
            return Reaction(observation=output)
        rewards, info = self._game.close()
        ending = str(info.get(0, {}).get("reason") or "")
        parts = [output, *([ending] if ending and ending not in output else [])]
        return Reaction(observation="\n".join(filter(None, parts)), reward=(rewards or {}).get(0, 0.0), done=True)

    def moves(self) -> list[ToolCall]:
        """Return the parts in brackets of the last output; some games list their moves there."""
        return [ToolCall(name="act", arguments={"action": move}) for move in _BRACKETED.findall(self._last)]

    def _new_output(self) -> str:
        """Return the new output of the game; its wrappers would repeat the whole history."""
        game = self._game
        while isinstance(game, textarena.Wrapper):
            game = game.env
        _, messages = game.get_observation()
        own = textarena.ObservationType.PLAYER_ACTION
        return "\n".join(text for _, text, kind in messages if kind is not own)


def _refuse_multiplayer(name: str, spec: str, options: dict[str, Any]) -> None:
    """Raise a `ConfigError` for a game that needs several players, which it only reports when it is opened."""
    if name in _played:
        return
    with GlobalState(0).entered():
        try:
            textarena.make(name, **options).reset(num_players=1, seed=0)
        except AssertionError as error:
            raise ConfigError(f"env={spec} is not a game for one player: {error}") from error
        except Exception as error:
            raise ConfigError(f"env={spec} cannot be opened: {type(error).__name__}: {first_line(error)}") from error
    _played.add(name)
