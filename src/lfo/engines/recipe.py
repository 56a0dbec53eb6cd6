"""What a step rolls out and what it trains, whoever does the work: both engines follow the same recipe.

    collected = recipe.collect(step, roll_out)      tasks, groups of rollouts, and which of them the policy learns from
    heard = recipe.hear(collected.groups)           what the world model can learn from them
    plan = recipe.plan(step, collected, heard)      rows of each mini-batch, weight, learning rate
    recipe.row(step, collected)                     what is written down

Everything drawn at random is named by (seed, step, ...). Nothing here holds a model or samples a token; what changes
from step to step is in `state` and in the replay buffer, which are saved with a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays

from lfo.config import RunConfig
from lfo.env.interface import EnvironmentFactory, OffersLookahead, flaw_of, predicted_tools, tasks_of
from lfo.errors import ConfigError, DataError
from lfo.evaluation.success import rollout_metrics
from lfo.objectives.advantages import (
    DynamicSamplingReport,
    group_advantages,
    overlong_penalty,
    select_groups,
    surprise_bonus,
)
from lfo.objectives.schedule import active_losses, control_weight, learning_rate
from lfo.protocol.world_model import WorldModelCodec, WorldModelExample
from lfo.rollout.patience import call_all
from lfo.rollout.records import read_rollouts
from lfo.rollout.runner import BROKEN_OFF, RolloutRequest, refuse_dead_environment
from lfo.rollout.samples import ReplayBuffer, policy_sample, world_model_sample
from lfo.types import Rollout, RolloutGroup, TrainingSample

MOST_ENCODERS = 4  # threads that turn what was heard into tokens; more of them wait for the interpreter
RATE_FLOOR = 0.1  # the cosine ends at this share of the learning rate
BROKEN_ROLLOUTS = "some rollouts are broken off by their environment: `stops` counts them, and lfo rollouts shows why"
NO_CALLS = "no rollout called a tool of this environment: this base cannot; name one with model= that calls tools"

RollOut = Callable[[Sequence[RolloutRequest]], Sequence[Rollout]]
MeanLosses = Callable[[Sequence[TrainingSample]], Sequence[float]]  # the world model's loss of each row


@dataclass(slots=True)
class State:
    """What changes from step to step beside the weights; saved with every checkpoint."""

    step: int = 0
    tasks_seen: int = 0
    weight: float = 0.0
    best: float | None = None  # success on val


class Collected(NamedTuple):
    """The rollouts of a step."""

    groups: Sequence[RolloutGroup]  # all that were rolled out
    kept: Mapping[int, RolloutGroup]  # those that the policy learns from, by their place, with shaped rewards
    report: DynamicSamplingReport

    @property
    def rollouts(self) -> list[Rollout]:
        return [rollout for group in self.groups for rollout in group.rollouts]


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What a step trains, in order: one optimizer update for each mini-batch."""

    mini_batches: Sequence[Sequence[TrainingSample]]
    weight: float  # of the world-model loss
    rate_factor: float  # of every learning rate


