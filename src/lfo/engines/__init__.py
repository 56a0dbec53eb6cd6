"""Who trains: `local` is one process, `verl` is many. Both follow the same recipe and leave the same run folder."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lfo.config import RunConfig
    from lfo.env.interface import EnvironmentFactory


def create_trainer(
    config: RunConfig, environment: EnvironmentFactory, tokenizer: Any, *, engine: str | None = None
) -> Any:
    """A trainer of the config's engine, or of the one that is named; `create_trainer(...).fit()` trains."""
    from dataclasses import replace

    config = replace(config, engine=engine or config.engine)
    return import_module(f"lfo.engines.{config.engine}").create_trainer(config, environment, tokenizer)
