"""Our environments in verifiers, and a round trip: our adapter plays our wrapper."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from lfo.config import load_config
from lfo.env.worlds.oracle import OracleCodes
from lfo.loading import environment_factory
from lfo.protocol.hermes import format_tool_call
from lfo.types import ToolCall

MODULE = """
from lfo.env.for_verifiers import verifiers_environment
from lfo.env.worlds.oracle import OracleCodes


def load_environment():
    return verifiers_environment(OracleCodes, max_turns=4)
"""


@pytest.fixture
def wrapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("verifiers.clients", reason="verifiers 0.1 is not installed: pip install '.[verifiers]'")
    (tmp_path / "oracle_in_verifiers.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    return environment_factory(load_config(["env=verifiers:oracle-in-verifiers"]))


def call(tool: str, **arguments: Any) -> str:
    return format_tool_call(ToolCall(name=tool, arguments=arguments))


def test_there_and_back_every_reply_and_reward_is_the_same(wrapped: Any):
    for place in (0, 3):
        task = OracleCodes().tasks("train")[place]
        for words in (list(task.code), ["ash", "ember"]):
            ours, theirs = OracleCodes(), wrapped()
            opening = theirs.reset(theirs.tasks("train")[place])
            assert [each.content for each in opening] == [each.content for each in ours.reset(task)]
            for message in (call("ask_oracle", oracle=task.oracle), call("open_door", words=words)):
                mine, other = ours.step(message), theirs.step(message)
                assert (other.observation, other.reward, other.done) == (mine.observation, mine.reward, mine.done)


def test_splits_and_schemas_are_ours(wrapped: Any):
    environment = wrapped()
    assert [len(environment.tasks(split)) for split in ("train", "val")] == [
        len(OracleCodes().tasks(split)) for split in ("train", "val")
    ]
    assert environment.tools()[1]["function"]["parameters"] == OracleCodes().tools()[1]["function"]["parameters"]


def test_a_rollout_that_stops_or_runs_out_of_turns_is_paid_what_that_is_worth(wrapped: Any):
    stopped, endless = wrapped(), wrapped()
    task = stopped.tasks("train")[0]
    stopped.reset(task)
    end = stopped.step("I give up.")
    assert (end.done, end.reward) == (True, 0.0)
    endless.reset(task)
    results = [endless.step(call("ask_oracle", oracle="Nobody")) for _ in range(4)]
    assert [result.done for result in results] == [False, False, False, True]
    assert results[-1].reward == 0.0
