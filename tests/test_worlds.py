"""The promises of the six worlds in tests/worlds, which are held out for `lfo pretrain --env`."""

import json
import re

import pytest

from lfo.measure.environment_check import check_environment
from lfo.protocol.hermes import format_tool_call
from lfo.types import ToolCall
from worlds import clinic, coldstore, darkroom, kiln, labels, yard

WORLDS = {
    kiln.Kiln: kiln.gold,
    darkroom.Darkroom: darkroom.gold,
    labels.Labels: labels.gold,
    clinic.Clinic: clinic.gold,
    coldstore.ColdStore: coldstore.gold,
    yard.Yard: yard.gold,
}
LOOK_UP_FIRST = (clinic.Clinic, coldstore.ColdStore, yard.Yard)
SPLITS = ("train", "val", "test_unseen")

each_world = pytest.mark.parametrize("world", WORLDS, ids=lambda world: world.__name__)


def play(world, task, calls):
    """Return the reward, the replies to the calls that were made before the end, and whether it ended."""
    environment = world()
    environment.reset(task)
    replies = []
    for call in calls:
        result = environment.step(format_tool_call(call))
        replies.append(result.observation)
        if result.done:
            return result.reward, replies, True
    return 0.0, replies, False


def decision(world, task, **changed) -> ToolCall:
    """Return the last call of the gold solution, with some arguments changed."""
    call = WORLDS[world](task)[-1]
    return ToolCall(name=call.name, arguments=call.arguments | changed)


def other_values(world, task):
    """Return each decisive argument with a wrong value that its schema allows."""
    call = WORLDS[world](task)[-1]
    (schema,) = [tool["function"] for tool in world().tools() if tool["function"]["name"] == call.name]
    wrong = {}
    for name, value in call.arguments.items():
        choices = schema["parameters"]["properties"][name].get("enum", [])
        if value in task.answer:
            wrong[name] = value + 1 if isinstance(value, int) else next((c for c in choices if c != value), "nothing")
    assert len(wrong) == len(task.answer)
    return wrong


@each_world
def test_the_gold_solution_succeeds_and_ends_every_task(world):
    for split in SPLITS:
        for task in world().tasks(split):
            reward, replies, done = play(world, task, WORLDS[world](task))
            assert (reward, done) == (1.0, True), (task, replies)


@each_world
@pytest.mark.parametrize("seed", [1, 2])
def test_another_seed_draws_another_law(world, seed):
    def law(seed: int) -> dict:
        return {task.key: task.answer for task in world(seed=seed).tasks("train")}

    assert law(seed) != law(0)
    environment = world(seed=seed)
    task = environment.tasks("val")[0]
    environment.reset(task)
    assert [environment.step(format_tool_call(call)).reward for call in WORLDS[world](task)][-1] == 1.0


@each_world
def test_one_wrong_argument_loses_and_the_replies_say_what_was_right(world):
    for task in world().tasks("val"):
        before = WORLDS[world](task)[:-1]
        for name, value in other_values(world, task).items():
            wrong = decision(world, task, **{name: value})
            reward, replies, done = play(world, task, [*before, *[wrong] * 8])
            assert (reward, done) == (0.0, True)
            assert str(WORLDS[world](task)[-1].arguments[name]) in replies[-1]


def read_and_repeat(task, first) -> tuple[float, list[dict]]:
    """Soak strips, and put right in each what the reply to the last one named."""
    environment = darkroom.Darkroom()
    environment.reset(task)
    numbers, replies = dict(first), []
    while True:
        result = environment.step(format_tool_call(ToolCall(name="soak", arguments=dict(numbers))))
        replies.append(json.loads(result.observation))
        if result.done:
            return result.reward, replies
        numbers[replies[-1]["because"]] = replies[-1]["needed"]


def test_a_reader_of_strips_comes_too_late_unless_it_knows_one_number():
    nothing = {"degrees": 0, "minutes": 0, "tilts": 0}
    for task in darkroom.Darkroom().tasks("val"):
        reward, replies = read_and_repeat(task, nothing)
        assert reward == 0.0
        assert [reply["because"] for reply in replies] == ["degrees", "minutes", "tilts"]
        for name, number in darkroom.gold(task)[0].arguments.items():
            assert read_and_repeat(task, nothing | {name: number})[0] == 1.0


@each_world
def test_the_opening_and_the_look_ups_do_not_tell_the_answer(world):
    for split in SPLITS:
        for task in world().tasks(split):
            environment = world()
            said = " ".join(message.content for message in environment.reset(task))
            said += " ".join(play(world, task, WORLDS[world](task)[:-1])[1])
            for value in task.answer:
                assert not re.search(rf"\b{value}\b", said), (said, value)


@pytest.mark.parametrize("world", LOOK_UP_FIRST, ids=lambda world: world.__name__)
def test_only_the_look_ups_tell_the_facts_that_decide(world):
    for split in SPLITS:
        for task in world().tasks(split):
            opening = " ".join(message.content for message in world().reset(task))
            looked_up = " ".join(play(world, task, WORLDS[world](task)[:-1])[1])
            for fact in task.key:
                assert fact not in opening
                assert fact in looked_up


def test_the_chamber_cannot_be_set_before_the_crate_is_open():
    task = coldstore.ColdStore().tasks("train")[0]
    reward, replies, done = play(coldstore.ColdStore, task, [decision(coldstore.ColdStore, task)])
    assert (reward, done) == (0.0, False)
    assert "Nobody has looked" in replies[0]


@each_world
def test_splits_share_no_task_and_only_val_has_answers_of_training(world):
    splits = {split: world().tasks(split) for split in SPLITS}
    assert len(splits["train"]) in range(200, 500)
    assert all(len(splits[split]) >= 40 for split in ("val", "test_unseen"))
    every = [task for tasks in splits.values() for task in tasks]
    assert len({task.id for task in every}) == len({task.text for task in every}) == len(every)

    law = {task.key: task.answer for task in splits["train"]}
    assert len(law) in range(10, 21)
    assert all(law[task.key] == task.answer for task in splits["train"] + splits["val"])
    assert law.keys().isdisjoint(task.key for task in splits["test_unseen"])


@pytest.mark.parametrize("world", [world for world in WORLDS if world is not labels.Labels], ids=lambda w: w.__name__)
def test_the_parts_of_unseen_keys_occur_in_training(world):
    known = list(zip(*(task.key for task in world().tasks("train")), strict=True))
    for task in world().tasks("test_unseen"):
        assert all(part in parts for part, parts in zip(task.key, known, strict=True))


@each_world
def test_nobody_wins_without_knowledge(world):
    result = check_environment(world, episodes=60)
    assert result["problems"] == []
    assert result["players"]["nothing"]["reward"] == 0.0
    assert result["players"]["random"]["success"] <= 0.1
    answers = [task.answer for task in world().tasks("train")]
    assert max(map(answers.count, answers)) <= 0.1 * len(answers)  # the best constant answer
