"""The local engine: real training steps with every coupling and option, and what each must and must not change."""

from __future__ import annotations

import dataclasses
import itertools
import re
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import PeftModel

from lfo.agent import load_agent
from lfo.algorithms import draw_tasks
from lfo.engines import create_trainer
from lfo.env.worlds.oracle import OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.errors import ConfigError, DataError
from lfo.measure.success import SAMPLER_DIFFERS
from lfo.model.learner import Learner
from lfo.objectives.advantages import overlong_penalty
from lfo.protocol.world_model import WorldModelState
from lfo.rows.samples import deal, policy_samples
from lfo.runs.folder import RunDirectory, read_metrics
from lfo.train.loop import SUCCESS_LOST, Collected, Trainer
from lfo.types import RolloutGroup, StopReason, ToolCall
from small_runs import FussyCalls, base, fussy_calls, model_of, small_config, small_trainer, tokenizer, weights

BLIND = ("lookahead=false", "rollout.group_size=4")


def stepped(*settings: str, steps: int = 2, environment=fussy_calls) -> tuple[Trainer, list[dict]]:
    trainer = small_trainer(*settings, environment=environment)
    return trainer, [trainer.step(step) for step in range(steps)]


@pytest.fixture(scope="module")
def separate() -> tuple[Trainer, list[dict]]:
    """Two steps of dual-LoRA, adapters separate, no look-ahead."""
    return stepped(*BLIND, "world_model.weight=2")


# --- the negative control, through the whole engine --------------------------------------------------------------


def test_separate_without_look_ahead_the_weight_changes_nothing_for_the_policy(separate):
    weighted, rows = separate
    assert any("policy_loss" in row for row in rows)
    assert all(row["world_model_loss"] > 0 for row in rows)
    without, plain_rows = stepped(*BLIND, "world_model.weight=0")
    plain, dapo_rows = stepped(*BLIND, "algo=dapo")
    assert model_of(plain).adapter_names == ("policy",)
    assert torch.equal(weights(model_of(weighted), "policy"), weights(model_of(without), "policy"))
    assert torch.equal(weights(model_of(plain), "policy"), weights(model_of(without), "policy"))
    for name in ("success", "policy_loss", "tasks_seen", "sampled_tokens"):
        assert [row.get(name) for row in rows] == [row.get(name) for row in plain_rows]
        assert [row.get(name) for row in rows] == [row.get(name) for row in dapo_rows]
    first = model_of(small_trainer(*BLIND))
    assert torch.equal(weights(model_of(without), "world_model"), weights(first, "world_model"))
    assert not torch.equal(weights(model_of(weighted), "world_model"), weights(first, "world_model"))


def test_shared_with_weight_zero_is_plain_dapo(separate):
    shared, _ = stepped(*BLIND, "coupling=shared", "world_model.weight=0")
    assert torch.equal(weights(model_of(shared), "policy"), weights(model_of(separate[0]), "policy"))


@pytest.mark.parametrize("settings", [("coupling=shared",), ("coupling=shared", "world_model.input=inline")])
def test_other_couplings_change_the_policy(separate, settings):
    trainer, rows = stepped(*BLIND, *settings, "world_model.weight=2")
    assert not torch.equal(weights(model_of(trainer), "policy"), weights(model_of(separate[0]), "policy"))
    assert all(row["world_model_loss"] > 0 for row in rows)


# --- rollouts and dynamic sampling ---------------------------------------------------------------------------------


class Hopeless(PhoneCalls):
    def reward(self) -> float:
        return 0.0

    def check(self) -> None:
        pass


def test_dropped_groups_are_counted_drawn_again_and_still_feed_the_world_model():
    trainer = small_trainer("policy.max_resamples=1", environment=partial(Hopeless, levels=(2,)))
    before = weights(model_of(trainer), "policy").clone()
    row = trainer.step(0)
    assert (row["groups_kept"], row["groups_all_failed"], row["groups_all_succeeded"]) == (0, 4, 0)
    assert row["tasks_seen"] == 4, "two tasks and two more in their place"
    assert "policy_loss" not in row
    assert torch.equal(weights(model_of(trainer), "policy"), before)
    assert row["replay_size"] > 0
    assert row["world_model_loss"] > 0


