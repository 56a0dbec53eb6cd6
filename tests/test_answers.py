"""What environments answer is validated where it enters: plain values, or one sentence with environment and method."""

from __future__ import annotations

import math
from itertools import repeat
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from lfo.env.answers import (
    MOST_CHARS,
    MOST_MESSAGES,
    MOST_REWARD,
    InvalidAnswer,
    asked_call,
    checked_step,
    described,
    id_of,
    legal_moves,
    opening_of,
    plain_values,
    tools_of,
)
from lfo.env.interface import describe_with, flaw_of, predicted_tools, tasks_of
from lfo.errors import ConfigError, EnvironmentFailed, UsageError
from lfo.types import Message, ReplyFacts, StepResult, ToolCall


class Evil:
    """A value whose every use raises."""

    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("do not touch me")

    __bool__ = __str__ = __repr__ = __eq__ = __len__ = __iter__ = _refuse  # type: ignore[assignment]
    __hash__ = None  # type: ignore[assignment]


class EvilText(str):
    def _refuse(self, *_: object) -> Any:
        raise RuntimeError("do not read me")

    __str__ = __repr__ = __len__ = __getitem__ = encode = isascii = _refuse  # type: ignore[assignment]


class Says:
    """An environment each of whose methods answers with one value."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def _say(self, *_: object) -> Any:
        return self.answer() if callable(self.answer) else self.answer

    tasks = tools = reset = step = lookahead_query = describe_reply = moves = _say


def cyclic() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["again"] = found
    return found


USER = Message(role="user", content="Open the door.")


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "must return a list of Message, not None"),
        ("Open the door.", "must return a list of Message, not a str"),
        (USER, "must return a list of Message, not a Message"),
        ([], f"at least one, at most {MOST_MESSAGES}"),
        (lambda: repeat(USER), f"at least one, at most {MOST_MESSAGES}"),
        ([{"role": "user", "content": "x"}], "must return a list of Message, not of a dict"),
        ([Message(role="user", content=None)], "the content None (NoneType); the content of a message must be text"),  # type: ignore[arg-type]
        (
            [Message(role="user", content=Evil())],
            "the content a value of type Evil; the content of a message must be text",
        ),  # type: ignore[arg-type]
        ([Message(role="robot", content="x")], "the role robot (str); a role is system, user, assistant, tool"),  # type: ignore[arg-type]
        ([Message(role=Evil(), content="x")], "the role a value of type Evil; a role is"),  # type: ignore[arg-type]
        ([Message(role="tool", content="x", name=7)], "the name 7 (int)"),  # type: ignore[arg-type]
    ],
)
def test_an_opening_is_a_list_of_messages(answer: Any, words: str):
    with pytest.raises(InvalidAnswer) as error:
        opening_of(Says(answer), None)
    assert str(error.value).startswith("reset of Says ")
    assert words in str(error.value)


def test_an_opening_becomes_plain():
    role: Any = EvilText("user")
    (message,) = opening_of(Says(lambda: iter([Message(role=role, content=EvilText("Half: \ud800"))])), None)
    assert message == Message(role="user", content="Half: ?")
    assert (type(message.role), type(message.content)) == (str, str)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reward": math.inf}, "the reward inf (float); a reward is a number up to 1e+15"),
        ({"reward": 1e308}, "the reward 1e+308 (float)"),
        ({"reward": -2 * MOST_REWARD}, "the reward -2000000000000000.0 (float)"),
        ({"reward": 10**5000}, "the reward a value of type int"),
        ({"reward": None}, "the reward None (NoneType)"),
        ({"reward": Evil()}, "the reward a value of type Evil"),
        ({"done": None}, "returned None (NoneType) as done; it must be True or False"),
        ({"done": "yes"}, "returned yes (str) as done"),
        ({"done": 2}, "returned 2 (int) as done"),
        ({"done": Evil()}, "returned a value of type Evil as done"),
        ({"done": np.ones(1)}, "returned [1.] (ndarray) as done"),
        ({"info": None}, "an info that is not a mapping: None (NoneType)"),
        ({"observation": None}, "whose observation is text, not None"),
    ],
)
def test_a_bad_field_of_a_step_is_named(fields: dict[str, Any], words: str):
    with pytest.raises(InvalidAnswer) as error:
        checked_step(Says(StepResult(**{"observation": "x", **fields})), "hello")
    assert str(error.value).startswith("step of Says ")
    assert words in str(error.value)


@pytest.mark.parametrize("done", [True, 1, np.bool_(True), np.int64(1)])
def test_numbers_of_numpy_are_as_good_as_our_own(done: Any):
    numbers: dict[str, Any] = {"reward": np.float32(0.5), "done": done, "info": {"mistakes": np.int64(2)}}
    result = checked_step(Says(StepResult(observation=EvilText("Shut."), **numbers)), "hello")
    assert result == StepResult(observation="Shut.", reward=0.5, done=True, info={"mistakes": 2})
    assert [type(each) for each in (result.observation, result.reward, result.done)] == [str, float, bool]


def test_an_info_keeps_what_a_file_can_hold():
    messy = {
        "nan": math.nan,
        "long number": 10**400,
        "cycle": cyclic(),
        "evil": Evil(),
        7: 7,
        "array": np.ones(1),
        "text": EvilText("x" * 5_000),
        "half": "\ud800",
        "number": 3,
        "date": np.datetime64("2024-01-01"),
    }
    assert plain_values(messy) == {"text": "x" * MOST_CHARS, "half": "?", "number": 3}


def test_a_call_is_one_that_a_policy_could_write():
    for query in (asked_call, lambda environment, transcript: legal_moves(environment)[0]):
        call = ToolCall(name="open_door", arguments=MappingProxyType({"words": ("ash",)}))
        answer = call if query is asked_call else [call]
        assert query(Says(answer), []) == ToolCall(name="open_door", arguments={"words": ["ash"]})
    assert asked_call(Says(None), []) is None


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("open_door", "must return a ToolCall or None, not open_door (str)"),
        (ToolCall(name="open_door", arguments=cyclic()), "a call that cannot be written: ValueError: Circular"),
        (ToolCall(name="open_door", arguments={"x": math.nan}), "a call that cannot be written: ValueError"),
        (
            ToolCall(name="open_door", arguments={"x": "y" * 30_000}),
            "cannot be written: Mistake: The message is longer",
        ),
        (ToolCall(name=None, arguments={}), 'cannot be written: Mistake: The tool call must have a "name"'),  # type: ignore[arg-type]
    ],
)
def test_a_call_that_no_policy_could_write_is_named(answer: Any, words: str):
    with pytest.raises(InvalidAnswer) as error:
        asked_call(Says(answer), [])
    assert str(error.value).startswith("lookahead_query of Says ")
    assert words in str(error.value)


def test_the_meaning_of_a_reply_is_text(caplog):
    facts = ReplyFacts(category="refusal", facts=(7, "ash"))  # type: ignore[arg-type]
    assert described(Says(facts), "x") == ReplyFacts(category="refusal", facts=("7", "ash"))
    for bad in ("refusal", ReplyFacts(category=Evil())):  # type: ignore[arg-type]
        assert described(Says(bad), "x") is None
    assert "describe_reply of Says must return ReplyFacts or None" in caplog.text


def test_a_description_that_fails_costs_the_facts(caplog):
    def leave() -> None:
        raise SystemExit(3)

    assert describe_with(Says(leave), "x") is None  # type: ignore[arg-type]
    assert "describe_reply of Says raised SystemExit: 3" in caplog.text


def test_the_id_of_a_task_is_text():
    class Task:
        def __init__(self, name: Any) -> None:
            self.id = name

    names = [7, ["a"], EvilText("b"), "c" * 5_000]
    assert [id_of(Task(name)) for name in names] == ["7", "['a']", "b", "c" * MOST_CHARS]
    for bad in (Task(Evil()), object()):
        with pytest.raises(EnvironmentFailed, match="the id of a task raised"):
            id_of(bad)


SCHEMA: dict[str, Any] = {"type": "function", "function": {"name": "look", "description": "Look."}}


def test_tools_become_plain_json():
    parameters = {"type": "object", "properties": {}, "required": ()}
    schema = {"function": {"name": "look", "parameters": parameters}}
    tools = tools_of(Says((MappingProxyType(schema), SCHEMA)))
    assert tools == [{"function": {"name": "look", "parameters": {**parameters, "required": []}}}, SCHEMA]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (None, "raised TypeError"),
        ([None], "raised TypeError"),
        ([{"name": "look"}], 'each must be {"type": "function"'),
        ([{"type": "function", "function": {"name": 7}}], 'each must be {"type": "function"'),
        ([{"function": {"name": "look", "parameters": [1]}}], "the parameters of look (str) must be a JSON schema"),
        ([{"function": {"name": "look", "description": 7}}], "the description of look (str) must be text"),
        ([{"function": {"name": "look", "x": math.nan}}], "raised ValueError"),
        ([{"function": {"name": "look", "x": cyclic()}}], "raised ValueError: Circular"),
        ([{"function": {"name": "look", "x": "\ud800"}}], "raised UnicodeEncodeError"),
        ([{"function": {"name": "look", "x": "y" * 2_000_000}}], "1,000,000 characters"),
        (lambda: repeat(SCHEMA), "more than 1,000 schemas"),
    ],
)
def test_bad_tools_are_one_sentence(answer: Any, words: str):
    with pytest.raises(ConfigError) as error:
        tools_of(Says(answer))
    assert str(error.value).startswith("tools of Says")
    assert words in str(error.value)


def test_bad_tasks_are_one_sentence():
    def leave() -> None:
        raise SystemExit(3)

    for answer, words in (
        (leave, "the environment Says has no split 'val': tasks raised SystemExit: 3"),
        (iter(()), "the environment Says: tasks() must return a sequence"),
        ([], "the environment Says has no tasks in its split 'val'"),
    ):
        with pytest.raises(UsageError) as error:
            tasks_of(Says(answer), "val")  # type: ignore[arg-type]
        assert words in str(error.value)


def test_bad_names_of_predicted_tools_are_one_sentence():
    class Names(Says):
        predicted_tools: Any = (7,)

    with pytest.raises(ConfigError, match="the environment Names has no tool 7; the nearest is look"):
        predicted_tools(Names([SCHEMA]))  # type: ignore[arg-type]


def test_a_flaw_is_told_before_a_run_and_an_exception_is_left_to_the_rollouts():
    class Task:
        id = "a"

    class World(Says):
        def tools(self) -> Any:
            return [SCHEMA]

        def tasks(self, split: str) -> Any:
            return [Task()]

        lookahead_query = None  # type: ignore[assignment]

        def reset(self, task: Any) -> Any:
            return self._say()

    def leave() -> None:
        raise SystemExit(3)

    made: Any = World("Hi.")
    assert flaw_of(lambda: made) == "reset of World must return a list of Message, not a str"
    made = World(leave)
    with pytest.raises(EnvironmentFailed, match="reset of World raised SystemExit: 3"):
        flaw_of(lambda: made)
