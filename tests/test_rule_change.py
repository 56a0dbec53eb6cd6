"""Rules that change: noticed by a sequential test on fresh replies, and what was heard before is forgotten."""

import json
import random
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from lfo import engines
from lfo.cli.serve import learnt_from
from lfo.config import load_config, to_yaml
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.play.fresh import agreement, predictions_met, right_in, shared_words
from lfo.play.look_ahead import LookAhead
from lfo.play.memory_first import MemoryFirst
from lfo.play.reply_store import ReplyStore
from lfo.protocol.world_model import ObservedCall, WorldModelExample, WorldModelState
from lfo.rows.replay import ReplayBuffer
from lfo.rows.samples import MiniBatches
from lfo.rows.successes import Success, SuccessBuffer
from lfo.runs.advice import advise
from lfo.runs.folder import read_metrics
from lfo.runs.rule_change import PAST, RARE, Noticed, Watch, noticed_in
from lfo.serving.conversations import Context
from lfo.serving.fresh import Listener
from lfo.statistics import wilson
from lfo.train import changed_rules
from lfo.types import Message, Rollout, RolloutGroup, StopReason, ToolCall, Turn
from small_runs import small_config, small_trainer


def usual(tasks: float = 100, right: float = 80) -> Watch:
    return Watch(usual=[[tasks, right]])


# --- the test ---


def test_doubt_by_hand():
    watch = usual()
    p = wilson(0.8, 100)[0]
    assert watch.expected == pytest.approx(0.7112, abs=1e-4) == p
    assert watch.hear(step=3, tasks=4, right=1) is None
    assert watch.doubt == pytest.approx(0.5 * ((1 - p / 2) / (1 - p)) ** 3) == pytest.approx(5.553, abs=1e-3)
    assert watch.usual == [[100, 80.0]]  # while there is doubt, the past stays as it was
    watch.hear(step=4, tasks=3, right=3)
    assert (watch.doubt, watch.doubted) == (1.0, [])
    assert watch.usual[-2:] == [[4, 1], [3, 3]]


def test_a_prediction_that_is_right_in_part_counts_in_part():
    watch = usual()
    watch.hear(step=0, tasks=1, right=0.25)
    p = watch.expected
    assert watch.doubt == pytest.approx(0.5**0.25 * ((1 - p / 2) / (1 - p)) ** 0.75)


def test_alarm_after_eleven_tasks_in_a_row_are_wrong():
    watch = usual()
    heard = [watch.hear(step=step, tasks=1, right=0) for step in range(60, 72)]
    assert [step for step, noticed in enumerate(heard, start=60) if noticed] == [71]
    assert heard[-1] == Noticed(since=60, before=0.8, now=0.0, tasks=12)
    assert "0% in the last 12 tasks, 80% before" in heard[-1].words
    # What was heard since is the past from now on: nothing to doubt.
    assert watch == Watch(usual=[[1, 0]] * 12)
    assert all(watch.hear(step=step, tasks=8, right=0) is None for step in range(100))


def test_since_is_the_step_in_which_the_doubt_arose():
    watch = usual()
    watch.hear(step=60, tasks=8, right=7)
    noticed = [watch.hear(step=step, tasks=8, right=0) for step in (61, 62)]
    assert noticed[0] is None
    assert noticed[1] is not None
    assert (noticed[1].since, noticed[1].tasks) == (61, 16)


def test_an_agent_that_has_learned_nothing_raises_no_alarm():
    watch = Watch()
    assert all(watch.hear(step=step, tasks=8, right=0) is None for step in range(500))


def test_a_bad_day_raises_no_alarm():
    """Half as right is the alternative; predictions that fall from 80 to 60 % are nearer to the past."""
    watch = usual()
    assert all(watch.hear(step=step, tasks=10, right=6) is None for step in range(500))


def test_the_past_is_what_was_heard_last():
    watch = Watch()
    for step in range(100):
        watch.hear(step=step, tasks=8, right=8)
    assert sum(tasks for tasks, _ in watch.usual) == PAST


@pytest.mark.parametrize("share", [0.3, 0.8, 0.97])
def test_false_alarms_are_rare(share: float):
    """The bound is one alarm in `RARE` steps; 200 runs of 100 steps have as many as two of these bounds."""
    alarms = 0
    for seed in range(200):
        rng, watch = random.Random(seed), Watch()
        for step in range(100):
            right = sum(rng.random() < share for _ in range(8))
            alarms += watch.hear(step=step, tasks=8, right=right) is not None
    assert alarms <= 2 * 200 * 100 / RARE


