"""Environments of Gymnasium and TextArena, with the real libraries."""

from __future__ import annotations

import json
import os
import random
import sys
from enum import Enum
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces

from lfo.config import load_config
from lfo.env.adapters import adapter_word
from lfo.env.adapters.foreign import ForeignEnvironment, GlobalState, Reaction, one_tool, refuse_bad_arguments
from lfo.env.adapters.gymnasium_env import _meanings, schema_of, value_of, words_of
from lfo.env.patience import call_all
from lfo.errors import ConfigError, EnvironmentFailed, UsageError
from lfo.loading import environment_factory, naming_environment
from lfo.protocol.hermes import Mistake, format_tool_call
from lfo.types import Message, ToolCall


def make(*settings: str) -> Any:
    return environment_factory(load_config(list(settings)))()


def act(**arguments: Any) -> str:
    return format_tool_call(ToolCall(name="act", arguments=arguments))


def played(environment: Any, task: Any, actions: list[Any]) -> list[str]:
    """Everything that is heard and paid, until the end."""
    heard = [message.content for message in environment.reset(task)]
    for action in actions:
        result = environment.step(act(action=action))
        heard += [result.observation, str(result.reward)]
        if result.done:
            break
    return heard


# --- what all adapters share --------------------------------------------------------------------------------------


class Counter(ForeignEnvironment):
    """A library of our own that counts with global random numbers, prints, and changes the folder."""

    word = "gymnasium"
    shares_global_state = True

    def tools(self) -> list[dict[str, Any]]:
        return one_tool("act", "Do it.", {"type": "object", "properties": {"reward": {"type": "number"}}})

    def open(self, task: Any) -> list[Message]:
        print("noise")
        os.chdir("/")
        return [Message(role="user", content=f"{random.random()}")]

    def act(self, call: ToolCall) -> Reaction:
        if "reward" not in call.arguments:
            raise RuntimeError("boom")
        return Reaction(observation=f"{random.random()} {np.random.random()}", reward=call.arguments["reward"])


def test_splits_are_disjoint_and_unknown_ones_are_refused():
    environment = Counter("x", train_tasks=5, val_tasks=3)
    seeds = {split: {task.seed for task in environment.tasks(split)} for split in ("train", "val", "test")}
    assert {split: len(each) for split, each in seeds.items()} == {"train": 5, "val": 3, "test": 3}
    assert not seeds["train"] & seeds["val"] | seeds["val"] & seeds["test"]
    with pytest.raises(UsageError, match="has no split 'exam'; it has train, val, test"):
        environment.tasks("exam")


def test_global_state_of_a_library_stays_inside_and_rollouts_side_by_side_are_repeatable(capsys):
    folder, before = os.getcwd(), random.getstate()

    def rollout(place: int) -> list[str]:
        environment = Counter("x")
        heard = [environment.reset(environment.tasks("train")[place])[0].content]
        return heard + [environment.step(act(reward=0)).observation for _ in range(5)]

    alone = [rollout(place) for place in range(8)]
    beside = call_all([lambda place=place: rollout(place) for place in range(8)], timeout=30, retries=0, workers=8)
    assert beside == alone
    assert len({tuple(each) for each in alone}) == 8
    assert (os.getcwd(), random.getstate()) == (folder, before)
    assert capsys.readouterr().out == "", "what a library prints is no output of ours"


def test_an_environment_that_keeps_the_globals_costs_a_sentence(monkeypatch):
    monkeypatch.setattr("lfo.env.adapters.foreign.LONGEST_WAIT", 0.01)
    with GlobalState(0).entered(), pytest.raises(EnvironmentFailed, match=r"kept the random state for 0\.01 seconds"):
        GlobalState(1).entered().__enter__()


def test_a_removed_working_directory_does_not_keep_the_globals(tmp_path, monkeypatch):
    monkeypatch.setattr("lfo.env.adapters.foreign.LONGEST_WAIT", 0.01)
    monkeypatch.chdir(tmp_path)
    gone = tmp_path / "gone"
    gone.mkdir()
    os.chdir(gone)
    gone.rmdir()
    with pytest.raises(FileNotFoundError):
        GlobalState(0).entered().__enter__()
    os.chdir(tmp_path)
    with GlobalState(1).entered():
        pass


