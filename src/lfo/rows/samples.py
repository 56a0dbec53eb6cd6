"""Rollouts and what earlier steps have stored -> the samples of each mini-batch of a step."""

from __future__ import annotations

from collections.abc import Collection, Container, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from lfo.config import RunConfig
from lfo.objectives.advantages import group_advantages
from lfo.play.look_ahead import Question, asked_at, imagined
from lfo.play.runner import ENVIRONMENT_FAILURES
from lfo.protocol.world_model import WorldModelExample
from lfo.rows.replay import Practice, ReplayBuffer
from lfo.rows.successes import Renaming, SuccessBuffer, imitation_sample
from lfo.types import NOTHING, Observed, Origin, Rollout, RolloutGroup, StepPlan, TrainingSample

T = TypeVar("T")


def policy_sample(
    rollout: Rollout,
    advantage: float | None,
    *,
    adapters: tuple[str, ...],
    observed: Observed = NOTHING,
) -> TrainingSample | None:
    """Return a rollout as a sample: the advantage on sampled tokens, world-model weights on what is `observed`.

    `advantage=None`: the policy does not learn from this rollout. An advantage of 0 still counts in the mean over
    tokens. The sample ends with the last token that has a weight; None if there is none.
    """
    sampled = [float(origin == Origin.SAMPLED and advantage is not None) for origin in rollout.origins]
    learned = [0.0] * len(rollout.tokens)
    for turn in rollout.turns:
        for index in range(turn.observation_start, turn.observation_end):
            learned[index] = observed.weight(turn)
    weighted = [index for index in range(len(rollout.tokens)) if sampled[index] or learned[index]]
    if not weighted:
        return None
    end = weighted[-1] + 1
    return TrainingSample(
        tokens=rollout.tokens[:end],
        adapters=adapters,
        logprobs=rollout.logprobs[:end],
        advantages=[(advantage or 0.0) * weight for weight in sampled[:end]],
        policy_weights=sampled[:end],
        world_model_weights=learned[:end],
    )


def acted_by_policy(rollout: Rollout) -> bool:
    """Whether the policy alone acted: the environment did not fail, and the base did not act instead of it."""
    return rollout.stop not in ENVIRONMENT_FAILURES and not rollout.untrained


def mark_imagined(group: RolloutGroup, *, any_arguments: bool = False) -> RolloutGroup:
    """Mark real calls as `asked` if some rollout of the group has imagined the same call in the same state.

    Only imagined calls that stayed in a rollout count. With those that were taken back, mostly filled-in calls, one run
    learned far slower (LOG 26). `any_arguments`: a call of the same tool is the same. No two calls with a free text are
    equal; with a handful of asked calls, each mini-batch would repeat them (LOG 58).
    """

    def key_of(question: Question) -> Hashable:
        return (question.call.name, question.place) if any_arguments else question.key

    drafted = {key_of(question) for rollout in group.rollouts for question, _ in imagined(rollout)}

    def marked(rollout: Rollout) -> Rollout:
        turns = [
            replace(turn, asked=True)
            if turn.call is not None and not turn.predicted and key_of(asked_at(rollout, index)) in drafted
            else turn
            for index, turn in enumerate(rollout.turns)
        ]
        return replace(rollout, turns=tuple(turns))

    return replace(group, rollouts=tuple(map(marked, group.rollouts))) if drafted else group


def mark_first_calls(group: RolloutGroup, tools: Container[str] | None) -> RolloutGroup:
    """Mark the first real call of `tools` (None: all) in each rollout as `asked`, if no call of the group is.

    A memory learns from asked calls only. Without this it could stay empty: it predicts nothing at first, so nothing
    imagined is kept, and in a small group no two rollouts may make the same call.
    """
    if any(turn.asked for rollout in group.rollouts for turn in rollout.turns):
        return group

    def marked(rollout: Rollout) -> Rollout:
        for index, turn in enumerate(rollout.turns):
            if turn.imagined:
                break  # what follows was said because of it
            if turn.call is not None and not turn.predicted and (tools is None or turn.call.name in tools):
                turns = (*rollout.turns[:index], replace(turn, asked=True), *rollout.turns[index + 1 :])
                return replace(rollout, turns=turns)
        return rollout

    return replace(group, rollouts=tuple(map(marked, group.rollouts)))


def policy_samples(
    group: RolloutGroup, *, adapters: tuple[str, ...], observed: Observed = NOTHING
) -> list[TrainingSample]:
    """Return the samples of a group, each with its group-relative advantage."""
    advantages = group_advantages(group.rewards, conditions=group.conditions)
    if group.bonuses:
        advantages = [advantage + bonus for advantage, bonus in zip(advantages, group.bonuses, strict=True)]
    samples = (
        policy_sample(rollout, advantage, adapters=adapters, observed=observed)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True)
    )
    return [sample for sample in samples if sample is not None]


def inline_samples(
    groups: Sequence[RolloutGroup],
    *,
    without: Collection[int],
    adapters: tuple[str, ...],
    observed: Observed,
) -> list[list[TrainingSample]]:
    """Return, for each group, inline world-model samples of the rollouts that give no policy sample.

    `without`: indices of groups whose own rollouts already give policy samples.
    """
    return [
        [
            sample
            for rollout in group.rollouts
            if not (index in without and acted_by_policy(rollout))
            and (sample := policy_sample(rollout, None, adapters=adapters, observed=observed))
        ]
        for index, group in enumerate(groups)
    ]


