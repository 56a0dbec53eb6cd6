"""All processes of verl: trainer ranks, rollout servers, agent loops, and the queue between them.

verl's synchronous trainer starts them (roles, resource pool, worker group, servers, weight sync). Its training loop is
not used: `lfo.training` defines a step and calls `lfo.engines.verl.backend`.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import ray
import transfer_queue as tq
from ray.exceptions import RayError, RayTaskError
from ray.util import remove_placement_group
from safetensors import SafetensorError
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainerSync, trainer_base
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.router import get_router_handle

from lfo.engines.verl.config import BASE, sampling_parameters
from lfo.engines.verl.starting import stages
from lfo.engines.verl.worker import DualLoraWorker
from lfo.errors import WorkError
from lfo.model.adapters import POLICY, WORLD_MODEL
from lfo.rollout.row import RolloutRequest
from lfo.types import ReplyScore, Rollout, TrainingSample

POLL_SECONDS = 0.05
RELEASE_SECONDS = 10.0  # Ray releases slots a little later than it reports
LOGS = f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs"
# The messages of torch, and of vLLM if less memory is free than configured or too little for its cache.
OUT_OF_MEMORY = ("CUDA out of memory", "Free memory on device", "No available memory for the cache blocks")
ALIVE_SECONDS = 5.0  # how often to check, while waiting, that the processes are alive


class _Processes(PPOTrainerSync):
    """verl's trainer with our worker and without a dataset: each step draws tasks from the environment."""

    def _init_dataloader(self) -> None:
        self.total_training_steps = self.config.trainer.total_training_steps

    def _init_resource_pool_mgr(self) -> None:
        super()._init_resource_pool_mgr()
        for role in (Role.ActorRollout, Role.ActorRolloutRef, Role.Actor):
            if role in self.role_worker_mapping:
                self.role_worker_mapping[role] = ray.remote(DualLoraWorker)
        stages.begin("trainer ranks")

    def on_init_end(self) -> None:
        stages.begin("weights for the servers")
        super().on_init_end()


class _Servers(LLMServerManager):
    """verl's servers, registered at a load balancer that was started before them: see `Cluster`."""

    balancer: Any = None

    async def _init_global_load_balancer(self) -> None:
        self.global_load_balancer = self.balancer
        await self.balancer.add_servers.remote(dict(zip(self.server_addresses, self.server_handles, strict=True)))


