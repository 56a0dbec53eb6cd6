"""The five worlds of research/worlds: fair splits, no leak, one try, and chance."""

import json
import re
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

from lfo.errors import UsageError
from lfo.types import StepResult
from research.worlds.hotline import Tickets
from research.worlds.kitchen import STATIONS, TRAYS, Orders
from research.worlds.one_try import SIZES, OneTry, Task
from research.worlds.parcels import CARRIERS, LABELS, Desk
from research.worlds.permits import Office
from research.worlds.valves import VALVES, Plant

WORLDS = (Desk, Office, Orders, Plant, Tickets)
LAWS = (0, 1, 2)
Call = tuple[str, dict[str, Any]]

each_world = pytest.mark.parametrize("world", WORLDS)
each_law = pytest.mark.parametrize("law", LAWS)


def play(world: type[OneTry], task: Task, *calls: Call) -> list[StepResult]:
    environment = world()
    environment.reset(task)
    return [environment.step(written(*call)) for call in calls]


def written(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def solution(world: type[OneTry], task: Task) -> list[Call]:
    return [(call.name, dict(call.arguments)) for call in world().solution(task)]


def last_calls(world: type[OneTry]) -> list[Call]:
    """Return every call that can end a task with success, also those that only the hidden rule names."""
    codes = [letter + digit for letter, digit in product("KT", "1234")]
    rule = Office().draw_rule(Random("Office/0/rule"))
    forms, fees = ({answer[part] for answer in rule.answers.values()} for part in (0, 1))
    return {
        Desk: [("ship_parcel", {"carrier": a, "label": b}) for a, b in product(CARRIERS, LABELS)],
        Office: [("file_request", {"form": a, "fee": b}) for a, b in product(sorted(forms), sorted(fees))],
        Orders: [("serve", {"dish_station": a, "tray": b}) for a, b in product(STATIONS, TRAYS)],
        Plant: [("open_valves", {"valves": list(pair)}) for pair in combinations(VALVES, 2)],
        Tickets: [("close_ticket", {"code": code, "note": "Done."}) for code in codes],
    }[world]


def free_calls(world: type[OneTry], task: Task) -> list[list[Call]]:
    """Return the valid calls of the other tools."""
    if world is Orders:
        return [[("look_up", {"order_id": task.name})]]
    if world is Tickets:
        questions = ("since_when", "how_urgent", "tried_restart")
        return [
            [("search_customer", {"name": task.name})],
            [("ask_customer", {"question": question}) for question in questions],
        ]
    return []


def wrong_call(world: type[OneTry], task: Task) -> Call:
    right = solution(world, task)[-1]
    return next(call for call in last_calls(world) if call != right)


# --- tasks -----------------------------------------------------------------------------------------------------------


@each_world
@each_law
def test_splits_are_fair(world: type[OneTry], law: int) -> None:
    splits = {split: world(law=law).tasks(split) for split in SIZES}
    assert {split: len(tasks) for split, tasks in splits.items()} == {"train": 400, "val": 100, "test_unseen": 100}
    tasks = [task for drawn in splits.values() for task in drawn]
    for values in ([task.id for task in tasks], [task.name for task in tasks], [task.request for task in tasks]):
        assert len(set(values)) == len(tasks)
    answers = {split: {task.answer for task in drawn} for split, drawn in splits.items()}
    assert answers["train"] == answers["val"]
    assert answers["train"].isdisjoint(answers["test_unseen"])
    assert {task.case for task in splits["train"]}.isdisjoint(task.case for task in splits["test_unseen"])


@each_world
@each_law
def test_the_rule_is_the_same_everywhere_and_its_parts_are_all_seen(world: type[OneTry], law: int) -> None:
    environment = world(law=law)
    answers: dict[tuple[str, str], set[tuple[Any, ...]]] = {}
    for split in SIZES:
        for task in environment.tasks(split):
            answers.setdefault(task.case, set()).add(task.answer)
    assert all(len(found) == 1 for found in answers.values())
    train, unseen = environment.tasks("train"), environment.tasks("test_unseen")
    for part in (0, 1):
        assert {task.case[part] for task in unseen} <= {task.case[part] for task in train}
    seen_parts = {part for task in train for value in task.answer for part in parts(world, value)}
    assert {part for task in unseen for value in task.answer for part in parts(world, value)} <= seen_parts


def parts(world: type[OneTry], value: Any) -> list[Any]:
    return list(value) if world is Tickets else [value]


@each_world
def test_cases_are_equally_frequent(world: type[OneTry]) -> None:
    cases = [task.case for task in world().tasks("train")]
    counts = [cases.count(case) for case in set(cases)]
    assert len(counts) == {Desk: 12, Office: 15, Orders: 12, Plant: 24, Tickets: 12}[world]
    assert max(counts) - min(counts) <= 1


@each_world
def test_tasks_follow_from_the_law_alone(world: type[OneTry]) -> None:
    assert world(law=1).tasks("val") == world(law=1).tasks("val") != world(law=2).tasks("val")


@each_world
def test_val_has_other_wordings_than_train(world: type[OneTry]) -> None:
    assert set(world.requests).isdisjoint(world.val_requests)
    wordings = {split: {masked(task, task.request) for task in world().tasks(split)} for split in SIZES}
    assert wordings["train"] == wordings["test_unseen"]
    assert wordings["train"].isdisjoint(wordings["val"])


def masked(task: Task, text: str) -> str:
    """Return a text with the task's own words cut out."""
    words = sorted((str(word) for word in (task.name, *task.case, *task.answer)), key=len, reverse=True)
    return re.sub(r"\b(" + "|".join(map(re.escape, words)) + r")\b", "_", text)


def test_an_unknown_split_is_named() -> None:
    with pytest.raises(UsageError, match="no split 'test'"):
        Desk().tasks("test")


# --- what the agent sees ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("world", [Desk, Office, Orders, Tickets])
def test_nothing_shows_the_answer_before_the_try(world: type[OneTry]) -> None:
    """Neither the opening of a task nor a reply of a free tool names a part of its answer."""
    for task in (task for split in SIZES for task in world().tasks(split)):
        texts = [message.content for message in world().reset(task)]
        texts += [play(world, task, call)[0].observation for calls in free_calls(world, task) for call in calls]
        assert not any(re.search(rf"\b{value}\b", text) for value in task.answer for text in texts)


def test_the_opening_of_the_plant_names_all_valves_alike() -> None:
    for task in (task for split in SIZES for task in Plant().tasks(split)):
        system, request = (message.content for message in Plant().reset(task))
        assert "A, B, C, D, E and F" in system
        assert not re.search(r"\b[A-F]\b", request)


def test_no_form_is_the_one_in_the_description() -> None:
    forms = {task.answer[0] for law in range(50) for task in Office(law=law).tasks("train")}
    assert "B-17" in json.dumps(Office().tools())
    assert all(re.fullmatch(r"[AC-Z]-\d\d", str(form)) for form in forms)


@pytest.mark.parametrize("world", [Orders, Tickets])
def test_what_decides_must_be_looked_up(world: type[OneTry]) -> None:
    hidden = {Orders: (0, 1), Tickets: (0,)}[world]
    for task in world().tasks("train") + world().tasks("val"):
        record = play(world, task, solution(world, task)[0])[0].observation
        assert all(task.case[part] not in task.request for part in hidden)
        assert all(task.case[part] in record for part in hidden)
        assert task.name in task.request


@pytest.mark.parametrize(
    ("world", "call"),
    [(Orders, ("look_up", {"order_id": "1"})), (Tickets, ("search_customer", {"name": "No One"}))],
)
def test_a_record_that_does_not_exist_is_a_mistake(world: type[OneTry], call: Call) -> None:
    result = play(world, world().tasks("train")[0], call)[0]
    assert result.info["mistake"]
    assert not result.done


# --- one try ---------------------------------------------------------------------------------------------------------


@each_world
def test_a_solution_scores_1_and_nothing_scores_0(world: type[OneTry]) -> None:
    for task in (task for split in SIZES for task in world().tasks(split)):
        results = play(world, task, *solution(world, task))
        assert results[-1].done
        assert results[-1].reward == 1.0
        assert not any(result.info["mistake"] for result in results)
        idle = world()
        idle.reset(task)
        assert idle.step("I do nothing.").reward == 0.0


@each_world
def test_a_wrong_call_ends_the_task_and_says_what_was_needed(world: type[OneTry]) -> None:
    wordings = set()
    for task in world().tasks("train"):
        result = play(world, task, wrong_call(world, task))[0]
        assert result.done
        assert result.reward == 0.0
        wordings.add(masked(task, result.observation))
        if world is not Plant:
            assert all(str(value) in result.observation for value in task.answer)
    assert wordings == {"The pressure is wrong."} if world is Plant else len(wordings) >= 4


def test_the_plant_gives_one_refusal_whatever_is_called() -> None:
    task = Plant().tasks("train")[0]
    first, second = task.answer
    for valves in ([], [first], list(VALVES), [first, second, second], ["no valve"]):
        result = play(Plant, task, ("open_valves", {"valves": valves}))[0]
        assert (result.observation, result.reward, result.done) == ("The pressure is wrong.", 0.0, True)
    assert play(Plant, task, ("open_valves", {"valves": [second, first]}))[0].reward == 1.0


def test_a_second_question_loses_the_ticket() -> None:
    task = Tickets().tasks("train")[0]
    question = ("ask_customer", {"question": "since_when"})
    first, second = play(Tickets, task, question, question)
    assert not first.done
    assert (second.done, second.reward) == (True, 0.0)
    assert play(Tickets, task, question, *solution(Tickets, task))[-1].reward == 1.0


# --- chance ----------------------------------------------------------------------------------------------------------


@each_world
def test_one_last_call_is_right(world: type[OneTry]) -> None:
    calls = last_calls(world)
    assert len(calls) == {Desk: 16, Office: 20, Orders: 16, Plant: 15, Tickets: 8}[world]
    for task in (world().tasks(split)[0] for split in SIZES):
        assert sum(play(world, task, call)[0].reward for call in calls) == 1.0


@each_world
def test_random_valid_calls_seldom_succeed(world: type[OneTry]) -> None:
    """Any tool is as likely as any other, and so are its valid arguments. Expected: 6.3, 5, 6.3, 6.7 and 9.4 %."""
    dice, tasks, rewards = Random(0), world().tasks("train") * 5, []
    for task in tasks:
        environment, choices = world(), [last_calls(world), *free_calls(world, task)]
        environment.reset(task)
        result = StepResult(observation="")
        while not result.done:
            result = environment.step(written(*dice.choice(dice.choice(choices))))
        rewards.append(result.reward)
    expected = {Desk: 1 / 16, Office: 1 / 20, Orders: 1 / 16, Plant: 1 / 15, Tickets: 3 / 32}[world]
    assert sum(rewards) / len(tasks) == pytest.approx(expected, abs=0.015)
    assert sum(rewards) / len(tasks) < 0.1
