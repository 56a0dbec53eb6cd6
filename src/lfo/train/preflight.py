"""Validate the config, packages, environment and splits before a run starts, for every engine."""

from __future__ import annotations

import logging
from functools import partial

from lfo.config import RunConfig
from lfo.env.interface import Environment, EnvironmentFactory, flaw_of, predicted_tools, tasks_of
from lfo.env.patience import ask, name_of
from lfo.errors import ConfigError
from lfo.play.call_monitor import CallMonitor
from lfo.train.tracking import require_trackers

logger = logging.getLogger(__name__)


def check_run(config: RunConfig, make_environment: EnvironmentFactory) -> None:
    """Raise a `ConfigError` for the first problem that would make this run fail or learn nothing."""
    require_trackers(config)
    # If the environment raises or hangs here, go on: the rollouts report it.
    monitor = CallMonitor(config.rollout.environment_timeout)
    flaw, _ = monitor.call(partial(flaw_of, make_environment))
    if isinstance(flaw, str):
        raise ConfigError(flaw)
    asks = partial(ask, timeout=config.rollout.environment_timeout)
    made = asks(make_environment, what=f"the constructor of {name_of(make_environment)}")
    for effect in monitor.effects():
        logger.warning(f"the environment {type(made).__name__}: {effect}")
    asks(lambda: predicted_tools(made, config.world_model.predict), what=f"tools of {name_of(made)}")
    refuse_unknown_splits(config, made)


def refuse_unknown_splits(config: RunConfig, made: Environment) -> None:
    """Raise for an unknown or empty split before the folder of the run exists, not when it is first needed."""
    asks = partial(ask, timeout=config.rollout.environment_timeout)
    trained = () if hasattr(made, "stream") or config.world_model.from_logs else ("train",)
    evaluated = ("val", *config.eval.splits, *config.eval.final_splits) if config.eval.every else ()
    for split in dict.fromkeys((*trained, *evaluated)):
        asks(lambda split=split: tasks_of(made, split), what=f"tasks of {name_of(made)}")