def deal(parts: Sequence[Sequence[T]], count: int) -> list[list[T]]:
    """Distribute whole parts to `count` mini-batches, in order and as evenly as possible."""
    dealt: list[list[T]] = [[] for _ in range(count)]
    for index, part in enumerate(parts):
        dealt[index * count // max(len(parts), count)].extend(part)
    return dealt


def world_model_sample(example: WorldModelExample, *, adapters: tuple[str, ...]) -> TrainingSample:
    return TrainingSample.supervised(example.tokens, adapters=adapters, world_model_weights=example.token_weights)


@dataclass(kw_only=True, slots=True)
class MiniBatches:
    """Makes the samples of each step of a run."""

    config: RunConfig
    policy_adapters: tuple[str, ...]
    world_model_adapters: tuple[str, ...]
    predicted_tools: Collection[str] | None  # None: all
    practice: Practice
    renaming: Renaming
    replay: ReplayBuffer = field(default_factory=ReplayBuffer)
    successes: SuccessBuffer = field(default_factory=SuccessBuffer)

    @property
    def success_tasks(self) -> int:
        """The number of tasks with a success that could be imitated."""
        return len(self.successes.successes)

    @property
    def count(self) -> int:
        return self.config.rollout.prompts // self.config.rollout.mini_batch_prompts

    def store_successes(self, rollouts: Sequence[Rollout], step: int = 0) -> None:
        """Store the rollouts that the policy should imitate."""
        self.successes.add(rollouts, step)
        if self.config.internalise.teacher == "hindsight":
            self.successes.add_in_hindsight(rollouts, self.predicted_tools, step)

    def store_best(self, plan: StepPlan, groups: Sequence[RolloutGroup], step: int = 0) -> None:
        """Store the best rollout of each group in which none succeeded, if the plan imitates those too."""
        if plan.imitated_from is not None:
            for group in groups:
                self.successes.add_best(group.rollouts, plan.imitated_from, step)

    def of_step(
        self,
        plan: StepPlan,
        groups: Sequence[RolloutGroup],
        kept: Mapping[int, RolloutGroup],
        new_examples: Sequence[Sequence[WorldModelExample]],
        *,
        world_model_weight: float,
    ) -> list[list[TrainingSample]]:
        """Return the samples of all mini-batches: the groups `kept`, world-model examples and successes to imitate.

        `new_examples` are those of each group.
        """
        observed = plan.observed if plan.observed and world_model_weight else NOTHING
        kept, predicts = kept if plan.reinforces else {}, plan.predicts and world_model_weight
        parts = [
            self._policy_samples(kept, observed),
            self._world_samples(plan, groups, kept, new_examples, observed) if predicts else self._none(),
            self._imitation_samples(plan.step, plan.imitated_from) if plan.imitates else self._none(),
        ]
        return [[sample for part in each for sample in part] for each in zip(*parts, strict=True)]

    def examples(self, examples: Sequence[WorldModelExample]) -> list[TrainingSample]:
        return [world_model_sample(example, adapters=self.world_model_adapters) for example in examples]

    def _none(self) -> list[list[TrainingSample]]:
        return [[] for _ in range(self.count)]

    def _policy_samples(self, kept: Mapping[int, RolloutGroup], observed: Observed) -> list[list[TrainingSample]]:
        samples = [policy_samples(group, adapters=self.policy_adapters, observed=observed) for group in kept.values()]
        return deal(samples, self.count)

    def _world_samples(
        self,
        plan: StepPlan,
        groups: Sequence[RolloutGroup],
        kept: Mapping[int, RolloutGroup],
        new_examples: Sequence[Sequence[WorldModelExample]],
        observed: Observed,
    ) -> list[list[TrainingSample]]:
        if plan.observed is not None:
            inline = inline_samples(groups, without=kept, adapters=self.policy_adapters, observed=observed)
            return deal(inline, self.count)
        new_of_each = deal(new_examples, self.count)
        return [self._example_samples(plan.step, index, new) for index, new in enumerate(new_of_each)]

    def _example_samples(self, step: int, index: int, new: Sequence[WorldModelExample]) -> list[TrainingSample]:
        """Return the world-model samples of one mini-batch, from the whole replay buffer or only from new examples."""
        world, seeds = self.config.world_model, (self.config.seed, step, index)
        buffer = self.replay if world.replay else ReplayBuffer({each.key: each for each in new})
        drawn = buffer.draw(world.examples_per_mini_batch, seeds, asked_first=world.replay and self.config.looks_ahead)
        return self.examples(self.practice.of(drawn, buffer, seeds))

    def _imitation_samples(self, step: int, least: float | None) -> list[list[TrainingSample]]:
        seeds = (self.config.seed, step)
        drawn = self.successes.draw(self.config.internalise.rows * self.count, seeds, least=least)
        renamed = self.renaming.of(drawn, self.successes.successes.values(), seeds)
        return deal([[imitation_sample(success, adapters=self.policy_adapters)] for success in renamed], self.count)
