"""The held-out calls of world models: every kind of reply, the same in all runs, and true."""

from __future__ import annotations

from collections import Counter
from functools import partial

import pytest

from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.reps import describe
from lfo.measure.held_out import CALLS, _evenly, held_out_calls
from lfo.play.runner import RunnerConfig
from lfo.protocol.world_model import ObservedCall, WorldModelState
from lfo.types import ReplyFacts, ToolCall


def nobody(tasks):
    raise AssertionError("the phone-call world has players of its own")


def pool(*levels: int, settings: RunnerConfig | None = None) -> list[ObservedCall]:
    return held_out_calls(partial(PhoneCalls, levels=levels), settings or RunnerConfig(), nobody)


@pytest.mark.parametrize("levels", [(1,), (2,), (5,), (1, 2, 3, 4, 5)])
def test_every_kind_of_reply_of_a_level_is_asked_for(levels):
    calls = pool(*levels)
    assert len(calls) == CALLS
    counts = Counter(call.facts.category for call in calls if call.facts)
    expected = {"auth_failure", "success", "routing_violation", "refusal"}
    expected |= {"lockout"} if levels != (1,) else set()
    expected |= {"unclear"} if 5 in levels else set()
    assert set(counts) == expected
    assert min(counts.values()) >= 7
    asked = [call for call in calls if call.asked]
    assert 10 <= len(asked) <= CALLS // 2, "what look-ahead asks about is in it too"
    assert all(call.call.arguments["auth_info"] == {} for call in asked)


def test_the_pool_is_a_function_of_the_environment_alone_and_no_call_is_in_it_twice():
    first = pool(2)
    assert pool(2, settings=RunnerConfig(environment_workers=1, temperature=0.3, max_turns=2)) == first
    assert pool(3) != first
    assert len({repr((call.state, call.call)) for call in first}) == CALLS


def test_replies_are_those_of_the_world():
    for call in pool(2):
        assert call.facts == describe(call.reply)
        assert call.call.name == "make_phone_call"
        assert call.state.step == len(call.state.actions) + 1 >= 2, "the directory was read before"
    # A department that was given nothing asks for everything that it wants.
    asked = next(call for call in pool(2) if call.asked)
    tasks = [task for task in PhoneCalls(levels=(2,)).tasks("val") if task.goal == asked.state.task]
    assert set(asked.facts.facts) == set(tasks[0].errands[0].requires)


def test_kinds_take_turns_and_an_asked_call_is_not_counted_again():
    def call(number: int, category: str, asked: bool = False) -> ObservedCall:
        state = WorldModelState(task="t", step=number, actions=(), collected={})
        facts = ReplyFacts(category=category)
        return ObservedCall(state=state, call=ToolCall(name="x", arguments={}), reply="r", facts=facts, asked=asked)

    calls = [call(0, "a", asked=True), call(0, "a"), *(call(number, "a") for number in range(1, 9)), call(9, "b")]
    chosen = _evenly(calls, 5)
    assert [(each.facts.category, each.asked, each.state.step) for each in chosen if each.facts] == [
        ("a", False, 1),
        ("a", True, 0),
        ("b", False, 9),
        ("a", False, 2),
        ("a", False, 3),
    ]


class Flaky(PhoneCalls):
    """Fails for good in every second task."""

    def start(self, task):
        if int(task.id[-1]) % 2:
            raise ConnectionError("the exchange is down")
        return super().start(task)


def test_an_environment_that_sometimes_fails_gives_the_calls_that_it_answered():
    settings = RunnerConfig(environment_retries=0)
    calls = held_out_calls(partial(Flaky, levels=(2,)), settings, nobody)
    assert 20 < len(calls) <= CALLS


def test_elsewhere_the_base_policy_plays_and_look_ahead_is_asked_for_too():
    from lfo.play.records import rollout_from_texts
    from lfo.protocol.hermes import format_tool_call

    def knows_nothing(tasks):
        rollouts = []
        for task in tasks:
            environment = OracleCodes()
            opening = environment.reset(task)
            said = [
                format_tool_call(ToolCall(name="ask_oracle", arguments={"oracle": task.oracle})),
                format_tool_call(ToolCall(name="open_door", arguments={"words": ["ash", "dusk"]})),
            ]
            exchanges = [(message, environment.step(message).observation) for message in said]
            rollouts.append(rollout_from_texts(environment, task_id=task.id, opening=opening, exchanges=exchanges))
        return rollouts

    calls = held_out_calls(OracleCodes, RunnerConfig(), knows_nothing)
    kinds = Counter((call.facts.category, call.asked) for call in calls if call.facts)
    assert set(kinds) >= {("introduction", False), ("refusal", False), ("refusal", True)}
    asked = next(call for call in calls if call.asked)
    assert asked.call == ToolCall(name="open_door", arguments={"words": []})
