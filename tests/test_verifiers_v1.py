"""Tasksets of verifiers 0.4, with the real library where it is installed; and libraries of another version."""

import sys
from pathlib import Path

import pytest

from lfo.config import load_config
from lfo.env.adapters import adapter_class
from lfo.env.interface import Environment
from lfo.errors import ConfigError, UsageError
from lfo.loading import environment_factory
from lfo.protocol.hermes import format_tool_call
from lfo.types import ToolCall

TASKSET = '''
import verifiers.v1 as vf


class Sums(vf.State):
    made: int = 0


class Data(vf.TaskData):
    a: int
    b: int


class Adder(vf.Toolset[vf.ToolsetConfig, Sums]):
    @vf.tool
    async def add(self, x: int, y: int) -> str:
        """Add two numbers."""
        self.state.made += 1
        return f"The sum is {x + y}."


class Add(vf.Task[Data, Sums]):
    @classmethod
    def toolsets(cls, config):
        return [Adder(vf.ToolsetConfig())]

    @vf.stop
    async def too_many(self, trace) -> bool:
        return trace.state.made >= 3

    @vf.reward
    async def right(self, task, trace) -> float:
        return float(trace.last_reply == str(task.a + task.b) and trace.state.made == 1)


class Adding(vf.Taskset[Add]):
    def load(self):
        for number in range(10):
            yield Add(Data(prompt=f"What is {number} + 2?", a=number, b=2, system_prompt="Be exact."))


__all__ = ["Adding"]
'''


@pytest.fixture
def adding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Environment:
    pytest.importorskip("verifiers.v1", reason="verifiers 0.4 is not installed")
    (tmp_path / "adding_v1.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return environment_factory(load_config(["env=verifiers:adding-v1"]))()


def add(x: int, y: int) -> str:
    return format_tool_call(ToolCall(name="adder_add", arguments={"x": x, "y": y}))


def test_a_taskset_plays_with_its_own_tools_state_and_reward(adding: Environment):
    (tool,) = adding.tools()
    assert (tool["function"]["name"], tool["function"]["description"]) == ("adder_add", "Add two numbers.")
    assert [len(adding.tasks(split)) for split in ("train", "val")] == [8, 2]
    with pytest.raises(UsageError, match="no split 'test'"):
        adding.tasks("test")
    opening = adding.reset(adding.tasks("val")[0])
    assert [(each.role, each.content) for each in opening] == [("system", "Be exact."), ("user", "What is 4 + 2?")]
    assert adding.step(add(4, 2)).observation == "The sum is 6."
    end = adding.step("6")
    assert (end.reward, end.done) == (1.0, True)


def test_a_mistake_costs_a_turn_and_the_stop_condition_ends_the_rollout(adding: Environment):
    adding.reset(adding.tasks("train")[0])
    assert (
        "needs the argument"
        in adding.step(format_tool_call(ToolCall(name="adder_add", arguments={"x": 1}))).observation
    )
    ends = [adding.step(add(0, 2)).done for _ in range(3)]
    assert ends == [False, False, True]


def test_another_version_of_a_library_is_not_called_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "verifiers").mkdir()
    (tmp_path / "verifiers" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [each for each in sys.modules if each.partition(".")[0] == "verifiers"]:
        monkeypatch.delitem(sys.modules, name)
    for module in ("verifiers_env", "verifiers_v1"):
        monkeypatch.delitem(sys.modules, f"lfo.env.adapters.{module}", raising=False)
    try:
        with pytest.raises(ConfigError, match="the installed version of verifiers cannot be used") as error:
            adapter_class("verifiers:anything")
    finally:
        sys.modules.pop("verifiers", None)
    assert "not installed" not in str(error.value)
