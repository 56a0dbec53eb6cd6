"""The base class of all adapters to environments of other libraries.

An adapter lists tasks and tools, starts a task and executes a call. This base class parses the policy's message,
validates the call against the tool's JSON schema, counts mistakes and maps rewards.

- Tasks are seeds, if the library has seeds; the splits `train`, `val` and `test` share none.
- A mistake of the policy is answered with one sentence and costs a turn; after `max_mistakes` the rollout ends.
- An exception of the library ends the rollout (`EnvironmentFailed`). It is not retried: a retry might act twice.
- `reward_range=[low, high]` maps the sum of the library's rewards to 0..1 and clips it; the default keeps rewards.
- A library that draws from the global random state gets a separate state for each environment. Its output and changes
  of the working directory do not affect the run.
"""

from __future__ import annotations

import contextlib
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from lfo.env.patience import redirected_stdout
from lfo.errors import ConfigError, EnvironmentFailed, LfoError, UsageError
from lfo.protocol.hermes import Mistake, parse_tool_call, quote
from lfo.protocol.schemas import refuse_bad_arguments
from lfo.types import Message, StepResult, ToolCall

FIRST_SEED = {"train": 0, "val": 1_000_000, "test": 2_000_000}
LONGEST_WAIT = 60.0  # seconds until another environment releases the global random state
SYSTEM = "You act in the environment {name}. Make one tool call per message."


@dataclass(frozen=True, kw_only=True, slots=True)
class SeededTask:
    """`SeededTask(id="val-3", seed=1000003)`"""

    id: str
    seed: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Reaction:
    """The result of one action in a library."""

    observation: str
    reward: float = 0.0
    done: bool = False


class ForeignEnvironment(ABC):
    """One rollout in an environment of another library; `name` is the text after the colon."""

    word: ClassVar[str]  # the word before the colon
    shares_global_state: ClassVar[bool] = False  # the library draws from `random` or `numpy.random`

    def __init__(
        self,
        name: str,
        *,
        train_tasks: int = 1000,
        val_tasks: int = 200,
        max_mistakes: int = 8,
        reward_range: Sequence[float] | None = None,
    ) -> None:
        self.name = name
        self.spec = f"{self.word}:{name}"
        self.counts = {"train": train_tasks, "val": val_tasks, "test": val_tasks}
        self.max_mistakes = max_mistakes
        self.reward_range = _checked_range(reward_range)
        self.mistakes = 0
        self._calls = 0
        self._earned = 0.0  # the sum of the library's rewards
        self._paid = 0.0  # the mapped reward that was returned so far
        self._phase = "new"
        self._global_state = GlobalState(0)

    # An adapter implements these.

    @abstractmethod
    def tools(self) -> list[dict[str, Any]]:
        """Return the tool schemas in OpenAI format, the same for every task."""

    @abstractmethod
    def open(self, task: Any) -> Sequence[Message]:
        """Start the library's environment and return the opening messages."""

    @abstractmethod
    def act(self, call: ToolCall) -> Reaction:
        """Execute a call with valid arguments; raise `Mistake` for an error of the policy."""

    def answer(self, message: str) -> Reaction:
        """Handle a message without a call: it ends the rollout."""
        return Reaction(observation="", done=True)

    def conclude(self, message: str, reaction: Reaction) -> Reaction:
        """Complete the reaction to any message; called after a mistake too."""
        return reaction

    def splits(self) -> Mapping[str, Sequence[Any]]:
        """Return the tasks of each split: seeds, where the library has no tasks of its own."""
        return {
            split: [SeededTask(id=f"{split}-{index}", seed=first + index) for index in range(self.counts[split])]
            for split, first in FIRST_SEED.items()
        }

    # The rest of the system calls these.

    def tasks(self, split: str) -> Sequence[Any]:
        splits = self.splits()
        if split not in splits:
            raise UsageError(f"{self.spec} has no split {split!r}; it has {', '.join(splits)}")
        return splits[split]

    def reset(self, task: Any) -> Sequence[Message]:
        if self._phase != "new":
            raise UsageError("An environment plays one rollout; make a new one for the next.")
        self._global_state = GlobalState(getattr(task, "seed", 0))
        with self._own_state():
            messages = tuple(self.open(task))
        self._phase = "playing"
        return messages

    def step(self, message: str) -> StepResult:
        if self._phase != "playing":
            raise UsageError("step() needs a rollout that was reset and is not done.")
        mistakes = self.mistakes
        try:
            tool, reaction = self._react(message)
            if self.mistakes >= self.max_mistakes:
                reaction = replace(reaction, done=True)
            reaction = self.conclude(message, reaction)
        except LfoError:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"{self.spec} raised {type(error).__name__}: {error}"[:500]) from error
        if reaction.done:
            self._phase = "done"
        return StepResult(
            observation=reaction.observation,
            reward=self._pay(reaction.reward),
            done=reaction.done,
            info={
                "tool": tool,
                "mistake": self.mistakes > mistakes,
                "mistakes": self.mistakes,
                "calls": self._calls,
            },
        )

    def _react(self, message: str) -> tuple[str | None, Reaction]:
        """Return the tool that a message calls, and the reaction to the message."""
        tool = None
        try:
            call = parse_tool_call(message)
            if call is not None:
                tool = self._checked(call)
            with self._own_state():
                reaction = self.answer(message) if call is None else self.act(call)
        except Mistake as error:
            self.mistakes += 1
            return tool, Reaction(observation=str(error))
        self._calls += call is not None
        return tool, reaction

    @contextlib.contextmanager
    def _own_state(self) -> Iterator[None]:
        if not self.shares_global_state:
            yield
            return
        with self._global_state.entered():
            yield

    def _checked(self, call: ToolCall) -> str:
        for tool in self.tools():
            if tool["function"]["name"] == call.name:
                refuse_bad_arguments(call, tool["function"].get("parameters") or {})
                return call.name
        known = ", ".join(tool["function"]["name"] for tool in self.tools())
        raise Mistake(f"There is no tool {quote(call.name)}; the tools are: {known}.")

    def _pay(self, reward: float) -> float:
        """Return the change of the mapped reward, so that the sum over all steps is the reward so far."""
        self._earned += float(reward)
        low, high = self.reward_range or (0.0, 1.0)
        mapped = (self._earned - low) / (high - low)
        due = (min(1.0, max(0.0, mapped)) if self.reward_range else mapped) - self._paid
        self._paid += due
        return due