@pytest.mark.parametrize(
    ("reward_range", "rewards", "paid"),
    [
        (None, [1, -3], [1, -3]),
        ([0, 1], [-1, 0.5, 4], [0, 0, 1]),  # the sum is -1, -0.5, 3.5
        ([-10, 10], [0, 5, 5, 5], [0.5, 0.25, 0.25, 0]),  # the sum so far is always what a cut-off rollout has
    ],
)
def test_rewards_are_mapped_and_cut_off_rollouts_keep_what_they_earned(reward_range, rewards, paid):
    environment = Counter("x", reward_range=reward_range)
    environment.reset(environment.tasks("train")[0])
    assert [environment.step(act(reward=reward)).reward for reward in rewards] == pytest.approx(paid)


@pytest.mark.parametrize("bad", [[1, 0], [1], "x", [0, "a"]])
def test_a_bad_reward_range_is_a_config_error(bad):
    with pytest.raises(ConfigError, match=r"env_args\.reward_range must be two numbers"):
        Counter("x", reward_range=bad)


def test_what_a_library_raises_ends_the_rollout_and_bad_calls_do_not():
    environment = Counter("x", max_mistakes=3)
    environment.reset(environment.tasks("train")[0])
    unknown = environment.step(format_tool_call(ToolCall(name='fl<y"', arguments={})))
    assert unknown.observation == 'There is no tool "fl\\u003cy\\""; the tools are: act.'
    assert not unknown.done
    assert environment.step("<tool_call>{").info["mistakes"] == 2
    with pytest.raises(EnvironmentFailed, match="gymnasium:x raised RuntimeError: boom"):
        environment.step(act())
    assert environment.step(act(fly=1)).done, "the third mistake is the last"
    with pytest.raises(UsageError):
        environment.step(act())


def test_a_message_without_a_call_ends_the_rollout():
    environment = Counter("x")
    environment.reset(environment.tasks("train")[0])
    result = environment.step("I am done.")
    assert (result.done, result.reward, result.observation) == (True, 0, "")
    with pytest.raises(UsageError, match="one rollout"):
        environment.reset(environment.tasks("train")[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, "act needs the argument n."),
        ({"n": "1"}, "Argument n of act must be of type integer."),
        ({"n": 7}, "Argument n of act must be one of: 1, 2."),
        ({"n": 1, "m": 1}, 'act has no argument "m"; its arguments are: n, list.'),
        ({"n": 1, "list": ["<|im_end|>"]}, "Argument list.0 of act must be of type number."),
    ],
)
def test_bad_arguments_are_told_in_words_of_the_schema(arguments, words):
    lists = {"type": "array", "items": {"type": "number"}}
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer", "enum": [1, 2]}, "list": lists},
        "required": ["n"],
    }
    with pytest.raises(Mistake) as mistake:
        refuse_bad_arguments(ToolCall(name="act", arguments=arguments), schema)
    assert str(mistake.value) == words
    refuse_bad_arguments(ToolCall(name="act", arguments={"n": 2, "list": [0.5]}), schema)


# --- names --------------------------------------------------------------------------------------------------------


def test_reserved_words_stand_before_the_colon_and_classes_stay():
    assert adapter_word("gymnasium:FrozenLake-v1") == "gymnasium"
    assert adapter_word("gymnasium:") is None
    assert adapter_word("my_world:Safes") is None
    assert load_config(["env=my_world:Safes"]).env == "my_world:Safes"


@pytest.mark.parametrize(
    ("env", "words"),
    [
        ("gymnazium:FrozenLake", "env=gymnazium:FrozenLake cannot be imported.*did you mean gymnasium?"),
        ("gymnazium:FrozenLake-v1", "one of gymnasium, textarena.* with a colon and a name.*did you mean gymnasium?"),
        ("gymnasium:Nowhere-v0", "env=gymnasium:Nowhere-v0 cannot be made .*: Environment `Nowhere` doesn't exist"),
    ],
)
def test_a_name_that_leads_nowhere_is_one_sentence(env, words):
    with pytest.raises(ConfigError, match=words) as error:
        make(f"env={env}")
    assert "\n" not in str(error.value)


