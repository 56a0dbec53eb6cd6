"""The process of one rank of the engine, as the driver calls it.

All ranks get all samples, because a mini-batch is small compared with a model; the learner selects the share of its
rank.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from lfo.engines.verl.config import run_name
from lfo.types import ReplyScore, TrainingSample

TO_ALL: Any = getattr(Dispatch, "ONE_TO_ALL")  # noqa: B009  verl creates it at run time; type checkers do not know it


def own_socket(address: str, rollout: Any) -> str:
    """Return the address of verl's socket to vLLM with the name of this run in it.

    verl puts the number of the Ray job there, and the first job of every Ray session has the same number. Of two runs
    on one machine, each with its own Ray session, one would get the weights of the other.
    """
    return address.replace(ray.get_runtime_context().get_job_id(), run_name(rollout))


class DualLoraWorker(ActorRolloutRefWorker):
    """verl's worker with our engine; the driver calls `learn` instead of `update_actor`."""

    @register(dispatch_mode=TO_ALL)
    def init_model(self) -> None:
        if get_device_name() == "cpu":
            # verl would set one backend for "cpu" and another for its device; here both are the CPU.
            torch.distributed.init_process_group(
                "gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
            torch.set_num_threads(1)  # one rank has one core
        super().init_model()
        self._engine.rollout_name = self.config.rollout.name
        if self.config.rollout.name == "vllm":
            port: Any = self.rollout
            port.zmq_handle = own_socket(port.zmq_handle, self.config.rollout)

    @register(dispatch_mode=TO_ALL, blocking=False)
    async def update_weights(self, global_steps: Any = None, mode: str = "auto") -> Any:
        if self.config.rollout.name == "vllm":
            self._engine.export_world_model(global_steps or 0)
        return await super().update_weights(global_steps, mode)

    @property
    def _engine(self) -> Any:
        assert self.actor is not None
        return self.actor.engine

    @register(dispatch_mode=TO_ALL)
    def learn(
        self, samples: Sequence[TrainingSample], world_model_weight: float, rate_factor: float
    ) -> dict[str, float]:
        return self._engine.learn(samples, world_model_weight=world_model_weight, rate_factor=rate_factor)

    @register(dispatch_mode=TO_ALL)
    def policy_logprobs(self, samples: Sequence[TrainingSample]) -> list[list[float]]:
        return [logprobs_T.tolist() for logprobs_T in self._engine.policy_logprobs(samples)]

    @register(dispatch_mode=TO_ALL)
    def reply_scores(self, samples: Sequence[TrainingSample]) -> list[ReplyScore]:
        return self._engine.reply_scores(samples)

    @register(dispatch_mode=TO_ALL)
    def save_adapters(self, folder: str) -> None:
        self._engine.save_adapters(folder)
