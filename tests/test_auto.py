"""`algo=auto`: what a record of outcomes decides, and that every part of a run keeps to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from lfo.agent import load_agent
from lfo.algorithms import plan_of
from lfo.algorithms.auto import FIRST, SEATS, TRIAL, outcomes_of, read
from lfo.config import load_config
from lfo.errors import ConfigError
from lfo.play.acting import FILE, acting_config, save_agent
from lfo.play.episode import RolloutRequest
from lfo.play.look_ahead import Question
from lfo.play.predictors import _true_where_asked
from lfo.protocol.world_model import WorldModelState
from lfo.rows.successes import SuccessBuffer
from lfo.runs.folder import read_metrics
from lfo.serving.speaker import local_speaker
from lfo.statistics import GainTest
from lfo.train.changed_rules import without_probes
from lfo.train.loop import Trainer
from lfo.types import Message, Rollout, RolloutGroup, Situation, StepPlan, StopReason, Turn
from small_runs import fussy_calls, small_config, small_trainer

AUTO = small_config("algo=auto", "rollout.group_size=8")


def record(groups: int, phase: str = "imitate", **rewards: float) -> list[dict[str, Any]]:
    """Steps of eight equal groups; each kind of seat has this reward in all of them."""
    group = {kind: [reward] for kind, reward in rewards.items()}
    return [{"phase": phase, "groups": [group] * 8} for _ in range(-(-groups // 8))]


def plan(outcomes: Sequence[Any], *, tasks: int = 24, config=AUTO) -> StepPlan:
    return plan_of(config, len(outcomes), Situation(success_tasks=tasks, outcomes=outcomes))


ALONE: dict[str, Any] = {"own": 0.0, "explore": 0.0}
NO_HELP = record(200, own=0.5, explore=0.5, look=0.5, probe=0.5, feed=0.5)


# --- plans ---------------------------------------------------------------------------------------------------------


def test_at_first_every_way_of_helping_has_a_seat_and_the_policy_learns_by_dapo():
    first = plan([], tasks=0)
    assert first.kinds == ("own", "own", "explore", "explore", "look", "probe", "probe", "feed")
    assert first.seats == tuple(SEATS[kind] for kind in first.kinds)
    assert [seat.truth for seat in first.seats].count(True) == 2
    assert (first.first_wave, first.feedback) == (7, "own")
    assert (first.phase, first.reinforces, first.imitates, first.predicts) == ("begin", True, False, True)
    assert not first.looks_ahead, "nothing has shown that it is better than the policy alone"


def test_a_small_group_compares_too():
    kinds = plan([], config=small_config("algo=auto")).kinds
    assert kinds == ("own", "explore", "probe", "feed")
    with pytest.raises(ConfigError, match="group_size"):
        small_config("algo=auto", "rollout.group_size=3")


def test_true_replies_that_help_end_the_probes_and_keep_look_ahead():
    later = plan(record(16, **ALONE, look=0.0, probe=1.0, feed=1.0))
    assert "probe" not in later.kinds
    assert {"look", "feed", "explore", "own"} <= set(later.kinds)
    assert later.predicts


def test_true_replies_that_do_not_help_end_look_ahead_and_its_world_model():
    later = plan(NO_HELP)
    assert set(later.kinds) == {"own"}, "feedback did not help either, so nobody needs explorers"
    assert (later.predicts, later.looks_ahead, later.feedback) == (False, False, "off")
    assert (
        "look-ahead was given up: shown true replies the base gains +0 points over acting alone, after 31"
        in later.agent
    )
    assert "feedback was given up: with it the base gains +0 points over acting alone, after 31" in later.agent


def test_predictions_that_help_count_more_than_true_replies_that_do_not():
    later = plan([*record(FIRST, **ALONE, look=1.0), *record(16, **ALONE, look=1.0, probe=0.0)])
    assert "look" in later.kinds


def test_where_no_copy_of_the_environment_answers_predictions_decide_themselves():
    early, late = record(FIRST, **ALONE, look=0.0), record(120, **ALONE, look=0.0)
    assert "probe" in plan(early[:-1]).kinds
    assert "probe" not in plan(early).kinds
    assert "look" in plan(early).kinds, "predictions are still being learned"
    assert "look" not in plan([*early, *late]).kinds
    assert "look" in plan([*early, *record(120, **ALONE, look=0.5)]).kinds


def test_who_acts_is_who_succeeds_more_often_in_training():
    behind = record(16, own=0.1, explore=0.0, look=0.5, probe=1.0)
    assert plan(behind).looks_ahead
    assert "the base with look-ahead acts" in plan(behind).agent
    ahead = [*behind, *record(80, own=0.9, explore=0.0, look=0.5)]
    assert not plan(ahead).looks_ahead
    assert "the policy alone acts" in plan(ahead).agent


def test_look_ahead_ends_where_the_policy_alone_has_become_as_good():
    helped = [*record(FIRST, **ALONE, look=0.2, probe=0.8), *record(96, own=0.1, explore=0.0, look=0.7)]
    assert "look" in plan(helped).kinds
    caught_up = [*helped, *record(200, own=0.7, explore=0.0, look=0.75)]
    assert "look" not in plan(caught_up).kinds
    assert "points over acting alone in 96 groups, after" in plan(caught_up).agent


def test_a_world_model_that_has_not_learned_yet_is_not_given_up():
    assert "look" in plan(record(200, **ALONE, look=0.0, probe=0.8)).kinds


def test_a_world_model_that_never_learns_is():
    assert "look" not in plan(record(500, **ALONE, look=0.0, probe=0.8)).kinds


def test_imitation_begins_with_enough_successes():
    assert (plan([], tasks=23).phase, plan([], tasks=24).phase) == ("begin", "imitate")
    assert plan([], tasks=24).imitates
    assert not plan([], tasks=24).reinforces


def going_on(outcomes: Sequence[Any], own: Sequence[float], groups: int) -> list[dict[str, Any]]:
    """The record after so many more groups of the policy alone, with these rewards."""
    longer = list(outcomes)
    for _ in range(groups // 8):
        longer.append({"phase": plan(longer).phase, "groups": [{"own": list(own)}] * 8})
    return longer


def test_dapo_has_a_trial_where_imitation_stalls_and_groups_differ():
    differ, alike = [0.0, 1.0] * 4, [0.5] * 8
    assert plan(going_on(NO_HELP, alike, 4 * TRIAL)).phase == "imitate", "equal rewards teach DAPO nothing"
    better = going_on(record(200, **ALONE, look=0.0, probe=0.0, feed=0.0), differ, TRIAL)
    assert plan(better).phase == "imitate", "it still improves"
    tried = going_on(better, differ, TRIAL)
    while plan(tried[:-1]).phase == "dapo":
        tried = tried[:-1]
    begun = plan(tried)
    assert (begun.phase, begun.reinforces, begun.imitates) == ("dapo", True, False)
    assert begun.kinds == ("own",) * 8
    assert plan(going_on(tried, [1.0] * 6 + [0.0] * 2, TRIAL)).phase == "dapo", "from 50 to 75 %"
    failed = plan(going_on(tried, differ, TRIAL))
    assert failed.phase == "imitate"
    assert "DAPO was given up: in 64 groups the policy alone went from 50% to 50%" in failed.agent


def test_rewards_below_1_are_imitated_from_what_the_policy_reaches():
    assert plan(record(8, own=0.25, explore=0.0)).imitated_from == 0.25
    assert plan(record(30, own=1.0, explore=0.0)).imitated_from == 1.0, "nothing worse than what it reaches already"
    assert plan_of(small_config("algo=internalise"), 3).imitated_from is None


def test_plans_are_the_same_for_verl_and_its_requests_arrive():
    outcomes = record(8, **ALONE, look=0.0, probe=1.0, feed=1.0)
    verl = load_config(["preset=tiny", "algo=auto", "engine=verl"])
    local = load_config(["preset=tiny", "algo=auto"])
    assert (verl.lookahead_source, local.lookahead_source) == ("world_model", "memory_first")
    assert plan(outcomes, config=verl) == plan(outcomes, config=local)
    saved = json.loads(json.dumps(outcomes))
    assert plan(saved, config=verl) == plan(outcomes, config=verl)
    for seat in SEATS.values():
        request = RolloutRequest(task=None, seeds=(1, 2), **msgspec.to_builtins(seat))
        assert msgspec.convert(msgspec.to_builtins(request), RolloutRequest) == request


# --- the rules -----------------------------------------------------------------------------------------------------


def test_a_decision_falls_when_the_capital_is_twentyfold():
    # (1.05^n + 1.1^n + 1.2^n + 1.4^n + 1.8^n) / 5 is 15.7 for n = 7 and 26.6 for n = 8.
    always = GainTest()
    for count in range(1, 9):
        always.add(1.0, 0.2)
        assert always.helps is (True if count == 8 else None)
    # Against a gain of 0.2 each 0 multiplies a bet by 1 + bet / 4: 19.1 after 24 of them, 22.6 after 25.
    never = GainTest()
    for count in range(1, 26):
        never.add(0.0, 0.2)
        assert never.helps is (False if count == 25 else None)
    assert (always.after, never.after) == (8, 25)


@pytest.mark.parametrize("alone", [0.0, 0.1, 0.3, 0.6])
@pytest.mark.parametrize(("gain", "wrong"), [(0.0, True), (0.3, False)])
def test_wrong_decisions_are_rare(alone: float, gain: float, wrong: bool):
    """400 worlds: one seat that helps, or does not, beside two that do not."""
    rng, found = np.random.default_rng(5), []
    for _ in range(400):
        test, helped, plain = GainTest(), rng.random(256) < alone + gain, (rng.random((256, 2)) < alone).mean(1)
        for with_help, without in zip(helped, plain, strict=True):
            test.add(float(with_help) - float(without), min(0.2, 0.05 + alone))
            if test.helps is not None:
                break
        found.append(test.helps is wrong)
    assert np.mean(found) <= 0.05


@pytest.mark.parametrize(("alone", "helped"), [(0.15, 0.15), (0.05, 0.35), (0.3, 0.6)])
def test_whole_runs_decide_rightly(alone: float, helped: float):
    """100 runs of 20 steps, of which each takes the seats that the outcomes so far suggest."""
    found = []
    for seed in range(100):
        rng, outcomes = np.random.default_rng(seed), []
        for _ in range(20):
            kinds = plan(outcomes).kinds
            rates = [alone if kind in ("own", "explore") else helped for kind in kinds]
            groups = []
            for _ in range(8):
                group: dict[str, list[float]] = {}
                for kind, won in zip(kinds, rng.random(len(kinds)) < rates, strict=True):
                    group.setdefault(kind, []).append(float(won))
                groups.append(group)
            outcomes.append({"phase": "imitate", "groups": groups})
        kept = [kind for kind in ("look", "feed") if kind not in read(outcomes).given_up]
        found += [kind in kept for kind in ("look", "feed")]
    assert np.mean(found) <= 0.05 if helped == alone else np.mean(found) >= 0.95


def test_what_helped_is_not_dropped_while_it_helps():
    rng, test, dropped = np.random.default_rng(6), GainTest(), 0
    for _ in range(3000):
        test.add(float(rng.random() < 0.6) - float(rng.random() < 0.3), 0.2)
        dropped += not test.pays(0.1, 96)
    assert not dropped


# --- what is recorded and imitated -----------------------------------------------------------------------------------


def rollout(reward: float, *, said: str = "", task: str = "t", stop: StopReason = StopReason.DONE) -> Rollout:
    imagined = Turn(
        action="", observation=said, call=None, action_start=2, action_end=2, observation_start=2, observation_end=2,
        predicted=True,
    )  # fmt: skip
    said_itself = replace(imagined, predicted=False, action_start=1, action_end=2)
    return Rollout(
        task_id=task, opening=(Message(role="user", content="?"),), tokens=(5, 6), origins=(0, 1), logprobs=(0.0, -1.0),
        turns=(said_itself,), taken_back=(imagined,), reward=reward, stop=stop,
    )  # fmt: skip


def test_outcomes_are_recorded_by_seat_without_what_says_nothing():
    plan = StepPlan(step=0, kinds=("own", "own", "probe", "probe", "feed"), phase="imitate")
    broken = rollout(0.0, said="Hi", stop=StopReason.ENVIRONMENT_ERROR)
    members = (rollout(-3.0, said="Hi"), rollout(7.0, said="Hi"), rollout(1.0, said="Hi"), rollout(1.0), broken)
    seen = outcomes_of(plan, [RolloutGroup(task_id="t", rollouts=members)])
    assert seen == {"phase": "imitate", "groups": [{"own": [0.0, 1.0], "probe": [1.0]}]}


def test_true_replies_are_no_evidence_that_predictions_are_right():
    """An alarm over changed rules compares predictions with real replies: a probe would always be right."""
    plan = StepPlan(step=0, kinds=("own", "look", "probe"))
    group = RolloutGroup(task_id="t", rollouts=(rollout(0.1), rollout(0.2), rollout(0.3)))
    assert [each.reward for each in without_probes(plan, [group])[0].rollouts] == [0.1, 0.2]
    assert without_probes(StepPlan(step=0), [group]) == [group]


def test_the_best_of_a_group_is_imitated_where_none_succeeds(tmp_path: Path):
    buffer = SuccessBuffer()

    def best(*rewards: float, least: float = 0.0) -> float | None:
        buffer.add_best([rollout(reward) for reward in rewards], least)
        return buffer.successes["t"].reward if "t" in buffer.successes else None

    assert best(0.4, 0.4) is None, "it is no better than the others"
    assert best(0.1, 0.4, least=0.5) is None, "the policy alone reaches more"
    assert best(0.1, 0.4) == 0.4
    assert best(0.1, 0.3) == 0.4, "a worse one does not replace it"
    assert not buffer.draw(9, [1], least=0.5)
    assert len(buffer.draw(9, [1], least=0.4)) == 1
    buffer.save(tmp_path / "successes")
    assert SuccessBuffer.load(tmp_path / "successes") == buffer
    buffer.add([rollout(1.0)])
    assert best(0.1, 0.9) == 1.0


def test_only_the_seat_of_a_probe_is_shown_true_replies():
    def question(truth: bool) -> Question:
        state = WorldModelState(task="", step=1, actions=(), collected={})
        return Question(task=None, state=state, call=None, messages=(), truth=truth)  # type: ignore[arg-type]

    predict = _true_where_asked(lambda asked: ["guess"] * len(asked), lambda asked: ["truth"] * len(asked))
    assert predict([question(truth) for truth in (True, False, True)]) == ["truth", "guess", "truth"]


# --- runs ------------------------------------------------------------------------------------------------------------

RUN = ("algo=auto", "rollout.group_size=6", "steps=4", "eval.every=2", "eval.tasks=1", "checkpoint_every=1", "levels=2")


def rows(run: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if not key.startswith("seconds/") and key != "tokens_per_second"}
        for row in read_metrics(run)
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("whole") / "run"
    small_trainer(*RUN, f"output_dir={folder}", environment=fussy_calls).fit()
    return folder


def test_a_run_resumed_while_a_decision_is_pending_is_the_undisturbed_one(whole: Path, tmp_path: Path, monkeypatch):
    step = Trainer.step

    def killed(self: Trainer, number: int) -> dict[str, Any]:
        if number == 2:
            assert read(self.state.outcomes).tests["feed"].helps is None
            raise KeyboardInterrupt
        return step(self, number)

    settings = (*RUN, f"output_dir={tmp_path / 'run'}")
    first = small_trainer(*settings, environment=fussy_calls)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            first.fit()
    resumed = small_trainer(*settings, environment=fussy_calls)
    resumed.fit(resume=True)
    assert rows(tmp_path / "run") == rows(whole)
    assert len(resumed.state.outcomes) == 4


def test_a_row_says_who_acts_and_the_adapters_too(whole: Path):
    row = rows(whole)[-1]
    assert row["agent"].split(" act")[0] in ("the policy alone", "the base with look-ahead")
    assert {"own", "explore", "feed"} <= row["success_by_seat"].keys()
    assert json.loads((whole / "adapters" / FILE).read_text())["words"] == row["agent"]


@pytest.mark.parametrize("looks_ahead", [False, True])
def test_who_is_loaded_is_who_acts(whole: Path, tmp_path: Path, looks_ahead: bool):
    save_agent(tmp_path, replace(StepPlan(step=0), looks_ahead=looks_ahead, agent="so"))
    config = acting_config(AUTO, tmp_path)
    assert (config.looks_ahead, config.lookahead_source) == (
        (True, "memory_first") if looks_ahead else (False, "world_model")
    )
    if not looks_ahead:
        assert not acting_config(AUTO, None).looks_ahead


def test_commands_use_whoever_acts(whole: Path):
    agent = load_agent(whole, environment=fussy_calls)
    acts = json.loads((agent.adapters_folder / FILE).read_text())["looks_ahead"]  # type: ignore[operator]
    assert (agent.lookahead is not None) == acts
    assert (local_speaker(agent).lookahead is not None) == acts
