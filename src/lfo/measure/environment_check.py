"""Check by playing whether an environment is fit for training, without knowledge of its rules.

    check_environment(make_environment, episodes=20) -> {"ok": True, "problems": [], "warnings": [...], ...}

A problem makes runs fail or their metrics wrong; a warning tells the author what to look at. Two players are used: one
does nothing, and one makes random calls that fit the schemas. Each call to the environment has a time limit, and its
side effects on the process are recorded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from statistics import fmean, median
from typing import Any

import jsonschema

from lfo.env.answers import checked_step, id_of, opening_of, tools_of
from lfo.env.interface import FAREWELL, EnvironmentFactory, flaw_of
from lfo.env.patience import EnvironmentTimedOut
from lfo.env.random_play import random_message
from lfo.errors import EnvironmentFailed
from lfo.play.call_monitor import CallMonitor
from lfo.play.episode import CHARS_A_TOKEN
from lfo.types import Message

REPEATED = 5  # tasks that are played again, alone and in parallel
SLOW_STEP = 1.0  # seconds
MOST_TOOLS = 20
HOSTILE = (
    "",
    "<tool_call>",
    "<tool_call>{}</tool_call>",
    '<tool_call>{"name": 7, "arguments": []}</tool_call>',
    '<tool_call>{"name": "no such tool", "arguments": {"x": {"y": [null]}}}</tool_call>',
    "\x00\ud800<|im_end|>",
    "<tool_call>" + "[" * 20_000,
)
_TOOL_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


@dataclass(slots=True)
class Playthrough:
    """One rollout, as a player sees it."""

    opening: Sequence[Message] = ()
    replies: list[tuple[str, str, float, bool]] = field(default_factory=list)  # message, observation, reward, done
    seconds: list[float] = field(default_factory=list)  # of the reset, then of each step
    mistakes: int = 0
    cut: int = 0  # replies that were too long for any context
    failure: EnvironmentFailed | None = None

    @property
    def reward(self) -> float:
        return sum(reply[2] for reply in self.replies)

    @property
    def done(self) -> bool:
        return bool(self.replies) and self.replies[-1][3]

    @property
    def texts(self) -> list[str]:
        return [*(message.content for message in self.opening), *(reply[1] for reply in self.replies)]

    @property
    def outcome(self) -> tuple[Any, ...]:
        """Everything that must be equal if the same calls are made again."""
        return tuple(message.content for message in self.opening), tuple(self.replies), str(self.failure)


def check_environment(
    make_environment: EnvironmentFactory,
    *,
    episodes: int = 20,
    max_turns: int = 16,
    timeout: float = 30.0,
    specials: Collection[str] = (),
    length_of: Callable[[str], int] = len,
    prompt_length: Callable[[Sequence[Message]], int] | None = None,
    room: int | None = None,
) -> dict[str, Any]:
    """Play and check an environment. `specials` are the special tokens of the tokenizer, `length_of` counts the tokens
    of a text, `prompt_length` those of the first prompt with its tools, and `room` is the limit of a rollout."""
    monitor = CallMonitor(timeout, most_chars=CHARS_A_TOKEN * room if room else None)
    flaw, _ = monitor.call(partial(flaw_of, make_environment))
    problems = [flaw] if isinstance(flaw, str) else []
    if isinstance(flaw, EnvironmentFailed):
        problems.append(f"its first task cannot be opened: {flaw}")
    if problems:
        return {"ok": False, "problems": problems, "warnings": []}
    tools, _ = monitor.call(lambda: tools_of(make_environment()))
    if isinstance(tools, EnvironmentFailed):
        return {"ok": False, "problems": [str(tools)], "warnings": []}
    if problems := _schema_problems(tools):
        return {"ok": False, "problems": problems, "warnings": []}
    splits, found = _splits(make_environment, monitor)
    problems += found
    tasks = [*splits.get("train", ()), *splits.get("val", ())][:episodes]
    if not tasks:
        return {"ok": False, "problems": problems, "warnings": monitor.effects()}
    idly = _Stage(make_environment=make_environment, monitor=monitor, max_turns=1)
    randomly = replace(idly, max_turns=max_turns, tools=tools)
    idle = idly.play_all(tasks)
    played = randomly.play_all(tasks) if not hangs(idle) else []
    problems += _failures(played, idle)
    if hangs(idle) or hangs(played):  # each further call would wait for the time limit
        return {"ok": False, "problems": problems, "warnings": monitor.effects()}
    problems += _hostile_problems(idly, tasks[0], allowed=idle[0].reward)
    problems += [f"its text contains a special token of the model: {each!r}" for each in _specials_in(played, specials)]
    warnings = _repetition_warnings(randomly, tasks, played)
    warnings += [*schema_flaws(tools), *monitor.effects()]
    figures = _figures(idle, played, length_of, prompt_length)
    warnings += _figure_warnings(figures, room)
    return {
        "ok": not problems,
        "problems": problems,
        "warnings": warnings,
        "tasks": {split: len(each) for split, each in splits.items()},
        "tools": [tool["function"]["name"] for tool in tools],
        **figures,
    }


NextMessage = Callable[[str, Any], str]  # (text so far, environment) -> the player's next message


@dataclass(frozen=True, kw_only=True, slots=True)
class _Stage:
    """An environment that is played; with `tools` the player makes random calls, without it does nothing."""

    make_environment: EnvironmentFactory
    monitor: CallMonitor
    max_turns: int  # a rollout is ended after them
    tools: Sequence[Mapping[str, Any]] = ()

    def play_all(self, tasks: Sequence[Any]) -> list[Playthrough]:
        """Play each task, up to the first that hangs."""
        played: list[Playthrough] = []
        for index, task in enumerate(tasks):
            if hangs(played):
                break
            played.append(self.play(task, self.random(index)))
        return played

    def random(self, index: int) -> NextMessage | None:
        """Return the player of the task with this index: always the same."""
        return partial(random_message, self.tools, index) if self.tools else None

    def play(self, task: Any, next_message: NextMessage | None) -> Playthrough:
        played = Playthrough()
        for _ in self.turns(played, task, next_message):
            pass
        return played

    def turns(self, played: Playthrough, task: Any, next_message: NextMessage | None) -> Iterator[None]:
        """Play one rollout into `played` and yield before each turn, so that two rollouts can be interleaved."""
        call = self.monitor.call
        environment, _ = call(self.make_environment)
        opening, seconds = call(lambda: opening_of(environment, task))
        played.seconds.append(seconds)
        if isinstance(environment, EnvironmentFailed) or isinstance(opening, EnvironmentFailed):
            played.failure = environment if isinstance(environment, EnvironmentFailed) else opening
            return
        most = self.monitor.most_chars
        played.cut += most is not None and sum(len(each.content) for each in opening) > most
        played.opening = tuple(replace(each, content=each.content[:most]) for each in opening)
        for turn in range(self.max_turns + 1):
            yield
            message: Any = FAREWELL
            if next_message and turn < self.max_turns:
                message, _ = call(partial(next_message, "\n".join(played.texts), environment), "a random call")
            result, seconds = call(lambda message=message: checked_step(environment, message))
            if isinstance(message, EnvironmentFailed) or isinstance(result, EnvironmentFailed):
                played.failure = message if isinstance(message, EnvironmentFailed) else result
                return
            played.seconds.append(seconds)
            played.cut += most is not None and len(result.observation) > most
            played.mistakes += bool(result.info.get("mistake"))
            played.replies.append((message, result.observation[:most], result.reward, result.done))
            if result.done:
                return


def play(
    make_environment: EnvironmentFactory, task: Any, monitor: CallMonitor, *, max_turns: int, next_message: NextMessage
) -> Playthrough:
    """Play one rollout and end it after `max_turns`."""
    return _Stage(make_environment=make_environment, monitor=monitor, max_turns=max_turns).play(task, next_message)


def hangs(played: Sequence[Playthrough]) -> bool:
    return any(isinstance(each.failure, EnvironmentTimedOut) for each in played)


def _splits(make_environment: EnvironmentFactory, monitor: CallMonitor) -> tuple[dict[str, Sequence[Any]], list[str]]:
    splits: dict[str, Sequence[Any]] = {}
    names: dict[str, Sequence[str]] = {}
    problems: list[str] = []
    for split in ("train", "val"):
        found, _ = monitor.call(partial(_named_tasks, make_environment, split))
        if isinstance(found, EnvironmentFailed) or not found:
            problems.append(f"it has no tasks in its split {split}" + (f": {found}" if found else ""))
            continue
        splits[split], names[split] = zip(*found, strict=True)
        if len(set(names[split])) < len(names[split]):
            problems.append(f"two tasks of {split} have the same id")
    shared = set(names.get("train", ())) & set(names.get("val", ()))
    if shared:
        problems.append(f"{len(shared)} tasks are in train and in val, such as {min(shared)}")
    return splits, problems


def _named_tasks(make_environment: EnvironmentFactory, split: str) -> list[tuple[Any, str]]:
    return [(task, id_of(task)) for task in make_environment().tasks(split)]


def _failures(*groups: Sequence[Playthrough]) -> list[str]:
    """Return one sentence for each kind of failure, with its count."""
    failures = [played.failure for group in groups for played in group if played.failure is not None]
    rollouts = sum(map(len, groups))
    hung = [each for each in failures if isinstance(each, EnvironmentTimedOut)]
    raised = [each for each in failures if not isinstance(each, EnvironmentTimedOut)]
    return [f"{each[0]} (in {len(each)} of {rollouts} rollouts)" for each in (hung, raised) if each]


def _hostile_problems(stage: _Stage, task: Any, *, allowed: float) -> list[str]:
    for message in HOSTILE:
        played = stage.play(task, lambda *_, message=message: message)
        if played.failure is not None:
            return [f"it fails on the invalid message {message[:40]!r}: {played.failure}"]
        if played.reward > allowed:
            return [f"it rewards the invalid message {message[:40]!r} with {played.reward:g}"]
    return []


def _repetition_warnings(stage: _Stage, tasks: Sequence[Any], played: Sequence[Playthrough]) -> list[str]:
    """Check that the same calls get the same replies again, alone and in parallel with another rollout."""
    indices = [index for index in range(min(REPEATED, len(tasks))) if played[index].failure is None]
    for index in indices:
        again = stage.play(tasks[index], stage.random(index))
        if again.outcome != played[index].outcome:
            return [f"the same calls get other replies the second time (task {tasks[index].id})"]
    for one, other in pairwise(indices):
        parallel = {one: Playthrough(), other: Playthrough()}
        running = [stage.turns(again, tasks[index], stage.random(index)) for index, again in parallel.items()]
        while running:
            running = [each for each in running if next(each, _OVER) is not _OVER]
        if any(again.outcome != played[index].outcome for index, again in parallel.items()):
            return [f"two parallel rollouts affect each other (tasks {tasks[one].id} and {tasks[other].id})"]
    return []


_OVER = object()  # returned by a generator that has ended


def _specials_in(played: Sequence[Playthrough], specials: Collection[str]) -> list[str]:
    texts = [text for each in played for text in each.texts]
    return sorted(each for each in specials if any(each in text for text in texts))


def _schema_problems(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    problems = []
    for tool in tools:
        function = tool["function"]
        try:
            jsonschema.Draft202012Validator.check_schema(function.get("parameters") or {})
        except (jsonschema.SchemaError, RecursionError) as error:
            reason = getattr(error, "message", "nested too deeply")[:200]
            problems.append(f"the parameters of {function['name'][:80]} are not a JSON schema: {reason}")
    return problems


def schema_flaws(tools: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what makes a schema hard to read for a model, as sentences."""
    flaws = (
        [f"it has {len(tools)} tools, and the prompt contains all of their schemas"] if len(tools) > MOST_TOOLS else []
    )
    for tool in tools:
        function = tool["function"]
        name, schema = function["name"], function.get("parameters") or {}
        if not _TOOL_NAME.fullmatch(name):
            flaws.append(f"the tool name {name!r} may only have letters, digits, _ and -, as chat templates expect")
        if not (function.get("description") or "").strip():
            flaws.append(f"tool {name} has no description")
        for argument, part in schema.get("properties", {}).items():
            part = part if isinstance(part, Mapping) else {}  # a schema may also be true or false
            if not {"type", "enum", "anyOf", "oneOf", "$ref", "const"} & set(part):
                flaws.append(f"argument {argument} of {name} has no type")
            elif not part.get("description") and "enum" not in part:
                flaws.append(f"argument {argument} of {name} has no description")
        unknown = set(schema.get("required", ())) - set(schema.get("properties", {}))
        flaws += [f"tool {name} requires {each}, which it does not describe" for each in sorted(unknown)]
    return flaws


