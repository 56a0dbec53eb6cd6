"""The interface of an environment.

An environment object is single-use: it plays one rollout. A factory (`EnvironmentFactory`, usually the class itself)
makes one for each rollout, so that rollouts can run in parallel.

    environment = PhoneCalls()
    messages = environment.reset(environment.tasks("train")[0])
    result = environment.step('<tool_call>{"name": "search_company", "arguments": {"name": "Acme"}}</tool_call>')

An environment receives messages in Hermes format, whatever format the model uses: text with a tool call between
`<tool_call>` tags. If a message has several calls, the environment receives each as a separate message, in order, until
the rollout is over. A message without a call is a final answer and ends the rollout. Thoughts are removed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from typing import Any, Protocol, TypeVar, runtime_checkable

from lfo.env.answers import InvalidAnswer, asked_call, described, opening_of, tools_of
from lfo.env.patience import EnvironmentRaised, name_of, naming
from lfo.errors import ConfigError, UsageError
from lfo.types import Message, ReplyFacts, StepResult, ToolCall

FAREWELL = "I am done."  # a message without a call, for players that end a rollout
# Keys of the last `info` of a rollout that evaluation shows as means over rollouts.
MEASURES = ("mistakes", "calls", "excess_fields", "form_before_call", "department_order")
METHODS = ("tasks", "tools", "reset", "step")  # of every environment
MARK = "makes_lfo_environments"  # the attribute of a marked factory


@runtime_checkable
class Environment(Protocol):
    """Implement these four methods; nothing else is required."""

    def tasks(self, split: str) -> Sequence[Any]:
        """Return the tasks of a split, always the same, each with an `id`; at least "train" and "val" must exist."""
        ...

    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Return the tool schemas in OpenAI format, for the chat template."""
        ...

    def reset(self, task: Any) -> Sequence[Message]:
        """Start the one rollout of this object; return the opening messages (system, user)."""
        ...

    def step(self, message: str) -> StepResult:
        """Process one message of the policy; never raise, whatever text it contains.

        The reward of a rollout is the sum over its steps: 0 is failure, 1 is success, values between are partial
        credit.
        """
        ...


@runtime_checkable
class DescribesReplies(Protocol):
    """Optional: return the meaning of a reply, or None for a text that this environment never writes.

    Used for evaluation, and with `lookahead_source=memory_first` to decide when the world model takes over; no loss or
    reward uses it. It also gets replies of a world model, which may be any text."""

    def describe_reply(self, observation: str) -> ReplyFacts | None: ...


@runtime_checkable
class OffersLookahead(Protocol):
    """Optional: return the next call to imagine, or None. A control in evaluation, which no loss uses.

    A pure function of the transcript, which contains only what the policy has seen. It is called before each turn of
    the policy until it returns None; imagined exchanges are in the transcript as messages marked `predicted`. To list
    the calls of a point, their replies are left empty.
    """

    def lookahead_query(self, transcript: Sequence[Message]) -> ToolCall | None: ...


@runtime_checkable
class NamesPredictedTools(Protocol):
    """Optional: the tools whose replies `world_model.predict=default` predicts; without it, all tools."""

    @property
    def predicted_tools(self) -> Collection[str]: ...


@runtime_checkable
class NamesMoves(Protocol):
    """Optional: the legal calls now, for random play only (`lfo check-env`, `lfo pretrain env=...`)."""

    def moves(self) -> Sequence[ToolCall]: ...


@runtime_checkable
class HasScriptedPlayers(Protocol):
    """Optional: players that together receive every kind of reply, so that a world model is evaluated on all kinds.

    Each plays a task in the environment that it is given and returns the reward."""

    def scripted_players(self) -> Sequence[Callable[[Any, Any], float]]: ...


@runtime_checkable
class Scripted(Protocol):
    """Optional: the environment says what the policy says, to measure steps of models with random weights."""

    def scripted_words(self) -> str: ...


EnvironmentFactory = Callable[[], Environment]
Factory = TypeVar("Factory", bound=Callable[..., Any])


def makes_environments(factory: Factory) -> Factory:
    """Mark a function that makes an environment, so that `env=my_module:function` may call it.

    The config of a run may be a stranger's. What it names is called only if it is a class with the methods of an
    environment, or if its author marked it:

        @makes_environments
        def hard_safes(digits: int = 6) -> Safes:
            return Safes(digits=digits, tries=1)

    In Python, `create_trainer(config, hard_safes, tokenizer)` needs no mark.
    """
    setattr(factory, MARK, True)
    return factory