def test_a_step_that_does_not_train_the_policy_draws_once():
    settings = ("policy.max_resamples=1", "world_model.schedule=world_model_first:1")
    trainer = small_trainer(*settings, environment=partial(Hopeless, levels=(2,)))
    assert [len(trainer.collect(trainer.plan(step)).groups) for step in (0, 1)] == [2, 4]


def test_a_failed_group_is_not_kept_for_the_lengths_of_its_rollouts():
    settings = ("policy.overlong_buffer=400", "rollout.max_context=420", "rollout.max_turns=16")
    trainer = small_trainer(*settings, environment=partial(Hopeless, levels=(2,)))
    groups, kept, _ = trainer.collect(trainer.plan(0))
    assert any(len({len(rollout.tokens) for rollout in group.rollouts}) > 1 for group in groups)
    assert not kept


def test_sampler_and_trainer_compute_the_same_log_probs_before_the_first_update(monkeypatch):
    settings = ("lookahead=false", "policy.max_resamples=-1", "rollout.mini_batch_prompts=1")
    trainer = small_trainer(*settings, environment=fussy_calls)
    assert trainer.step(0)["logprob_gap_mean"] < 1e-4
    draw = trainer.draw

    def halved(step: int, number: int) -> list[RolloutGroup]:
        """As if the sampler had had another policy."""
        return [
            dataclasses.replace(
                group,
                rollouts=tuple(
                    dataclasses.replace(rollout, logprobs=tuple(each / 2 for each in rollout.logprobs))
                    for rollout in group.rollouts
                ),
            )
            for group in draw(step, number)
        ]

    monkeypatch.setattr(trainer, "draw", halved)
    row = trainer.step(1)
    assert row["logprob_gap_mean"] > 0.02
    assert SAMPLER_DIFFERS in row["warnings"]


def test_the_draws_of_a_step_are_all_different_and_kept_groups_are_no_more_than_asked():
    trainer = small_trainer("policy.max_resamples=3", "lookahead=false", environment=fussy_calls)
    seen: list[str] = []
    for step in range(3):
        groups, kept, report = trainer.collect(trainer.plan(step))
        assert report.seen == len(groups) >= 2
        assert len(kept) <= 2
        assert len(kept) == 2 or len(groups) == 8
        seen += [group.task_id for group in groups]
    assert len(set(seen)) == len(seen), "a stream of tasks repeats none"


def test_without_dynamic_sampling_every_group_is_used():
    trainer = small_trainer("policy.max_resamples=-1", environment=partial(Hopeless, levels=(2,)))
    groups, kept, report = trainer.collect(trainer.plan(0))
    assert len(kept) == len(groups) == report.seen == 2
    assert report.all_failed == 2
    rows = policy_samples(kept[0], adapters=("policy",))
    assert len(rows) == 4
    assert all(sum(row.policy_weights) > 0 and not any(row.advantages) for row in rows)


