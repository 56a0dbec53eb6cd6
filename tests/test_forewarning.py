"""What earlier conversations say about later ones."""

from dataclasses import replace

import pytest

from lfo.measure.forewarning import forewarning
from lfo.play.records import rollout_from_texts
from lfo.protocol.hermes import format_tool_call
from lfo.types import Message, Rollout, ToolCall

ASKS = "I need your {} first."


def conversation(company: str, *, given: bool, again: bool = False) -> Rollout:
    """A call that fails unless it gives what its company wants; `again`: made once more, then with it."""
    exchanges = []
    for gives in [False, True] if again else [given]:
        wanted = {"A": "pin", "B": "card"}[company]
        arguments = {"company": company, "gives": wanted if gives else ""}
        reply = "Done, thank you." if gives else ASKS.format(wanted)
        exchanges.append((format_tool_call(ToolCall(name="phone", arguments=arguments)), reply))
    opening = [Message(role="user", content=f"Call company {company}.")]
    return rollout_from_texts(None, task_id="", opening=opening, exchanges=exchanges)


def test_failing_calls_that_others_made_before_are_warned_about_and_right_ones_are_not():
    pattern = [conversation(company, given=given, again=not given) for company in "AB" for given in (False, True)]
    later = forewarning(pattern * 10)
    assert later is not None
    assert (later["earlier"], later["later"]) == (28, 12)
    row = later["tools"]["phone"]
    assert (row["calls"], row["failed"], row["warned"], row["false_alarms"]) == (18, 6, 6, 0)
    assert row["by_memory"] == 1
    assert row["by_frequency"] < 0.8
    assert {each["expected"] for each in later["examples"]} == {ASKS.format("pin"), ASKS.format("card")}


@pytest.mark.parametrize("known", [True, False])
def test_the_last_call_of_a_lost_conversation_failed(known: bool):
    look = (format_tool_call(ToolCall(name="look", arguments={})), "A, a company.")
    opening = [Message(role="user", content="Call company A.")]
    call = (format_tool_call(ToolCall(name="phone", arguments={"company": "A"})), ASKS.format("pin"))
    one = rollout_from_texts(None, task_id="", opening=opening, exchanges=[look, call])
    lost = [replace(one, info={"outcome_known": known})] * 10
    later = forewarning(lost)
    assert later is not None
    assert later["tools"]["phone"]["failed"] == (3 if known else 0)
    assert later["tools"]["look"]["failed"] == 0
    assert later["outcomes_known"] == (10 if known else 0)


def test_a_handful_of_conversations_says_nothing():
    assert forewarning([conversation("A", given=True)] * 9) is None
