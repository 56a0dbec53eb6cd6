"""Training in one process, on a CPU or one GPU: rollouts and updates use the same model.

lfo train preset=tiny algo=dual-lora steps=60 output_dir=runs/x
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from lfo.agent import REPLY_STORE_FILE, Agent, build_agent, start_from
from lfo.config import RunConfig, to_yaml
from lfo.env.interface import EnvironmentFactory
from lfo.errors import WorkError
from lfo.loading import limit_threads, load_base, pick_device
from lfo.model.learner import GAP, Learner
from lfo.play import ending_tools
from lfo.play.episode import RolloutRequest
from lfo.types import ReplyScore, Rollout, TrainingSample

OPTIMIZER = "optimizer.safetensors"

config_text = to_yaml


def create_backend(
    config: RunConfig, make_environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase, *, base: Any = None
) -> LocalBackend:
    if base is None:
        base = load_base(config.model, pick_device(config.device))
        limit_threads(base)
    agent = build_agent(config, make_environment, tokenizer, base)
    if config.init_from:
        start_from(agent.model, config.init_from)
    return LocalBackend(agent)


class LocalBackend:
    """The `lfo.backend.Backend` of one process: an agent that acts and the learner of its adapters."""

    def __init__(self, agent: Agent) -> None:
        self.agent, self.config = agent, agent.config
        self.reply_store, self.ending_tools = agent.reply_store, agent.ending_tools
        self.learner = Learner(agent.model, agent.config)

    @contextmanager
    def running(self, run: Path) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError as error:
            raise WorkError(
                "the GPU is out of memory; continue from the last checkpoint with --resume and a smaller "
                "micro_batch_tokens, or when the GPU is free again (`lfo plan` shows what needs how much)"
            ) from error

    def roll_out(
        self, requests: Sequence[RolloutRequest], *, temperature: float | None = None, untrained: bool = False
    ) -> list[Rollout]:
        return self.agent.run(requests, temperature=temperature, untrained=untrained)

    def complete(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        return self.agent.complete(prompts)

    def score(self, samples: Sequence[TrainingSample]) -> list[ReplyScore]:
        return self.learner.reply_scores(samples)

    def learn(
        self, mini_batches: Sequence[Sequence[TrainingSample]], *, world_model_weight: float, rate_factor: float
    ) -> list[dict[str, float]]:
        updates = [
            self.learner.update(samples, world_model_weight=world_model_weight, rate_factor=rate_factor)
            for samples in mini_batches
        ]
        for later in updates[1:]:
            later.pop(GAP, None)
        return updates

    def sync(self, step: int) -> None:
        self.agent.sampler.refresh()

    def save(self, folder: Path) -> None:
        self.save_adapters(folder)
        self.learner.save(folder / OPTIMIZER)

    def save_adapters(self, folder: Path) -> None:
        self.agent.model.save(folder)
        if self.reply_store is not None:
            self.reply_store.save(folder / REPLY_STORE_FILE)
        if self.ending_tools is not None:
            self.ending_tools.save(folder / ending_tools.FILE)

    def load(self, folder: Path) -> None:
        self.agent.load(folder)
        self.learner.load(folder / OPTIMIZER)