@pytest.mark.parametrize("share", [0.5, 0.8])
def test_a_change_is_noticed(share: float):
    late = []
    for seed in range(50):
        rng, watch = random.Random(seed), Watch()
        for step in range(20):
            watch.hear(step=step, tasks=8, right=sum(rng.random() < share for _ in range(8)))
        rang = (step for step in range(20, 60) if watch.hear(step=step, tasks=8, right=rng.random() < 0.3) is not None)
        late.append(next(rang, 60) - 19)
    assert max(late) <= 12


def test_a_watch_is_plain_values():
    watch = usual()
    watch.hear(step=1, tasks=4, right=1)
    assert Watch(**json.loads(json.dumps(asdict(watch)))) == watch


# --- predictions beside real replies ---

CALL = ToolCall(name="make_phone_call", arguments={"phone_number": "555-0100", "auth_info": {}})
OTHER_CALL = ToolCall(name="make_phone_call", arguments={"phone_number": "555-0100", "auth_info": {"pin": "1"}})


def turn(call: ToolCall, reply: str, *, start: int = 0, predicted: bool = False, **more: bool) -> Turn:
    return Turn(
        action=str(call.arguments),
        observation=reply,
        call=call,
        action_start=start,
        action_end=start,
        observation_start=start,
        observation_end=start,
        predicted=predicted,
        **more,
    )


def rollout(*turns: Turn, taken_back: tuple[Turn, ...] = (), task: str = "I need a copy.") -> Rollout:
    return Rollout(
        task_id="t",
        opening=(Message(role="user", content=task),),
        tokens=(),
        origins=(),
        logprobs=(),
        turns=turns,
        reward=0.0,
        stop=StopReason.DONE,
        taken_back=taken_back,
    )


def group(*rollouts: Rollout) -> RolloutGroup:
    return RolloutGroup(task_id="t", rollouts=rollouts)


def test_a_prediction_meets_the_reply_that_an_explorer_received():
    sighted = rollout(turn(CALL, "I need your pin.", predicted=True), turn(OTHER_CALL, "Done.", start=5))
    explorer, another = rollout(turn(CALL, "Give me your zip.")), rollout(turn(CALL, "Your pin, please."))
    found = list(predictions_met(group(sighted, explorer, another)))
    assert found == [("I need your pin.", ["Give me your zip.", "Your pin, please."])]


def test_a_prediction_that_was_taken_back_meets_the_reply_to_the_same_draft():
    draft = turn(OTHER_CALL, "Done.", start=7, predicted=True, taken_back=True)
    found = list(predictions_met(group(rollout(turn(OTHER_CALL, "No.", start=7), taken_back=(draft,)))))
    assert found == [("Done.", ["No."])]


def test_what_was_not_predicted_tests_nothing():
    explorer = rollout(turn(CALL, "Give me your zip."))
    for shown in ({"feedback": True}, {"checked": True}):
        assert not list(predictions_met(group(rollout(turn(CALL, "Your pin.", predicted=True, **shown)), explorer)))
    elsewhere = rollout(turn(CALL, "Your pin.", predicted=True), task="I need a refund.")
    assert not list(predictions_met(group(elsewhere, explorer)))


def test_agreement_is_meaning_or_else_words():
    world = PhoneCalls()
    asks = "For security purposes, I need your account number."
    assert world.describe_reply(asks) is not None
    assert agreement(world, "I have to ask you for your account number.", asks) == 1
    assert agreement(world, "I have to ask you for your member number.", asks) == 0
    assert agreement(world, "sun rain", "sun snow") == shared_words("sun rain", "sun snow") == 0.5
    sighted = rollout(turn(CALL, asks, predicted=True))
    heard = rollout(turn(CALL, asks)), rollout(turn(CALL, "For security purposes, I need your member number."))
    assert right_in(world, group(sighted, *heard)) == [0.5]


# --- forgetting ---


def example(key: str, *, asked: bool = False) -> WorldModelExample:
    return WorldModelExample(tokens=(1, 2), token_weights=(0.0, 1.0), key=key * 64, asked=asked)


