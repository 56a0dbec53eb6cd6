"""Rollout servers that start in parallel with the trainer's ranks.

The processes of the servers start with the ranks. vLLM's engine starts when the ranks have loaded their base, or at
once if the size of its cache is set, because it then need not measure the free memory. Nothing here imports vLLM; only
the process of a vLLM server does (`vllm.py`), so neither driver nor ranks wait for the import.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from verl.plugin.platform import get_platform
from verl.utils.net_utils import is_valid_ipv6_address
from verl.workers.rollout.replica import RolloutReplica

from lfo.engines.verl.places import Place


class BesideRanks(RolloutReplica):
    """A replica that knows the places of its ranks before they have started, and when they have loaded their base."""

    places: Sequence[Place] = ()
    ranks_loaded: Future[None]

    async def init_hybrid(self, worker_group: Any) -> None:
        first = self.world_size * self.replica_rank
        self.places = worker_group.places[first : first + self.world_size]
        self.ranks_loaded = worker_group.loaded
        await super().init_hybrid(worker_group)

    def at(self, node: str) -> dict[str, Any]:
        """Return Ray's options for a process on this node that sees all devices of it and selects its own."""
        variables = dict.fromkeys(get_platform().ray_noset_envvars(), "1") | get_platform().rollout_env_vars()
        return {
            "num_cpus": 0,
            "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node, soft=False),
            "runtime_env": {"env_vars": variables},
            "max_concurrency": self.max_concurrency,
        }


class VllmServer:
    """The Ray actor of a vLLM server. It passes the calls of verl on to `DualLoraServer`, whose module imports vLLM."""

    def __init__(self, **arguments: Any) -> None:
        from lfo.engines.verl.vllm import DualLoraServer

        self._server = DualLoraServer(**arguments)


def _passed_on(name: str) -> Callable[..., Any]:
    async def call(self: Any, *arguments: Any, **options: Any) -> Any:
        answer = getattr(self._server, name)(*arguments, **options)
        return await answer if inspect.isawaitable(answer) else answer

    call.__name__ = name
    return call


CALLS = (
    *("get_master_address", "launch_server", "get_server_address", "get_rollout_config"),
    *("generate", "abort_request", "abort_all_requests", "wait_for_requests_to_drain"),
    *("resume_generation", "resume_engine_generation", "open_submission_gate"),
    *("sleep", "wake_up", "clear_kv_cache", "release_kv_cache", "resume_kv_cache"),
    *("collective_rpc", "set_global_steps", "start_profile", "stop_profile"),
)
for _name in CALLS:
    setattr(VllmServer, _name, _passed_on(_name))


class VllmReplica(BesideRanks):
    """verl's `vLLMReplica` written anew, because the module of verl's class imports vLLM."""

    async def launch_servers(self) -> None:
        size = self.gpus_per_replica_node
        for node_rank in range(self.nnodes):
            here = slice(node_rank * size, (node_rank + 1) * size)
            server: Any = ray.remote(VllmServer).options(
                name=f"vllm_server_{self.replica_rank}_{node_rank}",  # the ranks look it up by this name
                **self.at(self.places[here][0].node),
            )
            self.servers.append(
                server.remote(
                    config=self.config,
                    model_config=self.model_config,
                    rollout_mode=self.rollout_mode,
                    workers=self.workers[here],
                    replica_rank=self.replica_rank,
                    node_rank=node_rank,
                    gpus_per_node=size,
                    nnodes=self.nnodes,
                    cuda_visible_devices=",".join(place.device for place in self.places[here]),
                )
            )
        first: Any = self.servers[0]
        master = await first.get_master_address.remote()
        if not self.config.engine_kwargs.get("vllm", {}).get("kv_cache_memory_bytes"):
            # vLLM measures the free memory, so no other process may allocate or free any at the same time.
            await asyncio.shield(asyncio.wrap_future(self.ranks_loaded))
        await asyncio.gather(*(server.launch_server.remote(*master) for server in self.servers))
        address, port = await first.get_server_address.remote()
        self._server_handle = first
        self._server_address = f"[{address}]:{port}" if is_valid_ipv6_address(address) else f"{address}:{port}"

    async def sleep(self) -> None:
        await self._first.wait_for_requests_to_drain.remote()
        await super().sleep()

    async def release_kv_cache(self) -> None:
        await self._first.wait_for_requests_to_drain.remote()
        await super().release_kv_cache()

    async def resume_generation(self) -> None:
        """Resume the engine first, then open the gates of all servers, as verl does."""
        await self._first.resume_engine_generation.remote()
        await asyncio.gather(*(server.open_submission_gate.remote() for server in self.servers))

    @property
    def _first(self) -> Any:
        return self.servers[0]
