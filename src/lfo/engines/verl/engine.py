"""verl's FSDP engine with two adapters on one frozen, sharded base.

The layers of the base are large, so several ranks shard them (FSDP2). Embeddings, output layer and both adapters are
small and stay whole on every rank. So the code of the local engine (`DualAdapterModel`, `Learner`) can switch, clip,
save and load adapters, and gradients are added once for each mini-batch instead of reduce-scattered by layer.

verl has one adapter, named "default". Here the adapters have their own names, and what verl does with its adapter
(`get_per_tensor_param`, checkpoints) is overridden.
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from verl.utils.device import get_device_name
from verl.utils.fsdp_utils import fsdp2_load_full_state_dict, load_fsdp_optimizer, offload_fsdp_optimizer
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngine

from lfo.agent import start_from
from lfo.atomic import write_folder_atomic
from lfo.config import RunConfig, from_mapping
from lfo.config.couplings import POLICY, WORLD_MODEL
from lfo.engines.verl.config import ENGINE, SAMPLER, forget_world_models, world_model_folder
from lfo.engines.verl.learner import RankedLearner
from lfo.model.adapters import DualAdapterModel
from lfo.types import ReplyScore, TrainingSample

OPTIMIZER_FILE = "optimizer.safetensors"


@EngineRegistry.register(model_type=ENGINE, backend=["fsdp2"], device=["cuda", "npu", "cpu"])
class DualLoraEngine(FSDPEngine):
    """Created by verl's `TrainingWorker`; our worker calls `learn` instead of `train_batch`."""

    def __init__(self, model_config: Any, engine_config: Any, *rest: Any, **options: Any) -> None:
        model_config.model_type = "language_model"  # of the base; our value only selected this engine
        super().__init__(model_config, engine_config, *rest, **options)
        self.run: RunConfig = from_mapping(_plain(model_config.lora["run"]))
        self.rollout_name = SAMPLER
        self._exported: Path | None = None  # the folder of the world model that the servers have

    # --- building ----------------------------------------------------------------------------------------------

    def initialize(self) -> None:
        self._build_model_optimizer()
        if self.run.init_from:
            start_from(self.model, self.run.init_from)

    def _build_lora_module(self, module: Any) -> Any:
        checkpointing = self.model_config.enable_gradient_checkpointing
        self.model = DualAdapterModel.of_run(module, self.run, gradient_checkpointing=checkpointing)
        return self.model.peft_model

    def _build_fsdp_module(self, module: Any) -> Any:
        if torch.distributed.get_world_size() == 1:
            return module.to(get_device_name())  # whole layers can run our own forward, as in the local engine
        whole = module.state_dict()
        decoder = self.model.causal_lm.get_decoder()
        adapters = {parameter for name in self.model.adapter_names for parameter in self.model.adapter_parameters(name)}
        options = {"mesh": self.device_mesh, "reshard_after_forward": self.engine_config.reshard_after_forward}
        for layer in decoder.layers:
            fully_shard(layer, ignored_params=adapters & set(layer.parameters()), **options)
        # The root has no sharded parameters itself; it schedules the communication of the layers.
        fully_shard(
            decoder,
            ignored_params={each for each in decoder.parameters() if not hasattr(each, "placements")} | adapters,
            **options,
        )
        fsdp2_load_full_state_dict(module, whole, self.device_mesh, None)
        return module

    def _build_optimizer(self, module: Any) -> Any:
        self.learner = RankedLearner(self.model, self.run, micro_batch_tokens=self.micro_batch_tokens)
        return None

    def _build_lr_scheduler(self, optimizer: Any) -> Any:
        return None  # the driver sets the rate of each update

    @property
    def micro_batch_tokens(self) -> int:
        return int(self.engine_config.max_token_len_per_gpu)

    # --- learning ----------------------------------------------------------------------------------------------

    def learn(
        self, samples: Sequence[TrainingSample], *, world_model_weight: float, rate_factor: float
    ) -> dict[str, float]:
        """Make one update on a mini-batch, of which this rank computes its share; return the metrics."""
        self._place_optimizer(on_device=True)
        on_gpu = self.model.device.type == "cuda"
        rest = torch.cuda.memory_allocated() if on_gpu else 0
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            watched = self.learner.update(samples, world_model_weight=world_model_weight, rate_factor=rate_factor)
            if on_gpu:  # of this rank only, without a server on the same GPU
                watched |= {"gpu_gib/rest": rest / 2**30, "gpu_gib/update": torch.cuda.max_memory_allocated() / 2**30}
            return watched
        finally:
            self._place_optimizer(on_device=False)

    def policy_logprobs(self, samples: Sequence[TrainingSample]) -> list[Tensor]:
        return self.learner.policy_logprobs(samples)

    def reply_scores(self, samples: Sequence[TrainingSample]) -> list[ReplyScore]:
        """Score all samples on every rank: there are few, and only at an evaluation."""
        return self.learner.reply_scores(samples)

    def _place_optimizer(self, *, on_device: bool) -> None:
        if self._is_offload_optimizer:
            if on_device:
                load_fsdp_optimizer(self.learner.optimizer, self.model.device)
            else:
                offload_fsdp_optimizer(self.learner.optimizer)

    # --- weights out and in ------------------------------------------------------------------------------------

    def export_world_model(self, step: int) -> None:
        """Write the world model to the folder that vLLM reads, and remove older ones except the last."""
        if self.rank == 0 and self.model.world_model_adapters and not self.model.coupling.is_shared:
            folder = world_model_folder(Path(self.run.output_dir), step)
            folder.parent.mkdir(parents=True, exist_ok=True)
            write_folder_atomic(folder, lambda path: self.model.export(path, WORLD_MODEL))
            forget_world_models(folder, self._exported)
            self._exported = folder
        torch.distributed.barrier()

    def save_adapters(self, folder: str) -> None:
        """Write the adapters on the first rank; all ranks have the same."""
        if self.rank == 0:
            self.model.save(folder)
        torch.distributed.barrier()

    def save_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        """Write adapters and optimizer as the local engine does, so that each engine can resume the other's run."""
        if self.rank == 0:
            self.learner.save(Path(local_path) / OPTIMIZER_FILE)
        self.save_adapters(local_path)

    def load_checkpoint(self, local_path: str, *_: Any, **__: Any) -> None:
        self.model.load(local_path)
        self.learner.load(Path(local_path) / OPTIMIZER_FILE)

    def get_per_tensor_param(self, **_: Any) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
        """Return the weights for rollouts: all adapters for our sampler, or the policy as a LoRA for vLLM."""
        if self.rollout_name == SAMPLER:
            adapters = [
                (f"{name}.{index}", parameter.detach())
                for name in self.model.adapter_names
                for index, parameter in enumerate(self.model.adapter_parameters(name))
            ]
            return iter(adapters), {"adapters": list(self.model.adapter_names)}
        return policy_lora(self.model)


def policy_lora(model: DualAdapterModel) -> tuple[Iterator[tuple[str, Tensor]], dict[str, Any]]:
    """Return the policy as an ordinary LoRA."""
    tensors, config = model.as_lora(POLICY)
    return iter(tensors.items()), {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.r,
        "lora_alpha": int(config.lora_alpha),
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),  # ...q_proj.lora_A.weight
        "lora_dropout": 0.0,
        "bias": "none",
    }


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