def test_replay_forgets_what_was_heard_last_before(tmp_path: Path):
    replay = ReplayBuffer()
    replay.add([example("a"), example("b")], step=3)
    replay.add([example("b"), example("c")], step=9)  # b is still true
    replay.save(tmp_path / "replay")
    replay = ReplayBuffer.load(tmp_path / "replay")
    assert replay.heard == {"a" * 64: 3, "b" * 64: 9, "c" * 64: 9}
    replay.forget(before=9)
    assert set(replay.examples) == {"b" * 64, "c" * 64}
    aged = replay.aged()
    aged.add([example("d")], step=0)
    aged.forget(before=0)
    assert set(aged.examples) == {"d" * 64}


def observed(reply: str) -> ObservedCall:
    state = WorldModelState(task="Pay the bill.", step=1, actions=(), collected={})
    return ObservedCall(state=state, call=CALL, reply=reply, facts=None, asked=True)


def test_memory_forgets_what_was_heard_last_before(tmp_path: Path):
    store = ReplyStore()
    store.add([observed("Your pin."), observed("Your zip.")], step=3)
    store.add([observed("Your zip.")], step=9)
    store.save(tmp_path / "memory.json")
    again = ReplyStore()
    again.load(tmp_path / "memory.json")
    assert again.replies == store.replies
    again.forget(before=9)
    assert [each.reply for each in again.replies] == ["Your zip."]
    assert again.recall([(observed("").state, CALL)]) == ["Your zip."]


def test_a_memory_of_older_runs_has_no_steps(tmp_path: Path):
    (tmp_path / "memory.json").write_text(json.dumps([["task", "before", "call", "reply"]]))
    store = ReplyStore()
    store.load(tmp_path / "memory.json")
    assert list(store.replies.values()) == [0]


def test_a_memory_that_had_handed_over_begins_again():
    store = MemoryFirst(store=ReplyStore(), world_model=lambda questions: [""] * len(questions), judge=str.__eq__)
    store.handed_over, store.tested = True, [(True, True)] * 3
    store.forget(before=4)
    assert (store.handed_over, store.tested) == (False, [])


def test_successes_by_old_rules_are_not_imitated(tmp_path: Path):
    kept = Success(tokens=(1, 2), sampled=(False, True))
    buffer = SuccessBuffer({"old": kept, "new": kept}, {"old": 3, "new": 9})
    buffer.save(tmp_path / "successes")
    buffer = SuccessBuffer.load(tmp_path / "successes")
    assert buffer.made == {"old": 3, "new": 9}
    buffer.forget(before=9)
    assert list(buffer.successes) == ["new"]


# --- a run ---


def test_a_step_says_so_once():
    sighted = rollout(turn(CALL, "For security purposes, I need your account number.", predicted=True))
    heard = group(sighted, rollout(turn(CALL, "For security purposes, I need your member number.")))
    watch, world = usual(), PhoneCalls()
    rows = [changed_rules.heed(watch, [heard] * 8, step, judge=world, asks=lambda call: call()) for step in (5, 6, 7)]
    assert [row["fresh_right"] for row in rows] == [0, 0, 0]
    assert rows[0]["fresh_doubt"] > 1
    assert [row.get("rules_changed") for row in rows] == [
        None,
        {"since": 5, "before": 0.8, "now": 0, "tasks": 16},
        None,
    ]
    assert rows[1]["warnings"][0].endswith("what was heard before is forgotten")
    assert changed_rules.heed(watch, [group(sighted)], 8, judge=world, asks=lambda call: call()) == {}


SMALL_RUN = ("levels=1", "steps=1", "rollout.max_turns=3")


def test_a_run_goes_on_with_what_another_has_heard(tmp_path: Path):
    before = small_trainer(*SMALL_RUN, f"output_dir={tmp_path / 'old'}")
    before.fit()
    assert before.mini_batches.replay
    checkpoint = Path(before.config.output_dir) / "checkpoints" / "step-000001"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state["watch"] == asdict(before.state.watch)

    def heard(*settings: str) -> MiniBatches:
        config = small_config(*SMALL_RUN, *settings)
        batches = replace(before.mini_batches, replay=ReplayBuffer())
        changed_rules.go_on_from(config, batches, None)
        return batches

    taken = heard(f"init_from={tmp_path / 'old'}").replay
    assert taken.examples == before.mini_batches.replay.examples
    assert set(taken.heard.values()) == {-1}
    # The adapters alone, another law, another environment, and no run at all: nothing was heard.
    old = tmp_path / "old"
    others = [f"{old / 'adapters'}"], [f"{old}", "env_args.law=1"], [f"{old}", "env=oracle-codes"], ["none"]
    for start, *settings in others:
        assert not heard(f"init_from={start}", *settings).replay


