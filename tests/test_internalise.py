"""Runs that train what look-ahead or feedback achieves into the policy: phases, teachers, waves, resuming."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import pytest
import torch

from lfo.agent import load_agent
from lfo.algorithms import plan_of
from lfo.algorithms.dapo import rate_of
from lfo.algorithms.internalise import FIRST_TASKS
from lfo.checkpoints import latest_checkpoint
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import ConfigError
from lfo.play.episode import Feedback, RolloutRequest
from lfo.play.feedback import feedback_from, roll_out_in_waves
from lfo.rows.samples import acted_by_policy
from lfo.runs.alone import Alone, policy_alone
from lfo.runs.folder import read_metrics
from lfo.train.loop import Trainer
from lfo.types import Rollout, Situation, StopReason
from small_runs import model_of, requests_of, small_config, small_trainer, weights
from test_deliberation import A, B, Chore, play, say

LEVEL_2 = ("levels=2", "rollout.max_turns=5", "lookahead_source=truth", "internalise.rows=2")


class Counting(PhoneCalls):
    """The phone-call world, which counts what it is told."""

    told: ClassVar[Counter[str]] = Counter()

    def step(self, message: str):
        Counting.told[message] += 1
        return super().step(message)


# --- who acts, and what it is shown ----------------------------------------------------------------------------


def acting(*settings: str, step: int = 5) -> list[tuple[bool, bool]]:
    """(blind, by the base) of each rollout of a group of eight."""
    config = small_config("rollout.group_size=8", "internalise.until=9", *settings)
    return [(not each.look_ahead, each.player == "base") for each in requests_of(config, PhoneCalls(), step)[:8]]


def test_until_then_the_base_acts_for_the_policy_or_explores_for_it():
    sighted, blind = (False, True), (True, True)
    rows = "internalise.rows=2"
    assert acting(rows) == [blind, sighted] * 2 + [sighted] * 4
    assert acting(rows, "internalise.teacher=policy") == [blind, (False, False)] * 2 + [(False, False)] * 4
    assert acting() == [(True, False), (False, False)] * 2 + [(False, False)] * 4
    assert acting(rows, "lookahead=off", "feedback=true") == [blind] * 8
    first_wave_of_base = [blind] * 4 + [(True, False)] * 4
    assert acting("algo=dapo", rows, "feedback=true", "internalise.teacher=policy") == first_wave_of_base


@pytest.mark.parametrize("settings", [(), ("internalise.rows=2",), ("internalise.rows=2", "feedback=true")])
def test_afterwards_the_policy_acts_alone_and_all_can_be_compared(settings: tuple[str, ...]):
    assert acting(*settings, step=9) == [(True, False)] * 8


def test_the_policy_is_not_judged_by_what_the_base_did():
    rollout = play(A, blind=True).rollout
    assert acted_by_policy(rollout)
    assert not acted_by_policy(replace(rollout, untrained=True))


def test_the_phases_and_their_rates():
    config = small_config("algo=internalise", "internalise.until=4")
    plans = [plan_of(config, step, Situation(success_tasks=30 * (step > 1))) for step in range(6)]
    assert [plan.phase for plan in plans] == [*["ask"] * 2, *["internalise"] * 2, *["reinforce"] * 2]
    assert [plan.imitates for plan in plans] == [False, False, True, True, False, False]
    assert [plan.reinforces for plan in plans] == [*[False] * 4, True, True], "the base acts until then"
    assert [plan.predicts for plan in plans] == [*[True] * 4, False, False]
    assert plan_of(small_config("algo=internalise"), 1000).phase == "ask"
    whole = [rate_of(step, warmup=2, total=10, until=0) for step in range(10)]
    assert [rate_of(step, warmup=2, total=99, until=10) for step in range(10)] == whole
    assert [rate_of(step, warmup=2, total=20, until=10) for step in range(10, 20)] == whole
    assert [rate_of(step, warmup=2, total=10, until=0, constant=True) for step in range(10)] == [0.5, *[1.0] * 9]
    kept = [rate_of(step, warmup=2, total=20, until=4, constant=True) for step in range(8)]
    assert kept == [0.5, 1.0, 1.0, 1.0] * 2


# --- feedback --------------------------------------------------------------------------------------------------


def failed(*said: str, **changes: Any) -> Rollout:
    return replace(play(*said, turns=len(said), blind=True).rollout, **changes)


def test_the_earliest_call_of_a_failed_rollout_is_told():
    late, early = failed(say("x", "look"), A), failed(B, A)
    assert feedback_from([late, early], tools=("say",)) == Feedback(after=0, action=B, observation="Reply 1.")
    assert feedback_from([late], tools=("say",)) == Feedback(after=1, action=A, observation="Reply 2.")
    assert feedback_from([late], tools=None) == Feedback(after=0, action=say("x", "look"), observation="Reply 1.")
    assert feedback_from([replace(early, reward=1.0)], tools=("say",)) is None
    assert feedback_from([failed(say("x", "look"))], tools=("say",)) is None


def test_what_is_told_stands_where_it_happened_and_reaches_no_environment_and_no_loss():
    told_b = Feedback(after=1, action=B, observation="No.")
    played = play(A, say("e"), turns=2, blind=True, feedback=told_b)
    assert played.turns == [(A, False), (B, True), (say("e"), False)]
    assert played.heard == [A, say("e")]
    assert played.rollout.feedback
    assert [turn.feedback for turn in played.rollout.turns] == [False, True, False]
    assert played.rollout.turns[1].observation == "No."
    spoken = {token for speech in played.slots.spoken[0] for token in speech.logprobs}
    trained = [logprob for logprob in played.rollout.logprobs if logprob]
    assert set(trained) <= spoken
    assert len(trained) == sum(len(speech.tokens) for speech in played.slots.spoken[0])


@pytest.mark.parametrize(
    ("source", "drawn", "told"),
    [
        ("own", "xyz", "xyz"),
        ("other_task", "xyz", "yzx"),
        ("other_task", "xxyx", "yyxy"),  # few tasks: one draw has the same task more than once
        ("other_task", "xx", ""),
    ],
)
def test_a_second_wave_is_told_what_the_first_heard_on_its_task_or_in_the_control_on_another(
    source: str, drawn: str, told: str
):
    config = small_config("rollout.group_size=4", f"feedback={source}")
    tasks = [Chore(id=name) for name in drawn]
    requests = [RolloutRequest(task=task, seeds=(place,)) for task in tasks for place in range(4)]
    waves: list[Sequence[RolloutRequest]] = []

    def roll_out(asked: Sequence[RolloutRequest]) -> list[Rollout]:
        waves.append(asked)
        return [failed(say(each.task.id), task_id=each.task.id, error=str(each.seeds[0])) for each in asked]

    rollouts = roll_out_in_waves(plan_of(config, 0), requests, roll_out, tools=None)
    assert [(each.task_id, each.error) for each in rollouts] == [(r.task.id, str(r.seeds[0])) for r in requests]
    first, second = waves
    assert [request.feedback for request in first] == [None] * 2 * len(drawn)
    assert len(second) == 2 * len(drawn)
    heard = [request.feedback.action for request in second if request.feedback]
    assert heard == [say(name) for name in told for _ in range(2)]


def test_rollouts_are_compared_with_those_that_were_told_as_much():
    trainer = small_trainer("levels=2", "rollout.max_turns=4", "algo=dapo", "feedback=true", "rollout.prompts=1")
    (group,) = trainer.draw(trainer.plan(0), 0)
    assert [rollout.feedback for rollout in group.rollouts] == [False, False, True, True]
    assert len(set(group.conditions)) == 2
    shown = [turn for rollout in group.rollouts[2:] for turn in rollout.turns if turn.predicted]
    heard = [turn.observation for rollout in group.rollouts[:2] for turn in rollout.turns if turn.observation]
    assert shown
    assert {turn.observation for turn in shown} <= set(heard)


def test_nobody_is_told_anything_at_an_evaluation(monkeypatch):
    trainer = small_trainer("levels=2", "rollout.max_turns=3", "algo=dapo", "feedback=true", "eval.tasks=2")
    asked: list[RolloutRequest] = []
    roll_out = trainer.backend.roll_out
    monkeypatch.setattr(trainer.backend, "roll_out", lambda each, **how: asked.extend(each) or roll_out(each, **how))
    trainer.evaluate()
    assert len(asked) == 2
    assert not any(request.feedback or request.player == "base" for request in asked)


# --- runs ------------------------------------------------------------------------------------------------------


def rows(run: Path) -> list[dict[str, Any]]:
    """All metrics but times."""
    timed = ("seconds/", "tokens_per_second")
    return [{name: value for name, value in row.items() if not name.startswith(timed)} for row in read_metrics(run)]


PHASES = (
    *LEVEL_2,
    "seed=1",  # one step of asking, two of imitation, one of DAPO
    "rollout.prompts=1",
    "internalise.until=3",
    "steps=4",
    "checkpoint_every=1",
    "eval.every=3",
    "eval.tasks=2",
    "feedback=true",
)


@pytest.fixture(autouse=True, scope="module")
def _imitation_begins_with_the_first_success():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("lfo.algorithms.internalise.FIRST_TASKS", 1)
        yield


@pytest.mark.parametrize(("train_tasks", "first"), [(None, 24), (100, 24), (5, 3), (1, 1)])
def test_imitation_begins_after_24_tasks_or_half_of_all(monkeypatch, train_tasks: int | None, first: int):
    monkeypatch.setattr("lfo.algorithms.internalise.FIRST_TASKS", FIRST_TASKS)
    situations = [Situation(success_tasks=stored, train_tasks=train_tasks) for stored in (first - 1, first)]
    plans = [plan_of(small_config("algo=internalise"), 0, situation) for situation in situations]
    assert [plan.phase for plan in plans] == ["ask", "internalise"]


def test_a_trainer_counts_the_tasks_that_can_succeed():
    assert small_trainer("algo=internalise").train_tasks is None, "the phone-call world has a stream"
    codes = small_trainer("algo=internalise", "env=oracle-codes", "world_model.predict=all", environment=OracleCodes)
    assert codes.train_tasks == len(OracleCodes().tasks("train"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("whole") / "run"
    small_trainer(*PHASES, f"output_dir={run}").fit()
    return run


def test_a_run_has_its_phases_and_each_trains_what_it_should(whole: Path):
    _, *steps = rows(whole)
    phases = [row["phase"] for row in steps]
    assert phases[-1] == "reinforce"
    assert "internalise" in phases
    for row in steps:
        assert ("imitation_loss" in row) == (row["phase"] == "internalise")
        assert ("world_model_loss" in row) == (row["phase"] != "reinforce")
        assert ("groups_kept" in row) == (row["phase"] == "reinforce"), "DAPO alone"
        assert (row["success_tasks"] > 0) == (row["phase"] != "ask")
        assert "gradient_ratio" not in row
    assert "drafts" not in steps[-1], "nobody looks ahead any more"
    assert steps[2]["eval/val/success"] > steps[2]["eval/val/success_blind"], "true replies, and hardly any training"
    assert "eval/val/lookahead_accuracy" not in steps[3]
    assert steps[3]["eval/val/success"] == steps[3]["eval/val/success_blind"]


def test_a_run_is_played_later_as_it_was_evaluated(whole: Path):
    """With look-ahead by the base, without it by the policy."""
    agent = load_agent(whole)
    tasks = agent.tasks("val")[:2]
    alone = agent.roll_out(tasks, greedy=True, lookahead=False)
    assert not any(rollout.untrained for rollout in alone)
    assert fmean(rollout.reward for rollout in alone) == rows(whole)[-1]["eval/val/success_blind"]
    sighted = agent.roll_out(tasks, greedy=True)
    assert all(rollout.untrained for rollout in sighted)
    assert fmean(rollout.reward for rollout in sighted) == rows(whole)[3]["eval/val/success"], "true replies: the same"


class Stopped(Exception):
    pass


@pytest.mark.parametrize("stopped_in", [2, 3])
def test_a_run_that_was_stopped_in_any_phase_goes_on_as_if_it_had_not(whole: Path, tmp_path: Path, stopped_in: int):
    run = tmp_path / "run"
    trainer = small_trainer(*PHASES, f"output_dir={run}")
    learn = trainer.backend.learn

    def stop(mini_batches: Any, **how: Any) -> Any:
        if trainer.state.step == stopped_in:
            raise Stopped
        return learn(mini_batches, **how)

    trainer.backend.learn = stop  # type: ignore[method-assign]
    with pytest.raises(Stopped):
        trainer.fit()
    checkpoint = latest_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.step == stopped_in
    small_trainer(*PHASES, f"output_dir={run}").fit(resume=True)
    assert rows(run) == rows(whole)
    for name in ("policy", "world_model"):
        one, other = (each / "adapters" / name / "adapter_model.safetensors" for each in (run, whole))
        assert one.read_bytes() == other.read_bytes()


def test_while_the_base_acts_the_policys_weights_change_nothing_that_is_said():
    """Nor what the environment hears: the same messages, counted."""

    def said(trainer: Trainer) -> tuple[list[tuple[int, ...]], Counter[str]]:
        Counting.told = Counter()
        rollouts = [rollout for group in trainer.draw(trainer.plan(0), 0) for rollout in group.rollouts]
        cut_off = (StopReason.TURN_OVERFLOW, StopReason.CONTEXT_OVERFLOW)  # with words that nobody was told
        turns = [turn for each in rollouts for turn in each.turns[: -1 if each.stop in cut_off else None]]
        real = Counter(turn.action for turn in turns if not turn.predicted)
        assert real == Counting.told, "nothing that was shown or imagined was said to anybody"
        return [rollout.tokens for rollout in rollouts], Counting.told

    settings = (*LEVEL_2, "rollout.prompts=1", "feedback=true", "lookahead_source=world_model")
    trainer = small_trainer(*settings, environment=lambda: Counting(levels=(2,)))
    before = said(trainer)
    with torch.no_grad():
        for parameter in model_of(trainer).adapter_parameters("policy"):
            parameter.add_(0.3)
    trainer.backend.sync(1)
    assert said(trainer) == before
    trainer.config = small_config(*settings, "internalise.teacher=policy")
    assert said(trainer) != before, "the policy's weights would have been heard"


def test_imitation_moves_the_policy_and_not_the_world_model():
    trainer = small_trainer(*LEVEL_2, "world_model.weight=0")
    begin = {name: weights(model_of(trainer), name).clone() for name in ("policy", "world_model")}
    row = trainer.step(0)
    assert row["phase"] == "internalise"
    assert torch.equal(weights(model_of(trainer), "world_model"), begin["world_model"])
    assert not torch.equal(weights(model_of(trainer), "policy"), begin["policy"])


def test_no_more_tasks_are_drawn_for_a_policy_that_is_taught():
    trainer = small_trainer(*LEVEL_2, "policy.max_resamples=3", "rollout.prompts=1", "rollout.max_turns=2")
    trainer.collect(trainer.plan(0))
    assert trainer.state.tasks_seen == 1


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (("internalise.rows=2", "policy.frozen=true"), "policy.frozen=true forbids"),
        (("internalise.rows=2", "lookahead=off"), "needs look-ahead or feedback"),
        (("internalise.teacher=hindsight",), "needs internalise.rows above 0"),
        (("feedback=other_task", "rollout.prompts=1"), "needs rollout.prompts above 1"),
        (("feedback=true", "exploration.blind_share=1"), "exploration.blind_share below 1"),
        (("feedback=true", "algo=dapo", "rollout.group_size=2"), "rollout.group_size=2 into waves of 1 and 1"),
        (("feedback=true", "lookahead=off", "exploration.blind_share=0.75"), "into waves of 3 and 1"),
        (("internalise.until=3", "policy.frozen=true"), "policy.frozen=true forbids"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(settings: tuple[str, ...], words: str):
    with pytest.raises(ConfigError, match=words):
        small_config(*settings)


@pytest.mark.parametrize("learns_otherwise", ["internalise.rows=2", "policy.frozen=true"])
def test_without_dapo_a_wave_of_feedback_may_be_one_rollout(learns_otherwise: str):
    config = small_config("lookahead=off", "feedback=true", "rollout.group_size=2", learns_otherwise)
    assert config.first_wave == 1


# --- the policy alone ------------------------------------------------------------------------------------------


def evaluated(step: int, sighted: float, blind: float, **more: Any) -> dict[str, Any]:
    return {"step": step, "eval/val/success": sighted, "eval/val/success_blind": blind, **more}


def test_a_policy_suffices_alone_where_it_comes_near_its_look_ahead():
    alone = evaluated(30, 0.7, 0.7, phase="reinforce")
    history = [evaluated(10, 0.8, 0.2), {"step": 11}, evaluated(20, 0.8, 0.76), alone]
    last, second = (policy_alone(history, at_most=100, step=step) for step in (None, 20))
    assert last == Alone(blind=0.7, sighted=0.8, tasks=100), "look-ahead had its last evaluation at step 20"
    assert second == Alone(blind=0.76, sighted=0.8, tasks=100)
    found = [policy_alone(history, at_most=100, step=step) for step in (10, 20, 30)]
    assert [each is not None and each.suffices for each in found] == [False, True, False]
    assert policy_alone([{"step": 1, "eval/val/success": 0.5}], at_most=100) is None


@pytest.mark.parametrize(
    ("start", "blind", "sighted", "stops", "suffices"),
    [
        (0.033, 0.067, 0.07, {}, False),  # of 100 tasks
        (0.0, 0.067, 0.07, {}, False),  # random calls may succeed where the untrained base calls nothing
        (0.22, 0.24, 0.2, {}, False),
        (0.22, 0.4, 0.4, {}, True),
        (0.22, 0.4, 0.4, {"done": 12}, False),  # too few tasks to tell
        (0.0, 0.8, 0.9, {}, False),  # no chance, but look-ahead is better
        (None, 0.3, 0.3, {}, False),
    ],
)
def test_chance_never_suffices(
    start: float | None, blind: float, sighted: float, stops: dict[str, int], suffices: bool
):
    more: dict[str, Any] = {"eval/val/stops": stops} if stops else {}
    history = [] if start is None else [evaluated(0, start, start)]
    found = policy_alone([*history, evaluated(10, sighted, blind, **more)], at_most=100)
    assert found is not None
    assert found.suffices == suffices
    assert ("better than chance" in found.words) == (not suffices and blind != 0.8)
    assert (f"{start:.1%} before any training" in found.words) if start and not suffices else True


def test_the_baseline_is_dapo_without_feedback_and_imitation():
    feedback = small_config("algo=dapo", "feedback=true")
    imitating = small_config("algo=dapo", "internalise.rows=2", "internalise.teacher=policy")
    plain = [small_config("algo=dapo"), feedback, imitating, small_config()]
    assert [config.is_plain_dapo for config in plain] == [True, False, False, False]
