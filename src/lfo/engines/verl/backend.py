"""Training on verl: rollouts and updates run in other processes.

    lfo train engine=verl preset=tiny steps=30 output_dir=runs/x
    create_trainer(config, environment, tokenizer, engine="verl").fit()

The driver runs `lfo.train.loop` and loads no model. Run folder, metrics and checkpoints are the same as with the local
engine.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import os
import sys
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from statistics import fmean
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict
from transformers import PreTrainedTokenizerBase

from lfo.base_form import with_stored_form
from lfo.config import RunConfig
from lfo.engines.verl.config import SAMPLER, is_cpu, verl_config
from lfo.engines.verl.starting import stages
from lfo.env.answers import tools_of
from lfo.env.interface import EnvironmentFactory, Scripted
from lfo.errors import ConfigError, WorkError
from lfo.model.learner import GAP
from lfo.play import ending_tools
from lfo.play.ending_tools import EndingTools, learns_tools
from lfo.play.episode import RolloutRequest
from lfo.protocol.chat import ChatCodec
from lfo.types import ReplyScore, Rollout, TrainingSample

CHECKED_SAMPLES = 4  # samples of each step whose sampled log-probs are compared with the trainer's
LARGEST_GAP = 1e-3  # in fp32; a server with other weights than the trainer has a far larger gap


class VerlBackend:
    """The `lfo.backend.Backend` on verl's processes, which start and end with `running`."""

    reply_store = None  # a reply store would need all rollouts of a step in one process

    def __init__(
        self, config: RunConfig, make_environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        if config.source.needs_whole_step:
            raise ConfigError(
                f"lookahead_source={config.lookahead_source} needs all rollouts of a step in one process: "
                "use engine=local"
            )
        # Raise for a bad config or chat template now, before a folder exists.
        verl_config(config)
        codec = ChatCodec(tokenizer, tools_of(make_environment()), thinking=config.rollout.thinking)
        self._ends = codec.ends
        self.config = with_stored_form(config, codec)  # the driver has no model that could be probed
        self.make_environment = make_environment
        self.tokenizer = tokenizer
        self.cluster: Any = None
        self._step = 0  # the step whose weights the servers have
        self.ending_tools = EndingTools() if learns_tools(make_environment(), config) else None
        self._scripted = isinstance(make_environment(), Scripted)  # its messages are scripted, not sampled

    @contextmanager
    def running(self, run: Path) -> Iterator[None]:
        """Start all processes of a run and end them with the context, whatever happens."""
        # Below the run folder, which all machines see; the name is one that `RunDirectory` removes after a kill.
        with tempfile.TemporaryDirectory(dir=run.absolute(), prefix=".tokenizer.", suffix=".tmp") as folder:
            self.tokenizer.save_pretrained(folder)
            config = runnable(verl_config(self.config, tokenizer=folder), self.config, self.make_environment)
            if config.actor_rollout_ref.rollout.name == "vllm" and find_spec("vllm") is None:
                raise ConfigError("rollout.name=vllm needs vLLM: pip install 'learn-from-observation[vllm]'")
            import ray  # verl and Ray are optional, and read environment variables when they are imported

            from lfo.engines.verl.cluster import Cluster
            from lfo.engines.verl.failures import in_one_sentence

            started_here = not ray.is_initialized()
            with in_one_sentence(str(run), lambda: Cluster.logs):
                try:
                    if started_here:
                        stages.begin("Ray")
                        start_ray(config)
                    with redirect_stdout(sys.stderr):  # verl prints while it starts; stdout is for our own result
                        self.cluster = Cluster(config)
                    stages.end()
                    yield
                finally:
                    stages.end(failed=True)  # one that has not ended until here
                    if self.cluster is not None:
                        self.cluster.close()
                        self.cluster = None
                    if started_here:
                        ray.shutdown()

    def roll_out(
        self, requests: Sequence[RolloutRequest], *, temperature: float | None = None, untrained: bool = False
    ) -> list[Rollout]:
        tools = None if self.ending_tools is None else self.ending_tools.names
        return self.cluster.roll_out(
            requests, step=self._step, temperature=temperature, untrained=untrained, tools=tools
        )

    def complete(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        limit = self.config.world_model.reply_tokens
        return self.cluster.complete(prompts, limit=limit, ends=self._ends)

    def score(self, samples: Sequence[TrainingSample]) -> list[ReplyScore]:
        return self.cluster.reply_scores(samples) if samples else []

    def learn(
        self, mini_batches: Sequence[Sequence[TrainingSample]], *, world_model_weight: float, rate_factor: float
    ) -> list[dict[str, float]]:
        self.cluster.before_learning()
        checked = [each for samples in mini_batches for each in samples if any(each.policy_weights)]
        checked = checked[:CHECKED_SAMPLES] if self.cluster.trusts_servers else checked
        own = self.cluster.policy_logprobs(checked) if checked else []
        gaps = self._check_logprobs(checked, own)
        if not self.cluster.trusts_servers:
            mini_batches = with_logprobs(mini_batches, checked, own)
        updates = [
            self.cluster.learn(samples, world_model_weight=world_model_weight, rate_factor=rate_factor)
            for samples in mini_batches
            if samples
        ]
        for update in updates:
            update.pop(GAP, None)  # `gaps` has it, measured before the first update
        return [gaps, *updates]

    def _check_logprobs(self, samples: Sequence[TrainingSample], own: Sequence[Sequence[float]]) -> dict[str, float]:
        """Compare the log-probs of servers and trainer before the update. Only this shows whether rollouts were sampled
        with an old or a wrong adapter."""
        if not samples or self._scripted:
            return {}
        gaps = logprob_gaps(samples, own)
        if is_cpu(self.config) and max(gaps) > LARGEST_GAP:
            raise WorkError(
                f"the rollout servers do not have the weights of the trainer: log-probs differ by {max(gaps):.3g}, "
                f"more than {LARGEST_GAP:g}"
            )
        return {"logprob_gap": max(gaps), GAP: fmean(gaps)}

    def sync(self, step: int) -> None:
        self.cluster.after_learning(step)
        self._step = step

    def save(self, folder: Path) -> None:
        self.cluster.save(str(folder.absolute()))
        self._save_tools(folder)

    def save_adapters(self, folder: Path) -> None:
        self.cluster.save_adapters(str(folder.absolute()))
        self._save_tools(folder)

    def _save_tools(self, folder: Path) -> None:
        if self.ending_tools is not None:
            self.ending_tools.save(folder / ending_tools.FILE)

    def load(self, folder: Path) -> None:
        self.cluster.load(str(folder.absolute()))
        if self.ending_tools is not None:
            self.ending_tools.load(folder / ending_tools.FILE)
        self.cluster.before_learning()  # the servers release their memory until the next sync


def runnable(tree: DictConfig, config: RunConfig, make_environment: EnvironmentFactory) -> DictConfig:
    """Add to verl's config what cannot be printed: the environment factory, and the name of this run's servers."""
    with open_dict(tree):
        tree.lfo = OmegaConf.create({"environment": make_environment}, flags={"allow_objects": True})
        tree.actor_rollout_ref.rollout.engine_kwargs[SAMPLER] = {"servers": f"lfo-{uuid.uuid4().hex[:12]}"}
    OmegaConf.resolve(tree)
    return tree


def start_ray(config: DictConfig) -> None:
    """Start Ray on this machine or, with `verl.ray_kwargs.ray_init.address=auto`, connect to the running cluster."""
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
    if not options.get("address") and "RAY_ADDRESS" not in os.environ:
        options["address"] = "local"  # else Ray would join a cluster that somebody has started here
    try:
        ray.init(**{key: value for key, value in options.items() if value is not None}, runtime_env=runtime)
    except ConnectionError as error:
        raise WorkError(
            f"no Ray cluster answers at {options.get('address')}: start one with ray start --head, and set the token "
            "of its nodes in this shell (RAY_AUTH_MODE=token, RAY_AUTH_TOKEN)"
        ) from error


def logprob_gaps(samples: Sequence[TrainingSample], logprobs: Sequence[Sequence[float]]) -> list[float]:
    """Return the differences between sampled and given log-probs, for each token that trains the policy."""
    return [
        abs(sampled - mine)
        for sample, given in zip(samples, logprobs, strict=True)
        for sampled, mine, weight in zip(sample.logprobs, given, sample.policy_weights, strict=True)
        if weight
    ]


def with_logprobs(
    mini_batches: Sequence[Sequence[TrainingSample]],
    changed: Sequence[TrainingSample],
    logprobs: Sequence[Sequence[float]],
) -> list[list[TrainingSample]]:
    """Return the mini-batches with the log-probs of `changed` replaced by `logprobs`."""
    own = dict(zip(map(id, changed), logprobs, strict=True))
    return [
        [replace(each, logprobs=own[id(each)]) if id(each) in own else each for each in samples]
        for samples in mini_batches
    ]
