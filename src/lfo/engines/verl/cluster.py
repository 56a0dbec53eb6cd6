"""All processes of verl: trainer ranks, rollout servers, agent loops, and the queue between them.

verl's synchronous trainer starts them (roles, resource pool, worker group, servers, weight sync). Its training loop is
not used: `lfo.train.loop` defines a step and calls `lfo.engines.verl.backend`.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false, reportPrivateImportUsage=false

from __future__ import annotations

import asyncio
import itertools
import os
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Thread
from typing import Any, cast

import msgspec
import ray
import transfer_queue as tq
from ray.util import remove_placement_group
from transfer_queue import interface as queue
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.utils import Role
from verl.trainer.ppo.v1 import AgentLoopManagerTQ, PPOTrainerSync, trainer_base
from verl.utils import tensordict_utils as tu
from verl.workers.rollout.llm_server import LLMServerClient, LLMServerManager
from verl.workers.rollout.router import get_router_handle

from lfo.engines.verl.config import sampling_parameters
from lfo.engines.verl.failures import Lost, as_if_here
from lfo.engines.verl.places import places_of
from lfo.engines.verl.starting import stages
from lfo.engines.verl.worker import DualLoraWorker
from lfo.errors import WorkError
from lfo.model.adapters import WORLD_MODEL
from lfo.play.episode import RolloutRequest
from lfo.types import ReplyScore, Rollout, TrainingSample

POLL_SECONDS = 0.05
RELEASE_SECONDS = 10.0  # how long to wait at the end for parts that are still starting, and for Ray's slots
SERVERS = {"vllm": "rollout servers: vLLM loads the base, compiles and captures graphs"}
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
        stages.begin("trainer ranks, and the processes of the servers")

    def on_init_end(self) -> None:
        stages.begin("weights for the servers")
        super().on_init_end()


class _Servers(LLMServerManager):
    """verl's servers, registered at a load balancer that was started before them: see `Cluster`."""

    balancer: Any
    rollout_replicas: Sequence[Any] = ()

    async def start(self) -> None:
        await self._initialize_llm_servers()
        await self._init_global_load_balancer()

    async def _init_global_load_balancer(self) -> None:
        self.global_load_balancer = self.balancer
        await self.balancer.add_servers.remote(dict(zip(self.server_addresses, self.server_handles, strict=True)))


class _Together:
    """Start ranks and servers at the same time; verl starts the servers after the ranks.

    `Cluster` installs this object in verl's trainer in place of two classes: the trainer calls `begin` to create its
    worker group, and later `create` to create its servers.
    """

    def __init__(self, config: Any, balancer: Any) -> None:
        self._config, self._balancer = config, balancer
        self._ranks_loaded: Future[None] = Future()
        self._servers: Any = None
        self._servers_started: Future[None] = Future()
        self.ranks: Sequence[Any] = ()

    def begin(self, *, resource_pool: Any, ray_cls_with_init: Any, **options: Any) -> RayWorkerGroup:
        """Start the processes of ranks and servers; return the worker group of the ranks."""
        places = places_of(resource_pool, options["device_name"])
        group: Any = RayWorkerGroup(
            resource_pool=resource_pool,
            ray_cls_with_init=ray_cls_with_init,
            master_addr=places[0].address,  # else verl asks a process that first imports all of verl
            master_port=places[0].port,
            **options,
        )
        self.ranks = group.workers
        group.places, group.loaded = places, self._ranks_loaded
        self._servers = _Servers(self._config, worker_group=group)
        self._servers.balancer = self._balancer
        self._servers_started = _beside(asyncio.run, self._servers.start())
        return group

    def create(self, **_: Any) -> LLMServerManager:
        """Wait for the servers. verl calls this when the ranks have loaded their base."""
        with suppress(InvalidStateError):  # cancelled, because a server failed; `result` below raises its error
            self._ranks_loaded.set_result(None)
        stages.begin(SERVERS.get(self._config.actor_rollout_ref.rollout.name, "rollout servers"))
        self._servers_started.result()
        return self._servers

    def servers(self) -> list[Any]:
        replicas = () if self._servers is None else self._servers.rollout_replicas
        return [server for replica in replicas for server in replica.servers]

    def end(self) -> None:
        """Kill ranks and servers, also after a start that failed half-way, whose servers may wait for the ranks."""
        self._ranks_loaded.cancel()
        for actor in (*self.servers(), *self.ranks):
            ray.kill(actor)
        if self._servers is not None:
            wait([self._servers_started], RELEASE_SECONDS)
            for late in self.servers():  # a server that was created after the first loop
                ray.kill(late)


