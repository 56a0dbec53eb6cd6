"""Small real runs for tests: the embedded base, the phone-call world, few rollouts and few tokens."""

from __future__ import annotations

import copy
import json
import zlib
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerBase, Qwen3Config

from lfo.algorithms import draw_requests, plan_of
from lfo.config import RunConfig, load_config
from lfo.engines import create_trainer
from lfo.engines.local import LocalBackend
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.loading import environment_factory, load_base, load_tokenizer
from lfo.model.adapters import DualAdapterModel
from lfo.model.catalog import PROVENANCE
from lfo.play.episode import RolloutRequest
from lfo.train.loop import Trainer

SMALL = (
    "preset=tiny",
    "rollout.prompts=2",
    "rollout.group_size=4",
    "rollout.mini_batch_prompts=1",
    "rollout.max_turns=6",
    "rollout.temperature=1",
    "rollout.max_context=1024",
    "policy.max_resamples=0",
    "policy.learning_rate=1e-3",
    "world_model.learning_rate=1e-3",
    "world_model.lora_plus=1",
    "world_model.examples_per_mini_batch=4",
    "exploration.blind_share=0.5",
    "optimizer.warmup_steps=0",
    "eval.every=0",
    "eval.tasks=3",
    "steps=5",
)


class FussyCalls(PhoneCalls):
    """The phone-call world with a reward for an arbitrary half of all forms: an untrained policy's groups differ."""

    def reward(self) -> float:
        return float(zlib.crc32(" ".join(self.form or ()).encode()) % 2)

    def check(self) -> None:
        pass


fussy_calls = partial(FussyCalls, levels=(2,))
tokenizer = cache(partial(load_tokenizer, "tiny"))


def random_base(folder: Path, tokenizer: PreTrainedTokenizerBase, form: str | None = None) -> str:
    """A folder with a small random base, as instruct models come: its form is unknown unless it is given."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4}
    shape = Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=2, head_dim=16, **sizes)
    AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    if form is not None:
        (folder / PROVENANCE).write_text(json.dumps({"form": form}))
    return str(folder)


def small_config(*overrides: str) -> RunConfig:
    return load_config([*SMALL, *overrides])


@cache
def _base() -> Any:
    return load_base("tiny", torch.device("cpu"))


def base() -> Any:
    """The embedded base, loaded once; adapters are put into a copy."""
    return copy.deepcopy(_base())


def small_trainer(*overrides: str, environment: Callable[[], Any] | None = None) -> Trainer:
    """A trainer on the local engine, whatever the settings say."""
    config = small_config(*overrides)
    environment = environment or environment_factory(config)
    return create_trainer(config, environment, tokenizer(), engine="local", base=base())


def model_of(trainer: Trainer) -> DualAdapterModel:
    return cast(LocalBackend, trainer.backend).agent.model


def small_model(coupling: Any = "separate", **options: Any) -> DualAdapterModel:
    return randomised(DualAdapterModel.build(base(), coupling=coupling, seed=0, rank=4, alpha=8, **options))


@torch.no_grad()
def randomised(model: DualAdapterModel, scale: float = 0.02) -> DualAdapterModel:
    """Adapters as after some training: a B of zeros would hide every mistake."""
    generator = torch.Generator().manual_seed(7)
    for name in model.adapter_names:
        for parameter in model.adapter_parameters(name):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model


def weights(model: DualAdapterModel, name: str) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.adapter_parameters(name)])


def gradient(model: DualAdapterModel, name: str) -> torch.Tensor | None:
    """All gradients of an adapter, or None where no parameter has one."""
    parameters = model.adapter_parameters(name)
    if all(parameter.grad is None for parameter in parameters):
        return None
    grads = [torch.zeros_like(each) if each.grad is None else each.grad for each in parameters]
    return torch.cat([grad.flatten() for grad in grads])


def requests_of(config: RunConfig, environment: Any, step: int = 0, draw: int = 0) -> list[RolloutRequest]:
    """The requests of a run without stored successes."""
    return draw_requests(config, environment, plan_of(config, step), draw)