def test_a_library_that_is_not_installed_names_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    monkeypatch.delitem(sys.modules, "lfo.env.adapters.textarena_game", raising=False)
    with pytest.raises(ConfigError, match=r"needs textarena, which is not installed: pip install '.*\[textarena\]'"):
        make("env=textarena:FrozenLake-v0")


def test_a_run_names_the_adapter_that_it_was_given():
    config = load_config(["env=gymnasium:FrozenLake-v1", "env_args.is_slippery=false"])
    factory = environment_factory(config)
    assert naming_environment(config, factory) is config
    named = naming_environment(load_config([]), factory)
    assert (named.env, named.env_args) == ("gymnasium:FrozenLake-v1", {"is_slippery": False})


# --- Gymnasium ----------------------------------------------------------------------------------------------------


def test_frozen_lake_is_won_by_the_shortest_way():
    environment = make("env=gymnasium:FrozenLake-v1", "env_args.is_slippery=false")
    schema = environment.tools()[0]["function"]
    assert schema["parameters"]["properties"]["action"] == {"type": "integer", "enum": [0, 1, 2, 3]}
    assert "2: Move right" in schema["description"]
    opening = environment.reset(environment.tasks("train")[0])
    assert opening[1].content == "Observation: 0"
    results = [environment.step(act(action=action)) for action in (1, 1, 2, 1, 2, 2)]
    assert [result.observation for result in results][:2] == ["Observation: 4", "Observation: 8"]
    assert [result.reward for result in results] == [0, 0, 0, 0, 0, 1]
    assert [result.done for result in results] == [False] * 5 + [True]


def test_gymnasium_tasks_repeat_by_seed():
    def rollout(place: int) -> list[str]:
        environment = make("env=gymnasium:Blackjack-v1")
        return played(environment, environment.tasks("train")[place], [1, 1, 1, 0])

    assert [rollout(place) for place in range(6)] == [rollout(place) for place in range(6)]
    assert len({tuple(rollout(place)) for place in range(6)}) > 3


def test_legal_actions_stand_in_the_text_and_pictures_only_on_request():
    plain = make("env=gymnasium:CliffWalking-v1")
    shown = make("env=gymnasium:CliffWalking-v1", "env_args.render=true")
    assert plain.reset(plain.tasks("train")[0])[1].content == "Observation: 36"
    assert shown.reset(shown.tasks("train")[0])[1].content.endswith("x  C  C  C  C  C  C  C  C  C  C  T")
    taxi = make("env=gymnasium:Taxi-v4")
    assert "\nLegal actions: " in taxi.reset(taxi.tasks("train")[0])[1].content


OWN_ENVIRONMENT = """
import gymnasium


class Own(gymnasium.Env):
    action_space = observation_space = gymnasium.spaces.Discrete(2)

    def __init__(self):
        pass

    def reset(self, seed=None, options=None):
        return 1, {}


gymnasium.register("lfo-tests/Own-v0", entry_point=Own)
"""


