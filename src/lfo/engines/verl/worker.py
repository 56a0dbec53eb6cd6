"""The process that holds one rank of the engine, as the driver calls it.

Rows go to all ranks as they are (a mini-batch is small beside a model); each rank takes its share in the learner.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.device import get_device_name
from verl.workers.engine_workers import ActorRolloutRefWorker

from lfo.types import ReplyScore, TrainingSample

TO_ALL: Any = getattr(Dispatch, "ONE_TO_ALL")  # noqa: B009  made at run time, so no type checker knows it


class DualLoraWorker(ActorRolloutRefWorker):
    """verl's worker with our engine inside; `update_actor` is never called, `learn` is."""

    @register(dispatch_mode=TO_ALL)
    def init_model(self) -> None:
        if get_device_name() == "cpu":
            # verl would ask for one backend on "cpu" and another on its device, which is the same here.
            torch.distributed.init_process_group(
                "gloo",
                rank=int(os.environ["RANK"]),
                world_size=int(os.environ["WORLD_SIZE"]),
                init_method=os.environ.get("DIST_INIT_METHOD"),
            )
            torch.set_num_threads(int(self.config.model.lora.run.threads) or 1)
        super().init_model()
        self._engine.rollout_name = self.config.rollout.name

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