def test_a_finite_environment_shows_every_task_once_before_any_twice():
    config = small_config("env=oracle-codes", "world_model.predict=all", "rollout.prompts=6")
    count = len(OracleCodes().tasks("train"))

    def drawn() -> list[str]:
        return [task.id for step in range(count // 6) for task in draw_tasks(config, OracleCodes(), step, 0)]

    ids = drawn()
    assert len(set(ids)) == len(ids) == count // 6 * 6
    assert ids == drawn()


def test_blind_rollouts_are_the_asked_share_and_all_in_the_first_steps():
    trainer = small_trainer(
        "exploration.blind_share=0.25", "world_model.schedule=explore_first:1", environment=fussy_calls
    )
    for step, expected in ((0, [True] * 4), (1, [True, False, False, False])):
        groups, *_ = trainer.collect(trainer.plan(step))
        assert [not rollout.look_ahead for rollout in groups[0].rollouts] == expected


class Ringing(PhoneCalls):
    """Breaks in the rollouts that asked for a form of an even number of fields."""

    def step(self, message: str):
        result = super().step(message)
        if self.form and len(self.form) % 2 == 0:
            raise ConnectionError("the line went dead")
        return result


def test_the_policy_is_not_blamed_for_what_the_environment_broke_off():
    trainer = small_trainer(environment=partial(Ringing, levels=(2,)))
    groups, *_ = trainer.collect(trainer.plan(0))
    broken = [r for group in groups for r in group.rollouts if r.stop == StopReason.ENVIRONMENT_ERROR]
    assert broken
    assert {rollout.error for rollout in broken} == {"step of Ringing raised ConnectionError: the line went dead"}
    for group in groups:
        fair = trainer.own_rollouts(group)
        assert [r.tokens for r in fair.rollouts] == [r.tokens for r in group.rollouts if r not in broken]


# --- knobs -----------------------------------------------------------------------------------------------------


class Recorder:
    """Notes what the learner is given, in place of learning."""

    def __init__(self, monkeypatch) -> None:
        self.updates: list[tuple[list, float]] = []
        monkeypatch.setattr(Learner, "update", self.update)

    def update(self, samples, *, world_model_weight: float, rate_factor: float) -> dict[str, float]:
        self.updates.append((list(samples), world_model_weight))
        return {}

    def losses(self) -> str:
        """Which losses the updates of a step had, as in the table of `active_losses`."""
        policy = any(any(row.policy_weights) for rows, _ in self.updates for row in rows)
        world = any(weight and any(row.world_model_weights) for rows, weight in self.updates for row in rows)
        self.updates.clear()
        return "p" * policy + "w" * world


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (("world_model.schedule=joint",), ["pw", "pw", "pw"]),
        (("world_model.schedule=alternating",), ["w", "p", "w"]),
        (("world_model.schedule=alternating", "coupling=shared", "world_model.input=inline"), ["w", "p", "w"]),
        (("world_model.schedule=world_model_first:1",), ["w", "pw", "pw"]),
        (("world_model.schedule=hierarchical:2",), ["pw", "p", "pw"]),
        (("policy.frozen=true",), ["w", "w", "w"]),
        (("world_model.predict=none",), ["p", "p", "p"]),
        (("world_model.weight=0",), ["p", "p", "p"]),
    ],
)
def test_schedules_decide_which_losses_a_step_has(monkeypatch, settings, expected):
    recorder = Recorder(monkeypatch)
    trainer = small_trainer(*BLIND, *settings, environment=fussy_calls)
    recorded = trainer.collect(trainer.plan(0))  # informative
    assert len(recorded[1]) > 0
    monkeypatch.setattr(trainer, "collect", lambda step: recorded)
    found = []
    for step in range(3):
        trainer.step(step)
        found.append(recorder.losses())
    assert found == expected


def test_replay_fills_each_mini_batch_up_to_the_cap_and_without_it_only_fresh_examples_are_used(monkeypatch):
    recorder = Recorder(monkeypatch)
    for replay in ("true", "false"):
        recorder.updates.clear()
        trainer = small_trainer(
            *BLIND,
            f"world_model.replay={replay}",
            "world_model.examples_per_mini_batch=6",
            "world_model.swap_names=0",  # or a reply that comes back stands in another row
            environment=fussy_calls,
        )
        for step in range(2):
            trainer.step(step)
        sizes = [sum(any(row.world_model_weights) for row in rows) for rows, _ in recorder.updates]
        assert all(size <= 6 for size in sizes)
        keys = [{row.tokens for row in rows if any(row.world_model_weights)} for rows, _ in recorder.updates]
        assert [len(each) for each in keys] == sizes, "no example twice in one mini-batch"
        if replay == "true":
            assert sizes[-1] == 6
            assert keys[2] & (keys[0] | keys[1]), "old replies come back"
            assert len(trainer.mini_batches.replay) > 0
        else:
            assert not (keys[2] | keys[3]) & (keys[0] | keys[1])
            assert len(trainer.mini_batches.replay) == 0


@pytest.mark.parametrize("same_task", [False, True])
def test_inline_every_group_gives_its_observations_once(monkeypatch, same_task):
    recorder = Recorder(monkeypatch)
    trainer = small_trainer(*BLIND, "coupling=shared", "world_model.input=inline", environment=fussy_calls)
    groups, kept, report = trainer.collect(trainer.plan(0))
    if same_task:  # as in a small environment: one task in two groups of a step, of which one taught nothing
        groups = [dataclasses.replace(group, task_id="again") for group in groups]
    place, learned = next(iter(kept.items()))
    monkeypatch.setattr(trainer, "collect", lambda plan: Collected(groups, {place: learned}, report))
    trainer.step(0)
    rows = [row for rows, _ in recorder.updates for row in rows]
    assert len(rows) == sum(len(group.rollouts) for group in groups)
    assert sum(any(row.policy_weights) for row in rows) == len(learned.rollouts)
    assert all(row.adapters == ("policy",) for row in rows)


