"""What an environment is to the rest of the system.

An environment object is single-use: it plays one rollout. Whoever needs many makes many, from a factory
(`EnvironmentFactory`, usually the class itself), so that rollouts can run at the same time.

    environment = PhoneCalls()
    messages = environment.reset(environment.tasks("train")[0])
    result = environment.step('<tool_call>{"name": "search_company", "arguments": {"name": "Acme"}}</tool_call>')

An environment hears Hermes' form, whatever the model's own is: the whole message is text, a tool call stands between
`<tool_call>` tags. Of a message with several calls it hears one after the other, each as a message of its own, until
the rollout is over. A message without a call is a final answer and ends the rollout. It hears no thoughts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from typing import Any, Protocol, runtime_checkable

from lfo.errors import ConfigError, LfoError, UsageError
from lfo.types import Message, ReplyFacts, StepResult, ToolCall

logger = logging.getLogger(__name__)

# What an environment may report in the `info` of a rollout's end and evaluation shows as a mean over rollouts.
MEASURES = ("mistakes", "calls", "excess_fields", "form_before_call", "department_order")


@runtime_checkable
class Environment(Protocol):
    """Implement these four methods and everything else works."""

    def tasks(self, split: str) -> Sequence[Any]:
        """The tasks of a split, each with an `id`; at least "train" and "val"."""
        ...

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tool schemas in OpenAI form, for the chat template."""
        ...

    def reset(self, task: Any) -> Sequence[Message]:
        """Start the one rollout of this object; answers the opening messages (system, user)."""
        ...

    def step(self, message: str) -> StepResult:
        """Take the policy's whole message; never raises on bad text, whatever it contains.

        The rewards of a rollout's steps are summed up; 0 is failure and 1 success, and what lies between is a part.
        """
        ...


@runtime_checkable
class DescribesReplies(Protocol):
    """Optional: the meaning of a reply's text, for evaluation only, never for training; None for a text that nobody
    here would say. It is also asked about what a world model says, which may be anything."""

    def describe_reply(self, observation: str) -> ReplyFacts | None: ...


@runtime_checkable
class OffersLookahead(Protocol):
    """Optional: which call the world model should be asked about next, or None.

    A pure function of the transcript, which holds what the policy has seen and nothing else. It is asked
    before each turn of the policy, again and again until it answers None; imagined exchanges stand in the
    transcript as messages marked `predicted`. Training may also make the call for real (`exploration.inquiries`),
    for which the questions of a point are listed with nothing expected in answer.
    """

    def lookahead_query(self, transcript: Sequence[Message]) -> ToolCall | None: ...


@runtime_checkable
class NamesPredictedTools(Protocol):
    """Optional: the tools whose replies are worth predicting, for `world_model.predict=default`; else all of them."""

    @property
    def predicted_tools(self) -> Collection[str]: ...


@runtime_checkable
class NamesMoves(Protocol):
    """Optional: calls that are legal now, for random play (`lfo check-env`, `lfo pretrain --env`) and nobody else."""

    def moves(self) -> Sequence[ToolCall]: ...


EnvironmentFactory = Callable[[], Environment]


def tasks_of(environment: Environment, split: str) -> Sequence[Any]:
    """The tasks of a split; that there is none of them is the caller's mistake."""
    try:
        tasks = environment.tasks(split)
    except LfoError:
        raise  # the environment says it better
    except Exception as error:
        raise UsageError(f"the environment {type(environment).__name__} has no split {split!r}") from error
    if not tasks:
        raise UsageError(f"the environment {type(environment).__name__} has no tasks in its split {split!r}")
    return tasks


def predicted_tools(environment: Environment, setting: str = "default") -> frozenset[str] | None:
    """The tools that a setting means here: `default`, `all`, `none` or names with commas; None is all."""
    if setting in ("all", "none"):
        return None if setting == "all" else frozenset()
    if setting != "default":
        names = [name.strip() for name in setting.split(",")]
    elif isinstance(environment, NamesPredictedTools):
        names = environment.predicted_tools
    else:
        return None
    tools = [tool["function"]["name"] for tool in environment.tools()]
    for name in names:
        if name not in tools:
            close = get_close_matches(name, tools, n=1, cutoff=0.0)[0]
            raise ConfigError(
                f"world_model.predict={setting}: the environment {type(environment).__name__} has no tool {name!r}; "
                f"the nearest is {close}"
            )
    return frozenset(names)


def flaw_of(environment: EnvironmentFactory) -> str | None:
    """The first thing in which this is no environment, in a sentence, by looking at one task."""
    made = environment()
    name = f"the environment {type(made).__name__}"
    tools = {tool["function"]["name"] for tool in made.tools()}
    if not tools:
        return f"{name} has no tools: tools() must answer at least one schema"
    tasks = made.tasks("val" if hasattr(made, "stream") else "train")
    if not isinstance(tasks, Sequence):
        return f"{name}: tasks() must answer a sequence, such as a list, not a {type(tasks).__name__}"
    if not tasks:
        return None
    if not hasattr(tasks[0], "id"):
        return f"{name}: a task must have an id, which {type(tasks[0]).__name__} has not"
    opening = made.reset(tasks[0])
    if not opening or not all(isinstance(message, Message) for message in opening):
        return f"{name} must open with a list of Message: see its reset() or start()"
    call = made.lookahead_query(opening) if isinstance(made, OffersLookahead) else None
    if call is not None and not (isinstance(call, ToolCall) and call.name in tools):
        return f"{name}: lookahead_query must answer None or a ToolCall of one of its tools, not {str(call)[:80]}"
    return None


def describe_with(environment: Environment, reply: str) -> ReplyFacts | None:
    """What a reply means, where the environment can tell."""
    if not isinstance(environment, DescribesReplies):
        return None
    try:
        return environment.describe_reply(reply)
    except Exception as error:  # somebody else's code, and nothing that is learned depends on it
        _warn_once(f"describe_reply of {type(environment).__name__} raised {type(error).__name__}: {error}"[:300])
        return None


def same_meaning(environment: Environment, predicted: str, actual: str) -> bool | None:
    """Whether two replies mean the same; None where the environment cannot say what the true one means."""
    meant = describe_with(environment, actual)
    if meant is None:
        return None
    said = describe_with(environment, predicted)  # the facts in whatever order
    return said is not None and said.category == meant.category and set(said.facts) == set(meant.facts)


@cache
def _warn_once(message: str) -> None:
    logger.warning(message)
