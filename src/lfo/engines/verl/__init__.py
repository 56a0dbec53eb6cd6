"""The same training on verl 0.9.1: Ray, FSDP2 and rollout servers, on one machine or many.

    lfo train engine=verl preset=tiny output_dir=runs/x

    settings.py     our settings in verl's words
    trainer.py      the driver's loop               cluster.py      verl's processes, as the driver calls them
    engine.py       the registered FSDP engine      learner.py      the local update, shared among ranks
    worker.py       one rank's process              rollout.py      rollout servers made of our sampler
    agent_loop.py   our runner as an agent loop     vllm.py         both adapters in vLLM (not run so far)
    platform.py     a CPU as a platform of verl's

How the parts meet, and what is tested where: docs/VERL_INTEGRATION.md. Importing this package imports no verl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lfo.config import RunConfig
    from lfo.engines.verl.trainer import Trainer
    from lfo.env.interface import EnvironmentFactory


def train(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Run an experiment from names alone; what `lfo train engine=verl` calls."""
    from lfo.loading import environment_factory, load_tokenizer

    return create_trainer(config, environment_factory(config), load_tokenizer(config.model)).fit(resume=resume)


def create_trainer(config: RunConfig, environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase) -> Trainer:
    """A trainer for any environment; `environment` makes one environment per rollout, in whichever process it runs."""
    from lfo.engines.verl.trainer import Trainer
    from lfo.loading import naming_environment

    return Trainer(naming_environment(config, environment), environment, tokenizer)


def config_text(config: RunConfig) -> str:
    """The whole config of verl's that a run would have, as YAML."""
    from omegaconf import OmegaConf

    from lfo.engines.verl.settings import verl_config

    return OmegaConf.to_yaml(verl_config(config), resolve=True)
