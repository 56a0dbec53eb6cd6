"""What schemas say about a call."""

from __future__ import annotations

from typing import Any

import pytest

from lfo.protocol.schemas import listed_words, misfit
from lfo.types import ToolCall


def tool(name: str, **properties: Any) -> dict[str, Any]:
    schema = {"type": "object", "properties": properties, "required": list(properties)[:1]}
    return {"type": "function", "function": {"name": name, "description": "Do it.", "parameters": schema}}


DIAL = tool("dial", number={"type": "integer"}, speed={"enum": ["slow", "fast"]})


@pytest.mark.parametrize(
    ("name", "arguments", "flaw"),
    [
        ("dial", {"number": 3}, None),
        ("dial", {"number": 3, "speed": "fast"}, None),
        ("dial", {}, "dial needs the argument number."),
        ("dial", {"number": "3"}, "Argument number of dial must be of type integer."),
        ("dial", {"number": 3, "speed": "now"}, "Argument speed of dial must be one of: slow, fast."),
        ("dial", {"number": 3, "<b>": 1}, 'dial has no argument "\\u003cb>"; its arguments are: number, speed.'),
        ("call", {}, 'There is no tool "call"; the tools are: dial.'),
    ],
)
def test_a_call_that_does_not_fit_is_described_in_one_sentence(name: str, arguments: dict[str, Any], flaw: str | None):
    assert misfit(ToolCall(name=name, arguments=arguments), [DIAL]) == flaw


@pytest.mark.parametrize("schema", [{"$ref": "#"}, {"properties": {"number": {"type": "odd"}}}, {"$ref": "#/nowhere"}])
def test_a_schema_that_cannot_be_used_leaves_it_to_the_environment(schema: dict[str, Any]):
    known = {"function": {"name": "dial", "parameters": {"additionalProperties": True, **schema}}}
    assert misfit(ToolCall(name="dial", arguments={"number": 1}), [known]) is None


def test_without_tools_nothing_can_be_said():
    assert misfit(ToolCall(name="dial", arguments={}), []) is None


def test_only_an_enum_that_is_listed_completely_is_listed():
    nested = tool("paint", parts={"items": {"enum": ["dark red", "blue"]}}, one={"enum": ["only"]})
    tools = [DIAL, nested]
    assert listed_words("slow or fast", tools) == {"slow", "fast"}
    assert listed_words("It wants dark red, or blue.", tools) == {"dark", "red", "blue"}
    assert listed_words("It wants dark blue. fast! only", tools) == set()