def _figures(
    idle: Sequence[Playthrough],
    played: Sequence[Playthrough],
    length_of: Callable[[str], int],
    prompt_length: Callable[[Sequence[Message]], int] | None,
) -> dict[str, Any]:
    def opening_length(each: Playthrough) -> int:
        if prompt_length is not None:
            return prompt_length(each.opening)
        return sum(length_of(message.content) for message in each.opening)

    started = [each for each in played if each.opening]
    openings = list(map(opening_length, started))
    exchanges = [sum(length_of(text) for reply in each.replies for text in reply[:2]) for each in started]
    replies = [length_of(reply[1]) for each in played for reply in each.replies if reply[1]]
    steps = [seconds for each in played for seconds in each.seconds[1:]]
    turns = sum(len(each.replies) for each in played)
    return {
        "players": {"nothing": _player(idle), "random": _player(played)},
        "random_mistakes": sum(each.mistakes for each in played) / max(1, turns),
        "replies_cut": sum(each.cut for each in played),
        "distinct_replies": len({reply[1] for each in played for reply in each.replies}),
        "seconds": {
            "reset": median(each.seconds[0] for each in played),
            "step": median(steps) if steps else 0.0,
            "slowest": max([*steps, *(each.seconds[0] for each in played)]),
        },
        "lengths": {
            "opening": _spread(openings),
            "reply": _spread(replies),
            "rollout": _spread([sum(parts) for parts in zip(openings, exchanges, strict=True)]),
        },
    }


