"""The engines, which hold the model during training: `local` is one process, `verl` is many.

    create_trainer(config, environment, tokenizer).fit()

Each engine is a `Backend`. Run folders, metrics and checkpoints are the same for both.

Every process of verl imports this package on its way to `lfo.engines.verl.platform`, so it imports nothing at the top.
"""

from __future__ import annotations

from dataclasses import replace
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from lfo.config import RunConfig
    from lfo.env.interface import EnvironmentFactory
    from lfo.train.loop import Trainer


def train(config: RunConfig, *, resume: bool = False) -> dict[str, Any]:
    """Train the run of a config; called by `lfo train`."""
    from pathlib import Path

    from lfo.loading import environment_factory, load_tokenizer, model_source, pick_device, refuse_missing_model

    environment = environment_factory(config)
    refuse_missing_model(config.model)  # before seconds of imports
    trainer = create_trainer(config, environment, load_tokenizer(config.model))
    if config.engine == "local":
        from lfo.train.kept_evaluation import kept_evaluation

        base, device = Path(model_source(config.model)), pick_device(config.device)
        trainer.kept = kept_evaluation(trainer.config, environment, base=base, device=device.type)
    return trainer.fit(resume=resume)


def create_trainer(
    config: RunConfig,
    environment: EnvironmentFactory,
    tokenizer: PreTrainedTokenizerBase,
    *,
    engine: str | None = None,
    base: Any = None,
) -> Trainer:
    """Return a trainer for any environment, on the engine of the config or on `engine`.

    `environment` is an environment factory, such as a class: it makes one environment for each rollout. `base` is a
    loaded model for the local engine; without it, the engine loads the model of the config.
    """
    from lfo.loading import naming_environment
    from lfo.train.loop import Trainer
    from lfo.train.preflight import check_run

    config = naming_environment(replace(config, engine=engine or config.engine), environment)
    check_run(config, environment)
    backend = import_module(f"lfo.engines.{config.engine}").create_backend(config, environment, tokenizer, base=base)
    return Trainer(backend.config, environment, tokenizer, backend)


def config_text(config: RunConfig) -> str:
    """Return the complete config of the engine as YAML, for `lfo train --print-config`."""
    return import_module(f"lfo.engines.{config.engine}").config_text(config)