def own_options(options: dict[str, Any]) -> dict[str, Any]:
    """Take what `ForeignEnvironment` itself understands out of `env_args`; the rest goes to the library."""
    own = ("train_tasks", "val_tasks", "max_mistakes", "reward_range")
    return {name: options.pop(name) for name in own if name in options}


def system_message(name: str, rules: str = "") -> Message:
    return Message(role="system", content="\n\n".join(filter(None, [SYSTEM.format(name=name), rules])))


def one_tool(name: str, description: str, parameters: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the single typed tool of an environment whose actions are not tools."""
    return [{"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}]


def one_text_tool(description: str, about: str) -> list[dict[str, Any]]:
    """Return the single tool `act(action)` of an environment whose actions are texts."""
    action = {"type": "string", "description": about}
    return one_tool("act", description, {"type": "object", "properties": {"action": action}, "required": ["action"]})


def _checked_range(given: Sequence[float] | None) -> tuple[float, float] | None:
    if given is None:
        return None
    try:
        low, high = map(float, given)
    except (TypeError, ValueError):
        low = high = 0.0
    if not low < high:
        raise ConfigError(f"env_args.reward_range must be two numbers, the lower one first, not {given!r}")
    return low, high


class GlobalState:
    """The random state of one environment whose library uses the global state of the process.

    Only one environment uses the global state at a time, so that parallel environments are repeatable.
    """

    _lock = threading.Lock()

    def __init__(self, seed: int) -> None:
        self._inside = random.Random(seed).getstate(), np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        if not self._lock.acquire(timeout=LONGEST_WAIT):
            raise EnvironmentFailed(f"another environment has kept the random state for {LONGEST_WAIT:g} seconds")
        with contextlib.ExitStack() as stack:
            stack.callback(self._lock.release)
            stack.callback(os.chdir, os.getcwd())
            stack.callback(_set_state, (random.getstate(), np.random.get_state()))
            _set_state(self._inside)
            try:
                with redirected_stdout():
                    yield
            finally:
                self._inside = random.getstate(), np.random.get_state()


def _set_state(state: tuple[Any, Any]) -> None:
    random.setstate(state[0])
    np.random.set_state(state[1])
