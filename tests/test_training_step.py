"""One step of training and one evaluation: which tasks are played, with which random numbers, by which weights."""

from __future__ import annotations

import itertools
from collections.abc import Collection
from dataclasses import dataclass, field
from functools import partial
from typing import cast

from lfo.engines.local import LocalBackend
from lfo.measure.fixed_tasks import SAMPLE_ROLLOUTS, evaluate_splits
from lfo.train.loop import Trainer
from lfo.types import Message, RolloutGroup, StepResult
from small_runs import fussy_calls, requests_of, small_config, small_trainer

DAPO = ("algo=dapo", "rollout.max_turns=1", "rollout.max_turn_tokens=96")


@dataclass(frozen=True)
class Round:
    id: str
    number: int = 0


@dataclass
class Rounds:
    """Endless training tasks 0, 1, 2, ...; of those in `mixed` every second answer is paid, of the others none."""

    mixed: frozenset[int] = frozenset()
    answers: dict[str, itertools.count] = field(default_factory=dict)  # of each task; shared by all rollouts

    def stream(self, split: str, stream_seed: int) -> Rounds:
        return self

    def task(self, number: int) -> Round:
        return Round(f"train-{number}", number)

    def tasks(self, split: str) -> list[Round]:
        return [Round(f"{split}-{number}", number) for number in range(6)]

    def tools(self) -> list[dict]:
        return [{"type": "function", "function": {"name": "wait", "parameters": {"type": "object", "properties": {}}}}]

    def reset(self, task: Round) -> list[Message]:
        self.round = task
        return [Message(role="user", content=f"Round {task.number}.")]

    def step(self, message: str) -> StepResult:
        answer = next(self.answers.setdefault(self.round.id, itertools.count()))
        return StepResult(observation="", reward=float(self.round.number in self.mixed and answer % 2), done=True)


def rounds(*settings: str, mixed: Collection[int] = ()) -> Trainer:
    """A trainer whose draws have two tasks each, in groups of four."""
    return small_trainer(*DAPO, *settings, environment=partial(Rounds, frozenset(mixed), {}))


def first_group(trainer: Trainer) -> RolloutGroup:
    return trainer.collect(trainer.plan(0)).groups[0]


# --- dynamic sampling ------------------------------------------------------------------------------------------------


def test_dynamic_sampling_draws_new_tasks_until_it_has_its_groups_and_no_more():
    trainer = rounds("policy.max_resamples=3", mixed={1, 4, 5})
    groups, kept, report = trainer.collect(trainer.plan(0))
    # 0 and 1 give one group, 2 and 3 none, 4 and 5 one too many; the fourth draw is not needed.
    assert [group.task_id for group in groups] == [f"train-{number}" for number in range(6)]
    assert list(kept) == [1, 4]
    assert [group.task_id for group in kept.values()] == ["train-1", "train-4"]
    assert (report.kept, report.all_failed, report.all_succeeded) == (3, 3, 0)
    assert trainer.state.tasks_seen == 6, "all that were played, whether they taught anything or not"


def test_a_step_begins_with_the_tasks_after_all_draws_of_the_step_before():
    """Whether those draws were needed or not, so that the tasks of a step do not depend on what was learned."""
    trainer = rounds("policy.max_resamples=3", mixed={0, 1, 9})
    assert [group.task_id for group in trainer.collect(trainer.plan(0)).groups] == ["train-0", "train-1"]
    groups, kept, _ = trainer.collect(trainer.plan(1))
    assert [group.task_id for group in groups] == [f"train-{number}" for number in range(8, 16)]
    assert list(kept) == [1], "four draws are the most"


def test_a_step_learns_from_the_groups_that_it_kept():
    row = rounds("policy.max_resamples=3", mixed={1, 4, 5}).step(0)
    assert (row["groups_kept"], row["groups_all_failed"], row["tasks_seen"]) == (3, 3, 6)
    assert "policy_loss" in row


# --- random numbers --------------------------------------------------------------------------------------------------


def test_every_rollout_of_a_run_has_random_numbers_of_its_own():
    config = small_config(*DAPO, "seed=7", "rollout.group_size=3", "policy.max_resamples=1")
    drawn = [
        request.seeds for step in (0, 1) for draw in (0, 1) for request in requests_of(config, Rounds(), step, draw)
    ]
    assert drawn == [
        (7, step, draw, task, member)
        for step, draw, task, member in itertools.product((0, 1), (0, 1), (0, 1), (0, 1, 2))
    ]


def test_the_rollouts_of_a_group_differ_and_come_again():
    group = first_group(rounds())
    assert len({rollout.tokens for rollout in group.rollouts}) > 1
    assert first_group(rounds()) == group
    assert first_group(rounds("seed=1")) != group


def test_the_samples_of_a_task_differ_and_greedy_answers_do_not():
    agent = cast(LocalBackend, rounds().backend).agent
    tasks = agent.tasks("val")[:2]
    rollouts = agent.roll_out(tasks, greedy=False, samples=4)
    for group in (rollouts[:4], rollouts[4:]):
        assert len({rollout.tokens for rollout in group}) > 1
    assert len({rollout.tokens for rollout in agent.roll_out(tasks[:1], greedy=True, samples=4)}) == 1


# --- weights ---------------------------------------------------------------------------------------------------------


def test_the_next_step_samples_with_the_weights_that_this_step_trained():
    """The sampler has a copy of its own; an old one shows as a gap between its log-probs and the trainer's."""
    settings = ("lookahead=false", "policy.max_resamples=-1", "policy.learning_rate=1e-2")
    trainer = small_trainer(*settings, environment=fussy_calls)
    assert trainer.step(0)["gradient_norm/policy"] > 0
    assert trainer.step(1)["logprob_gap_mean"] < 1e-4


# --- evaluation ------------------------------------------------------------------------------------------------------


def test_each_split_is_evaluated_on_its_own_tasks():
    trainer = rounds("eval.tasks=5")
    splits = ("val", "test_unseen", "train")
    row, records = evaluate_splits(trainer.config, trainer.make_environment, splits, trainer.backend.roll_out)
    assert [(record["split"], record["task_id"]) for record in records] == [
        (split, f"{split}-{number}") for split in splits for number in range(SAMPLE_ROLLOUTS)
    ]
    assert [sum(row[f"eval/{split}/stops"].values()) for split in splits] == [5, 5, 5]
