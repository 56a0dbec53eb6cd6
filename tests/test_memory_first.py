"""Look-ahead by the memory first: both are tested on new replies, and the world model takes over once it is as good."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from lfo.agent import REPLY_STORE_FILE
from lfo.errors import ConfigError, DataError
from lfo.play import memory_first
from lfo.play.look_ahead import Predictor, Question
from lfo.play.memory_first import CLOSE, WINDOW, MemoryFirst
from lfo.play.reply_store import ReplyStore
from lfo.protocol.world_model import ObservedCall, WorldModelState
from lfo.types import ToolCall
from small_runs import small_config, small_trainer

ARM = ("lookahead_source=memory_first", "levels=2", "rollout.group_size=4", "rollout.max_turns=6", "eval.tasks=2")


def reply_to(task: str, reply: str = "") -> ObservedCall:
    state = WorldModelState(task=task, step=1, actions=(), collected={})
    call = ToolCall(name="make_phone_call", arguments={"phone_number": "1"})
    return ObservedCall(state=state, call=call, reply=reply or f"reply to {task}", facts=None, asked=True)


def question(task: str) -> Question:
    call = reply_to(task)
    return Question(task=None, state=call.state, call=call.call, messages=())


def started(monkeypatch: pytest.MonkeyPatch, knows: Sequence[str] = ()) -> Any:
    """A memory beside a world model that knows the replies to some tasks. Its rollouts are lists of calls."""

    def world_model(questions: Sequence[Question]) -> list[str]:
        return [f"reply to {each.state.task}" if each.state.task in knows else "wrong" for each in questions]

    monkeypatch.setattr(memory_first, "observed_calls", lambda rollout: rollout)
    monkeypatch.setattr("lfo.play.reply_store.observed_calls", lambda rollout: rollout)
    return memory(world_model)


def memory(world_model: Predictor = lambda questions: [""] * len(questions), **state: Any) -> MemoryFirst:
    return MemoryFirst(store=ReplyStore(), world_model=world_model, judge=str.__eq__, **state)


def test_the_memory_answers_until_the_world_model_is_as_good(monkeypatch):
    tasks = [f"task{index}" for index in range(WINDOW)]
    store = started(monkeypatch, knows=tasks)
    store.observe([[reply_to(task)] for task in tasks[:-1]])
    assert not store.handed_over, "a window is not full"
    assert store.answer([question("task3")]) == ["reply to task3"], "by the memory"
    assert len(store) == WINDOW - 1
    store.observe([[reply_to(tasks[-1])]])
    assert store.handed_over
    assert len(store) == 0
    assert store.answer([question("task3"), question("new")]) == ["reply to task3", "wrong"], "by the world model"
    store.observe([[reply_to("later")]])
    assert len(store) == 0, "it no longer stores"


def test_a_world_model_that_is_behind_does_not_take_over(monkeypatch):
    store = started(monkeypatch)
    store.observe([[reply_to("the only one", "again")]])
    for index in range(WINDOW):  # each task twice: the memory knows the second
        store.observe([[reply_to(f"task{index}")]])
        store.observe([[reply_to(f"task{index}")]])
    assert sum(memory for memory, _ in store.tested) >= WINDOW // 2
    assert not any(world for _, world in store.tested)
    assert not store.handed_over


@pytest.mark.parametrize(
    ("behind", "enough"), [(0, True), (int(CLOSE * WINDOW), True), (int(CLOSE * WINDOW) + 1, False)]
)
def test_it_may_be_a_little_behind(behind: int, enough: bool):
    tested = [(True, index >= behind) for index in range(WINDOW)]
    assert memory(tested=tested).world_model_is_as_good is enough
    assert not memory(tested=tested[1:]).world_model_is_as_good


def test_a_reply_tests_both_before_they_learn_it_and_only_once(monkeypatch):
    store = started(monkeypatch, knows=["b"])
    store.observe([[reply_to("a"), reply_to("a")], [reply_to("a"), reply_to("b")]])
    assert store.tested == [(False, False), (False, True)]


def test_it_is_saved_and_loaded(tmp_path: Path, monkeypatch):
    store = started(monkeypatch, knows=["b"])
    store.observe([[reply_to("a"), reply_to("b")]])
    store.save(tmp_path / "store")
    again = memory()
    again.load(tmp_path / "store")
    assert (again.store.replies, again.tested, again.handed_over) == (store.store.replies, store.tested, False)
    store.handed_over = True
    store.store.replies.clear()
    store.save(tmp_path / "store")
    again.load(tmp_path / "store")
    assert again.handed_over
    assert len(again) == 0


@pytest.mark.parametrize("text", [None, "[", "[]", "{}", '{"replies": 3, "handed_over": false, "tested": []}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / "store").write_text(text)
    with pytest.raises(DataError, match="not a store of replies"):
        memory().load(tmp_path / "store")


def test_it_needs_a_trained_world_model():
    with pytest.raises(ConfigError, match="memory_first needs a world model that is trained"):
        small_config("lookahead_source=memory_first", "world_model.weight=0")


def test_a_run_hands_over_and_resumes(tmp_path: Path, monkeypatch):
    """Neither predicts anything so early, so the world model takes over as soon as a window is full."""
    monkeypatch.setattr(memory_first, "WINDOW", 2)
    settings = (*ARM, "eval.every=0", "checkpoint_every=1")
    first = small_trainer(*settings, "steps=1", f"output_dir={tmp_path}")
    first.fit()
    store = first.backend.reply_store
    assert isinstance(store, MemoryFirst)
    assert store.handed_over or len(store) > 0
    small_trainer(*settings, "steps=3", f"output_dir={tmp_path}").fit(resume=True)
    last = memory()
    last.load(tmp_path / "adapters" / REPLY_STORE_FILE)
    assert last.handed_over
    assert len(last) == 0
