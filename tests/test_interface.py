"""What an environment declares about itself: the tools whose replies are worth predicting."""

from __future__ import annotations

import pytest

from lfo.env.interface import predicted_tools
from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import ConfigError
from lfo.protocol.hermes import format_tool_call
from lfo.types import Message, ToolCall


class Lamp(ToolEnvironment):
    """An environment that says nothing about its tools."""

    def tasks(self, split: str) -> list:
        return []

    def start(self, task: object) -> list[Message]:
        return []

    def reward(self) -> float:
        return 0.0

    def finished(self) -> bool:
        return False

    @tool
    def switch(self) -> str:
        """Turn the lamp on or off."""
        return "Click."


@pytest.mark.parametrize(
    ("environment", "setting", "tools"),
    [
        (PhoneCalls, "default", {"make_phone_call"}),
        (PhoneCalls, "make_phone_call,auth_info_form", {"make_phone_call", "auth_info_form"}),
        (PhoneCalls, "search_company, auth_info_form", {"search_company", "auth_info_form"}),
        (PhoneCalls, "all", None),
        (PhoneCalls, "none", set()),
        (OracleCodes, "default", {"open_door"}),
        (OracleCodes, "ask_oracle", {"ask_oracle"}),
        (OracleCodes, "all", None),
        (Lamp, "default", None),
        (Lamp, "none", set()),
    ],
)
def test_which_tools_are_predicted(environment, setting: str, tools: set[str] | None):
    assert predicted_tools(environment(), setting) == tools


def test_a_tool_that_there_is_not_is_refused_with_the_nearest():
    with pytest.raises(ConfigError, match=r"^world_model\.predict=switsh: .* Lamp has no tool 'switsh'; .* is switch$"):
        predicted_tools(Lamp(), "switsh")


def test_what_look_ahead_asks_about_is_predicted():
    calls, doors = PhoneCalls(levels=(2,)), OracleCodes()
    for environment, search in (
        (calls, lambda task: ToolCall(name="search_company", arguments={"name": task.company_name})),
        (doors, lambda task: ToolCall(name="ask_oracle", arguments={"oracle": task.oracle})),
    ):
        task = environment.tasks("val")[0]
        opening, call = environment.reset(task), search(task)
        heard = environment.step(format_tool_call(call)).observation
        told = Message(role="assistant", content=format_tool_call(call))
        asked = environment.lookahead_query((*opening, told, Message(role="tool", content=heard, name=call.name)))
        assert asked is not None
        assert asked.name in (predicted_tools(environment) or ())