class Recipe:
    def __init__(
        self,
        config: RunConfig,
        environment: EnvironmentFactory,
        codec: WorldModelCodec,
        *,
        policy_adapters: tuple[str, ...],
        world_model_adapters: tuple[str, ...],
        mean_losses: MeanLosses,
    ) -> None:
        self.config = config
        self.environment = environment
        self.codec = codec
        self.policy_adapters = policy_adapters
        self.world_model_adapters = world_model_adapters
        self._mean_losses = mean_losses
        self._check_environment()
        self.replay = self._logged_replies() if config.world_model.from_logs else ReplayBuffer()
        self.state = State(weight=config.world_model.weight)

    def _check_environment(self) -> None:
        # What it raises, or that it hangs, costs a rollout and is told by it.
        (flaw,) = call_all(
            [partial(flaw_of, self.environment)],
            timeout=self.config.rollout.environment_timeout,
            retries=0,
            workers=1,
        )
        if isinstance(flaw, str):
            raise ConfigError(flaw)
        environment = self.environment()
        if self.config.lookahead and not isinstance(environment, OffersLookahead):
            raise ConfigError(
                f"the environment {type(environment).__name__} has no lookahead_query, so nothing would ever be "
                "imagined; write one, or set lookahead=false"
            )
        self._tools = {tool["function"]["name"] for tool in environment.tools()}
        self.predicted_tools = predicted_tools(environment, self.config.world_model.predict)

    def _logged_replies(self) -> ReplayBuffer:
        """Everything that was heard in the rollouts of `world_model.from_logs`."""
        path = str(self.config.world_model.from_logs)
        replay = ReplayBuffer()
        for rollout in read_rollouts(path, self.environment()):
            replay.add(self.codec.examples_of(rollout, predict=self.predicted_tools))
        if not replay:
            raise DataError(
                f"{path} holds no reply that world_model.predict={self.config.world_model.predict} learns from"
            )
        return replay

    @property
    def learns_to_predict(self) -> bool:
        """Whether this run trains a world model that can be asked in the form of `WorldModelExample`."""
        settings = self.config.world_model
        return settings.weight > 0 and settings.predict != "none" and settings.input == "state"

    # --- rollouts ----------------------------------------------------------------------------------------------

    def tasks(self, step: int, draw: int) -> list[Any]:
        """The tasks of one draw of one step. Environments with an endless stream never repeat a task."""
        count = self.config.rollout.prompts
        first = (step * (self.config.policy.max_resamples + 1) + draw) * count
        environment = self.environment()
        stream = getattr(environment, "stream", None)
        if stream is not None:
            tasks = stream("train", 1 + self.config.seed)
            return [tasks.task(number) for number in range(first, first + count)]
        known = self.known_tasks("train")
        return [
            known[np.random.default_rng([self.config.seed, epoch]).permutation(len(known))[place]]
            for epoch, place in (divmod(number, len(known)) for number in range(first, first + count))
        ]

    def known_tasks(self, split: str) -> Sequence[Any]:
        return tasks_of(self.environment(), split)

    def requests(self, step: int, draw: int) -> list[RolloutRequest]:
        """The rollouts of one draw: those of one task side by side, the blind ones of each first.

        A blind policy that cannot go on after a failed call only ever hears the first of look-ahead's questions
        answered. So where there are several, the blind rollouts of a task take turns in asking them.
        """
        config = self.config
        size = config.rollout.group_size
        blind = size if step < config.exploration.blind_steps else round(size * config.exploration.blind_share)
        return [
            RolloutRequest(
                task=task,
                seeds=(config.seed, step, draw, place, member),
                blind=not config.lookahead or member < blind,
                inquiry=member if config.exploration.inquiries and member < blind else 0,
            )
            for place, task in enumerate(self.tasks(step, draw))
            for member in range(size)
        ]

    def draw(self, step: int, draw: int, roll_out: RollOut) -> list[RolloutGroup]:
        """One group of rollouts for each task of one draw."""
        requests, size = self.requests(step, draw), self.config.rollout.group_size
        rollouts = tuple(roll_out(requests))
        refuse_dead_environment(rollouts)
        return [
            RolloutGroup(task_id=str(requests[first].task.id), rollouts=rollouts[first : first + size])
            for first in range(0, len(requests), size)
        ]

    def collect(self, step: int, roll_out: RollOut) -> Collected:
        """Draw tasks and roll them out, and draw anew, as often as allowed, while too few groups teach the policy."""
        config = self.config
        groups: list[RolloutGroup] = []
        kept: dict[int, RolloutGroup] = {}
        report = DynamicSamplingReport(kept=0, all_failed=0, all_succeeded=0)
        # With logs everything that will ever be heard is in the buffer already.
        for draw in range(0 if config.world_model.from_logs else config.policy.max_resamples + 1):
            drawn = self.draw(step, draw, roll_out)
            shaped = [self.shaped(group) for group in drawn]
            informative, seen = select_groups(shaped)
            report += seen
            for place, group in enumerate(shaped, start=len(groups)):
                if len(kept) < config.rollout.prompts and (group in informative or not config.policy.dynamic_sampling):
                    kept[place] = group
            groups += drawn
            if not config.policy.dynamic_sampling or len(kept) == config.rollout.prompts:
                break
        self.state.tasks_seen += report.seen
        return Collected(groups=groups, kept=kept, report=report)

    def shaped(self, group: RolloutGroup) -> RolloutGroup:
        """The group as the policy is trained on it: its rewards, without rollouts that the environment broke off and
        those in which somebody else made a call."""
        config = self.config
        group = dataclasses.replace(group, rollouts=tuple(filter(_is_the_policys, group.rollouts)))
        rewards = list(group.rewards)
        if config.policy.overlong_buffer:
            limits = {"limit": config.rollout.max_context, "buffer": config.policy.overlong_buffer}
            lengths = [len(rollout.tokens) for rollout in group.rollouts]
            rewards = [
                reward + overlong_penalty(length, **limits) for reward, length in zip(rewards, lengths, strict=True)
            ]
        if config.surprise:
            bonus = surprise_bonus([self._surprise(rollout) for rollout in group.rollouts], config.surprise)
            rewards = [reward + extra for reward, extra in zip(rewards, bonus, strict=True)]
        rollouts = [
            dataclasses.replace(rollout, reward=reward) for rollout, reward in zip(group.rollouts, rewards, strict=True)
        ]
        return RolloutGroup(task_id=group.task_id, rollouts=tuple(rollouts))

    def _surprise(self, rollout: Rollout) -> float:
        examples = self.codec.examples_of(rollout, predict=self.predicted_tools)
        losses = self._mean_losses([self._world_row(example) for example in examples])
        return fmean(losses) if losses else 0.0

    # --- learning ----------------------------------------------------------------------------------------------

    def hear(self, groups: Sequence[RolloutGroup]) -> list[list[WorldModelExample]]:
        """The distinct world-model examples of each group, kept for later too; identical ones are merged."""
        if not self.state.weight or self.config.world_model.input == "inline":
            return [[] for _ in groups]
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        with ThreadPoolExecutor(min(MOST_ENCODERS, self.config.threads or os.cpu_count() or 1)) as pool:
            examples = pool.map(partial(self.codec.examples_of, predict=self.predicted_tools), rollouts)
        heard = []
        for group in groups:
            merged = ReplayBuffer()
            for of_rollout in islice(examples, len(group.rollouts)):
                merged.add(of_rollout)
            heard.append(list(merged.examples.values()))
            if self.config.world_model.replay:
                self.replay.add(heard[-1])
        return heard

    def plan(self, step: int, collected: Collected, heard: Sequence[Sequence[WorldModelExample]]) -> Plan:
        """The rows of each mini-batch: whole groups for the policy, and examples for the world model beside them."""
        config = self.config
        active = active_losses(
            config.world_model.schedule,
            step,
            first_steps=config.world_model.first_steps,
            every=config.world_model.every,
        )
        weight = self.state.weight if active.world_model and config.world_model.predict != "none" else 0.0
        trains_policy = active.policy and not config.world_model.only
        rate = learning_rate(step, base=1.0, warmup=config.optimizer.warmup_steps, total=config.steps, floor=RATE_FLOOR)
        count = config.rollout.prompts // config.rollout.mini_batch_prompts
        kept = collected.kept if trains_policy else {}
        policy_parts = _deal([self._policy_rows(group) for group in kept.values()], count)
        if weight and config.world_model.input == "inline":
            world_parts = _deal(self._inline_rows(collected.groups, without=kept), count)
        elif weight:
            world_parts = [self._world_rows(step, part, place) for place, part in enumerate(_deal(heard, count))]
        else:
            world_parts = [[] for _ in range(count)]
        mini_batches = [[*policy, *world] for policy, world in zip(policy_parts, world_parts, strict=True)]
        return Plan(mini_batches=mini_batches, weight=weight, rate_factor=rate)

    def _policy_rows(self, group: RolloutGroup) -> list[TrainingSample]:
        advantages = group_advantages(
            group.rewards, conditions=group.conditions, scale_by_std=self.config.policy.scale_by_std
        )
        rows = [
            policy_sample(rollout, advantage, adapters=self.policy_adapters, inline=self._inline_tools)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
        ]
        return [row for row in rows if row is not None]

    @property
    def _inline_tools(self) -> Any:
        inline = self.config.world_model.input == "inline" and self.state.weight > 0
        return self.predicted_tools if inline else frozenset()

    def _inline_rows(self, groups: Sequence[RolloutGroup], *, without: Collection[int]) -> list[list[TrainingSample]]:
        """Rows of what the policy does not learn from; the others carry their observations themselves."""
        return [
            [
                row
                for rollout in group.rollouts
                if not (place in without and _is_the_policys(rollout))
                and (row := policy_sample(rollout, None, adapters=self.policy_adapters, inline=self._inline_tools))
            ]
            for place, group in enumerate(groups)
        ]

    def _world_rows(self, step: int, heard: Sequence[WorldModelExample], part: int) -> list[TrainingSample]:
        """The world-model rows of one mini-batch, at most the cap: of all that was ever heard, or of what is new."""
        settings = self.config.world_model
        cap, seeds = settings.examples_per_mini_batch, (self.config.seed, step, part)
        if settings.replay:
            examples = self.replay.draw(cap, seeds, asked_first=self.config.lookahead)
        else:
            examples = ReplayBuffer({example.key: example for example in heard}).draw(cap, seeds)
        return [self._world_row(each) for each in examples]

    def _world_row(self, example: WorldModelExample) -> TrainingSample:
        return world_model_sample(example, adapters=self.world_model_adapters)

    def control_weight(self, row: Mapping[str, Any]) -> None:
        """Let an evaluation's row set the weight, where the run wants that."""
        if self.config.world_model.adaptive_weight and self.state.weight:
            # Of the held-out calls where they were asked: in this very step the world model may not have trained.
            accuracy = row.get("world_model_eval/token_accuracy", row.get("world_model_accuracy", float("nan")))
            success = row.get("eval/val/success", 0.0)
            baseline = success if self.state.best is None else self.state.best
            self.state.weight = control_weight(self.state.weight, accuracy, success, baseline)

    # --- the record --------------------------------------------------------------------------------------------

    def row(self, step: int, collected: Collected) -> dict[str, Any]:
        """What the rollouts of a step show, for its row of metrics."""
        report, rollouts = collected.report, collected.rollouts
        own = [rollout for rollout in rollouts if not rollout.inquired]
        warnings = [
            *([BROKEN_ROLLOUTS] if any(rollout.stop in BROKEN_OFF for rollout in rollouts) else []),
            *([NO_CALLS] if own and not any(self._calls_a_tool(rollout) for rollout in own) else []),
        ]
        return {
            "step": step + 1,
            "tasks_seen": self.state.tasks_seen,
            **rollout_metrics(own),
            **_by_sight(own),
            **({"stops": rollout_metrics(rollouts)["stops"]} if rollouts else {}),  # how all of them ended
            "groups_kept": report.kept,
            "groups_all_failed": report.all_failed,
            "groups_all_succeeded": report.all_succeeded,
            "replay_size": len(self.replay),
            "world_model_weight": self.state.weight,
            "sampled_tokens": sum(rollout.sampled_count for rollout in rollouts),
            **({"warnings": warnings} if warnings else {}),
        }

    def _calls_a_tool(self, rollout: Rollout) -> bool:
        said = (turn.call for turn in rollout.turns if not turn.predicted)
        return any(call is not None and call.name in self._tools for call in said)

    def save(self, folder: Path) -> None:
        save_arrays(self.replay.arrays(), folder / "replay.safetensors")
        (folder / "state.json").write_text(json.dumps(dataclasses.asdict(self.state)), encoding="utf-8")

    def load(self, folder: Path) -> None:
        self.replay = ReplayBuffer.from_arrays(load_arrays(folder / "replay.safetensors"))
        self.state = State(**json.loads((folder / "state.json").read_text(encoding="utf-8")))


def _deal(parts: Sequence[Sequence[Any]], count: int) -> list[list[Any]]:
    """Deal whole groups into `count` mini-batches, as evenly as their number allows, in order."""
    dealt: list[list[Any]] = [[] for _ in range(count)]
    for place, part in enumerate(parts):
        dealt[place * count // max(len(parts), count)].extend(part)
    return dealt


def _is_the_policys(rollout: Rollout) -> bool:
    """Whether the policy is to be judged by a rollout: not where its environment broke, or a call was dictated."""
    return rollout.stop not in BROKEN_OFF and not rollout.inquired


def _by_sight(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Success with and without look-ahead, where both occur."""
    sighted = [rollout.reward for rollout in rollouts if not rollout.blind]
    blind = [rollout.reward for rollout in rollouts if rollout.blind]
    return {"success_sighted": fmean(sighted), "success_blind": fmean(blind)} if sighted and blind else {}
