"""Rollout servers that use our own sampler, for machines without vLLM: a CPU or one GPU.

verl needs two parts: a replica that starts servers and continues token sequences (`SamplerReplica`), and its
counterpart next to the trainer that sends weights to the servers (`SamplerPort`). A server has the base and all
adapters, and each request names its adapter: policy and world model run in the same process. Waiting requests are
decoded in one batch.

Each request contains its random numbers in [0, 1), so a rollout here has the same tokens as with the local engine.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_visible_devices_keyword
from verl.workers.rollout import base as verl_rollouts
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplicaRegistry, TokenOutput

from lfo.config import from_mapping
from lfo.config.couplings import POLICY, WORLD_MODEL
from lfo.engines.verl.config import BASE, SAMPLER, run_name
from lfo.engines.verl.replicas import BesideRanks, VllmReplica
from lfo.loading import load_base, pick_device
from lfo.model.adapters import DualAdapterModel
from lfo.model.sampler import Sampler
from lfo.protocol.chat import ChatCodec

GATHER_SECONDS = 0.02  # a batch starts when no request has arrived for so long; larger batches are faster


@dataclass(frozen=True, kw_only=True, slots=True)
class _Request:
    tokens: list[int]
    adapter: str
    temperature: float
    limit: int
    uniforms: list[float] | None
    answer: asyncio.Future[Any]


class SamplerServer:
    """One base with its adapters, in its own process, on the device of its trainer."""

    def __init__(self, run: dict[str, Any], ends: Sequence[int], visible_devices: str) -> None:
        os.environ[get_visible_devices_keyword()] = visible_devices
        config = from_mapping(run)
        torch.set_num_threads(1)  # one server has one core
        self._model = DualAdapterModel.of_run(load_base(config.model, pick_device(config.device)), config)
        self._sampler = Sampler(self._model, max_context=config.rollout.max_context, eos_ids=ends)
        self._waiting: list[_Request] = []
        self._serving: asyncio.Task[None] | None = None
        self._step: int | None = None

    async def ready(self) -> None:
        pass

    async def update_weights(self, tensors: dict[str, Any], step: int | None) -> None:
        expected = {f"{name}.{index}" for name in self._model.adapter_names for index in range(self._count(name))}
        if set(tensors) != expected:
            raise ValueError(f"the trainer sent {len(tensors)} tensors, but the adapters have {len(expected)}")
        with torch.no_grad():
            for name in self._model.adapter_names:
                for index, parameter in enumerate(self._model.adapter_parameters(name)):
                    parameter.copy_(torch.tensor(tensors[f"{name}.{index}"]))
        self._sampler.refresh()
        self._step = step

    def _count(self, adapter: str) -> int:
        return len(self._model.adapter_parameters(adapter))

    async def generate(
        self,
        prompt_ids: list[int],
        sampling_params: dict[str, Any],
        request_id: str,
        adapter: str = POLICY,
        **_: Any,
    ) -> TokenOutput:
        request = _Request(
            tokens=list(prompt_ids),
            adapter=adapter,
            temperature=float(sampling_params["temperature"]),
            limit=int(sampling_params["max_tokens"]),
            uniforms=sampling_params.get("uniforms"),
            answer=asyncio.get_running_loop().create_future(),
        )
        self._waiting.append(request)
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve())
        said = await request.answer
        return TokenOutput(
            token_ids=list(said.tokens),
            log_probs=list(said.logprobs),
            stop_reason="completed" if said.stopped else "length",
            extra_fields={"global_steps": self._step, "stopped": said.stopped},
        )

    async def _serve(self) -> None:
        while self._waiting:
            joined = 0
            while joined < len(self._waiting):
                joined = len(self._waiting)
                await asyncio.sleep(GATHER_SECONDS)
            kinds: dict[tuple[str, float], list[_Request]] = defaultdict(list)
            for request in self._waiting:
                kinds[request.adapter, request.temperature].append(request)
            self._waiting = []
            for requests in kinds.values():
                try:
                    answers = await asyncio.to_thread(self._decode, requests)
                except Exception as error:
                    for request in requests:
                        request.answer.set_exception(error)
                    continue
                for request, answer in zip(requests, answers, strict=True):
                    request.answer.set_result(answer)

    def _decode(self, requests: list[_Request]) -> list[Any]:
        first, indices = requests[0], range(len(requests))
        adapters = {
            POLICY: self._model.policy_adapters,
            WORLD_MODEL: self._model.world_model_adapters,
            BASE: (),
        }[first.adapter]
        session = self._sampler.session(slots=len(requests), adapters=adapters)
        session.extend(indices, [request.tokens for request in requests])
        return session.decode(
            indices,
            max_new_tokens=[request.limit for request in requests],
            temperature=first.temperature,
            uniforms=None if first.temperature == 0 else [request.uniforms for request in requests],
        )

    # verl calls these to free a GPU; this server keeps its weights, and a cache lives for one request only.

    async def _nothing(self, *_: Any, **__: Any) -> None:
        pass

    sleep = wake_up = clear_kv_cache = release_kv_cache = resume_kv_cache = _nothing
    abort_all_requests = resume_generation = start_profile = stop_profile = _nothing


def _server_name(config: Any, rank: int) -> str:
    return f"{run_name(config)}-{rank}"


class SamplerReplica(BesideRanks):
    """One server next to one trainer."""

    async def launch_servers(self) -> None:
        model = omega_conf_to_dataclass(self.model_config)
        (place,) = self.places
        name = _server_name(self.config, self.replica_rank)
        server: Any = ray.remote(SamplerServer).options(name=name, **self.at(place.node))
        handle: Any = server.remote(dict(model.lora["run"]), ChatCodec(model.tokenizer).ends, place.device)
        self._server_address = name
        self._server_handle, self.servers = handle, [handle]
        await handle.ready.remote()


class SamplerPort(BaseRollout):
    """Runs next to the trainer, one on each rank, and sends weights to the server of that rank."""

    async def update_weights(self, weights: Iterator[tuple[str, torch.Tensor]], **options: Any) -> None:
        server: Any = ray.get_actor(_server_name(self.config, torch.distributed.get_rank()))
        tensors = {name: tensor.float().cpu().numpy() for name, tensor in weights}
        await server.update_weights.remote(tensors, options.get("global_steps"))

    async def resume(self, tags: list[str]) -> None:
        pass

    async def release(self) -> None:
        pass


verl_rollouts._ROLLOUT_REGISTRY[SAMPLER, "async"] = f"{__name__}.{SamplerPort.__name__}"
RolloutReplicaRegistry.register(SAMPLER, lambda: SamplerReplica)
RolloutReplicaRegistry.register("vllm", lambda: VllmReplica)
