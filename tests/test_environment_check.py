"""`lfo check-env` for any environment: it finds each defect and reports it in one sentence."""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lfo.cli import main
from lfo.env.random_play import random_call, some_words
from lfo.env.seeds import stream
from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.env.worlds.oracle import OracleCodes
from lfo.measure.environment_check import check_environment, schema_flaws
from lfo.measure.predictability import predictability, word_f1
from lfo.play.records import rollout_from_texts
from lfo.protocol.hermes import format_tool_call
from lfo.types import Message, StepResult, ToolCall


@dataclass(frozen=True)
class Lamp:
    id: str


class Lamps(ToolEnvironment):
    """A good one: one tool, one right answer."""

    def tasks(self, split: str) -> list[Lamp]:
        return [Lamp(f"{split}-{number}") for number in range(4)]

    def start(self, task: Lamp) -> list[Message]:
        self.task, self.lit = task, 0
        return [Message(role="user", content=f"Light lamp {task.id}.")]

    @tool
    def light(self, lamp: str) -> str:
        """Light a lamp.

        lamp: its name
        """
        self.lit += lamp == self.task.id
        return f"Lamp {self.lit}."

    def finished(self) -> bool:
        return bool(self.lit)

    def reward(self) -> float:
        return float(self.lit)


class Raising(Lamps):
    def start(self, task):
        if task.id == "train-2":
            raise OSError("no bulb")
        return super().start(task)


class NeverOpens(Lamps):
    def start(self, task):
        raise OSError("no bulb")


class Hanging(Lamps):
    def step(self, message):
        time.sleep(60)
        return super().step(message)


class Printing(Lamps):
    def start(self, task):
        print("hello from inside")
        return super().start(task)


class Wandering(Lamps):
    def start(self, task):
        os.chdir("/")
        return super().start(task)


class Homeless(Lamps):
    def start(self, task):
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
        return super().start(task)


class Empty(Lamps):
    def tasks(self, split):
        return []


class LikeGymnasium(Lamps):
    def step(self, message):
        return "a lamp", 0.0, False, {}


class Gambling(Lamps):
    def start(self, task):
        random.random()
        return super().start(task)


class Forgetful(Lamps):
    def start(self, task):
        messages = super().start(task)
        return [Message(role="user", content=f"{messages[0].content} {time.perf_counter_ns()}")]


class Leaking(Lamps):
    playing = 0

    def start(self, task):
        type(self).playing = hash(task.id)
        return super().start(task)

    @tool
    def light(self, lamp: str) -> str:
        """Light a lamp.

        lamp: its name
        """
        return f"{type(self).playing == hash(self.task.id)}"


class Generous(Lamps):
    def reward(self):
        return 1.0


class Speaking(Lamps):
    def start(self, task):
        return [*super().start(task), Message(role="user", content="Now <|im_end|> stop.")]


class Fragile(Lamps):
    def step(self, message):
        json.loads(message.partition("<tool_call>")[2].partition("</tool_call>")[0] or "{}")
        return super().step(message)


class Twins(Lamps):
    def tasks(self, split):
        return [Lamp("same"), Lamp("same")]


class Endless(Lamps):
    def step(self, message):
        result = super().step(message) if "<tool_call>" in message else None
        return result or StepResult(observation="Go on.")


def checked(factory: Any, **options: Any) -> dict[str, Any]:
    return check_environment(factory, **{"episodes": 6, "max_turns": 4, "timeout": 5.0} | options)


@pytest.mark.parametrize("factory", [Lamps, OracleCodes])
def test_a_good_environment_has_no_problem_and_no_warning(factory):
    result = checked(factory)
    assert (result["ok"], result["problems"], result["warnings"]) == (True, [], [])
    nothing = {"reward": 0, "lowest": 0, "highest": 0, "success": 0, "turns": 1, "ended": 1, "n": 6}
    assert result["players"]["nothing"] == nothing
    assert result["players"]["random"]["n"] == 6


def test_figures_of_a_world_that_can_be_computed_by_hand():
    result = checked(Lamps, length_of=lambda text: len(text.split()))
    assert result["tasks"] == {"train": 4, "val": 4}
    assert result["tools"] == ["light"]
    assert result["lengths"]["opening"] == {"median": 3, "p95": 3, "longest": 3}
    assert result["lengths"]["reply"]["longest"] == 2
    assert 0 < result["players"]["random"]["success"] <= 1, "a name is one of the words that were heard"


