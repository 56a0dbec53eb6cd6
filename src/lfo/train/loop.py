"""The training loop of every engine: draw tasks, roll out, select groups, make samples, learn, evaluate, write.

    create_trainer(config, environment, tokenizer).fit()        from lfo.engines, which picks the backend

A `Backend` implements the few operations that differ between one process and many. Everything else is here and in the
pure functions called from here. All random numbers are seeded by (seed, step, ...), so a resumed run continues exactly.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from lfo.algorithms import count_tasks, draw_requests, draw_tasks, plan_of
from lfo.algorithms.dual_lora import adapted_weight
from lfo.backend import Backend
from lfo.checkpoints import Checkpoint, reading
from lfo.config import RunConfig
from lfo.config.couplings import coupling_of
from lfo.env.answers import tools_of
from lfo.env.interface import EnvironmentFactory, predicted_tools
from lfo.env.patience import name_of
from lfo.errors import EnvironmentFailed, UsageError
from lfo.measure.fixed_tasks import evaluate_splits
from lfo.measure.held_out import Examination
from lfo.measure.success import judged, mean_of_each, step_metrics
from lfo.objectives.advantages import (
    Collected,
    DynamicSamplingReport,
    select_groups,
    surprise_bonus,
    with_overlong_penalty,
)
from lfo.play.acting import save_agent
from lfo.play.ending_tools import guess_ending_tools
from lfo.play.feedback import roll_out_in_waves
from lfo.play.predictors import world_model_codec
from lfo.play.runner import RunnerConfig, refuse_dead_environment
from lfo.protocol.world_model import WorldModelExample
from lfo.rows.replay import Practice, ReplayBuffer, examples_of_groups, logged_replies
from lfo.rows.samples import MiniBatches, acted_by_policy, mark_first_calls, mark_imagined
from lfo.rows.successes import Renaming, SuccessBuffer
from lfo.runs.data import continued_data, describe_data
from lfo.runs.folder import RunDirectory
from lfo.runs.rule_change import NOTICED
from lfo.runs.trends import evaluated_tasks, far_below
from lfo.train.changed_rules import REPLAY_FILE, STATE_FILE, forget, go_on_from, heed, without_probes
from lfo.train.kept_evaluation import Evaluation, KeptEvaluation
from lfo.train.state import State
from lfo.train.tracking import Progress, open_trackers
from lfo.types import Rollout, RolloutGroup, Situation, StepPlan, TrainingSample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SUCCESSES_FILE = "successes.safetensors"
SUCCESS_LOST = "success on val is far below its best, whose checkpoint is kept; if it stays there, run lfo advise"


class Clock:
    """Measures the seconds spent in named phases."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[name] = time.monotonic() - started


