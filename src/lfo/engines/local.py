"""Training in one process, on a CPU or one GPU: the steps that `loop` runs.

    lfo train preset=tiny algo=dual-lora steps=60 output_dir=runs/x
    create_trainer(config, environment, tokenizer).fit()

One step: draw tasks, run a group of rollouts for each, keep every reply for the world model, turn rewards into
advantages, update both adapters mini-batch by mini-batch, refresh the sampler. All randomness is named by (seed,
step, ...), so a run that was killed goes on exactly as it would have.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lfo.agent import MEMORY, adapters_of, build_agent
from lfo.config import RunConfig, to_yaml, validate
from lfo.engines.loop import SAMPLE_ROLLOUTS, Clock, run_steps
from lfo.engines.recipe import Collected, Plan, Recipe
from lfo.engines.trackers import require_trackers
from lfo.engines.world_model_eval import WorldModelExamination
from lfo.env.interface import EnvironmentFactory
from lfo.errors import WorkError
from lfo.evaluation.balance import gradient_balance
from lfo.evaluation.fixed_tasks import evaluate_tasks, lookahead_accuracy
from lfo.evaluation.success import rollout_metrics
from lfo.loading import environment_factory, load_base, load_tokenizer, naming_environment, pick_device
from lfo.model.learner import Learner
from lfo.protocol.world_model import observed_calls
from lfo.rollout.records import rollout_record
from lfo.rollout.runner import RolloutRequest, refuse_dead_environment
from lfo.rundir import Checkpoint, RunDirectory
from lfo.types import Rollout, RolloutGroup


def train(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Run an experiment from names alone; what `lfo train` calls."""
    return create_trainer(config, environment_factory(config), load_tokenizer(config.model)).fit(resume=resume)


def config_text(config: RunConfig) -> str:
    """The whole config of a run, as YAML; what `lfo train --print-config` shows."""
    return to_yaml(config)


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


class Trainer:
    def __init__(
        self, config: RunConfig, environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase, base: Any
    ) -> None:
        self.config = config
        self.environment = environment
        self.agent = build_agent(config, environment, tokenizer, base)
        self.codec, self.settings, self.predictor = self.agent.codec, self.agent.settings, self.agent.predictor
        self.model, self.sampler = self.agent.model, self.agent.sampler
        if config.init_from:
            self.model.load(adapters_of(Path(config.init_from)))
        self.learner = Learner(self.model, config)
        self.runner = self.agent.runner()
        self.recipe = Recipe(
            config,
            environment,
            self.agent.world_model_codec,
            policy_adapters=self.model.policy_adapters,
            world_model_adapters=self.model.world_model_adapters,
            mean_losses=self.learner.row_losses,
        )
        self.examination = WorldModelExamination(self.agent, self.learner)

    # --- the loop ----------------------------------------------------------------------------------------------

    def fit(self, *, resume: bool = False) -> dict[str, Any]:
        """Train to the last step; answers a summary."""
        with RunDirectory.create(self.config.output_dir, self.config, resume=resume) as run:
            try:
                return run_steps(self, run, self.environment, resume=resume)
            except torch.OutOfMemoryError as error:
                raise WorkError(
                    "the GPU is out of memory; continue from the last checkpoint with --resume and a smaller "
                    "micro_batch_tokens, or when others have left the GPU (`lfo plan` says what takes how much)"
                ) from error

    def step(self, step: int) -> dict[str, Any]:
        """One step of training: rollouts, then updates; answers its row of metrics."""
        clock = Clock()
        with clock("rollout"):
            collected = self.collect(step)
        with clock("examples"):
            self._remember(collected.groups)
            heard = self.recipe.hear(collected.groups)
        with clock("update"):
            watched = self.update(self.recipe.plan(step, collected, heard))
            self.sampler.refresh()
        row = self.recipe.row(step, collected)
        return {
            **row,
            **watched,
            **gradient_balance({**row, **watched}),
            **({} if self.agent.memory is None else {"memory_size": len(self.agent.memory)}),
            "tokens_per_second": row["sampled_tokens"] / max(clock.seconds["rollout"], 1e-9),
            **{f"seconds/{name}": seconds for name, seconds in clock.seconds.items()},
        }

    def collect(self, step: int) -> Collected:
        return self.recipe.collect(step, self.roll_out)

    def roll_out(self, requests: Sequence[RolloutRequest]) -> list[Rollout]:
        rows = self.sampler.session(rows=len(requests), adapters=self.model.policy_adapters)
        return self.runner.run(requests, rows)

    def _remember(self, groups: Sequence[RolloutGroup]) -> None:
        """Keep what look-ahead will ask about, where a memory answers it; evaluation is never remembered.

        Of other calls it would recall as much and take five times as long (docs/LOG.md).
        """
        if self.agent.memory is not None:
            for group in groups:
                for rollout in group.rollouts:
                    self.agent.memory.add(call for call in observed_calls(rollout, predict=None) if call.asked)

    def update(self, plan: Plan) -> dict[str, float]:
        """One optimizer update for each mini-batch; answers the means of what was watched."""
        watched: dict[str, list[float]] = defaultdict(list)
        for samples in plan.mini_batches:
            seen = self.learner.update(samples, weight=plan.weight, rate_factor=plan.rate_factor)
            for name, value in seen.items():
                watched[name].append(value)
        return {name: fmean(values) for name, values in watched.items()}

    # --- evaluation --------------------------------------------------------------------------------------------

    def evaluate(self, run: RunDirectory | None = None, splits: Sequence[str] | None = None) -> dict[str, Any]:
        """Greedy success on the fixed tasks of each split, with look-ahead where the run has it; and what the world
        model expects to hear after the held-out calls."""
        started = time.monotonic()
        row: dict[str, Any] = {}
        records: list[dict[str, Any]] = []
        for split in self.config.eval.splits if splits is None else splits:
            tasks = self.recipe.known_tasks(split)[: self.config.eval.tasks]
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
        if self.recipe.learns_to_predict:
            metrics, predictions = self.examination.run()
            row |= metrics
        if run is not None:
            run.write_rollouts(self.recipe.state.step, records)
            if predictions:
                run.write_predictions(self.recipe.state.step, predictions)
        row["seconds/eval"] = time.monotonic() - started
        return row

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save_agent(self, folder: Path) -> None:
        self.model.save(folder)
        if self.agent.memory is not None:
            self.agent.memory.save(folder / MEMORY)

    def save(self, folder: Path) -> None:
        self.save_agent(folder)
        self.learner.save(folder / "optimizer.safetensors")
        self.recipe.save(folder)

    def load(self, checkpoint: Checkpoint) -> None:
        self.model.load(checkpoint.path)
        if self.agent.memory is not None:
            self.agent.memory.load(checkpoint.path / MEMORY)
        self.learner.load(checkpoint.path / "optimizer.safetensors")
        self.recipe.load(checkpoint.path)
        self.sampler.refresh()
