"""The same training on verl 0.9.1: Ray, FSDP2 and rollout servers, on one machine or many.

    lfo train engine=verl preset=tiny output_dir=runs/x

    config.py       our config as a config of verl
    backend.py      the driver's side               cluster.py      verl's processes, as the driver calls them
    engine.py       the registered FSDP engine      learner.py      the local update, shared among ranks
    worker.py       one rank's process              rollout.py      rollout servers made of our sampler
    agent_loop.py   our runner as an agent loop     vllm.py         both adapters in vLLM
    platform.py     a CPU as a platform of verl     starting.py     which part of a run is starting
    places.py       node and device of each rank    replicas.py     servers that start with the ranks
    failures.py     errors as one sentence          bare_vllm.py    vLLM without verl, for a benchmark
    unread.py       settings that nothing reads

How the parts work together, and what is tested where: docs/VERL_INTEGRATION.md. This package imports nothing at the
top, because every process of verl imports it on its way to `platform.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lfo.config import RunConfig
    from lfo.engines.verl.backend import VerlBackend
    from lfo.env.interface import EnvironmentFactory


def create_backend(
    config: RunConfig, make_environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase, *, base: Any = None
) -> VerlBackend:
    if base is not None:
        raise ValueError("verl's processes load the base themselves: name it in the config")
    from lfo.engines.verl.backend import VerlBackend

    return VerlBackend(config, make_environment, tokenizer)


def config_text(config: RunConfig) -> str:
    """Return the complete config of verl for a run, as YAML."""
    from omegaconf import OmegaConf

    from lfo.engines.verl.config import verl_config

    return OmegaConf.to_yaml(verl_config(config), resolve=True)