def test_tools_and_messages_of_the_agent_need_room_too():
    counted = {"length_of": lambda text: len(text.split()), "prompt_length": lambda messages: 100 + len(messages)}
    lengths = checked(Lamps, **counted)["lengths"]
    assert lengths["opening"]["longest"] == 101
    assert lengths["rollout"]["longest"] > 101 + lengths["reply"]["longest"], "calls have words as well"
    (warning,) = checked(Lamps, **counted, room=100)["warnings"]
    assert "longer than rollout.max_context=100: openings with their tools take up to 101 tokens" in warning


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (Raising, "reset of Raising raised OSError: no bulb (in 2 of 12 rollouts)"),
        (NeverOpens, "its first task cannot be opened: reset of NeverOpens raised OSError: no bulb"),
        (Speaking, "its text contains a special token of the model: '<|im_end|>'"),
        (Fragile, "it fails on the invalid message '<tool_call>"),
        (Twins, "two tasks of train have the same id"),
        (Empty, "it has no tasks in its split train"),
        (LikeGymnasium, "step of LikeGymnasium must return a StepResult, not a tuple"),
        (Twins, "1 tasks are in train and in val, such as same"),
    ],
)
def test_what_makes_runs_fail_is_a_problem(factory, words):
    result = checked(factory, specials=["<|im_end|>", "<|im_start|>"])
    assert not result["ok"]
    assert any(words in problem for problem in result["problems"]), result["problems"]


@pytest.mark.parametrize(
    ("factory", "words"),
    [
        (Printing, "it prints: 'hello from inside'"),
        (Wandering, "it changes the working directory of the process"),
        (Homeless, "it changes the working directory of the process"),
        (Gambling, "it draws from the global random state"),
        (Forgetful, "the same calls get other replies the second time (task train-0)"),
        (Leaking, "two parallel rollouts affect each other (tasks train-0 and train-1)"),
        (Generous, "doing nothing is rewarded with 1 on average"),
        (Endless, "it does not end when the policy writes a message without a call"),
    ],
)
def test_what_an_author_should_know_is_a_warning(factory, words, capsys):
    folder = os.getcwd()
    result = checked(factory)
    assert any(words in warning for warning in result["warnings"]), result["warnings"]
    assert os.getcwd() == folder
    assert capsys.readouterr().out == ""


def test_an_environment_that_hangs_is_told_once_and_not_waited_for_again():
    started = time.monotonic()
    result = checked(Hanging, timeout=0.2)
    assert result["problems"] == ["the environment did not answer within 0.2 seconds (in 1 of 1 rollouts)"]
    assert time.monotonic() - started < 50, "a hang lasts 60 seconds"


def test_flaws_of_schemas_are_named():
    schema = {"properties": {"x": {}, "y": {"type": "string"}, "z": {"enum": [1]}}, "required": ["q"]}
    tools = [{"type": "function", "function": {"name": "do it", "description": " ", "parameters": schema}}]
    assert schema_flaws(tools) == [
        "the tool name 'do it' may only have letters, digits, _ and -, as chat templates expect",
        "tool do it has no description",
        "argument x of do it has no type",
        "argument y of do it has no description",
        "tool do it requires q, which it does not describe",
    ]
    assert schema_flaws(OracleCodes().tools()) == []


# --- random play --------------------------------------------------------------------------------------------------


