"""Measure the gate of a base in an environment: `lfo check-env`, `lfo pretrain --check`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from lfo.agent import batches, build_agent
from lfo.config import RunConfig
from lfo.config.knobs import PolicyConfig, WorldModelConfig
from lfo.env.interface import EnvironmentFactory
from lfo.loading import limit_threads, load_base, pick_device
from lfo.measure.gate import measure_gate
from lfo.play.ending_tools import guess_ending_tools
from lfo.play.episode import RolloutRequest
from lfo.types import Rollout

TASKS = 64
SMALL = 20_000_000  # parameters
TASKS_OF_LARGE = 24  # on a CPU each task takes a base of half a billion parameters about a minute
PASSES = 4  # alone, sampled, true replies, feedback


def gate_of(
    config: RunConfig,
    make_environment: EnvironmentFactory,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tasks: int | None = None,
    base: Any = None,
    on_start: Callable[[int], None] = lambda tasks: None,
    progress: Callable[[int], None] = lambda rollouts: None,
) -> dict[str, Any]:
    """Return the figures and the verdict of `measure_gate` for `config.model`, without any adapters."""
    began = time.monotonic()
    config = shown_the_truth(config)
    base = load_base(config.model, pick_device(config.device)) if base is None else base
    limit_threads(base)
    agent = build_agent(config, make_environment, tokenizer, base)
    count = tasks or (TASKS if base.num_parameters() < SMALL else TASKS_OF_LARGE)
    chosen = agent.tasks("train")[:count]
    on_start(len(chosen))
    learnt = agent.ending_tools
    if learnt is not None:
        learnt.first_guess = guess_ending_tools(make_environment, chosen, config)

    def play(requests: Sequence[RolloutRequest], temperature: float) -> list[Rollout]:
        return [each for batch in batches(requests) for each in agent.run(batch, temperature=temperature)]

    def imagines(rollouts: Sequence[Rollout]) -> Callable[[str], bool]:
        if learnt is not None:
            learnt.observe(rollouts)
        tools = agent.lookahead.tools if agent.lookahead else None
        return lambda name: tools is None or name in tools

    figures = measure_gate(agent.config, chosen, play, tools=agent.codec.tools, imagines=imagines, progress=progress)
    return {**figures, "model": config.model, "seconds": time.monotonic() - began}


def shown_the_truth(config: RunConfig) -> RunConfig:
    """Return a config of look-ahead with true replies that plays like this one, whatever its algorithm."""
    predict = config.world_model.predict if config.world_model.predict != "none" else "default"
    return RunConfig(
        model=config.model,
        env=config.env,
        env_args=config.env_args,
        device=config.device,
        rollout=config.rollout,
        imagine=config.imagine,
        policy=PolicyConfig(frozen=True),  # nothing is trained, so no group needs rollouts to compare
        world_model=WorldModelConfig(
            predict=predict,
            state_tokens=config.world_model.state_tokens,
            reply_tokens=config.world_model.reply_tokens,
        ),
        lookahead="policy",
        lookahead_source="truth",
    )