def test_surprise_pays_for_what_was_hard_to_predict():
    plain = small_trainer(*BLIND, environment=fussy_calls)
    curious = small_trainer(*BLIND, "surprise=0.5", environment=fussy_calls)
    (group, *_), _, _ = plain.collect(plain.plan(0))
    assert plain.own_rollouts(group) == group
    losses = [curious._surprise(rollout) for rollout in group.rollouts]
    assert len(set(losses)) > 1
    curious_group = curious.own_rollouts(group)
    assert curious_group.rewards == group.rewards
    assert sum(curious_group.bonuses) == pytest.approx(0.0, abs=1e-9)
    assert max(range(4), key=lambda place: curious_group.bonuses[place]) == max(
        range(4), key=lambda place: losses[place]
    )


def test_overlong_shaping_takes_reward_from_long_rollouts_only():
    trainer = small_trainer(
        *BLIND, "rollout.max_context=420", "policy.overlong_buffer=120", "rollout.max_turns=16", environment=fussy_calls
    )
    (group, *_), _, _ = trainer.collect(trainer.plan(0))
    shaped = trainer.shaped(group)
    lengths = [len(rollout.tokens) for rollout in group.rollouts]
    expected = [
        reward + overlong_penalty(length, limit=420, buffer=120)
        for reward, length in zip(group.rewards, lengths, strict=True)
    ]
    assert list(shaped.rewards) == expected
    assert shaped.rewards != group.rewards


def test_an_evaluation_sets_the_weight_and_only_when_asked(tmp_path: Path, monkeypatch):
    settings = (*BLIND, "world_model.weight=0.5", "eval.every=1", "steps=2", "eval.tasks=3")
    for schedule, expected in (("adaptive", 1.0), ("joint", 0.5)):
        run = f"output_dir={tmp_path / schedule}"
        trainer = small_trainer(*settings, f"world_model.schedule={schedule}", run, environment=fussy_calls)
        monkeypatch.setattr(trainer, "evaluate", lambda *_, **__: {"world_model_eval/token_accuracy": 0.1})
        trainer.fit()
        assert trainer.state.weight == expected


@pytest.mark.parametrize("source", ["world_model", "truth", "shuffled"])
def test_every_source_of_look_ahead_is_heard_and_evaluated(source: str):
    trainer = small_trainer(f"lookahead_source={source}", "eval.tasks=3")
    row = trainer.evaluate()
    assert 0.0 <= row["eval/val/success"] <= 1.0
    assert ("eval/val/lookahead_accuracy" in row) == (source != "truth")
    assert row["eval/val/stops"].get("environment_error", 0) == 0


def test_an_environment_that_hangs_does_not_hold_up_a_trainer():
    release, answered = threading.Event(), []

    class Slow(FussyCalls):
        def reset(self, task):
            release.wait(20)
            answered.append(task)
            return super().reset(task)

    small_trainer("rollout.environment_timeout=0.1", environment=partial(Slow, levels=(2,)))
    assert not answered
    release.set()


def test_a_constructor_that_raises_costs_rollouts_and_no_step(monkeypatch):
    monkeypatch.setattr("lfo.play.runner.RETRIES", 0)
    begun, made = threading.Event(), itertools.count()

    def every_second() -> FussyCalls:
        if begun.is_set() and next(made) % 2 == 0:
            raise OSError("no licence")
        return fussy_calls()

    trainer = small_trainer(environment=every_second)
    begun.set()
    assert trainer.step(0)["stops"]["environment_error"] == 4


class Inscrutable(FussyCalls):
    def describe_reply(self, observation: str) -> None:
        return None


def test_where_nobody_can_say_what_a_reply_means_look_ahead_is_not_called_wrong():
    row = small_trainer("eval.tasks=3", environment=partial(Inscrutable, levels=(2,))).evaluate()
    assert row["eval/val/lookahead_accuracy"] is None


def test_a_context_without_room_for_a_whole_state_still_looks_ahead():
    trainer = small_trainer("rollout.max_context=330", "world_model.state_tokens=512", environment=fussy_calls)
    groups, *_ = trainer.collect(trainer.plan(0))
    turns = [turn for group in groups for rollout in group.rollouts for turn in rollout.turns]
    assert any(turn.predicted for turn in turns)
    state = WorldModelState(task="Please call the bank. " * 100, step=1, actions=(), collected={})
    question = trainer.codec.question_ids(state, ToolCall(name="make_phone_call", arguments={}))
    assert len(question) == 330 - trainer.config.world_model.reply_tokens
    assert len(trainer.backend.complete([question])) == 1