class Cluster:
    """The operations of verl that the training loop needs.

    Every process needs seconds for its imports. So the parts without a model (the queue, the load balancer, the agent
    loops) start in parallel with the trainer and its servers, not after them.
    """

    def __init__(self, config: Any) -> None:
        self._config = config
        self._own_queue = not _queue_runs()
        options = config.actor_rollout_ref.rollout
        self._balancer: Any = get_router_handle(
            servers={}, router_config_path=options.router_config_path, full_determinism=options.full_determinism
        )
        self._client: Any = LLMServerClient(config=config, load_balancer_handle=self._balancer)
        beside = ThreadPoolExecutor(1)
        loops = beside.submit(self._start_loops)
        beside.shutdown(wait=False)
        self._processes: Any = cast(Any, _Processes)(config)  # the decorator makes verl's class concrete
        _Servers.balancer = self._balancer
        trainer_base.LLMServerManager = _Servers
        try:
            self._processes.init()
        except ValueError as error:  # too few GPUs, mostly
            raise WorkError(f"verl cannot start its processes: {error}") from error
        self._workers = self._processes.actor_rollout_wg
        stages.begin("agent loops")
        self._loops: Any = loops.result()

    def _start_loops(self) -> Any:
        tq.init(self._config.transfer_queue)  # joins the queue of this Ray session, if there is one
        loops: Any = AgentLoopManagerTQ.create(
            config=self._config, llm_client=self._client, teacher_client=None, reward_loop_worker_handles=[]
        )
        _await_all(loops.agent_loop_workers)
        return loops

    def close(self) -> None:
        """End all processes and release their slots, so that another run can follow in the same Ray session."""
        servers = [
            server for replica in self._processes.llm_server_manager.get_replicas() for server in replica.servers
        ]
        for actor in (*self._loops.agent_loop_workers, self._balancer, *servers, *self._workers.workers):
            ray.kill(actor)
        pools = self._processes.resource_pool_manager.resource_pool_dict.values()
        for pool in pools:
            for group in pool.pgs or ():
                remove_placement_group(group)
        if self._own_queue:
            tq.close()
        taken = sum(pool.world_size for pool in pools)
        deadline = time.monotonic() + RELEASE_SECONDS
        while ray.available_resources().get("GPU", 0) < taken and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    # --- rollouts ----------------------------------------------------------------------------------------------

    def roll_out(
        self,
        requests: Sequence[RolloutRequest],
        *,
        step: int,
        temperature: float | None,
        untrained: bool,
        tools: Sequence[str] | None,
    ) -> list[Rollout]:
        """Return one rollout for each request, in order; requests of one task must be next to each other."""
        greedy = temperature == 0
        groups = [list(group) for _, group in itertools.groupby(requests, key=lambda request: id(request.task))]
        names = [uuid.uuid4().hex for _ in groups]
        partition = "val" if greedy else "train"
        prompts = tu.get_tensordict(
            {
                "uid": names,
                "index": list(range(len(groups))),
                "task": [group[0].task for group in groups],
                "seeds": [[list(request.seeds) for request in group] for group in groups],
                "blind": [[request.blind for request in group] for group in groups],
                "imagine": [[request.imagine for request in group] for group in groups],
                "picks": [[request.picks for request in group] for group in groups],
                "inquiry": [[request.inquiry for request in group] for group in groups],
                "adapter": [[BASE if untrained or each.untrained else POLICY for each in group] for group in groups],
                "untrained": [[request.untrained for request in group] for group in groups],
                "feedback": [[msgspec.to_builtins(request.feedback) for request in group] for group in groups],
                "looks_ahead": [not untrained] * len(groups),
                "tools": [tools] * len(groups),
                "temperature": [temperature] * len(groups),
                "__rollout_n__": [len(group) for group in groups],
            },
            non_tensor_dict={"global_steps": step, "validate": greedy},
        )
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in names]
        tq.kv_batch_put(keys=names, partition_id=partition, tags=tags)
        self._loops.generate_sequences(prompts)
        self._await(names, partition)
        members = [(name, member) for name, group in zip(names, groups, strict=True) for member in range(len(group))]
        keys = [f"{name}_{member}_0" for name, member in members]
        fields = tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=["rollout"])
        rollouts = [msgspec.convert(getattr(each, "data", each), Rollout) for each in fields["rollout"]]
        tq.kv_clear(keys=[*names, *keys], partition_id=partition)
        return rollouts

    def _await(self, names: Sequence[str], partition: str) -> None:
        """Wait for all rollouts of these prompts; a loop that fails writes the reason to its log."""
        looked = time.monotonic()
        while True:
            tags = (tq.kv_list(partition) or {}).get(partition, {})
            states = [tags[name]["status"] for name in names]
            if "failure" in states:
                raise Lost("a rollout could not be played: its server or its agent loop failed")
            if all(state == "finished" for state in states):
                return
            if time.monotonic() - looked > ALIVE_SECONDS:
                _await_all(self._loops.agent_loop_workers)
                looked = time.monotonic()
            time.sleep(POLL_SECONDS)

    def complete(
        self, prompts: Sequence[Sequence[int]], uniforms: Sequence[Sequence[float]] | None, *, limit: int
    ) -> list[tuple[int, ...]]:
        """Return what the world model writes after each prompt, greedy or sampled, in at most `limit` tokens."""
        server = self._config.actor_rollout_ref.rollout.name

        async def ask(prompt: Sequence[int], numbers: Sequence[float]) -> tuple[int, ...]:
            parameters = sampling_parameters(
                server,
                limit=limit,
                temperature=float(bool(numbers)),
                uniforms=numbers,
                repeatable=self._config.actor_rollout_ref.rollout.full_determinism,
            )
            output = await self._client.generate(
                uuid.uuid4().hex, prompt_ids=list(prompt), sampling_params=parameters, adapter=WORLD_MODEL
            )
            return tuple(output.token_ids)

        async def everybody() -> list[tuple[int, ...]]:
            rows = [()] * len(prompts) if uniforms is None else uniforms
            return await asyncio.gather(*map(ask, prompts, map(tuple, rows)))

        return asyncio.run(everybody())

    @property
    def trusts_servers(self) -> bool:
        """Whether training uses the log-probs of the servers (verl's bypass mode)."""
        return bool(self._config.algorithm.rollout_correction.bypass_mode)

    # --- learning ----------------------------------------------------------------------------------------------

    def learn(
        self, samples: Sequence[TrainingSample], *, world_model_weight: float, rate_factor: float
    ) -> dict[str, float]:
        return self._workers.learn(ray.put(list(samples)), world_model_weight, rate_factor)[0]

    def policy_logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        return self._workers.policy_logprobs(ray.put(list(samples)))[0]

    def reply_scores(self, samples: Sequence[TrainingSample]) -> list[ReplyScore]:
        return self._workers.reply_scores(ray.put(list(samples)))[0]

    def before_learning(self) -> None:
        """Let the servers release the memory that training needs."""
        self._processes.checkpoint_manager.sleep_replicas()

    def after_learning(self, step: int) -> None:
        """Send the new weights to the servers."""
        self._processes.checkpoint_manager.update_weights(step)

    def save(self, folder: str) -> None:
        with _as_if_here():
            self._workers.save_checkpoint(folder)

    def save_adapters(self, folder: str) -> None:
        with _as_if_here():
            self._workers.save_adapters(folder)

    def load(self, folder: str) -> None:
        self._workers.load_checkpoint(folder)


def _await_all(actors: Sequence[Any]) -> None:
    """Wait for the results; raise if a process is lost."""
    ray.get([actor.__ray_ready__.remote() for actor in actors])


def _queue_runs() -> bool:
    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:
        return False
    return True


class Lost(WorkError):
    """A process was lost; the run can be resumed from its last checkpoint."""


@contextmanager
def _as_if_here() -> Iterator[None]:
    """Raise a disk error of another process here, where `lfo.rundir` turns it into one sentence."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, OSError | SafetensorError):
            raise error.cause from error
        raise


@contextmanager
def in_one_sentence(resume: str) -> Iterator[None]:
    """Turn the exception of a lost or failed process into a `WorkError` that says how to continue."""
    way_on = f"continue from the last checkpoint with: lfo train --resume {resume}"
    try:
        yield
    except Lost as error:
        raise WorkError(f"{error}; {way_on}") from error
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, WorkError):
            raise cause from error
        if any(words in str(error) for words in OUT_OF_MEMORY):
            raise WorkError(
                "the GPU is out of memory: lower verl.actor_rollout_ref.rollout.gpu_memory_utilization or "
                f"micro_batch_tokens (lfo plan counts what fits); {way_on} and the lower values"
            ) from error
        (reason, *_) = [*str(cause or error).strip().splitlines(), ""]
        raise WorkError(
            f"a process of the run was lost or failed ({type(cause or error).__name__}: {reason[:200]}); "
            f"its log lies in {LOGS}; {way_on}"
        ) from error
