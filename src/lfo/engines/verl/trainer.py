"""The training loop on verl: the local engine's steps, with rollouts, updates and weights in other processes.

    lfo train engine=verl preset=tiny steps=30 output_dir=runs/x
    create_trainer(config, environment, tokenizer, engine="verl").fit()

The driver draws tasks, turns rewards into rows and writes the run's folder; it holds no model. Run folder, metrics and
checkpoints are those of the local engine.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import os
import sys
import tempfile
import time
import uuid
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from transformers import PreTrainedTokenizerBase

from lfo.config import RunConfig, validate
from lfo.engines.loop import SAMPLE_ROLLOUTS, Clock, run_steps
from lfo.engines.recipe import Plan, Recipe
from lfo.engines.trackers import require_trackers
from lfo.engines.verl.settings import SAMPLER, is_cpu, prepare_environment, verl_config
from lfo.engines.world_model_eval import WorldModelExamination
from lfo.env.interface import EnvironmentFactory
from lfo.errors import ConfigError, WorkError
from lfo.evaluation.balance import gradient_balance
from lfo.evaluation.success import rollout_metrics
from lfo.model.adapters import POLICY, WORLD_MODEL
from lfo.protocol.world_model import WorldModelCodec, WorldModelState
from lfo.rollout.records import rollout_record
from lfo.rollout.runner import RolloutRequest, RunnerSettings, refuse_dead_environment
from lfo.rundir import Checkpoint, RunDirectory
from lfo.types import Rollout, ToolCall, TrainingSample

CHECKED_ROWS = 4  # rows of each step whose sampled log-probs are compared with the trainer's
LARGEST_GAP = 1e-3  # in fp32; a server with other weights than the trainer's is far beyond


class Trainer:
    """Made by `create_trainer`; processes start in `fit` and end with it."""

    def __init__(self, config: RunConfig, environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase) -> None:
        validate(config)
        require_trackers(config)
        if config.lookahead_source in ("shuffled", "memory"):
            raise ConfigError(
                f"lookahead_source={config.lookahead_source} needs all rollouts of a step in one process: "
                "use engine=local"
            )
        prepare_environment(config)
        self.config = config
        self.environment = environment
        self.tokenizer = tokenizer
        self.codec = WorldModelCodec(tokenizer, state_tokens=config.world_model.state_tokens)

    def fit(self, *, resume: bool = False) -> dict[str, Any]:
        """Train to the last step; answers a summary."""
        from lfo.engines.verl.cluster import in_one_sentence

        verl_config(self.config)  # settings that verl refuses leave no folder behind
        with RunDirectory.create(self.config.output_dir, self.config, resume=resume) as run:
            return in_one_sentence(lambda: self._fit(run, resume), str(run.path))

    def _fit(self, run: RunDirectory, resume: bool) -> dict[str, Any]:
        with self._cluster() as cluster:
            return run_steps(_RemoteSteps(self, cluster), run, self.environment, resume=resume)

    @contextmanager
    def _cluster(self) -> Iterator[Any]:
        """All processes of a run, which end with it, however it ends."""
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            config = runnable(verl_config(self.config, tokenizer=folder), self.config, self.environment)
            import ray

            from lfo.engines.verl.cluster import Cluster

            started_here = not ray.is_initialized()
            if started_here:
                start_ray(config)
            cluster = None
            try:
                with redirect_stdout(sys.stderr):  # verl talks while it starts; our own answer goes to stdout
                    cluster = Cluster(config)
                yield cluster
            finally:
                if cluster is not None:
                    cluster.close()
                if started_here:
                    ray.shutdown()


def runnable(tree: DictConfig, config: RunConfig, environment: EnvironmentFactory) -> DictConfig:
    """verl's config with what cannot be printed: the environment itself, and the name of this run's servers."""
    with open_dict(tree):
        tree.lfo = OmegaConf.create({"environment": environment}, flags={"allow_objects": True})
        tree.actor_rollout_ref.rollout.engine_kwargs[SAMPLER] = {"servers": f"lfo-{uuid.uuid4().hex[:12]}"}
    OmegaConf.resolve(tree)
    return tree


def start_ray(config: DictConfig) -> None:
    """Ray on this machine, or, with `verl.ray_kwargs.ray_init.address=auto`, the cluster that runs here."""
    import ray

    options: dict[str, Any] = OmegaConf.to_container(config.ray_kwargs.ray_init, resolve=True)  # pyright: ignore
    names = (
        "VERL_USE_EXTERNAL_MODULES",
        "VERL_PLATFORM",
        "VERL_LOGGING_LEVEL",
        "TQ_LOGGING_LEVEL",
        "TOKENIZERS_PARALLELISM",
    )
    variables = {name: os.environ[name] for name in names if name in os.environ}
    variables |= {"TRANSFER_QUEUE_ENABLE": "1", "PYTHONWARNINGS": "ignore"}
    if config.trainer.device == "cpu":
        ranks = config.trainer.n_gpus_per_node * config.trainer.nnodes
        variables["OMP_NUM_THREADS"] = "1"
        if not options.get("address"):
            options["num_gpus"] = ranks  # slots, not devices
            options["num_cpus"] = 8 * ranks + 8
    runtime = options.pop("runtime_env", None) or {}
    runtime["env_vars"] = variables | dict(runtime.get("env_vars", {}))
    options.setdefault("log_to_driver", False)
    ray.init(**{key: value for key, value in options.items() if value is not None}, runtime_env=runtime)


@dataclass(frozen=True, kw_only=True, slots=True)
class _RemoteModel:
    world_model_adapters: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class _RemoteAgent:
    """As much of an `Agent` as an examination of the world model needs."""

    config: RunConfig
    environment: EnvironmentFactory
    settings: RunnerSettings
    world_model_codec: WorldModelCodec
    model: _RemoteModel
    cluster: Any

    def predict(self, questions: Sequence[tuple[WorldModelState, ToolCall]]) -> list[str]:
        prompts = [self.world_model_codec.prompt_ids(state, call) for state, call in questions]
        limit = self.config.world_model.reply_tokens
        room = self.config.rollout.max_context - limit
        answers = self.cluster.complete([prompt[-room:] for prompt in prompts], limit=limit)
        return [self.world_model_codec.decode(answer) for answer in answers]


class _RemoteExamination(WorldModelExamination):
    def _untrained_rollouts(self, tasks: Sequence[Any]) -> list[Rollout]:
        requests = [RolloutRequest(task=task, seeds=(0, place), blind=True) for place, task in enumerate(tasks)]
        heard = self._agent.cluster.roll_out(requests, step=0, adapter="base")  # pyright: ignore
        return [each.rollout for each in heard]


class _RemoteSteps:
    """The steps of one run on a running cluster."""

    def __init__(self, trainer: Trainer, cluster: Any) -> None:
        config = self.config = trainer.config
        self.environment = trainer.environment
        self.cluster = cluster
        stacked, shared = config.coupling == "stacked", config.coupling == "shared"
        has_world_model = config.algo == "dual-lora" or stacked
        self.recipe = Recipe(
            config,
            trainer.environment,
            trainer.codec,
            policy_adapters=(WORLD_MODEL, POLICY) if stacked else (POLICY,),
            world_model_adapters=((POLICY,) if shared else (WORLD_MODEL,)) if has_world_model else (),
            mean_losses=self._mean_losses,
        )
        settings = RunnerSettings(
            environment_timeout=config.rollout.environment_timeout,
            environment_retries=config.rollout.environment_retries,
            environment_workers=config.rollout.environment_workers,
        )
        agent: Any = _RemoteAgent(
            config=config,
            environment=trainer.environment,
            settings=settings,
            world_model_codec=trainer.codec,
            model=_RemoteModel(world_model_adapters=self.recipe.world_model_adapters),
            cluster=cluster,
        )
        self.examination = _RemoteExamination(agent, cluster)

    def _mean_losses(self, samples: Sequence[TrainingSample]) -> list[float]:
        return [score.loss / score.tokens for score in self.cluster.reply_scores(samples)] if samples else []

    def step(self, step: int) -> dict[str, Any]:
        """One step of training: rollouts, then updates; answers its row of metrics."""
        clock = Clock()
        with clock("rollout"):
            collected = self.recipe.collect(step, lambda requests: self._roll_out(requests, step))
        with clock("examples"):
            heard = self.recipe.hear(collected.groups)
        with clock("update"):
            self.cluster.before_learning()
            plan = self.recipe.plan(step, collected, heard)
            watched = self._check_logprobs(plan)
            watched |= self._update(plan if self.cluster.trusts_servers else self._with_own_logprobs(plan))
        with clock("sync"):
            self.cluster.after_learning(step + 1)
        row = self.recipe.row(step, collected)
        return {
            **row,
            **watched,
            **gradient_balance({**row, **watched}),
            "tokens_per_second": row["sampled_tokens"] / max(clock.seconds["rollout"], 1e-9),
            **{f"seconds/{name}": seconds for name, seconds in clock.seconds.items()},
        }

    def _roll_out(self, requests: Sequence[RolloutRequest], step: int) -> list[Rollout]:
        return [heard.rollout for heard in self.cluster.roll_out(requests, step=step)]

    def _update(self, plan: Plan) -> dict[str, float]:
        watched: dict[str, list[float]] = defaultdict(list)
        for samples in plan.mini_batches:
            if not samples:
                continue
            seen = self.cluster.learn(samples, weight=plan.weight, rate_factor=plan.rate_factor)
            for name, value in seen.items():
                watched[name].append(value)
        return {name: fmean(values) for name, values in watched.items()}

    def _check_logprobs(self, plan: Plan) -> dict[str, float]:
        """How far the servers' log-probs lie from the trainer's, before anything is trained: nothing else would tell
        that rollouts were sampled with an old or a wrong adapter."""
        rows = [row for samples in plan.mini_batches for row in samples if any(row.policy_weights)][:CHECKED_ROWS]
        if not rows:
            return {}
        gap = logprob_gap(rows, self.cluster.policy_logprobs(rows))
        if is_cpu(self.config) and gap > LARGEST_GAP:
            raise WorkError(
                f"rollouts were sampled with other weights than the trainer's: log-probs differ by {gap:.3g}, "
                f"more than {LARGEST_GAP:g}"
            )
        return {"logprob_gap": gap}

    def _with_own_logprobs(self, plan: Plan) -> Plan:
        """The plan with the trainer's log-probs in place of the servers', where those compute in another precision."""
        rows = [row for samples in plan.mini_batches for row in samples if any(row.policy_weights)]
        own = dict(zip(map(id, rows), self.cluster.policy_logprobs(rows) if rows else (), strict=True))
        return replace(
            plan,
            mini_batches=[
                [replace(row, logprobs=own[id(row)]) if id(row) in own else row for row in samples]
                for samples in plan.mini_batches
            ],
        )

    def evaluate(self, run: RunDirectory, splits: Sequence[str]) -> dict[str, Any]:
        """Greedy success on the fixed tasks of each split, and what the world model expects after held-out calls."""
        started, config = time.monotonic(), self.config
        row: dict[str, Any] = {}
        records: list[dict[str, Any]] = []
        for split in splits:
            tasks = self.recipe.known_tasks(split)[: config.eval.tasks]
            requests = [RolloutRequest(task=task, seeds=(0,), blind=not config.lookahead) for task in tasks]
            heard = self.cluster.roll_out(requests, step=self.recipe.state.step, greedy=True)
            rollouts = [each.rollout for each in heard]
            refuse_dead_environment(rollouts)
            metrics = rollout_metrics(rollouts)
            if config.lookahead and config.lookahead_source != "truth":
                metrics["lookahead_accuracy"] = _mean_accuracy(heard)
            row |= {f"eval/{split}/{name}": value for name, value in metrics.items()}
            records += [{"split": split, **rollout_record(rollout)} for rollout in rollouts[:SAMPLE_ROLLOUTS]]
        run.write_rollouts(self.recipe.state.step, records)
        if self.recipe.learns_to_predict:
            metrics, predictions = self.examination.run()
            row |= metrics
            if predictions:
                run.write_predictions(self.recipe.state.step, predictions)
        row["seconds/eval"] = time.monotonic() - started
        return row

    # --- checkpoints -------------------------------------------------------------------------------------------

    def save(self, folder: Path) -> None:
        self.cluster.save(str(folder.absolute()))
        self.recipe.save(folder)

    def save_agent(self, folder: Path) -> None:
        self.cluster.save_adapters(str(folder.absolute()))

    def load(self, checkpoint: Checkpoint) -> None:
        self.cluster.load(str(checkpoint.path.absolute()))
        self.recipe.load(checkpoint.path)
        self.cluster.before_learning()
        self.cluster.after_learning(checkpoint.step)


def logprob_gap(samples: Sequence[TrainingSample], logprobs: Sequence[Sequence[float]]) -> float:
    """The largest difference between sampled and given log-probs on tokens that train the policy."""
    return max(
        abs(sampled - mine)
        for sample, row in zip(samples, logprobs, strict=True)
        for sampled, mine, weight in zip(sample.logprobs, row, sample.policy_weights, strict=True)
        if weight
    )


def _mean_accuracy(heard: Sequence[Any]) -> float | None:
    """Over all questions that look-ahead asked; None where nobody can tell."""
    told = [(each.asked, each.lookahead_accuracy) for each in heard if each.lookahead_accuracy is not None]
    return sum(asked * accuracy for asked, accuracy in told) / sum(asked for asked, _ in told) if told else None