def test_a_predicted_reply_ends_at_its_limit():
    agent = small_trainer("world_model.reply_tokens=3").backend.agent
    prompt = agent.tokenizer.encode("I have to ask you for")
    ((answer,), (longer,)) = (one.complete([prompt]) for one in (agent, small_trainer().backend.agent))
    assert len(answer) == 3
    assert longer[:3] == answer != longer


class Grim(FussyCalls):
    def reward(self) -> float:
        return super().reward() - 5


def test_the_best_of_bad_rewards_is_kept_and_is_no_loss(tmp_path: Path):
    config = small_config("steps=2", "eval.every=1", f"output_dir={tmp_path}")
    summary = create_trainer(config, partial(Grim, levels=(2,)), tokenizer(), base=base()).fit()
    rows = [row for row in read_metrics(tmp_path / "metrics.jsonl") if row["step"] > 0]
    assert summary["best_success"] == max(row["eval/val/success"] for row in rows) < -3
    assert not any("success" in warning for warning in rows[0].get("warnings", ()))


def test_what_is_heard_is_told_group_by_group():
    trainer = small_trainer("rollout.prompts=4")
    groups = trainer.collect(trainer.plan(0)).groups
    heard = trainer.store_replies(groups)
    assert len(groups) > 1
    for group, examples in zip(groups, heard, strict=True):
        own = [each for rollout in group.rollouts for each in trainer.codec.examples_of(rollout, predict=None)]
        keys = [example.key for example in examples]
        assert keys == [key for key in dict.fromkeys(each.key for each in own) if key in keys]
        assert len(keys) == len(set(keys)) > 0
    assert set(trainer.mini_batches.replay.examples) == {example.key for examples in heard for example in examples}


# --- the loop --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tasks", "told"), [(100, True), (3, False)])
def test_success_far_below_its_best_is_warned_of_and_the_best_is_kept(tmp_path, monkeypatch, capsys, tasks, told):
    settings = ("steps=4", "eval.every=1", "eval.tasks=100", f"output_dir={tmp_path / 'run'}")
    trainer = small_trainer(*BLIND, *settings, environment=fussy_calls)
    success = iter([0.9, 0.5, 0.8, 0.7, 0.3])  # the first is the untrained policy's, of which there is no checkpoint

    def evaluate(run, splits=("val",), kept=None):
        return {"eval/val/success": next(success), "eval/val/stops": {"done": tasks}}

    monkeypatch.setattr(trainer, "evaluate", evaluate)
    monkeypatch.setattr(trainer, "step", lambda step: {"step": step + 1, "tasks_seen": step + 1, "warnings": ["other"]})
    summary = trainer.fit()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    last = ["other", SUCCESS_LOST] if told else ["other"]
    assert [row.get("warnings") for row in rows] == [None, ["other"], ["other"], ["other"], last]
    assert (summary["best_step"], summary["best_success"]) == (2, 0.8)
    assert (SUCCESS_LOST in " ".join(capsys.readouterr().err.split())) == told


# --- any environment -----------------------------------------------------------------------------------------------