def test_random_calls_fit_their_schema():
    jsonschema = pytest.importorskip("jsonschema")
    inner = {"type": "object", "properties": {"deep": {"type": ["null", "boolean"]}}, "required": ["deep"]}
    schema = {
        "type": "object",
        "properties": {
            "way": {"enum": ["up", "down"]},
            "count": {"type": "integer", "minimum": 3, "maximum": 4},
            "share": {"type": "number"},
            "list": {"type": "array", "items": {"$ref": "#/$defs/inner"}, "minItems": 1, "maxItems": 2},
            "pair": {"type": "array", "prefixItems": [{"const": 7}, {"type": "string", "maxLength": 4}], "minItems": 2},
            "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        },
        "required": ["way", "count", "list", "pair", "either"],
        "$defs": {"inner": inner},
    }
    tools = [{"type": "function", "function": {"name": "go", "parameters": schema}}]
    calls = [random_call(tools, transcript="Take the [left] way.", random=stream(seed)) for seed in range(200)]
    for call in calls:
        jsonschema.validate(call.arguments, schema)
    assert {call.arguments["way"] for call in calls} == {"up", "down"}
    assert calls[3] == random_call(tools, transcript="Take the [left] way.", random=stream(3)), "a function of its seed"
    move = ToolCall(name="act", arguments={"action": "up"})
    assert random_call(tools, transcript="", random=stream(0), moves=[move]) == move


def test_random_values_follow_references_and_limits_inside_alternatives():
    schema = {
        "type": "object",
        "properties": {
            "colour": {"anyOf": [{"$ref": "#/$defs/Colour"}, {"type": "null"}]},
            "debt": {"type": "integer", "maximum": -5},
        },
        "required": ["colour", "debt"],
        "$defs": {"Colour": {"type": "string", "enum": ["red", "blue"]}},
    }
    tools = [{"type": "function", "function": {"name": "paint", "parameters": schema}}]
    calls = [random_call(tools, transcript="green", random=stream(seed)) for seed in range(50)]
    assert {call.arguments["colour"] for call in calls} == {"red", "blue", None}
    assert all(call.arguments["debt"] <= -5 for call in calls)


def test_words_are_those_that_were_heard():
    heard = {some_words('Say "open sesame" or [left].', stream(seed)) for seed in range(100)}
    assert {"open sesame", "left"} <= heard
    assert all(word in "Say open sesame or left" for words in heard for word in words.split())
    assert some_words("", stream(0)) == "nothing"


# --- recorded rollouts --------------------------------------------------------------------------------------------


def _logged(replies: dict[str, Any], count: int = 60) -> list[Any]:
    """Rollouts in which each tool is called once, with a colour; a function of number and colour is its reply."""
    colours = ("red", "blue", "green")
    return [
        rollout_from_texts(
            Lamps(),
            task_id=str(number),
            opening=[Message(role="user", content="Try the doors.")],
            exchanges=[
                (
                    format_tool_call(ToolCall(name=name, arguments={"door": colours[number % 3]})),
                    reply(number, colours[number % 3]),
                )
                for name, reply in replies.items()
            ],
        )
        for number in range(count)
    ]


def test_which_replies_are_worth_predicting():
    code = {"red": "seventeen ember", "blue": "forty salt", "green": "ninety moss"}
    rollouts = _logged(
        {
            "law": lambda number, colour: f"wanted {code[colour]}",
            "same": lambda number, colour: "thank you kindly",
            "echo": lambda number, colour: f"the doors {colour}",
            "dice": lambda number, colour: " ".join(
                f"n{stream(number, place).randint(0, 10**6)}" for place in range(4)
            ),
        }
    )
    result = predictability(rollouts)
    rows = result["tools"]
    assert result["worth_predicting"] == ["law"]
    assert rows["law"]["by_memory"] == 1.0
    assert rows["law"]["by_frequency"] < 0.7
    assert rows["same"]["verdict"] == "no: nearly all replies are the same"
    assert rows["echo"]["verdict"] == "no: replies only repeat the transcript"
    assert rows["dice"]["verdict"] == "unclear: earlier replies do not help to predict it"
    assert (rows["law"]["replies"], rows["law"]["distinct"], rows["law"]["constant"]) == (60, 3, pytest.approx(1 / 3))
    assert predictability(rollouts[:20])["worth_predicting"] == ["law"]
    few = predictability(rollouts[:19])["tools"]["law"]
    assert few["verdict"] == "unknown: fewer than 20 replies"


@pytest.mark.parametrize(
    ("said", "true", "f1"), [("", "", 1), ("", "a", 0), ("a b", "A, b!", 1), ("a a", "a b", 0.5), ("x", "y", 0)]
)
def test_word_f1_by_hand(said, true, f1):
    assert word_f1(said, true) == pytest.approx(f1)


# --- the command --------------------------------------------------------------------------------------------------


@pytest.fixture
def lfo(monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


def test_check_env_takes_any_environment(lfo):
    code, out, _ = lfo("check-env", "env=oracle-codes", "--episodes", "4", "--gate", "0")
    assert code == 0
    assert "The environment works." in out
    code, out, _ = lfo("check-env", "env=test_environment_check:Twins", "--episodes", "2", "--json")
    result = json.loads(out)
    assert (code, result["ok"]) == (1, False)
    code, out, err = lfo("check-env", "env=test_environment_check:Nobody")
    assert (code, out) == (2, "")
    assert "has no Nobody" in err


def test_check_env_reads_logs(lfo, tmp_path: Path):
    path = tmp_path / "rollouts.jsonl"
    rollouts = _logged({"light": lambda number, colour: f"wanted {hash(colour) % 7} {colour * 2}"}, count=40)
    lines = [
        {
            "opening": [{"role": "user", "content": "Go."}],
            "turns": [{"action": turn.action, "observation": turn.observation} for turn in rollout.turns],
        }
        for rollout in rollouts
    ]
    path.write_text("\n".join(map(json.dumps, lines)))
    code, out, _ = lfo("check-env", "env=test_environment_check:Lamps", "--logs", str(path))
    assert code == 0
    assert "Train with world_model.predict=light" in out
    code, out, err = lfo("check-env", "--logs", str(path))
    assert (code, out) == (2, "")
    assert "--logs needs the environment" in err
