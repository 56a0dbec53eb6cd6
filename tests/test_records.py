"""Rollouts survive the way to JSON and back, and a record that is none is named."""

import json
from dataclasses import replace
from typing import Any

import pytest

from lfo.errors import DataError
from lfo.protocol.world_model import observed_calls
from lfo.rollout.records import rollout_of, rollout_record, rollouts_of
from lfo.types import Message, ReplyFacts, Rollout, StopReason, ToolCall, Turn

CALL = '<tool_call>\n{"name": "make_phone_call", "arguments": {"phone_number": "1", "auth_info": {}}}\n</tool_call>'
SPANS: dict[str, int] = {"action_start": 0, "action_end": 0, "observation_start": 0, "observation_end": 0}
READ = ToolCall(name="make_phone_call", arguments={"phone_number": "1", "auth_info": {}})
ROLLOUT = Rollout(
    task_id="val-1",
    opening=(Message(role="system", content="You call."), Message(role="user", content="Call Acme.")),
    tokens=(),
    origins=(),
    logprobs=(),
    turns=(
        Turn(action=CALL, observation="I expect no.", call=READ, predicted=True, **SPANS),
        Turn(
            action=CALL,
            observation="I need your pin.",
            call=READ,
            asked=True,
            facts=ReplyFacts(category="auth_failure", facts=("pin",)),
            **SPANS,
        ),
        Turn(action="<tool_call>{", observation="Not JSON.", call=None, **SPANS),
    ),
    reward=1.0,
    stop=StopReason.MAX_TURNS,
    blind=True,
    info={"level": 2},
)


def test_a_rollout_comes_back_from_its_record():
    assert rollout_of(json.loads(json.dumps(rollout_record(ROLLOUT)))) == ROLLOUT


def test_what_a_rollout_leaves_open_stays_open():
    bare = replace(ROLLOUT, turns=(), info={}, error="it raised", stop=StopReason.ENVIRONMENT_ERROR)
    assert rollout_of(rollout_record(bare)) == bare


def test_a_log_of_another_program_needs_only_what_was_said():
    turns = [{"action": CALL, "observation": "I need your pin."}]
    read = rollout_of({"task_id": "7", "opening": [{"role": "user", "content": "Call."}], "turns": turns})
    (seen,) = observed_calls(read, predict={"make_phone_call"})
    assert (seen.state.task, seen.call, seen.reply) == ("Call.", READ, "I need your pin.")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"opening": None}, "NoneType"),
        ({"task_id": 7}, "7 is no text"),
        ({"stop": "frob"}, "'frob' is not a valid StopReason"),
        ({"turns": [{"action": CALL}]}, "has no 'observation'"),
        ({"turns": ["x"]}, "cannot be used"),
        ({"reward": "much"}, "much"),
    ],
)
def test_a_record_that_is_none_is_named(change: dict[str, Any], words: str):
    records = [rollout_record(ROLLOUT), rollout_record(ROLLOUT) | change]
    with pytest.raises(DataError, match=r"logs\.jsonl, record 2: the rollout ") as caught:
        rollouts_of(records, "logs.jsonl")
    assert words in str(caught.value)