def test_an_alarm_in_a_run_makes_it_forget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trainer = small_trainer(*SMALL_RUN, "steps=2", f"output_dir={tmp_path / 'run'}")
    trainer.mini_batches.replay.add([example("a")], step=-1)
    trainer.state.watch = usual()
    wrong = [[0.0] * 3 for _ in range(16)]
    monkeypatch.setattr(changed_rules, "right_in", lambda judge, group: wrong.pop())
    monkeypatch.setattr("lfo.train.loop.go_on_from", lambda *_: Watch(usual=[[1000, 999.0]]))
    trainer.fit()
    rows = read_metrics(tmp_path / "run")
    rang = [row["step"] for row in rows if "rules_changed" in row]
    assert rang == [2]
    assert "a" * 64 not in trainer.mini_batches.replay.examples
    assert any("stopped being right" in words for words in rows[-1]["warnings"])


def test_advice_names_the_alarm_until_predictions_are_right_again():
    config = load_config(["preset=tiny"])
    noticed = asdict(Noticed(since=6, before=0.8, now=0.1, tasks=16))
    rows = [{"step": step, "fresh_right": 0.8 if step < 6 else 0.2} for step in range(9)]
    rows[7] = {**rows[7], "rules_changed": noticed}
    (trouble,) = advise(rows, config)
    assert trouble.name == "rules changed"
    assert "at step 7" in trouble.figure
    assert "--from RUN" in trouble.knob
    recovered = [*rows, *({"step": step, "fresh_right": 0.75} for step in (9, 10, 11))]
    assert advise(recovered, config) == []
    assert noticed_in([{"step": 1, "rules_changed": "yes"}, {"step": 2, "rules_changed": {"since": 1}}]) == []


# --- a served agent ---


def test_a_served_agent_compares_what_its_clients_hear(caplog: pytest.LogCaptureFixture):
    asked = []

    def predictor(questions):
        asked.extend(question.call for question in questions)
        return ["For security purposes, I need your account number."] * len(questions)

    def context(reply: str, call: ToolCall = CALL) -> Context:
        opening = (Message(role="user", content="I need a copy."),)
        return Context(opening=opening, tokens=(), turns=(turn(call, reply),), transcript=opening)

    listener = Listener(LookAhead(predictor=predictor, tools={"make_phone_call"}), PhoneCalls())
    right, wrong = (context(f"For security purposes, I need your {name} number.") for name in ("account", "member"))
    listener.hear([right] * 100)
    listener.hear([context("Acme Bank", ToolCall(name="search_company", arguments={}))])  # nobody would imagine that
    assert listener.figures().split("\n")[:2] == ["lfo_fresh_replies_total 100", "lfo_fresh_right_total 100"]
    assert asked == [CALL] * 100
    for _ in range(5):
        listener.hear([wrong])
    assert "lfo_rules_changed_total 1" in listener.figures()
    assert "100% before; the rules have probably changed" in caplog.text


def test_a_served_agent_without_look_ahead_compares_nothing():
    listener = Listener(None, PhoneCalls())
    listener.hear([])
    assert "lfo_fresh_replies_total 0" in listener.figures()


def test_a_log_becomes_a_served_agent_in_one_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    trained = []
    monkeypatch.setattr(engines, "train", trained.append)
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "config.yaml").write_text(
        to_yaml(load_config(["preset=tiny", "seed=4", "eval.final_splits=test_unseen_rules"]))
    )
    new = learnt_from(tmp_path / "old", tmp_path / "calls.jsonl", tmp_path / "new", steps=20)
    (config,) = trained
    assert (new, config.output_dir) == (tmp_path / "new", str(tmp_path / "new"))
    assert (config.seed, config.steps, config.policy.frozen, config.eval.every) == (4, 20, True, 0)
    assert config.init_from == str(tmp_path / "old")
    assert config.world_model.from_logs == str(tmp_path / "calls.jsonl")