class Cluster:
    """The operations of verl that the training loop needs.

    Every process needs seconds for its imports. So the parts without a model (the queue, the load balancer, the agent
    loops) start in parallel with the trainer and its servers, and these in parallel with each other.
    """

    logs = f"{os.environ.get('RAY_TMPDIR', '/tmp')}/ray/session_latest/logs"  # until the session is known

    def __init__(self, config: Any) -> None:
        Cluster.logs = _logs_of_this_session()
        self._config = config
        self._own_queue = not _queue_runs()
        self._processes: Any = cast(Any, _Processes)(config)  # the decorator makes verl's class concrete
        options = config.actor_rollout_ref.rollout
        self._balancer: Any = get_router_handle(
            servers={}, router_config_path=options.router_config_path, full_determinism=options.full_determinism
        )
        # From here on there is a process, so whatever fails must lead to `close`.
        self._together = _Together(config, self._balancer)
        trainer_base.RayWorkerGroup, trainer_base.LLMServerManager = self._together.begin, self._together
        self._loops_started: Future[Any] = _beside(self._start_loops)
        try:
            self._processes.init()
            self._workers = self._processes.actor_rollout_wg
            stages.begin("agent loops")
            self._loops: Any = self._loops_started.result()
        except BaseException as error:
            stages.end(failed=True)
            with suppress(Exception):  # the first error is reported
                self.close()
            if isinstance(error, ValueError):  # too few GPUs, mostly
                raise WorkError(f"verl cannot start its processes: {error}") from error
            raise

    def _start_loops(self) -> Any:
        self._client: Any = LLMServerClient(config=self._config, load_balancer_handle=self._balancer)
        tq.init(self._config.transfer_queue)  # joins the queue of this Ray session, if there is one
        loops: Any = AgentLoopManagerTQ.create(
            config=self._config, llm_client=self._client, teacher_client=None, reward_loop_worker_handles=[]
        )
        ray.get([worker.__ray_ready__.remote() for worker in loops.agent_loop_workers])
        return loops

    def close(self) -> None:
        """End all processes and release their slots, so that another run can follow in the same Ray session.

        It also ends the processes of a start that failed half-way.
        """
        for actor in (self._balancer, *self._loop_workers()):
            ray.kill(actor)
        self._together.end()
        manager = getattr(self._processes, "resource_pool_manager", None)
        pools = () if manager is None else manager.resource_pool_dict.values()
        for pool in pools:
            for group in pool.pgs or ():
                remove_placement_group(group)
        if self._own_queue:
            tq.close()
        taken = sum(pool.world_size for pool in pools if pool.pgs)
        deadline = time.monotonic() + RELEASE_SECONDS
        while ray.available_resources().get("GPU", 0) < taken and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)

    def _loop_workers(self) -> Sequence[Any]:
        """Return the agent-loop workers; if they are still starting, wait for them a little."""
        wait([self._loops_started], RELEASE_SECONDS)
        if not self._loops_started.done() or self._loops_started.exception():
            return ()
        return self._loops_started.result().agent_loop_workers

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
                "requests": [[msgspec.to_builtins(replace(each, task=None)) for each in group] for group in groups],
                "looks_ahead": [not untrained] * len(groups),
                "tools": [tools] * len(groups),
                "temperature": [temperature] * len(groups),
                "__rollout_n__": [len(group) for group in groups],
            },
            non_tensor_dict={"global_steps": step, "validate": greedy},
        )
        tags = [{"is_prompt": True, "status": "pending", "global_steps": step} for _ in names]
        self._queued(tq.kv_batch_put, keys=names, partition_id=partition, tags=tags)
        self._loops.generate_sequences(prompts)
        self._await(names, partition)
        members = [(name, member) for name, group in zip(names, groups, strict=True) for member in range(len(group))]
        keys = [f"{name}_{member}_0" for name, member in members]
        fields = self._queued(tq.kv_batch_get, keys=keys, partition_id=partition, select_fields=["rollout"])
        rollouts = [msgspec.convert(getattr(each, "data", each), Rollout) for each in fields["rollout"]]
        self._queued(tq.kv_clear, keys=[*names, *keys], partition_id=partition)
        return rollouts

    def _queued(self, call: Any, **options: Any) -> Any:
        """Call the queue. Its calls have no time limit, not even if it is dead, so check meanwhile that it is alive."""
        answer = _beside(partial(call, **options))
        while not wait([answer], ALIVE_SECONDS).done:
            self._check_alive()
        return answer.result()

    def _check_alive(self) -> None:
        """Raise Ray's error if an agent loop or a process of the queue is dead. One that is busy may answer later."""
        actors = (*self._loops.agent_loop_workers, *_queue_actors())
        asked = [actor.__ray_ready__.remote() for actor in actors]
        answered, _ = ray.wait(asked, num_returns=len(asked), timeout=ALIVE_SECONDS)
        ray.get(answered)

    def _await(self, names: Sequence[str], partition: str) -> None:
        """Wait for all rollouts of these prompts; a loop that fails writes the reason to its log."""
        looked = time.monotonic()
        while True:
            tags = (self._queued(tq.kv_list, partition_id=partition) or {}).get(partition, {})
            states = [tags[name]["status"] for name in names]
            if "failure" in states:
                raise Lost("a rollout could not be played: its server or its agent loop failed")
            if all(state == "finished" for state in states):
                return
            if time.monotonic() - looked > ALIVE_SECONDS:
                self._check_alive()
                looked = time.monotonic()
            time.sleep(POLL_SECONDS)

    def complete(self, prompts: Sequence[Sequence[int]], *, limit: int, ends: Sequence[int]) -> list[tuple[int, ...]]:
        """Return what the world model writes after each prompt, up to one of the tokens `ends` or to `limit` tokens."""
        server = self._config.actor_rollout_ref.rollout.name

        async def ask(prompt: Sequence[int]) -> tuple[int, ...]:
            parameters = sampling_parameters(server, limit=limit, temperature=0.0, uniforms=(), ends=ends)
            output = await self._client.generate(
                uuid.uuid4().hex, prompt_ids=list(prompt), sampling_params=parameters, adapter=WORLD_MODEL
            )
            return tuple(output.token_ids)

        async def everybody() -> list[tuple[int, ...]]:
            return await asyncio.gather(*map(ask, prompts))

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
        with as_if_here():
            self._workers.save_checkpoint(folder)

    def save_adapters(self, folder: str) -> None:
        with as_if_here():
            self._workers.save_adapters(folder)

    def load(self, folder: str) -> None:
        self._workers.load_checkpoint(folder)


def _beside(work: Any, *arguments: Any) -> Future[Any]:
    """Run `work` in its own thread; return the future of its result.

    The thread is a daemon: it may wait for a dead process, and must not keep this one alive.
    """
    done: Future[Any] = Future()

    def run() -> None:
        try:
            done.set_result(work(*arguments))
        except BaseException as error:
            done.set_exception(error)

    Thread(target=run, daemon=True).start()
    return done


def _queue_actors() -> list[Any]:
    """Return the processes of the queue; storage is known only if this process started the queue."""
    storage = (queue._TQ_STORAGE or {}).get("SimpleStorage", {})
    return [queue._TQ_CONTROLLER, *storage.values()]


def _logs_of_this_session() -> str:
    return cast(Any, ray)._private.worker.global_worker.node.get_logs_dir_path()


def _queue_runs() -> bool:
    try:
        ray.get_actor("TransferQueueController", namespace="transfer_queue")
    except ValueError:
        return False
    return True
