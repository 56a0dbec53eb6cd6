"""The whole training loop in one process, on a CPU or one GPU.

    lfo train preset=tiny algo=dual-lora steps=60 output_dir=runs/x
    create_trainer(config, environment, tokenizer).fit()

One step: draw tasks, run a group of rollouts for each, keep every reply for the world model, turn rewards into
advantages, update both adapters mini-batch by mini-batch, refresh the sampler. All randomness is named by (seed,
step, ...), so a run that was killed goes on exactly as it would have.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.numpy import save_file as save_arrays
from transformers import PreTrainedTokenizerBase

from lfo.config import RunConfig, validate
from lfo.engines.agent import MEMORY, adapters_of, build_agent
from lfo.engines.learner import Learner
from lfo.engines.loading import environment_factory, load_base, load_tokenizer, naming_environment, pick_device
from lfo.engines.progress import Progress
from lfo.engines.trackers import open_trackers, require_trackers
from lfo.engines.world_model_eval import WorldModelExamination
from lfo.env.interface import EnvironmentFactory
from lfo.errors import ConfigError, DataError
from lfo.evaluation.balance import gradient_balance
from lfo.evaluation.fixed_tasks import evaluate_tasks, lookahead_accuracy
from lfo.evaluation.runs import describe_data
from lfo.evaluation.success import rollout_metrics
from lfo.objectives.advantages import (
    DynamicSamplingReport,
    group_advantages,
    overlong_penalty,
    select_groups,
    surprise_bonus,
)
from lfo.objectives.schedule import active_losses, control_weight, learning_rate
from lfo.protocol.world_model import WorldModelExample, observed_calls
from lfo.rollout.records import read_rollouts, rollout_record
from lfo.rollout.runner import BROKEN_OFF, RolloutRequest, refuse_dead_environment
from lfo.rollout.samples import PREDICTED_TOOLS, ReplayBuffer, policy_sample, world_model_sample
from lfo.rundir import RunDirectory, read_metrics
from lfo.types import Rollout, RolloutGroup, TrainingSample

SAMPLE_ROLLOUTS = 4  # kept from each evaluation, for a person to read
RATE_FLOOR = 0.1  # the cosine ends at this share of the learning rate


def train(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Run an experiment from names alone; what `lfo train` calls."""
    return create_trainer(config, environment_factory(config), load_tokenizer(config.model)).fit(resume=resume)


def create_trainer(
    config: RunConfig, environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase, *, base: Any = None
) -> Trainer:
    """A trainer for any environment and any base; `environment` makes one environment per rollout (a class does)."""
    config = naming_environment(config, environment)
    validate(config)
    require_trackers(config)
    if config.threads:
        torch.set_num_threads(config.threads)
    device = pick_device(config.device)
    return Trainer(config, environment, tokenizer, base if base is not None else load_base(config.model, device))


@dataclass(slots=True)
class State:
    """What changes from step to step beside the weights; saved with every checkpoint."""

    step: int = 0
    tasks_seen: int = 0
    weight: float = 0.0
    best: float = -1.0