class Trainer:
    """Trains one run. Create it with `lfo.engines.create_trainer`."""

    def __init__(
        self,
        config: RunConfig,
        make_environment: EnvironmentFactory,
        tokenizer: PreTrainedTokenizerBase,
        backend: Backend,
    ) -> None:
        self.config = config
        self.make_environment = make_environment
        self.backend = backend
        world = config.world_model
        self.coupling = coupling_of(config.coupling, with_world_model=config.has_world_model)
        self.codec = world_model_codec(config, tokenizer)
        # For its tasks and tools. A step makes no other one here: one that raises or hangs would end or block the run.
        self.asks = RunnerConfig.of_run(config).ask
        self.environment = self.asks(make_environment)
        tools = self.asks(lambda: tools_of(self.environment), f"tools of {name_of(self.environment)}")
        self.tool_names = {tool["function"]["name"] for tool in tools}
        self.predicted_tools = self.asks(lambda: predicted_tools(self.environment, world.predict))  # None: all
        self.state = State(weight=world.weight)
        self.mini_batches = MiniBatches(
            config=config,
            policy_adapters=self.coupling.policy,
            world_model_adapters=self.coupling.world_model,
            predicted_tools=self.predicted_tools,
            practice=Practice(self.codec, swap_names=world.swap_names, wording=world.wording),
            renaming=Renaming(tokenizer, chance=config.internalise.swap_names, copied=config.is_auto),
        )
        self.imitates = config.imitates
        self.train_tasks = self.asks(lambda: count_tasks(self.environment)) if self.imitates else None
        if world.from_logs:
            logged = logged_replies(world.from_logs, self.environment, self.codec, predict=self.predicted_tools)
            self.mini_batches.replay = logged
        self.kept: KeptEvaluation | None = None  # where the first evaluation may be found instead of measured
        self.examination: Examination | None = None
        if world.weight and world.predict != "none" and world.input == "state":
            self.examination = Examination(config, make_environment, self.codec, backend, self.coupling.world_model)

    # --- the loop ----------------------------------------------------------------------------------------------

    def fit(self, *, resume: bool = False) -> dict[str, Any]:
        """Train to the last step and return a summary."""
        config, state = self.config, self.state
        with (
            RunDirectory.create(config.output_dir, config, resume=resume) as run,
            self.backend.running(run.path),
            Progress(config) as progress,
        ):
            first_row = 0
            if resume:
                checkpoint, first_row = run.rewind()
                if checkpoint is not None:
                    self.load(checkpoint)
            if state.step == 0:
                state.watch = go_on_from(config, self.mini_batches, self.backend.reply_store)
            run.write_data(continued_data(run.path, describe_data(config, self.make_environment)))
            if self.backend.ending_tools is not None and state.step == 0:  # also if killed after the row of step 0
                drawn = self.asks(lambda: draw_tasks(config, self.environment, 0, 0))
                self.backend.ending_tools.first_guess = guess_ending_tools(self.make_environment, drawn, config)
            with open_trackers(config, run.path, first_step=first_row) as track:
                if config.eval.every and first_row == 0:
                    # The untrained policy is the first point of every curve.
                    row = {"step": 0, "tasks_seen": 0, **self.evaluate(run, kept=self.kept)}
                    run.append_metrics(row)
                    track(row)
                for step in range(state.step, config.steps):
                    with self._saving_what_was_learned(run):
                        row = self.step(step)
                    done = state.step = step + 1
                    if config.eval.every and (done % config.eval.every == 0 or done == config.steps):
                        self._judge(run, row)
                    run.append_metrics(row)
                    success = row.get(self._judged_by)
                    best = success is not None and (state.best is None or success > state.best)
                    state.best = success if best else state.best
                    if best or done % config.checkpoint_every == 0 or done == config.steps:
                        run.write_checkpoint(done, self.save, best=best)
                    track(row)  # after the checkpoint: no display may cost what was learned
                    progress.show(row)
            run.write_adapters(self.save_adapters)
            return self._summary(run)

    @contextmanager
    def _saving_what_was_learned(self, run: RunDirectory) -> Iterator[None]:
        """Write a checkpoint of the last full step if the environment fails; the error then says how to continue."""
        before = dataclasses.replace(self.state, watch=deepcopy(self.state.watch))
        try:
            yield
        except (EnvironmentFailed, UsageError) as error:
            self.state, saved = before, run.latest_checkpoint()
            if not before.step:
                raise
            if saved is None or saved.step < before.step:
                run.write_checkpoint(before.step, self.save)
            raise EnvironmentFailed(
                f"{error}; what was learned up to step {before.step} is saved, continue with: "
                f"lfo train --resume {self.config.output_dir}"
            ) from error

    def step(self, step: int) -> dict[str, Any]:
        """Run one training step, rollouts and then updates; return its row of metrics."""
        clock, plan = Clock(), self.plan(step)
        with clock("rollout"):
            collected = self.collect(plan)
        with clock("examples"):
            fresh = self._heeded(plan, collected) if self.config.lookahead != "off" else {}
            examples = self.store_replies(collected.groups, step) if plan.listens else []
            if NOTICED in fresh:
                forget(self.mini_batches, self.backend.reply_store, fresh[NOTICED]["since"])
            self.mini_batches.store_best(plan, collected.groups, step)
        plan = self.plan(step)  # again: a success of this step may be the one that imitation was waiting for
        with clock("update"):
            learnt = self.learn(plan, self.samples(plan, collected, examples))
        with clock("sync"):
            self.backend.sync(step + 1)
        row = self.rollout_metrics(plan, collected) | self.decided(plan, collected)
        watched = mean_of_each(learnt)
        heard = [*row.get("warnings", ()), *fresh.get("warnings", ())]
        row |= {**fresh, **({"warnings": heard} if heard else {})}
        self.state.rollouts += len(collected.rollouts)
        self.state.sampled_tokens += row["sampled_tokens"]
        self.state.seconds += sum(clock.seconds.values())
        return {
            **row,
            "rollouts_seen": self.state.rollouts,
            "sampled_tokens_seen": self.state.sampled_tokens,
            "seconds/seen": self.state.seconds,
            **watched,
            **judged({**row, **watched}),
            **({} if self.backend.reply_store is None else {"memory_size": len(self.backend.reply_store)}),
            "tokens_per_second": row["sampled_tokens"] / max(clock.seconds["rollout"], 1e-9),
            **{f"seconds/{name}": seconds for name, seconds in clock.seconds.items()},
        }

    def _heeded(self, plan: StepPlan, collected: Collected) -> dict[str, Any]:
        predicted = without_probes(plan, collected.groups)
        return heed(self.state.watch, predicted, plan.step, judge=self.environment, asks=self.asks)

    def plan(self, step: int) -> StepPlan:
        situation = Situation(
            success_tasks=self.mini_batches.success_tasks,
            train_tasks=self.train_tasks,
            predicted_tools=self.predicted_tools,
            outcomes=self.state.outcomes,
        )
        return plan_of(self.config, step, situation)

    @property
    def last_plan(self) -> StepPlan:
        """The plan of the last step, with what its outcomes have decided."""
        return self.plan(max(0, self.state.step - 1))

    def decided(self, plan: StepPlan, collected: Collected) -> dict[str, Any]:
        """Record the outcomes of a step, if its plan names its seats; return what they say for the row of metrics."""
        if not plan.kinds:
            return {}
        return {**self.state.record(plan, collected.groups), "agent": self.plan(plan.step).agent}

    # --- rollouts ----------------------------------------------------------------------------------------------

    def collect(self, plan: StepPlan) -> Collected:
        """Draw tasks and roll them out; repeat, at most `max_resamples` times, if too few groups are informative."""
        config = self.config
        groups: list[RolloutGroup] = []
        kept: dict[int, RolloutGroup] = {}
        report = DynamicSamplingReport(kept=0, all_failed=0, all_succeeded=0)
        for draw in range(plan.draws):
            drawn = self.draw(plan, draw)
            own = [self.own_rollouts(group) for group in drawn]
            informative, seen = select_groups(own)
            report += seen
            for index, group in enumerate(own, start=len(groups)):
                if len(kept) < config.rollout.prompts and (group in informative or config.policy.max_resamples < 0):
                    kept[index] = self.shaped(group)
            groups += drawn
            if len(kept) == config.rollout.prompts:
                break
        self.state.tasks_seen += report.seen
        return Collected(groups=groups, kept=kept, report=report)

    def draw(self, plan: StepPlan, draw: int) -> list[RolloutGroup]:
        """Roll out the tasks of one draw; return one group for each task."""
        size = len(plan.seats)
        what = f"tasks of {name_of(self.environment)}"
        requests = self.asks(lambda: draw_requests(self.config, self.environment, plan, draw), what)
        if plan.feedback != "off":
            rollouts = roll_out_in_waves(plan, requests, self.backend.roll_out, tools=self.predicted_tools)
        else:
            rollouts = self.backend.roll_out(requests)
        refuse_dead_environment(rollouts)
        groups = [
            RolloutGroup(task_id=rollouts[first].task_id, rollouts=tuple(rollouts[first : first + size]))
            for first in range(0, len(requests), size)
        ]
        if self.config.lookahead != "policy" or (plan.kinds and "look" not in plan.kinds):
            return groups
        found = self.backend.ending_tools is not None  # nobody has said which calls are asked about
        groups = [mark_imagined(group, any_arguments=found) for group in groups]
        if self.backend.reply_store is None:
            return groups
        tools = self.predicted_tools if self.backend.ending_tools is None else self.backend.ending_tools
        return [mark_first_calls(group, tools) for group in groups]

    def own_rollouts(self, group: RolloutGroup) -> RolloutGroup:
        """Return the group with only the policy's own rollouts, and their bonuses for surprise."""
        own = dataclasses.replace(group, rollouts=tuple(filter(acted_by_policy, group.rollouts)))
        if not self.config.surprise:
            return own
        losses = [self._surprise(rollout) for rollout in own.rollouts]
        bonuses = surprise_bonus(losses, self.config.surprise, conditions=own.conditions)
        return dataclasses.replace(own, bonuses=bonuses)

    def shaped(self, group: RolloutGroup) -> RolloutGroup:
        """Return the group with shaped rewards."""
        buffer = self.config.policy.overlong_buffer
        return with_overlong_penalty(group, limit=self.config.rollout.max_context, buffer=buffer) if buffer else group

    def _surprise(self, rollout: Rollout) -> float:
        """Return the mean world-model loss on the replies in this rollout; 0 if there are none."""
        examples = self.codec.examples_of(rollout, predict=self.predicted_tools)
        scores = self.backend.score(self.mini_batches.examples(examples))
        return fmean(score.loss / score.tokens for score in scores) if scores else 0.0

    # --- learning ----------------------------------------------------------------------------------------------

    def store_replies(self, groups: Sequence[RolloutGroup], step: int = 0) -> list[list[WorldModelExample]]:
        """Store what later steps need of these rollouts; return the distinct world-model examples of each group."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        if self.imitates:
            self.mini_batches.store_successes(rollouts, step)
        if self.backend.reply_store is not None:
            self.backend.reply_store.observe(rollouts, step)
        if self.backend.ending_tools is not None:
            self.backend.ending_tools.observe(rollouts)
        if not self.state.weight or self.config.world_model.input == "inline":
            return [[] for _ in groups]
        found = examples_of_groups(groups, self.codec, predict=self.predicted_tools)
        if self.config.world_model.replay:
            for examples in found:
                self.mini_batches.replay.add(examples, step)
        return found

    def samples(
        self, plan: StepPlan, collected: Collected, examples: Sequence[Sequence[WorldModelExample]]
    ) -> list[list[TrainingSample]]:
        """Return the samples of each mini-batch of this step; `examples` are those of each group."""
        groups, weight = (collected.groups, collected.kept), self.state.weight
        return self.mini_batches.of_step(plan, *groups, examples, world_model_weight=weight)

    def learn(self, plan: StepPlan, samples: Sequence[Sequence[TrainingSample]]) -> list[dict[str, float]]:
        weight = self.state.weight if plan.predicts else 0.0
        return self.backend.learn(samples, world_model_weight=weight, rate_factor=plan.rate)

    def rollout_metrics(self, plan: StepPlan, collected: Collected) -> dict[str, Any]:
        """Return the metrics that come from the rollouts of a step."""
        metrics, warnings = step_metrics(collected.rollouts, self.tool_names)
        if self.examination is not None:
            metrics |= self.examination.lost_tokens(collected.rollouts, self.predicted_tools)
        groups = {
            "groups_kept": collected.report.kept,
            "groups_all_failed": collected.report.all_failed,
            "groups_all_succeeded": collected.report.all_succeeded,
        }
        return {
            "step": plan.step + 1,
            "tasks_seen": self.state.tasks_seen,
            **metrics,
            **(groups if plan.selects else {}),
            "replay_size": len(self.mini_batches.replay.examples),
            "world_model_weight": self.state.weight,
            **({"phase": plan.phase} if plan.phase else {}),
            **({"success_tasks": self.mini_batches.success_tasks} if self.imitates else {}),
            **({"warnings": warnings} if warnings else {}),
        }

    # --- evaluation --------------------------------------------------------------------------------------------

    def evaluate(
        self,
        run: RunDirectory | None = None,
        splits: Sequence[str] | None = None,
        *,
        kept: KeptEvaluation | None = None,
    ) -> dict[str, Any]:
        """Measure greedy success on the fixed tasks of each split, with look-ahead unless the last step has ended it,
        and the world model on the held-out calls; or find that in `kept`."""
        started = time.monotonic()
        measure = partial(self._measured, self.config.eval.splits if splits is None else splits)
        # Which tools look-ahead may imagine depends on the first tasks of this run, if it has to find them out.
        kept = kept if self.backend.ending_tools is None else None
        row, rollouts, predictions = measure() if kept is None else kept.of(measure)
        if run is not None:
            run.write_samples("rollouts", self.state.step, rollouts)
            if predictions:
                run.write_samples("predictions", self.state.step, predictions)
        return {**row, "seconds/eval": time.monotonic() - started}

    def _measured(self, splits: Sequence[str]) -> Evaluation:
        """Return metrics, and rollouts and predictions to read."""
        ahead = self.last_plan.looks_ahead
        play = self.backend.roll_out
        row, rollouts = evaluate_splits(self.config, self.make_environment, splits, play, look_ahead=ahead)
        if self.examination is None or not ahead:
            return row, rollouts, []
        metrics, predictions = self.examination.run()
        return row | metrics, rollouts, predictions

    @property
    def _judged_by(self) -> str:
        """The metric that chooses the best checkpoint; without look-ahead if the run trains a policy to act alone."""
        return "eval/val/success_blind" if self.config.leaves_policy_alone else "eval/val/success"

    def _judge(self, run: RunDirectory, row: dict[str, Any]) -> None:
        """Evaluate after a step, add the result to its row, and adapt the world-model weight."""
        config, state = self.config, self.state
        final = config.eval.final_splits if state.step == config.steps else ()
        try:
            row |= self.evaluate(run, (*config.eval.splits, *final))
        except (EnvironmentFailed, UsageError) as error:  # the step is worth more than its evaluation
            row["warnings"] = [*row.get("warnings", ()), f"there is no evaluation of this step: {error}"]
            return
        if config.world_model.schedule == "adaptive":
            success = row.get(self._judged_by, 0.0)
            state.weight = adapted_weight(state.weight, row, success=success, best=state.best)
        tasks, success = evaluated_tasks(row, at_most=config.eval.tasks), row.get(self._judged_by, state.best)
        if state.best is not None and far_below(state.best, success, tasks=tasks):
            row["warnings"] = [*row.get("warnings", ()), SUCCESS_LOST]

    # --- the run's folder --------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        """Write everything that a resumed run needs to continue exactly."""
        self.backend.save(folder)
        save_agent(folder, self.last_plan)
        self.mini_batches.replay.save(folder / REPLAY_FILE)
        if self.imitates:
            self.mini_batches.successes.save(folder / SUCCESSES_FILE)
        self.state.save(folder / STATE_FILE)

    def save_adapters(self, folder: Path) -> None:
        """Write what an agent needs to act."""
        self.backend.save_adapters(folder)
        save_agent(folder, self.last_plan)

    def load(self, checkpoint: Checkpoint) -> None:
        self.backend.load(checkpoint.path)
        self.backend.sync(checkpoint.step)
        with reading(checkpoint.path / REPLAY_FILE) as file:
            logged = self.mini_batches.replay.examples.values()  # from logs, which may have grown since
            self.mini_batches.replay = ReplayBuffer.load(file)
            self.mini_batches.replay.add(logged)
        if self.imitates:
            with reading(checkpoint.path / SUCCESSES_FILE) as file:
                self.mini_batches.successes = SuccessBuffer.load(file)
        with reading(checkpoint.path / STATE_FILE) as file:
            self.state.load(file)

    def _summary(self, run: RunDirectory) -> dict[str, Any]:
        best = run.best_checkpoint()
        return {
            "run": str(run.path),
            "steps": self.state.step,
            "tasks_seen": self.state.tasks_seen,
            "best_success": self.state.best if best else None,
            "best_step": best.step if best else None,
        }