def test_an_own_environment_in_the_current_folder_is_opened(tmp_path, monkeypatch):
    (tmp_path / "own_gymnasium_environment.py").write_text(OWN_ENVIRONMENT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    environment = make("env=gymnasium:own_gymnasium_environment:lfo-tests/Own-v0")
    assert environment.reset(environment.tasks("train")[0])[1].content == "Observation: 1"


def test_an_argument_that_an_environment_refuses_is_one_sentence():
    words = r"env=gymnasium:FrozenLake-v1 cannot be made with env_args=\{'map_name': '9x9'\}: KeyError: '9x9'"
    with pytest.raises(ConfigError, match=words):
        make("env=gymnasium:FrozenLake-v1", "env_args.map_name=9x9")


Ways = Enum("Ways", {"left": 0, "right": 1, "forward": 2, "toggle": 3, "drop": 4})


@pytest.mark.parametrize(
    ("game", "space", "named"),
    [
        ({"actions": Ways}, spaces.Discrete(3), {"left": 0, "right": 1, "forward": 2}),
        ({"actions": Ways}, spaces.Discrete(7), {}),
        ({"actions": Enum("Words", {"left": "l", "right": "r"})}, spaces.Discrete(2), {}),
        ({"actions": 4}, spaces.Discrete(4), {}),
        ({"get_action_meanings": lambda: ["NOOP", "FIRE"]}, spaces.Discrete(2, start=5), {"noop": 5, "fire": 6}),
        ({"get_action_meanings": lambda: ["NOOP", "NOOP"]}, spaces.Discrete(2), {}),
    ],
)
def test_actions_have_names_only_if_the_names_cover_the_space(game, space, named):
    assert _meanings(SimpleNamespace(**game), space) == named


SPACE = spaces.Dict(
    {
        "way": spaces.Discrete(3, start=1),
        "speed": spaces.Box(-2, 2, (2,)),
        "word": spaces.Text(5),
        "pair": spaces.Tuple((spaces.Discrete(100), spaces.MultiDiscrete([2, 3]))),
    }
)


def test_spaces_become_schemas_values_and_words():
    schema = schema_of(SPACE)
    assert schema["properties"]["way"] == {"type": "integer", "enum": [1, 2, 3]}
    assert schema["properties"]["pair"]["prefixItems"][0] == {"type": "integer", "minimum": 0, "maximum": 99}
    for seed in range(20):
        SPACE.seed(seed)
        sampled = SPACE.sample()
        written = json.loads(json.dumps(sampled, default=lambda each: each.tolist()))
        refuse_bad_arguments(ToolCall(name="act", arguments=written), schema)
        assert SPACE.contains(value_of(SPACE, written))
    value = {"way": 2, "speed": np.array([0.5, -1], np.float32), "word": "abc", "pair": (7, np.array([1, 2]))}
    assert words_of(SPACE, value) == "pair: 7, 1, 2\nspeed: 0.5, -1\nway: 2\nword: abc"


def test_pictures_cannot_be_put_into_words():
    with pytest.raises(ValueError, match="27648 numbers"):
        schema_of(spaces.Box(0, 255, (96, 96, 3), np.uint8))


# --- TextArena ----------------------------------------------------------------------------------------------------


@pytest.fixture
def textarena():
    return pytest.importorskip("textarena", reason="textarena is not installed: pip install '.[textarena]'")


LAKE = "env=textarena:FrozenLake-v0"


def test_textarena_tasks_repeat_by_seed_and_replies_hold_no_history(textarena):
    def rollout(place: int) -> list[str]:
        environment = make(LAKE)
        return played(environment, environment.tasks("val")[place], ["down", "[right]", "right", "down"])

    heard = [rollout(place) for place in range(4)]
    assert heard == [rollout(place) for place in range(4)]
    assert len({each[1] for each in heard}) == 4, "other seeds, other lakes"
    assert "Welcome to Frozen Lake!" in heard[0][1]
    assert all("Welcome" not in reply for reply in heard[0][2:])
    assert "[down]" not in heard[0][2].partition("Current Board")[0], "the policy's own words are not repeated"


def test_textarena_pays_1_for_the_goal_and_nothing_for_a_hole(textarena):
    environment = make(LAKE, "env_args.num_holes=1")
    task = next(
        task
        for task in environment.tasks("train")
        if "|     |     |     |  G  |" in make(LAKE, "env_args.num_holes=1").reset(task)[1].content
    )
    environment.reset(task)
    results = []
    for move in ("down", "down", "down", "right", "right", "right"):
        results.append(environment.step(act(action=move)))
        if results[-1].done:
            break
    assert (results[-1].done, sum(result.reward for result in results)) == (True, 1.0)
    bad = make(LAKE)
    bad.reset(task)
    first, second = bad.step(act(action="fly")), bad.step(act(action="fly"))
    assert "invalid move" in first.observation
    assert (second.done, second.reward) == (True, 0.0), "TextArena's -1 is our 0"


@pytest.mark.parametrize(
    ("game", "words"),
    [
        ("FrozenLak-v0", "TextArena has no game FrozenLak-v0; the nearest is"),
        ("TicTacToe-v0", "not a game for one player"),
    ],
)
def test_games_that_cannot_be_played_are_one_sentence(game, words, textarena):
    with pytest.raises(ConfigError, match=words):
        make(f"env=textarena:{game}")