class Trainer:
    def __init__(
        self, config: RunConfig, environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase, base: Any
    ) -> None:
        self.config = config
        self.environment = environment
        self.tools = environment().tools()
        self.predicted_tools = PREDICTED_TOOLS[config.world_model.predict]
        self._check_predicted_tools()
        self.agent = build_agent(config, environment, tokenizer, base)
        self.codec, self.world_model_codec = self.agent.codec, self.agent.world_model_codec
        self.model, self.sampler = self.agent.model, self.agent.sampler
        self.settings, self.predictor = self.agent.settings, self.agent.predictor
        if config.init_from:
            self.model.load(adapters_of(Path(config.init_from)))
        self.learner = Learner(self.model, config)
        self.runner = self.agent.runner()
        self.replay = self._logged_replies() if config.world_model.from_logs else ReplayBuffer()
        self.examination = WorldModelExamination(self.agent, self.learner)
        self.state = State(weight=config.world_model.weight)

    def _check_predicted_tools(self) -> None:
        names = {tool["function"]["name"] for tool in self.tools}
        wanted = self.predicted_tools
        if self.config.world_model.weight and wanted and not names & set(wanted):
            raise ConfigError(
                f"world_model.predict={self.config.world_model.predict} names no tool of this environment "
                f"({', '.join(sorted(names))}); use world_model.predict=all"
            )

    def _logged_replies(self) -> ReplayBuffer:
        """Everything that was heard in the rollouts of `world_model.from_logs`."""
        path = str(self.config.world_model.from_logs)
        replay = ReplayBuffer()
        for rollout in read_rollouts(path, self.environment()):
            replay.add(self.world_model_codec.examples_of(rollout, predict=self.predicted_tools))
        if not replay:
            raise DataError(
                f"{path} holds no reply that world_model.predict={self.config.world_model.predict} learns from"
            )
        return replay

    @property
    def _learns_to_predict(self) -> bool:
        """Whether this run trains a world model that can be asked in the form of `WorldModelExample`."""
        settings = self.config.world_model
        return settings.weight > 0 and settings.predict != "none" and settings.input == "state"

    # --- the loop ----------------------------------------------------------------------------------------------

    def fit(self, *, resume: bool = False) -> dict[str, Any]:
        """Train to the last step; answers a summary."""
        config = self.config
        with RunDirectory.create(config.output_dir, config, resume=resume) as run, Progress(config) as progress:
            first_row = self._restore(run) if resume else 0
            run.write_data(describe_data(config, self.environment))
            with open_trackers(config, run.path, first_step=first_row) as track:
                if config.eval.every and first_row == 0:
                    # The untrained policy is the first point of every curve.
                    row = {"step": 0, "tasks_seen": 0, **self.evaluate(run)}
                    run.append_metrics(row)
                    track(row)
                for step in range(self.state.step, config.steps):
                    row = self.step(step)
                    done = self.state.step = step + 1
                    if config.eval.every and (done % config.eval.every == 0 or done == config.steps):
                        row |= self.evaluate(run)
                        self._control_weight(row)
                    run.append_metrics(row)
                    track(row)
                    progress.show(row)
                    best = row.get("eval/val/success", -1.0) > self.state.best
                    if best:
                        self.state.best = row["eval/val/success"]
                    if best or done % config.checkpoint_every == 0 or done == config.steps:
                        run.write_checkpoint(done, self._save, best=best)
            run.write_adapters(self._save_agent)
            return self._summary(run)

    def step(self, step: int) -> dict[str, Any]:
        """One step of training: rollouts, then updates; answers its row of metrics."""
        clock = _Clock()
        with clock("rollout"):
            groups, kept, report = self._collect(step)
        with clock("examples"):
            self._remember(groups)
            heard = self._hear(groups)
        with clock("update"):
            watched = self._update(step, groups, kept, heard)
            self.sampler.refresh()
        self.state.tasks_seen += report.seen
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        sampled = sum(rollout.sampled_count for rollout in rollouts)
        return {
            "step": step + 1,
            "tasks_seen": self.state.tasks_seen,
            **rollout_metrics(rollouts),
            **_by_sight(rollouts),
            **watched,
            **gradient_balance(watched),
            "groups_kept": report.kept,
            "groups_all_failed": report.all_failed,
            "groups_all_succeeded": report.all_succeeded,
            "replay_size": len(self.replay),
            **({} if self.agent.memory is None else {"memory_size": len(self.agent.memory)}),
            "world_model_weight": self.state.weight,
            "sampled_tokens": sampled,
            "tokens_per_second": sampled / max(clock.seconds["rollout"], 1e-9),
            **{f"seconds/{name}": seconds for name, seconds in clock.seconds.items()},
        }

    # --- rollouts ----------------------------------------------------------------------------------------------

    def _tasks(self, step: int, draw: int) -> list[Any]:
        """The tasks of one draw of one step. Environments with an endless stream never repeat a task."""
        count = self.config.rollout.prompts
        first = (step * (self.config.policy.max_resamples + 1) + draw) * count
        environment = self.environment()
        stream = getattr(environment, "stream", None)
        if stream is not None:
            tasks = stream("train", 1 + self.config.seed)
            return [tasks.task(number) for number in range(first, first + count)]
        known = self._known_tasks("train")
        return [
            known[np.random.default_rng([self.config.seed, epoch]).permutation(len(known))[place]]
            for epoch, place in (divmod(number, len(known)) for number in range(first, first + count))
        ]

    def _known_tasks(self, split: str) -> Sequence[Any]:
        tasks = self.environment().tasks(split)
        if not tasks:
            raise ConfigError(f"the environment has no tasks in its split {split}")
        return tasks

    def _collect(self, step: int) -> tuple[list[RolloutGroup], dict[int, RolloutGroup], DynamicSamplingReport]:
        """All groups that were rolled out, those that the policy learns from by their place, and what was dropped."""
        config = self.config
        groups: list[RolloutGroup] = []
        kept: dict[int, RolloutGroup] = {}
        report = DynamicSamplingReport(kept=0, all_failed=0, all_succeeded=0)
        if config.world_model.from_logs:  # everything that will ever be heard is in the buffer already
            return groups, kept, report
        for draw in range(config.policy.max_resamples + 1):
            drawn = self._roll_out(step, draw)
            refuse_dead_environment([rollout for group in drawn for rollout in group.rollouts])
            shaped = [self._shaped(group) for group in drawn]
            informative, seen = select_groups(shaped)
            report += seen
            for place, group in enumerate(shaped, start=len(groups)):
                if len(kept) < config.rollout.prompts and (group in informative or not config.policy.dynamic_sampling):
                    kept[place] = group
            groups += drawn
            if not config.policy.dynamic_sampling or len(kept) == config.rollout.prompts:
                break
        return groups, kept, report

    def _roll_out(self, step: int, draw: int) -> list[RolloutGroup]:
        config = self.config
        size = config.rollout.group_size
        blind = size if step < config.exploration.blind_steps else round(size * config.exploration.blind_share)
        tasks = self._tasks(step, draw)
        requests = [
            RolloutRequest(
                task=task, seeds=(config.seed, step, draw, place, member), blind=not self.predictor or member < blind
            )
            for place, task in enumerate(tasks)
            for member in range(size)
        ]
        rows = self.sampler.session(rows=len(requests), adapters=self.model.policy_adapters)
        rollouts = self.runner.run(requests, rows)
        return [
            RolloutGroup(task_id=str(task.id), rollouts=tuple(rollouts[place * size : (place + 1) * size]))
            for place, task in enumerate(tasks)
        ]

    def _shaped(self, group: RolloutGroup) -> RolloutGroup:
        """The group as the policy is trained on it: its rewards, without rollouts that the environment broke off."""
        config = self.config
        group = dataclasses.replace(group, rollouts=tuple(r for r in group.rollouts if r.stop not in BROKEN_OFF))
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
        examples = self.world_model_codec.examples_of(rollout, predict=self.predicted_tools)
        adapters = self.model.world_model_adapters
        losses = self.learner.row_losses([world_model_sample(example, adapters=adapters) for example in examples])
        return fmean(losses) if losses else 0.0

    # --- learning ----------------------------------------------------------------------------------------------

    def _remember(self, groups: Sequence[RolloutGroup]) -> None:
        """Keep what look-ahead will ask about, where a memory answers it; evaluation is never remembered.

        Of other calls it would recall as much and take five times as long (docs/LOG.md).
        """
        if self.agent.memory is not None:
            for group in groups:
                for rollout in group.rollouts:
                    self.agent.memory.add(call for call in observed_calls(rollout, predict=None) if call.asked)

    def _hear(self, groups: Sequence[RolloutGroup]) -> list[list[WorldModelExample]]:
        """The distinct world-model examples of each group, kept for later too; identical ones are merged."""
        if not self.state.weight or self.config.world_model.input == "inline":
            return [[] for _ in groups]
        heard = []
        for group in groups:
            examples = {
                example.key: example
                for rollout in group.rollouts
                for example in self.world_model_codec.examples_of(rollout, predict=self.predicted_tools)
            }
            heard.append(list(examples.values()))
            if self.config.world_model.replay:
                self.replay.add(heard[-1])
        return heard

    def _update(
        self,
        step: int,
        groups: Sequence[RolloutGroup],
        kept: Mapping[int, RolloutGroup],
        heard: Sequence[Sequence[WorldModelExample]],
    ) -> dict[str, float]:
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
        watched: dict[str, list[float]] = defaultdict(list)
        count = config.rollout.prompts // config.rollout.mini_batch_prompts
        policy_parts = _deal([self._policy_rows(group) for group in kept.values()] if trains_policy else [], count)
        if weight and config.world_model.input == "inline":
            world_parts = _deal(self._inline_rows(groups, without=kept if trains_policy else ()), count)
        elif weight:
            world_parts = [self._world_rows(step, part, place) for place, part in enumerate(_deal(heard, count))]
        else:
            world_parts = [[] for _ in range(count)]
        for policy_rows, world_rows in zip(policy_parts, world_parts, strict=True):
            for name, value in self.learner.update(
                [*policy_rows, *world_rows], weight=weight, rate_factor=rate
            ).items():
                watched[name].append(value)
        return {name: fmean(values) for name, values in watched.items()}

    def _policy_rows(self, group: RolloutGroup) -> list[TrainingSample]:
        advantages = group_advantages(group.rewards, scale_by_std=self.config.policy.scale_by_std)
        rows = [
            policy_sample(rollout, advantage, adapters=self.model.policy_adapters, inline=self._inline_tools)
            for rollout, advantage in zip(group.rollouts, advantages, strict=True)
        ]
        return [row for row in rows if row is not None]

    @property
    def _inline_tools(self) -> Any:
        inline = self.config.world_model.input == "inline" and self.state.weight > 0
        return self.predicted_tools if inline else frozenset()

    def _inline_rows(self, groups: Sequence[RolloutGroup], *, without: Collection[int]) -> list[list[TrainingSample]]:
        """Rows of the groups that the policy does not learn from; the others carry their observations themselves."""
        return [
            [
                row
                for rollout in group.rollouts
                if (row := policy_sample(rollout, None, adapters=self.model.policy_adapters, inline=self._inline_tools))
            ]
            for place, group in enumerate(groups)
            if place not in without
        ]

    def _world_rows(self, step: int, heard: Sequence[WorldModelExample], part: int) -> list[TrainingSample]:
        """The world-model rows of one mini-batch, at most the cap: of all that was ever heard, or of what is new."""
        settings = self.config.world_model
        cap, seeds = settings.examples_per_mini_batch, (self.config.seed, step, part)
        if settings.replay:
            examples = self.replay.draw(cap, seeds, asked_first=self.config.lookahead)
        else:
            examples = ReplayBuffer({example.key: example for example in heard}).draw(cap, seeds)
        return [world_model_sample(each, adapters=self.model.world_model_adapters) for each in examples]

    def _control_weight(self, row: Mapping[str, Any]) -> None:
        if self.config.world_model.adaptive_weight and self.state.weight:
            accuracy = row.get("world_model_accuracy", float("nan"))
            self.state.weight = control_weight(
                self.state.weight, accuracy, row.get("eval/val/success", 0.0), self.state.best
            )

    # --- evaluation --------------------------------------------------------------------------------------------

    def evaluate(self, run: RunDirectory | None = None) -> dict[str, Any]:
        """Greedy success on the fixed tasks of each split, with look-ahead where the run has it; and what the world
        model expects to hear after the held-out calls."""
        started = time.monotonic()
        row: dict[str, Any] = {}
        records: list[dict[str, Any]] = []
        for split in self.config.eval.splits:
            tasks = self._known_tasks(split)[: self.config.eval.tasks]
            evaluation = evaluate_tasks(
                tasks,
                self.sampler.session(rows=len(tasks), adapters=self.model.policy_adapters),
                environment=self.environment,
                codec=self.codec,
                settings=self.settings,
                predictor=self.predictor,
            )
            rollouts = evaluation.rollouts
            refuse_dead_environment(rollouts)
            metrics = rollout_metrics(rollouts)
            if self.config.lookahead_source != "truth" and self.predictor is not None:
                accuracy = lookahead_accuracy(evaluation.asked, self.environment, self.settings)
                metrics["lookahead_accuracy"] = accuracy
            row |= {f"eval/{split}/{name}": value for name, value in metrics.items()}
            records += [{"split": split, **rollout_record(rollout)} for rollout in rollouts[:SAMPLE_ROLLOUTS]]
        predictions: list[dict[str, Any]] = []
        if self._learns_to_predict:
            metrics, predictions = self.examination.run()
            row |= metrics
        if run is not None:
            run.write_rollouts(self.state.step, records)
            if predictions:
                run.write_predictions(self.state.step, predictions)
        row["seconds/eval"] = time.monotonic() - started
        return row

    # --- checkpoints -------------------------------------------------------------------------------------------

    def _save_agent(self, folder: Path) -> None:
        """What acting needs; a checkpoint holds more."""
        self.model.save(folder)
        if self.agent.memory is not None:
            self.agent.memory.save(folder / MEMORY)

    def _save(self, folder: Path) -> None:
        self._save_agent(folder)
        self.learner.save(folder / "optimizer.safetensors")
        save_arrays(self.replay.arrays(), folder / "replay.safetensors")
        (folder / "state.json").write_text(json.dumps(dataclasses.asdict(self.state)), encoding="utf-8")

    def _restore(self, run: RunDirectory) -> int:
        """Take up the last checkpoint and forget the rows behind it; answers the step of the next row."""
        checkpoint = run.latest_checkpoint()
        run.truncate_metrics(checkpoint.step if checkpoint else 0)
        if checkpoint is None:  # killed before the first one: begin again, but for the untrained policy's evaluation
            return 1 if run.metrics.exists() and read_metrics(run.metrics) else 0
        self.model.load(checkpoint.path)
        if self.agent.memory is not None:
            self.agent.memory.load(checkpoint.path / MEMORY)
        self.learner.load(checkpoint.path / "optimizer.safetensors")
        self.replay = ReplayBuffer.from_arrays(load_arrays(checkpoint.path / "replay.safetensors"))
        saved = json.loads((checkpoint.path / "state.json").read_text(encoding="utf-8"))
        self.state = State(**saved)
        self.sampler.refresh()
        return checkpoint.step + 1

    def _summary(self, run: RunDirectory) -> dict[str, Any]:
        best = run.best_checkpoint()
        return {
            "run": str(run.path),
            "steps": self.state.step,
            "tasks_seen": self.state.tasks_seen,
            "best_success": self.state.best if best else None,
            "best_step": best.step if best else None,
        }


def _deal(parts: Sequence[Sequence[Any]], count: int) -> list[list[Any]]:
    """Deal whole groups into `count` mini-batches, as evenly as their number allows, in order."""
    dealt: list[list[Any]] = [[] for _ in range(count)]
    for place, part in enumerate(parts):
        dealt[place * count // max(len(parts), count)].extend(part)
    return dealt


def _by_sight(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Success with and without look-ahead, where both occur."""
    sighted = [rollout.reward for rollout in rollouts if not rollout.blind]
    blind = [rollout.reward for rollout in rollouts if rollout.blind]
    return {"success_sighted": fmean(sighted), "success_blind": fmean(blind)} if sighted and blind else {}


class _Clock:
    """Seconds spent in named phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started
