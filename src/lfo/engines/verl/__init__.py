"""The same training on verl 0.9.1: Ray, FSDP2 and rollout servers, on one machine or many.

    lfo train engine=verl preset=tiny output_dir=runs/x

    config.py       our config in verl's words
    backend.py      the driver's side               cluster.py      verl's processes, as the driver calls them
    engine.py       the registered FSDP engine      learner.py      the local update, shared among ranks
    worker.py       one rank's process              rollout.py      rollout servers made of our sampler
    agent_loop.py   our runner as an agent loop     vllm.py         both adapters in vLLM
    platform.py     a CPU as a platform of verl's   starting.py     what a run waits for while it starts
    places.py       where the ranks lie             replicas.py     servers that start beside them
    failures.py     what a user is told             bare_vllm.py    vLLM by itself, for a bench

How the parts meet, and what is tested where: docs/VERL_INTEGRATION.md. Importing this package imports nothing: every
process of verl's does, on its way to `platform.py`.
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
    """The whole config of verl's that a run would have, as YAML."""
    from omegaconf import OmegaConf

    from lfo.engines.verl.config import verl_config

    return OmegaConf.to_yaml(verl_config(config), resolve=True)
