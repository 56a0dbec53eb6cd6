"""Make the rows of each mini-batch of a step from its rollouts and from the buffers of earlier steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from lfo.config import RunConfig
from lfo.protocol.world_model import WorldModelExample
from lfo.rollout.practice import Practice
from lfo.rollout.renaming import Renaming
from lfo.rollout.samples import (
    NOTHING,
    Observed,
    ReplayBuffer,
    deal,
    inline_rows,
    policy_rows,
    world_model_sample,
)
from lfo.rollout.successes import SuccessBuffer, imitation_sample
from lfo.types import Rollout, RolloutGroup, StepPlan, TrainingSample


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """The updates of a step: one for each mini-batch, in order."""

    mini_batches: Sequence[Sequence[TrainingSample]]
    world_model_weight: float  # the factor of the world-model loss
    rate_factor: float  # multiplies every learning rate


@dataclass(kw_only=True, slots=True)
class MiniBatches:
    """Makes the rows of each step of a run."""

    config: RunConfig
    policy_adapters: tuple[str, ...]
    world_model_adapters: tuple[str, ...]
    predicted_tools: Collection[str] | None  # None: all
    practice: Practice
    renaming: Renaming
    replay: ReplayBuffer = field(default_factory=ReplayBuffer)
    successes: SuccessBuffer = field(default_factory=SuccessBuffer)

    @property
    def count(self) -> int:
        return self.config.rollout.prompts // self.config.rollout.mini_batch_prompts

    def store_successes(self, rollouts: Sequence[Rollout]) -> None:
        """Store the rollouts that the policy should imitate."""
        self.successes.add(rollouts)
        if self.config.internalise.teacher == "hindsight":
            self.successes.add_in_hindsight(rollouts, self.predicted_tools)

    def update(
        self,
        plan: StepPlan,
        groups: Sequence[RolloutGroup],
        kept: Mapping[int, RolloutGroup],
        new_examples: Sequence[Sequence[WorldModelExample]],
        *,
        world_model_weight: float,
    ) -> Update:
        """Return the rows of all mini-batches: the groups `kept`, world-model examples and successes to imitate.

        `new_examples` are those of each group. `world_model_weight` is used in steps that train the world model.
        """
        observed = self._observed() if world_model_weight else NOTHING
        world_model_weight = world_model_weight if plan.predicts else 0.0
        kept = kept if plan.reinforces else {}
        parts = [
            self._policy_rows(kept, observed),
            self._world_rows(plan, groups, kept, new_examples, observed) if world_model_weight else self._no_rows(),
            self._imitation_rows(plan.step) if plan.imitates else self._no_rows(),
        ]
        return Update(
            mini_batches=[[row for part in rows for row in part] for rows in zip(*parts, strict=True)],
            world_model_weight=world_model_weight,
            rate_factor=plan.rate,
        )

    def examples(self, examples: Sequence[WorldModelExample]) -> list[TrainingSample]:
        return [world_model_sample(example, adapters=self.world_model_adapters) for example in examples]

    def _observed(self) -> Observed:
        """Return what an inline world model learns, on the rows of the policy; another one has rows of its own."""
        world = self.config.world_model
        if world.input != "inline":
            return NOTHING
        return Observed(tools=self.predicted_tools, user_turns=world.user_turns, other=world.other_replies)

    def _no_rows(self) -> list[list[TrainingSample]]:
        return [[] for _ in range(self.count)]

    def _policy_rows(self, kept: Mapping[int, RolloutGroup], observed: Observed) -> list[list[TrainingSample]]:
        rows = [policy_rows(group, adapters=self.policy_adapters, observed=observed) for group in kept.values()]
        return deal(rows, self.count)

    def _world_rows(
        self,
        plan: StepPlan,
        groups: Sequence[RolloutGroup],
        kept: Mapping[int, RolloutGroup],
        new_examples: Sequence[Sequence[WorldModelExample]],
        observed: Observed,
    ) -> list[list[TrainingSample]]:
        if self.config.world_model.input == "inline":
            return deal(inline_rows(groups, without=kept, adapters=self.policy_adapters, observed=observed), self.count)
        return [self._example_rows(plan.step, index, new) for index, new in enumerate(deal(new_examples, self.count))]

    def _example_rows(self, step: int, index: int, new: Sequence[WorldModelExample]) -> list[TrainingSample]:
        """Return the world-model rows of one mini-batch, from the whole replay buffer or only from new examples."""
        world, seeds = self.config.world_model, (self.config.seed, step, index)
        buffer = self.replay if world.replay else ReplayBuffer({each.key: each for each in new})
        drawn = buffer.draw(world.examples_per_mini_batch, seeds, asked_first=world.replay and self.config.looks_ahead)
        return self.examples(self.practice.of(drawn, buffer.examples.values(), seeds))

    def _imitation_rows(self, step: int) -> list[list[TrainingSample]]:
        seeds = (self.config.seed, step)
        drawn = self.successes.draw(self.config.internalise.rows, self.count, seeds)
        renamed = self.renaming.of(drawn, self.successes.successes.values(), seeds)
        return [[imitation_sample(success, adapters=self.policy_adapters) for success in part] for part in renamed]