def test_another_environment_trains_through_create_trainer(tmp_path: Path):
    config = small_config(
        "env=oracle-codes",
        "world_model.predict=all",
        "steps=2",
        "eval.every=1",
        "eval.final_splits=test_unseen_oracles",
        f"output_dir={tmp_path / 'run'}",
    )
    summary = create_trainer(config, OracleCodes, tokenizer(), base=base()).fit()
    assert (summary["steps"], summary["run"]) == (2, str(tmp_path / "run"))
    rows = read_metrics(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert ["eval/val/success" in row for row in rows] == [True, True, True]
    assert ["eval/test_unseen_oracles/success" in row for row in rows] == [False, False, True], "only at the end"
    records = (tmp_path / "run" / "rollouts" / "step-000002.jsonl").read_text()
    assert records.count('"split": "val"') == records.count('"split": "test_unseen_oracles"') == 3


# --- adapters on disk ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def saved(separate, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    model_of(separate[0]).save(folder / "adapters")
    return folder


@pytest.mark.parametrize("name", ["policy", "world_model"])
def test_adapters_are_ordinary_peft_folders(separate, saved: Path, name: str):
    tokens = torch.tensor([tokenizer().encode("Please call the bank and unlock my card.")])
    loaded = PeftModel.from_pretrained(base(), saved / "adapters" / name).eval()
    with torch.no_grad():
        model = model_of(separate[0])
        ours, theirs = model.logits(tokens, (name,)), loaded(tokens).logits
        of_modules = model.causal_lm.get_output_embeddings()(model.hidden_of_modules(tokens, (name,)))
        bare = base()(tokens).logits
    torch.testing.assert_close(of_modules, theirs, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)  # in fewer operations, rounded elsewhere
    assert not torch.allclose(theirs, bare, atol=1e-3)


def test_with_shared_the_world_model_is_a_copy(tmp_path: Path):
    model_of(small_trainer("coupling=shared")).save(tmp_path)
    files = [(tmp_path / name / "adapter_model.safetensors").read_bytes() for name in ("policy", "world_model")]
    assert files[0] == files[1]


def test_a_run_can_start_from_the_adapters_of_another(separate, saved: Path, tmp_path: Path):
    for folder in (saved, saved / "adapters"):
        trainer = small_trainer(*BLIND, f"init_from={folder}", "seed=5")
        for name in ("policy", "world_model"):
            assert torch.equal(weights(model_of(trainer), name), weights(model_of(separate[0]), name))
    with pytest.raises(DataError, match="has no adapters"):
        small_trainer(f"init_from={tmp_path}")
    with pytest.raises(DataError, match="another rank"):
        small_trainer(f"init_from={saved}", "lora.rank=4")


def test_a_trainer_starts_from_a_checkpoint_of_a_run_that_never_ended(separate, tmp_path: Path):
    config = dataclasses.replace(separate[0].config, output_dir=str(tmp_path / "run"))
    with RunDirectory.create(config.output_dir, config) as run:
        run.write_checkpoint(3, separate[0].save)
    trainer = small_trainer(*BLIND, f"init_from={run.path}")
    assert torch.equal(weights(model_of(trainer), "policy"), weights(model_of(separate[0]), "policy"))


@pytest.mark.parametrize(
    ("before", "now"), [("coupling=shared", "coupling=separate"), ("algo=dapo", "coupling=separate")]
)
def test_a_run_starts_from_a_policy_and_acts_as_that_one_did(tmp_path: Path, before: str, now: str):
    source = small_trainer(before, f"output_dir={tmp_path / 'run'}")
    with RunDirectory.create(source.config.output_dir, source.config) as run, torch.no_grad():
        for name in model_of(source).adapter_names:
            for parameter in model_of(source).adapter_parameters(name):
                parameter.add_(0.01)
        run.write_checkpoint(3, source.save)
    model, tokens = model_of(small_trainer(now, f"init_from={run.path}")), torch.arange(8)[None]
    theirs, ours = (each.logits(tokens, each.policy_adapters) for each in (model_of(source), model))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4)


def test_a_run_with_a_retired_setting_neither_acts_nor_starts_another(separate, tmp_path: Path):
    with RunDirectory.create(tmp_path / "run", separate[0].config) as run:
        run.write_checkpoint(3, separate[0].save)
    file = run.path / "config.yaml"
    file.write_text(re.sub(r"(?m)^coupling: .*$", "coupling: stacked", file.read_text()))
    with pytest.raises(ConfigError, match=r"run: coupling=stacked is retired .* commit 836ca30"):
        load_agent(run.path)
    with pytest.raises(ConfigError, match=r"init_from=.*run: coupling=stacked is retired"):
        small_trainer(f"init_from={run.path}")


# --- dealing -------------------------------------------------------------------------------------------------------


@given(st.integers(0, 40), st.integers(1, 9))
def test_groups_are_dealt_whole_in_order_and_evenly(groups: int, count: int):
    dealt = deal([[place, place] for place in range(groups)], count)
    assert len(dealt) == count
    assert [each for part in dealt for each in part] == [place for place in range(groups) for _ in range(2)]
    sizes = [len(part) // 2 for part in dealt]
    assert max(sizes) - min(sizes) <= 1
    assert all(part.count(each) == 2 for part in dealt for each in part)
