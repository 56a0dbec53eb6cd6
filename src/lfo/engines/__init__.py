"""Who holds the model while `lfo.training` trains: `local` is one process, `verl` is many.

    create_trainer(config, environment, tokenizer).fit()

Each engine is a `Backend` and nothing else; run folders, metrics and checkpoints are the same.

Every process of verl's imports this package on its way to `lfo.engines.verl.platform`, so it imports nothing by itself.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lfo.config import RunConfig
    from lfo.env.interface import EnvironmentFactory
    from lfo.training import Trainer


def train(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Run an experiment from names alone: what `lfo train` calls."""
    from lfo.loading import environment_factory, load_tokenizer

    return create_trainer(config, environment_factory(config), load_tokenizer(config.model)).fit(resume=resume)


def create_trainer(
    config: RunConfig,
    environment: EnvironmentFactory,
    tokenizer: PreTrainedTokenizerBase,
    *,
    engine: str | None = None,
    base: Any = None,
) -> Trainer:
    """A trainer for any environment, on the config's engine or the one that is named.

    `environment` makes one environment per rollout (a class does). `base` is a model in memory, for the local engine.
    """
    from lfo.loading import naming_environment
    from lfo.preflight import check_run
    from lfo.training import Trainer

    config = naming_environment(replace(config, engine=engine or config.engine), environment)
    check_run(config, environment)
    backend = import_module(f"lfo.engines.{config.engine}").create_backend(config, environment, tokenizer, base=base)
    return Trainer(config, environment, tokenizer, backend)


def config_text(config: RunConfig) -> str:
    """The engine's whole config of a run, as YAML: what `lfo train --print-config` shows."""
    return import_module(f"lfo.engines.{config.engine}").config_text(config)