def tasks_of(environment: Environment, split: str) -> Sequence[Any]:
    """Return the tasks of a split; raise a `UsageError` if there are none."""
    name = f"the environment {name_of(environment)}"
    try:
        with naming("tasks"):
            tasks = environment.tasks(split)
            count = len(tasks) if isinstance(tasks, Sequence) else None
    except EnvironmentRaised as error:  # not an `LfoError`: the environment then has a better message
        raise UsageError(f"{name} has no split {split!r}: {error}{_usual_splits(environment, split)}") from error
    if count is None:
        raise UsageError(f"{name}: tasks() must return a sequence, such as a list, not a {type(tasks).__name__}")
    if not count:
        raise UsageError(f"{name} has no tasks in its split {split!r}{_usual_splits(environment, split)}")
    return tasks


def _usual_splits(environment: Environment, wrong: str) -> str:
    """Say which of the usual splits an environment has."""
    found = []
    for split in ("train", "val", "test"):
        with suppress(Exception, SystemExit):
            if split != wrong and len(environment.tasks(split)):
                found.append(split)
    return f"; it has {' and '.join(found)}" if found else ""


def predicted_tools(environment: Environment, setting: str = "default") -> frozenset[str] | None:
    """Return the tools that a setting names: `default`, `all`, `none` or names separated by commas. None: all."""
    if setting in ("all", "none"):
        return None if setting == "all" else frozenset()
    if setting != "default":
        names = [name.strip() for name in setting.split(",")]
    else:
        with naming(f"predicted_tools of {name_of(environment)}"):
            if not isinstance(environment, NamesPredictedTools):
                return None
            names = list(environment.predicted_tools)
    tools = [tool["function"]["name"] for tool in tools_of(environment)]
    for name in names:
        if name not in tools:
            close = (get_close_matches(str(name), tools, n=1, cutoff=0.0) or ["none"])[0]
            raise ConfigError(
                f"world_model.predict={setting}: the environment {type(environment).__name__} has no tool {name!r}; "
                f"the nearest is {close}"
            )
    return frozenset(names)


def imagined_tools(environment: Environment, setting: str = "default") -> frozenset[str] | None:
    """Return the tools that look-ahead may imagine: those that the world model learns.

    With `none` it learns nothing, so those of `default`: the control with an untrained world model looks ahead too.
    """
    return predicted_tools(environment, "default" if setting == "none" else setting)


def flaw_of(make_environment: EnvironmentFactory) -> str | None:
    """Validate an environment on one task; return the first problem as a sentence, or None."""
    made = make_environment()
    name = f"the environment {type(made).__name__}"
    try:
        tools = {tool["function"]["name"] for tool in tools_of(made)}
    except ConfigError as error:
        return str(error)
    if not tools:
        return f"{name} has no tools: tools() must return at least one schema"
    tasks = made.tasks("val" if hasattr(made, "stream") else "train")
    if not isinstance(tasks, Sequence):
        return f"{name}: tasks() must return a sequence, such as a list, not a {type(tasks).__name__}"
    if not tasks:
        return None
    if not hasattr(tasks[0], "id"):
        return f"{name}: each task needs an attribute id, which {type(tasks[0]).__name__} does not have"
    try:
        opening = opening_of(made, tasks[0])
        call = asked_call(made, opening) if isinstance(made, OffersLookahead) else None
    except InvalidAnswer as flaw:
        return str(flaw)
    if call is not None and call.name not in tools:
        return f"lookahead_query of {type(made).__name__} must name one of its tools, not {call.name[:80]!r}"
    return None


def describe_with(environment: object, reply: str) -> ReplyFacts | None:
    """Return the meaning of a reply, or None if the environment, or its class, cannot describe it."""
    return described(environment, reply) if isinstance(environment, DescribesReplies) else None


def same_meaning(environment: object, predicted: str, actual: str) -> bool | None:
    """Whether two replies mean the same; None if the environment cannot describe the true one."""
    meant = describe_with(environment, actual)
    if meant is None:
        return None
    said = describe_with(environment, predicted)  # facts are compared as sets
    return said is not None and said.category == meant.category and set(said.facts) == set(meant.facts)
