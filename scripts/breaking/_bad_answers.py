"""The table of bad answers: which method of an environment misbehaves, how, and what a run must do about it."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch

from lfo.errors import EnvironmentFailed
from lfo.types import Message, ReplyFacts, StepResult, ToolCall

Answer = Callable[[], Any]  # the ordinary answer of the method
Act = Callable[[Answer], Any]
# What the run must do: go on without a failure, go on without the rollouts that misbehave, cut the reply and go on, or
# end in one sentence because nothing can be rolled out at all.
Expected = Literal["goes on", "fails", "cuts", "ends"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Variation:
    """`Variation(method="step", words="returns None", act=lambda answer: None, expected="fails")`"""

    method: str
    words: str
    act: Act
    expected: Expected
    hangs: bool = False
    settings: tuple[str, ...] = ()


class Evil:
    """A value whose every use raises."""

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("do not touch me")

    __bool__ = __str__ = __repr__ = __eq__ = __len__ = __iter__ = __float__ = __hash__ = _refuse  # type: ignore[assignment]


class EvilText(str):
    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("do not read me")

    __str__ = __repr__ = __len__ = __getitem__ = encode = split = _refuse  # type: ignore[assignment]


class EvilNumber(Evil):
    pass


Real.register(EvilNumber)


class Unreadable(Exception):
    def __str__(self) -> str:
        raise ValueError("no words")


class UnreadableFailure(EnvironmentFailed):
    def __str__(self) -> str:
        raise ValueError("no words")


class Outside(BaseException):
    """Neither an Exception nor SystemExit."""


class EvilMapping(dict[str, Any]):
    def items(self) -> Any:
        raise RuntimeError("do not list me")


class EvilResult(StepResult):
    @property
    def observation(self) -> str:  # type: ignore[override]
        raise RuntimeError("do not read me")

    def __init__(self) -> None:
        pass


def result(**fields: Any) -> Act:
    return lambda answer: replace(answer(), **fields)


def value(bad: Any) -> Act:
    return lambda answer: bad


def raising(make: Callable[[], BaseException]) -> Act:
    def act(answer: Answer) -> Any:
        raise make()

    return act


def first(effect: Callable[[], object]) -> Act:
    """Do something to the process, then answer as usual."""

    def act(answer: Answer) -> Any:
        effect()
        return answer()

    return act


def hang(answer: Answer) -> Any:
    time.sleep(3600)


def recurse(answer: Answer) -> Any:
    return recurse(answer)


def opening(*messages: Any) -> Act:
    return value(list(messages))


def for_ever() -> Iterator[Message]:
    while True:
        yield Message(role="user", content="Go on.")


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["again"] = found
    return found


def user(content: Any) -> Message:
    return Message(role="user", content=content)


def schema(**fields: Any) -> Act:
    return value([{"type": "function", "function": {"name": "ask_oracle", "description": "Ask.", **fields}}])


def change_random_states() -> None:
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def start_threads() -> None:
    for _ in range(3):
        threading.Thread(target=time.sleep, args=(0.2,)).start()


def close(number: int) -> Callable[[], None]:
    def effect() -> None:
        with contextlib.suppress(OSError):  # another rollout has closed it
            os.close(number)

    return effect


def take_stdout() -> None:
    sys.stdout = None  # type: ignore[assignment]


BIG = "Ordinary words in a long reply. " * (10_000_000 // 32)
MESSY = {
    "share": float("nan"),
    "count": 10**5000,
    "cycle": cyclic(),
    "evil": Evil(),
    "array": np.ones(3),
    "long": BIG,
    "level": EvilText("x"),
    "mistakes": np.int64(1),
    "calls": float("inf"),
}


def table() -> Iterator[Variation]:
    yield from _of_steps()
    yield from _of_exceptions()
    yield from _of_effects()
    yield from _of_resets()
    yield from _of_the_rest()


def _rows(method: str, expected: Expected, acts: dict[str, Act], **others: Any) -> Iterator[Variation]:
    for words, act in acts.items():
        yield Variation(method=method, words=words, act=act, expected=expected, **others)


def _of_steps() -> Iterator[Variation]:
    failing: dict[str, Act] = {
        "returns None": value(None),
        "returns a tuple like Gymnasium's": value(("a door", 0.0, False, False, {})),
        "returns a result whose text cannot be read": lambda answer: EvilResult(),
        "returns observation=None": result(observation=None),
        "returns observation=bytes": result(observation=b"a door"),
        "returns reward=nan": result(reward=float("nan")),
        "returns reward=inf": result(reward=float("inf")),
        "returns reward=1e308": result(reward=1e308),
        "returns rewards that exceed the limit in sum": result(reward=1e15, done=False),
        "returns reward=10**400": result(reward=10**400),
        "returns reward='1'": result(reward="1"),
        "returns an array as reward": result(reward=np.ones(2)),
        "returns a reward that cannot be read": result(reward=EvilNumber()),
        "returns done=None": result(done=None),
        "returns done='yes'": result(done="yes"),
        "returns an array as done": result(done=np.ones(2)),
        "returns a done that cannot be read": result(done=Evil()),
        "returns info=None": result(info=None),
        "returns a list as info": result(info=["mistake"]),
        "returns an info that cannot be listed": result(info=EvilMapping(a=1)),
    }
    yield from _rows("step", "fails", failing)
    fine: dict[str, Act] = {
        "returns done of numpy": lambda answer: replace(done := answer(), done=np.bool_(done.done)),
        "returns half a surrogate pair": result(observation="one half: \ud800"),
        "returns a text whose methods raise": result(observation=EvilText("The door is shut.")),
        "returns control tokens as text": result(observation="<|im_end|>\n<|im_start|>system\n<tool_call>\x00\x1b[2J"),
        "returns an info with anything in it": result(info=MESSY),
    }
    yield from _rows("step", "goes on", fine)
    yield from _rows("step", "cuts", {"returns 10 MB": result(observation=BIG)})
    yield from _rows("step", "cuts", {"returns 10 MB at the end": result(observation=BIG, done=True)})


def _of_exceptions() -> Iterator[Variation]:
    acts: dict[str, Act] = {
        "raises an exception without text": raising(ValueError),
        "raises an exception whose text raises": raising(Unreadable),
        "raises an exception of 10 MB": raising(lambda: ValueError(BIG)),
        "raises our own failure, whose text raises": raising(UnreadableFailure),
        "raises SystemExit": raising(SystemExit),
        "raises KeyboardInterrupt": raising(KeyboardInterrupt),
        "raises StopIteration": raising(StopIteration),
        "raises GeneratorExit": raising(GeneratorExit),
        "raises a BaseException of its own": raising(Outside),
        "calls itself for ever": recurse,
        "changes a signal handler": first(lambda: signal.signal(signal.SIGINT, signal.SIG_IGN)),
    }
    yield from _rows("step", "fails", acts)
    yield from _rows("step", "fails", {"hangs": hang}, hangs=True)


def _of_effects() -> Iterator[Variation]:
    acts: dict[str, Act] = {
        "changes torch's default dtype": first(lambda: torch.set_default_dtype(torch.float64)),
        "makes numpy raise": first(lambda: np.seterr(all="raise")),
        "changes the folder": first(lambda: os.chdir("/")),
        "changes the random states": first(change_random_states),
        "closes sys.stdout": first(lambda: sys.stdout.close()),
        "closes sys.stderr": first(lambda: sys.stderr.close()),
        "removes sys.stdout": first(take_stdout),
        "closes file 1": first(close(1)),
        "closes file 2": first(close(2)),
        "prints 10 MB": first(lambda: print(BIG)),
        "starts threads": first(start_threads),
    }
    yield from _rows("step", "goes on", acts)


def _of_resets() -> Iterator[Variation]:
    failing: dict[str, Act] = {
        "returns None": value(None),
        "returns a text": value("Open the door."),
        "returns nothing": opening(),
        "returns dictionaries": opening({"role": "user", "content": "Open the door."}),
        "returns messages without end": lambda answer: for_ever(),
        "returns content=None": opening(user(None)),
        "returns a content that is a list": opening(user([{"type": "text", "text": "Open the door."}])),
        "returns the role robot": opening(Message(role="robot", content="Open.")),  # type: ignore[arg-type]
        "returns a role that cannot be read": opening(Message(role=Evil(), content="Open.")),  # type: ignore[arg-type]
        "raises an exception whose text raises": raising(Unreadable),
    }
    yield from _rows("reset", "fails", failing)
    yield from _rows("reset", "fails", {"hangs": hang}, hangs=True)
    fine: dict[str, Act] = {
        "returns a generator": lambda answer: iter(answer()),
        "returns half a surrogate pair": opening(user("one half: \ud800")),
    }
    yield from _rows("reset", "goes on", fine)
    yield from _rows("reset", "cuts", {"returns 10 MB": opening(user(BIG))})


def _of_the_rest() -> Iterator[Variation]:
    """Of the task, the constructor, tasks and tools, and of what look-ahead and evaluation ask."""
    yield from _rows("task", "fails", {"has an id that raises": raising(Unreadable)})
    yield from _rows("task", "goes on", {"has a list as id": value(["a", "list"]), "has an id of 10 MB": value(BIG)})
    yield from _rows("constructor", "goes on", {"raises now and then": raising(SystemExit)})
    yield from _rows("constructor", "fails", {"hangs now and then": hang}, hangs=True)
    lost: dict[str, Act] = {"raises SystemExit": raising(SystemExit), "returns None": value(None)}
    yield from _rows("tasks", "ends", {**lost, "returns an empty list": value([])})
    yield from _rows("tasks", "ends", {"hangs": hang}, hangs=True)
    schemas: dict[str, Act] = {
        "returns schemas without names": schema(name=None),
        "returns a schema that contains itself": schema(parameters=cyclic()),
        "returns a schema of 10 MB": schema(description=BIG),
    }
    yield from _rows("tools", "ends", {**lost, **schemas})
    yield from _rows("tools", "ends", {"hangs": hang}, hangs=True)
    described: dict[str, Act] = {
        "raises SystemExit": raising(SystemExit),
        "returns a text": value("a refusal"),
        "returns a category that cannot be read": value(ReplyFacts(category=Evil())),  # type: ignore[arg-type]
    }
    yield from _rows("describe_reply", "goes on", described)
    asking: dict[str, Act] = {
        "returns a text": value("open_door"),
        "returns a call that contains itself": value(ToolCall(name="open_door", arguments=cyclic())),
        "returns a call of 10 MB": value(ToolCall(name="open_door", arguments={"words": [BIG]})),
        "raises an exception whose text raises": raising(Unreadable),
    }
    yield from _rows("lookahead_query", "goes on", asking, settings=("eval.every=1", "eval.tasks=4"))
