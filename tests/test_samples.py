"""Rollouts and replies as training rows: token weights, and a replay buffer that loses and invents nothing."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfo.protocol.world_model import WorldModelExample
from lfo.rows.replay import ReplayBuffer
from lfo.rows.samples import policy_sample, world_model_sample
from lfo.types import Observed, Rollout, StopReason, ToolCall, Turn

P, S, E, I = 0, 1, 2, 3  # noqa: E741  (imagined)


def turn(tool: str | None, action: tuple[int, int], observation: tuple[int, int], predicted: bool = False) -> Turn:
    return Turn(
        action="a",
        observation="o",
        call=ToolCall(name=tool, arguments={}) if tool else None,
        action_start=action[0],
        action_end=action[1],
        observation_start=observation[0],
        observation_end=observation[1],
        predicted=predicted,
    )


#         0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15
ORIGINS = (P, P, S, S, P, E, E, P, I, I, P, S, S, P, E, P)
ROLLOUT = Rollout(
    task_id="t",
    opening=(),
    tokens=tuple(range(100, 116)),
    origins=ORIGINS,
    logprobs=tuple(-0.1 if origin == S else 0.0 for origin in ORIGINS),
    turns=(
        turn("search_company", (2, 3), (5, 7)),
        turn("make_phone_call", (8, 9), (9, 10), predicted=True),
        turn("make_phone_call", (11, 12), (14, 15)),
    ),
    reward=1.0,
    stop=StopReason.DONE,
)
SAMPLED = [2, 3, 11, 12]


def places(weights) -> list[int]:
    return [place for place, weight in enumerate(weights) if weight]


def test_the_advantage_lies_on_sampled_tokens_and_the_row_ends_with_the_last_of_them():
    row = policy_sample(ROLLOUT, -0.5, adapters=("policy",))
    assert row is not None
    assert places(row.policy_weights) == SAMPLED
    assert row.advantages == [-0.5 if place in SAMPLED else 0.0 for place in range(13)]
    assert row.tokens == ROLLOUT.tokens[:13]
    assert row.logprobs == ROLLOUT.logprobs[:13]
    assert places(row.world_model_weights) == []


@pytest.mark.parametrize(
    ("tools", "heard"), [({"make_phone_call", "auth_info_form"}, [14]), (None, [5, 6, 14]), (frozenset(), [])]
)
def test_inline_the_replies_of_the_chosen_tools_get_weight_and_imagined_ones_never(tools, heard: list[int]):
    for advantage in (1.0, None):
        row = policy_sample(ROLLOUT, advantage, adapters=("policy",), observed=Observed(tools=tools))
        if advantage is None and not heard:
            assert row is None
            continue
        assert row is not None
        assert places(row.world_model_weights) == heard
        assert places(row.policy_weights) == (SAMPLED if advantage else [])
        assert len(row.tokens) == max([*heard, *places(row.policy_weights)]) + 1


def test_a_reply_to_a_message_without_a_call_is_nobodys_observation():
    silent = Rollout(
        task_id="t",
        opening=(),
        tokens=(1, 2, 3),
        origins=(P, S, E),
        logprobs=(0.0, -1.0, 0.0),
        turns=(turn(None, (1, 2), (2, 3)),),
        reward=0.0,
        stop=StopReason.MAX_TURNS,
    )
    row = policy_sample(silent, 1.0, adapters=("policy",), observed=Observed(tools=None))
    assert row is not None
    assert places(row.world_model_weights) == []


def test_each_source_of_observations_has_its_own_weight():
    spoken = turn(None, (1, 2), (2, 3))
    broken = replace(turn(None, (3, 4), (4, 5)), action='<tool_call>{"name": }</tool_call>')
    search, phone = turn("search_company", (5, 6), (6, 7)), turn("make_phone_call", (7, 8), (8, 9))
    imagined = turn("make_phone_call", (9, 10), (10, 11), predicted=True)
    rollout = Rollout(
        task_id="t",
        opening=(),
        tokens=tuple(range(11)),
        origins=(P, *[S, E] * 4, S, I),
        logprobs=(0.0,) * 11,
        turns=(spoken, broken, search, phone, imagined),
        reward=0.0,
        stop=StopReason.MAX_TURNS,
    )
    observed = Observed(tools={"make_phone_call"}, user_turns=0.25, other=0.5)
    row = policy_sample(rollout, None, adapters=("policy",), observed=observed)
    assert row is not None
    assert row.world_model_weights == [0.0, 0.0, 0.25, 0.0, 0.5, 0.0, 0.5, 0.0, 1.0]


def test_an_advantage_of_zero_counts_in_the_mean_and_no_advantage_does_not():
    zero = policy_sample(ROLLOUT, 0.0, adapters=("policy",))
    assert zero is not None
    assert places(zero.policy_weights) == SAMPLED
    assert set(zero.advantages) == {0.0}
    assert policy_sample(ROLLOUT, None, adapters=("policy",)) is None


def example(number: int, length: int = 5) -> WorldModelExample:
    key = hashlib.sha256(str(number).encode()).hexdigest()
    return WorldModelExample(
        tokens=tuple(range(number, number + length)), token_weights=(0.0,) + (1.0,) * (length - 1), key=key
    )


def test_a_world_model_row_trains_nothing_but_the_reply():
    row = world_model_sample(example(7), adapters=("world_model",))
    assert (row.tokens, row.world_model_weights) == ((7, 8, 9, 10, 11), (0.0, 1.0, 1.0, 1.0, 1.0))
    assert not any(row.policy_weights)
    assert not any(row.advantages)
    assert row.adapters == ("world_model",)


def test_the_buffer_keeps_everything_once():
    buffer = ReplayBuffer()
    assert buffer.add([example(1), example(2), example(1)]) == 2
    assert buffer.add([example(2), example(3)]) == 1
    assert len(buffer) == 3


@pytest.mark.parametrize("marks", [(True, False), (False, True)])
def test_what_look_ahead_asked_about_once_stays_marked(marks: tuple[bool, bool]):
    buffer = ReplayBuffer()
    for asked in marks:
        buffer.add([replace(example(1), asked=asked)])
    assert [each.asked for each in buffer.examples.values()] == [True]


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), max_size=20), st.integers(0, 12))
def test_a_buffer_read_back_draws_the_same(entries: list[tuple[int, int]], count: int):
    buffer = ReplayBuffer()
    buffer.add(example(number, length) for number, length in entries)
    with tempfile.TemporaryDirectory() as folder:
        buffer.save(Path(folder) / "replay.safetensors")
        copy = ReplayBuffer.load(Path(folder) / "replay.safetensors")
    assert list(copy.examples.items()) == list(buffer.examples.items()), "the order is part of what is drawn"
    drawn = buffer.draw(count, (0, 3, 1))
    assert drawn == copy.draw(count, (0, 3, 1))
    assert len(drawn) == len({each.key for each in drawn}) == min(count, len(buffer))


def test_draws_differ_by_seed_and_reach_everything():
    buffer = ReplayBuffer()
    buffer.add(map(example, range(30)))
    assert buffer.draw(10, (0, 1)) != buffer.draw(10, (0, 2))
    counts = np.zeros(30)
    for seed in range(600):
        for each in buffer.draw(5, (seed,)):
            counts[each.tokens[0]] += 1
    assert counts.min() > 60, "each is expected 100 times"
    assert counts.max() < 150


def test_a_draw_is_the_same_as_from_a_list_that_is_shuffled_and_then_sorted():
    buffer, rng = ReplayBuffer(), np.random.default_rng(0)
    for index in rng.integers(40, size=100):
        buffer.add([WorldModelExample(tokens=(1,), token_weights=(1.0,), key=f"{index:02x}", asked=rng.random() < 0.3)])
    for seed in range(20):
        keys = list(buffer.examples)
        keys = [keys[index] for index in np.random.default_rng([seed]).permutation(len(keys))]
        assert [each.key for each in buffer.draw(9, [seed])] == keys[:9]
        keys.sort(key=lambda key: not buffer.examples[key].asked)
        for count in (3, 30, 100):
            assert [each.key for each in buffer.draw(count, [seed], asked_first=True)] == keys[:count]
