"""Our environments in Gymnasium: its own checker, determinism, and texts inside their spaces."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import lfo.env.gym
from lfo.env.gym import MAX_TEXT_CHARS, TextEnvironment
from lfo.env.worlds.oracle import OracleCodes
from lfo.errors import UsageError
from lfo.protocol.hermes import format_tool_call
from lfo.types import Message, StepResult, ToolCall

NAMES = ("lfo/OracleCodes-v0", "lfo/PhoneCalls-v0")


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    if "PhoneCalls" in request.param:
        pytest.importorskip("lfo.env.worlds.phone.environment")
    return request.param


def ask(oracle: str) -> str:
    return format_tool_call(ToolCall(name="ask_oracle", arguments={"oracle": oracle}))


def test_gymnasiums_checker_passes(name: str) -> None:
    check_env(gymnasium.make(name).unwrapped)


def test_the_name_of_the_module_is_enough() -> None:
    """In a process that knows nothing of us: the module is imported by `make` itself."""
    program = "import gymnasium; print(gymnasium.make('lfo.env.gym:lfo/OracleCodes-v0').reset(seed=1)[1]['task_id'])"
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == gymnasium.make("lfo/OracleCodes-v0").reset(seed=1)[1]["task_id"]


def test_registering_again_changes_nothing() -> None:
    before = dict(gymnasium.registry)
    lfo.env.gym.register()
    assert dict(gymnasium.registry) == before


def test_a_seed_names_a_task(name: str) -> None:
    game, twin = gymnasium.make(name), gymnasium.make(name)
    drawn = [game.reset(seed=seed)[1]["task_id"] for seed in range(20)]
    assert drawn == [twin.reset(seed=seed)[1]["task_id"] for seed in range(20)]
    assert len(set(drawn)) > 10


def test_options_name_a_task_and_a_split() -> None:
    game = gymnasium.make("lfo/OracleCodes-v0")
    task = OracleCodes().tasks("val")[7]
    observation, info = game.reset(options={"task_id": task.id, "split": "val"})
    assert (info["task_id"], info["split"]) == (task.id, "val")
    assert info["messages"][-1]["role"] == "user"
    assert observation.endswith(info["messages"][-1]["content"])
    assert info["tools"] == OracleCodes().tools()
    with pytest.raises(UsageError, match="no task"):
        game.reset(options={"task_id": task.id, "split": "train"})
    with pytest.raises(UsageError, match="level"):
        game.reset(options={"level": 2})


def test_options_of_make_reach_the_environment() -> None:
    task = gymnasium.make("lfo/OracleCodes-v0", split="test_unseen_oracles", seed=5).reset(seed=0)[1]["task_id"]
    assert task in {task.id for task in OracleCodes(seed=5).tasks("test_unseen_oracles")}


def test_a_rollout_is_terminated_with_its_reward() -> None:
    game = gymnasium.make("lfo/OracleCodes-v0")
    task = OracleCodes().tasks("train")[0]
    game.reset(options={"task_id": task.id})
    observation, reward, terminated, truncated, info = game.step(ask(task.oracle))
    assert (task.order in observation, reward, terminated, truncated) == (True, 0.0, False, False)
    words = format_tool_call(ToolCall(name="open_door", arguments={"words": list(task.code)}))
    _, reward, terminated, truncated, info = game.step(words)
    assert (reward, terminated, truncated) == (1.0, True, False)
    assert (info["tool"], info["opened"]) == ("open_door", True)


def test_the_calls_of_a_message_are_made_one_by_one_until_the_end() -> None:
    game = TextEnvironment(OracleCodes)
    task = OracleCodes().tasks("train")[0]
    game.reset(options={"task_id": task.id})
    words = format_tool_call(ToolCall(name="open_door", arguments={"words": list(task.code)}))
    observation, reward, terminated, _, info = game.step(ask(task.oracle) + words + ask(task.oracle))
    assert (reward, terminated, info["tool"], game.turns) == (1.0, True, "open_door", 1)
    apart = OracleCodes()
    apart.reset(task)
    assert observation.split("\n\n") == [apart.step(each).observation for each in (ask(task.oracle), words)]


def test_a_rollout_is_truncated_after_max_turns() -> None:
    game = TextEnvironment(OracleCodes, max_turns=3)
    game.reset(seed=0)
    assert [game.step(ask("?"))[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]
    with pytest.raises(UsageError):
        game.step(ask("?"))
    with pytest.raises(UsageError):
        TextEnvironment(OracleCodes, max_turns=0)


def test_a_replay_of_saved_actions_gives_the_same_observations(name: str, tmp_path: Path) -> None:
    game = gymnasium.make(name, max_turns=30)
    game.action_space.seed(0)
    calls = [
        ToolCall(name=schema["function"]["name"], arguments=arguments)
        for schema in game.reset(seed=11)[1]["tools"]
        for arguments in ({}, {"name": "Acme"}, {"oracle": "?"}, {"fields": ["pin"]}, {"words": ["ash", "reed"]})
    ]
    actions = [*[format_tool_call(call) for call in calls[:7]], "<tool_call>{]", game.action_space.sample()]
    saved = tmp_path / "actions.json"
    saved.write_text(json.dumps(actions), encoding="utf-8")

    def play(actions: Sequence[str]) -> list[Any]:
        game = gymnasium.make(name, max_turns=30)
        heard: list[Any] = [game.reset(seed=11)]
        for action in actions:
            heard.append(game.step(action))
            if heard[-1][2] or heard[-1][3]:
                break
        return heard

    first = play(actions)
    assert len(first) > 3
    assert play(json.loads(saved.read_text(encoding="utf-8"))) == first


class Babbler:
    """An environment that is no `ToolEnvironment` and says what no space foresees."""

    def tasks(self, split: str) -> Sequence[Any]:
        return OracleCodes().tasks(split)

    def tools(self) -> Sequence[Any]:
        return []

    def reset(self, task: Any) -> Sequence[Message]:
        return [Message(role="user", content="\x00漢\ud800 né\n")]

    def step(self, message: str) -> StepResult:
        return StepResult(observation="x" * (MAX_TEXT_CHARS + 5))


def test_every_observation_lies_in_the_space() -> None:
    game = TextEnvironment(Babbler)
    observation, _ = game.reset(seed=0)
    assert observation == "��� né\n"
    assert observation in game.observation_space
    assert game.step("hello")[0] in game.observation_space
    with pytest.raises(UsageError):
        TextEnvironment(Babbler).step("too early")
