"""A tool without `parameters`, or with null, takes none, as in OpenAI's format: in serving and in training."""

from random import Random
from typing import Any

import pytest

from lfo.env.adapters.foreign import ForeignEnvironment, Reaction
from lfo.env.for_trl import trl_environment
from lfo.env.random_play import random_call
from lfo.measure.environment_check import schema_flaws
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.serving.batcher import Batcher
from lfo.serving.speaker import local_speaker
from lfo.types import Message, ToolCall
from small_runs import FussyCalls, small_trainer, tokenizer
from small_tokenizers import CHATML_PLAIN, CHATML_WITH_TOOLS, FAMILIES, family_tokenizer, small_tokenizer
from test_serving import opening, request, small_agent

LISTEN: dict[str, Any] = {"name": "listen", "description": "Listen at the door."}
WAYS = ({}, {"parameters": None}, {"parameters": {"type": "object", "properties": {}}})
# A template that reads the parameters of each tool, as many do and the embedded base's.
READING = CHATML_WITH_TOOLS.replace("tool | tojson", "tool.function.parameters.properties | tojson")
TOKENIZERS = {
    "tiny": tokenizer,
    "plain": lambda: small_tokenizer(CHATML_PLAIN),
    "reading": lambda: small_tokenizer(READING),
    **{name: lambda name=name: family_tokenizer(name) for name in FAMILIES},
}


def tool(**more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {**LISTEN, **more}}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_every_template_writes_it_as_a_tool_with_none(name: str):
    messages = [Message(role="user", content="Hi.")]
    rows = {ChatCodec(TOKENIZERS[name](), [tool(**way)]).opening(messages).ids for way in WAYS}
    assert len(rows) == 1


def test_the_given_tools_are_left_as_they_are():
    given = tool()
    ChatCodec(tokenizer(), [given])
    assert given == tool()


def test_it_is_served():
    agent = small_agent()
    with Batcher(local_speaker(agent)) as batcher:
        replies = [
            batcher.submit(request(opening(agent), tools=[tool(**way)], temperature=0, max_tokens=3)).result()
            for way in WAYS
        ]
    assert len({reply.content for reply in replies}) == 1


class Bare(FussyCalls):
    """The phone-call world with tools of which one has no parameters, and one null."""

    def tools(self) -> list[dict[str, Any]]:
        listed = super().tools()
        del listed[0]["function"]["parameters"]
        listed[1]["function"]["parameters"] = None
        return listed


def test_it_is_trained():
    trainer = small_trainer("steps=1", environment=lambda: Bare(levels=(2,)))
    assert trainer.step(1)["rollouts_seen"] == 8


class Door(ForeignEnvironment):
    word = "door"

    def tools(self) -> list[dict[str, Any]]:
        return [tool()]

    def open(self, task: Any) -> list[Message]:
        return [Message(role="user", content="Hi.")]

    def act(self, call: ToolCall) -> Reaction:
        return Reaction(observation="Steps.")


@pytest.mark.parametrize(
    ("arguments", "reply"),
    [({}, "Steps."), ({"at": "door"}, 'listen has no argument "at"; its arguments are: none.')],
)
def test_adapters_call_it_without_arguments(arguments: dict[str, Any], reply: str):
    door = Door("x")
    door.reset(door.tasks("train")[0])
    assert door.step(format_tool_call(ToolCall(name="listen", arguments=arguments))).observation == reply


def test_other_readers_of_schemas_know_it():
    for way in WAYS:
        assert schema_flaws([tool(**way)]) == []
        assert random_call([tool(**way)], transcript="Hi.", random=Random(0)) == ToolCall(name="listen", arguments={})
    methods = vars(trl_environment(lambda: Bare(levels=(2,))))
    assert str(methods[Bare().tools()[0]["function"]["name"]].__signature__) == "(self) -> str"