def _player(played: Sequence[Playthrough]) -> dict[str, float]:
    rewards = [each.reward for each in played]
    return {
        "reward": fmean(rewards),
        "lowest": min(rewards),
        "highest": max(rewards),
        "success": fmean(reward >= 1 for reward in rewards),
        "turns": fmean(len(each.replies) for each in played),
        "ended": fmean(each.done for each in played),
        "n": len(played),
    }


def _spread(values: Sequence[int]) -> dict[str, float]:
    ordered = sorted(values) or [0]
    return {"median": median(ordered), "p95": ordered[int(0.95 * (len(ordered) - 1))], "longest": ordered[-1]}


def _figure_warnings(figures: Mapping[str, Any], room: int | None) -> list[str]:
    warnings = []
    nothing, random = figures["players"]["nothing"], figures["players"]["random"]
    if nothing["reward"] > 0:
        warnings.append(f"doing nothing is rewarded with {nothing['reward']:.3g} on average")
    if random["success"] > 0.5:
        warnings.append(f"random calls succeed in {random['success']:.0%} of the tasks: there is little to learn")
    if random["lowest"] < 0 or random["highest"] > 1:
        warnings.append(
            f"rewards go from {random['lowest']:.3g} to {random['highest']:.3g}, where 0 is failure and 1 success; "
            "an adapter maps them with env_args.reward_range"
        )
    if random["ended"] < 1:
        warnings.append("it does not end when the policy writes a message without a call")
    if figures["replies_cut"]:
        warnings.append(
            f"{figures['replies_cut']} replies are longer than {CHARS_A_TOKEN} characters for each token of "
            f"rollout.max_context={room}; they are cut, and none fits into a rollout"
        )
    if figures["distinct_replies"] <= 1:
        warnings.append("all replies are the same, so there is nothing to predict")
    slowest = figures["seconds"]["slowest"]
    if slowest > SLOW_STEP:
        warnings.append(f"one call took {slowest:.1f} seconds; all rollouts of a batch wait for the slowest call")
    opening, rollout = figures["lengths"]["opening"], figures["lengths"]["rollout"]
    if room and rollout["p95"] > room:
        warnings.append(
            f"one rollout in twenty is longer than rollout.max_context={room}: openings with their tools take up to "
            f"{opening['longest']} tokens, replies up to {figures['lengths']['reply']['longest']}"
        )
    return warnings
