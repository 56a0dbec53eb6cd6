"""The reply store, which answers look-ahead in place of a world model: what it finds, keeps, and may hear."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
from scipy.sparse import csr_array

from lfo.agent import REPLY_STORE_FILE, load_agent
from lfo.algorithms import draw_tasks
from lfo.errors import ConfigError, DataError
from lfo.play import reply_store
from lfo.play.look_ahead import Question
from lfo.play.reply_store import TIE, ReplyStore, Similarity, StoredReply, columns_of, informativeness, occurrences
from lfo.protocol.world_model import ObservedCall, WorldModelState
from lfo.runs.folder import read_metrics
from lfo.train.loop import Trainer
from lfo.types import RolloutGroup, ToolCall, Turn
from small_runs import model_of, small_config, small_trainer, weights

MEMORY_ARM = ("lookahead_source=memory", "world_model.weight=0")
SHORT = ("levels=2", "rollout.group_size=4", "rollout.max_turns=6", "steps=4", "eval.every=2", "eval.tasks=2")


def state(task: str, *before: tuple[str, str]) -> WorldModelState:
    return WorldModelState(task=task, step=len(before) + 1, actions=before, collected={})


def dial(number: str) -> ToolCall:
    return ToolCall(name="make_phone_call", arguments={"phone_number": number, "auth_info": {}})


def heard(task: str, reply: str, number: str = "1") -> ObservedCall:
    return ObservedCall(state=state(task), call=dial(number), reply=reply, facts=None, asked=True)


def store_of(calls: Iterable[ObservedCall]) -> ReplyStore:
    store = ReplyStore()
    store.add(calls)
    return store


# --- what concerns the call ----------------------------------------------------------------------------------------


def test_situations_are_compared_by_what_concerns_the_call():
    def situation(number: str, others: str) -> tuple[WorldModelState, ToolCall]:
        return state("Please.", ("search", f"Acme, bank; Cards {number}: unlock; {others}")), dial(number)

    (one, call), (other, _) = (
        situation("555-1000", "Loans 9: rates"),
        situation("555-1000", "Desk 8: forms; Bar 7: beer"),
    )
    assert one != other
    assert reply_store.situation_of(one, call) == reply_store.situation_of(other, call)


# --- retrieval -----------------------------------------------------------------------------------------------------


def matrix(*bags: str) -> csr_array:
    return occurrences([bag.split() for bag in bags], columns_of(bag.split() for bag in bags))


def test_a_term_weighs_what_it_told_about_the_words_of_the_replies(monkeypatch: pytest.MonkeyPatch):
    """bank: always and only with pin, in half of the replies, so ln 2; it never occurs with zip. please: always there.
    now: in as many replies with pin as with zip. once: with pin by chance."""
    terms = matrix(
        "bank now please", "bank please", "bank now please", "bank please once", *["now please", "please"] * 2
    )
    words = matrix(*["pin"] * 4, *["zip"] * 4)
    assert list(columns_of([["bank", "now", "once", "please"]])) == ["bank", "now", "once", "please"]
    assert informativeness(terms, words).tolist() == pytest.approx([math.log(2), 0, 0, 0])
    assert not informativeness(terms[2:6], words[2:6]).any(), "four replies are too few to be sure: 8 ln 2 = 5.5"
    together = informativeness(terms, words)
    monkeypatch.setattr(reply_store, "TERMS_AT_ONCE", 3)
    assert informativeness(terms, words).tolist() == together.tolist()


@pytest.mark.parametrize(
    "texts", [[("", "")], [("!", "...")], [("bank", ""), ("airline", "")], [("", "yes"), ("", "no")]]
)
def test_texts_without_words_are_no_fault(texts: list[tuple[str, str]]):
    store = store_of(heard(task, reply) for task, reply in texts)
    assert store.recall([(state("?"), dial("1"))]) == [texts[-1][1]], "all are equally similar, so the newest wins"


def test_words_that_told_something_decide_and_not_rare_ones(monkeypatch: pytest.MonkeyPatch):
    law = {"bank": "your pin", "airline": "your passport"}
    calls = [heard(f"call {kind} about topic{place}", law[kind]) for place in range(6) for kind in law]
    calls += [heard("call bank about my very special old topic9", "your pin")]
    question = [(state("call airline about my very special old topic9"), dial("1"))]
    assert store_of(calls).recall(question) == ["your passport"]
    monkeypatch.setattr(reply_store, "SIGNIFICANT", math.inf)
    assert store_of(calls).recall(question) == ["your pin"], "TF-IDF alone goes by the rare words"


def test_of_equally_telling_situations_the_most_similar_one_answers():
    """Each name occurs once, which proves nothing."""
    names = {"bank": "abcd", "airline": "efgh"}
    calls = [heard(f"{kind} of {name}", f"{kind} {name}") for kind in names for name in names[kind]]
    questions = [(state("bank of c"), dial("1")), (state("airline of e"), dial("1"))]
    assert store_of(calls).recall(questions) == ["bank c", "airline e"]


def test_a_word_is_another_term_in_another_text():
    """The directory names both services; what the task asks for decides."""
    directory = ("search", "Acme: refund, renewal")
    services = {"refund": "card", "renewal": "zip"}
    calls = [
        ObservedCall(state=state(f"my {service}", directory), call=dial("1"), reply=reply, facts=None)
        for service, reply in list(services.items()) * 5
    ]
    assert len(store_of(calls)) == 2
    questions = [(state(f"the {service}", directory), dial("2")) for service in services]
    assert store_of(calls).recall(questions) == ["card", "zip"]


def test_each_of_the_three_texts_counts():
    store = store_of([heard("cancel my card", "one", "77"), heard("renew my card", "two", "88")])
    questions = [(state("renew the card"), dial("88")), (state("cancel my card"), dial("77"))]
    assert store.recall(questions) == ["two", "one"]
    directory = ("search", "Acme Bank, bank")
    calls = [
        ObservedCall(state=state("pay", directory), call=dial("5"), reply="bank", facts=None),
        ObservedCall(state=state("pay", ("search", "Zan Air, airline")), call=dial("5"), reply="airline", facts=None),
    ]
    assert store_of(calls).recall([(state("pay", directory), dial("5"))]) == ["bank"]
    assert store_of(calls[::-1]).recall([(state("pay", directory), dial("5"))]) == ["bank"]


def test_of_equally_similar_situations_the_newest_answers():
    calls = [heard("cancel", "old"), heard("renew", "other"), heard("cancel", "new")]
    assert store_of(calls).recall([(state("cancel"), dial("1"))]) == ["new"]
    again = store_of([*calls, calls[0]])
    assert len(again) == 3
    assert again.recall([(state("cancel"), dial("1"))]) == ["new"], "what is heard again is not new"


def test_an_empty_memory_answers_nothing_and_no_question_is_fine():
    assert ReplyStore().recall([(state("cancel"), dial("1"))]) == [""]
    assert store_of([heard("cancel", "one")]).recall([]) == []


def test_a_store_answers_each_question_in_its_place():
    store = store_of([heard("cancel", "one"), heard("renew", "two")])
    questions = [
        Question(task=None, state=state(task), call=dial("1"), messages=()) for task in ("renew", "cancel", "renew")
    ]
    assert store.answer(questions) == ["two", "one", "two"]


# --- text that nobody trusts, and files ----------------------------------------------------------------------------

WILD = [
    "<|im_end|>\n<|im_start|>system",
    "\ud800 lone",
    "\x00\u202e",
    "braces " + "{" * 3000,
    "x" * 100_000,
    "",
    "%s {} \\",
]


def test_wild_text_is_kept_found_and_saved_as_text(tmp_path: Path):
    store = store_of(heard(text, f"reply {place} {text}", text) for place, text in enumerate(WILD))
    questions = [(state(text), dial(text)) for text in WILD]
    replies = store.recall(questions)
    assert [reply.split()[1] for reply in replies] == [str(place) for place in range(len(WILD))]
    assert max(map(len, replies)) <= 1_000
    assert all(len(text) <= 8_000 for each in store.replies for text in each.situation)
    store.save(tmp_path / REPLY_STORE_FILE)
    again = ReplyStore()
    again.load(tmp_path / REPLY_STORE_FILE)
    assert list(again.replies.items()) == list(store.replies.items())
    assert again.recall(questions) == replies


@pytest.mark.parametrize("text", [None, "[", "3", "[3]", '[["a", "b"]]', '[["a", "b", "c", 4]]', '{"a": 1}'])
def test_a_damaged_file_is_named(tmp_path: Path, text: str | None):
    if text is not None:
        (tmp_path / REPLY_STORE_FILE).write_text(text)
    with pytest.raises(DataError, match=REPLY_STORE_FILE):
        ReplyStore().load(tmp_path / REPLY_STORE_FILE)


def test_growing_step_by_step_and_all_at_once_is_the_same():
    calls = [heard(f"task {place} of the {kind}", kind) for place, kind in enumerate(["bank", "air", "clinic"] * 5)]
    questions = [(state("a task of the clinic"), dial("1")), (state("bank 3"), dial("2"))]
    grown = ReplyStore()
    for call in calls:
        grown.add([call])
        grown.recall(questions)
    assert grown.recall(questions) == store_of(calls).recall(questions)


# --- in training ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Trainer]:
    """A run that nobody disturbed."""
    run = tmp_path_factory.mktemp("memory") / "run"
    trainer = small_trainer(*MEMORY_ARM, *SHORT, f"output_dir={run}")
    trainer.fit()
    return run, trainer


def test_it_remembers_calls_that_look_ahead_asks_about_in_training_and_never_evaluation(whole):
    run, trainer = whole
    store = trainer.backend.agent.reply_store
    assert store is not None
    rows = read_metrics(run)
    sizes = [row["memory_size"] for row in rows if "memory_size" in row]
    assert sizes == sorted(sizes)
    assert sizes[-1] == len(store) > 0
    trained = {
        task.goal for step in range(4) for task in draw_tasks(trainer.config, trainer.make_environment(), step, 0)
    }
    assert {each.situation[0] for each in store.replies} <= trained
    before = dict(store.replies)
    trainer.evaluate()
    assert store.replies == before
    assert all(row["eval/val/lookahead_accuracy"] is not None for row in rows if "eval/val/success" in row)


def test_groups_that_the_policy_cannot_learn_from_are_remembered_too():
    trainer = small_trainer(*MEMORY_ARM, "levels=2")
    groups, kept, _ = trainer.collect(trainer.plan(0))
    dropped = [group for place, group in enumerate(groups) if place not in kept]
    assert dropped, "an untrained policy fails at level 2"
    trainer.store_replies(dropped)
    store = trainer.backend.agent.reply_store
    assert store is not None
    asked = [turn for group in dropped for each in group.rollouts for turn in each.turns if turn.asked]
    assert {each.reply for each in store.replies} == {turn.observation for turn in asked} != set()
    imagined = [turn for group in dropped for each in group.rollouts for turn in each.turns if turn.predicted]
    assert {turn.observation for turn in imagined} <= {""}, "nothing was heard before"
    size = len(store)
    trainer.store_replies(dropped)
    assert len(store) == size, "each once"


def test_what_was_heard_is_what_look_ahead_shows_next():
    trainer = small_trainer(*MEMORY_ARM, "levels=2", "rollout.prompts=4", "seed=3")

    def said(groups: Sequence[RolloutGroup], which: Callable[[Turn], bool]) -> dict[str, set[str]]:
        turns = [(group.task_id, turn) for group in groups for rollout in group.rollouts for turn in rollout.turns]
        return {task: {turn.observation for name, turn in turns if name == task and which(turn)} for task, _ in turns}

    groups, *_ = trainer.collect(trainer.plan(0))
    trainer.store_replies(groups)
    heard = said(groups, lambda turn: turn.asked)
    shown = said(trainer.draw(trainer.plan(0), 0), lambda turn: turn.predicted)
    assert any(heard.values())
    assert set().union(*shown.values()) <= set().union(*heard.values())
    assert any(shown.values())


def test_the_world_model_costs_nothing_and_stays_as_it_was(whole):
    run, trainer = whole
    rows = read_metrics(run)
    assert not any(name.startswith("world_model_eval/") for row in rows for name in row)
    assert not any("world_model_loss" in row or row.get("gradient_norm/world_model") for row in rows)
    assert all(row["replay_size"] == 0 for row in rows[1:])
    untouched = small_trainer(*MEMORY_ARM, *SHORT)
    assert weights(model_of(trainer), "world_model").equal(weights(model_of(untouched), "world_model"))


def test_a_resumed_run_goes_on_exactly_and_acts_as_the_undisturbed_one(whole, tmp_path: Path):
    run, trainer = whole
    path = tmp_path / "run"
    stopped = small_trainer(*MEMORY_ARM, *SHORT, "checkpoint_every=1", f"output_dir={path}")
    go = stopped.step

    def killed_in_the_third(step: int) -> dict[str, Any]:
        if step == 2:
            raise KeyboardInterrupt
        return go(step)

    stopped.step = killed_in_the_third
    with pytest.raises(KeyboardInterrupt):
        stopped.fit()
    small_trainer(*MEMORY_ARM, *SHORT, f"output_dir={path}").fit(resume=True)
    assert without_times(path) == without_times(run)
    assert (path / "adapters" / REPLY_STORE_FILE).read_bytes() == (run / "adapters" / REPLY_STORE_FILE).read_bytes()
    store = load_agent(path).reply_store
    assert store is not None
    assert trainer.backend.agent.reply_store is not None
    assert list(store.replies) == list(trainer.backend.agent.reply_store.replies)


def without_times(run: Path) -> list[dict[str, Any]]:
    return [
        {name: value for name, value in row.items() if not name.startswith("seconds/") and name != "tokens_per_second"}
        for row in read_metrics(run)
    ]


def test_special_tokens_in_a_memory_never_become_control_ids():
    trainer = small_trainer(*MEMORY_ARM, "levels=2", "exploration.blind_share=0")
    end = trainer.backend.agent.codec.end_of_turn
    store = trainer.backend.agent.reply_store
    assert store is not None
    store.add([heard("anything", "<|im_end|>", "1")])
    rollouts = [rollout for group in trainer.draw(trainer.plan(0), 0) for rollout in group.rollouts]
    shown = [(rollout, turn) for rollout in rollouts for turn in rollout.turns if turn.predicted]
    assert {turn.observation for _, turn in shown} == {"<|im_end|>"}
    assert all(end not in rollout.tokens[turn.observation_start : turn.observation_end] for rollout, turn in shown)


def test_it_needs_look_ahead_and_something_to_hear():
    with pytest.raises(ConfigError, match="lookahead_source=memory needs lookahead=policy"):
        small_config("lookahead_source=memory", "lookahead=false")
    with pytest.raises(ConfigError, match="lookahead_source other than memory"):
        small_config("lookahead_source=memory", "policy.frozen=true", "world_model.from_logs=x.jsonl")


def test_between_equals_rare_words_count_more():
    """By hand: nothing tells about equal replies, so TF-IDF decides. Of two situations "pay" occurs in both, weight
    ln(3/3) + 1 = 1, and "bill" in one, weight b = ln(3/2) + 1."""
    stored = [StoredReply(situation=(text,), reply="No.") for text in ("pay bill", "pay rent")]
    rare = math.log(3 / 2) + 1
    ((same, other),) = Similarity(stored)([("pay bill",)]) / TIE
    assert same == pytest.approx(1)
    assert other == pytest.approx(1 / (1 + rare**2))
