"""What is checked before a run begins, whichever engine trains it: settings, packages, the environment, its splits."""

from __future__ import annotations

import logging
from functools import partial

from lfo.config import RunConfig
from lfo.env.interface import EnvironmentFactory, OffersLookahead, flaw_of, predicted_tools, tasks_of
from lfo.errors import ConfigError
from lfo.rollout.watch import Watch
from lfo.tracking import require_trackers

logger = logging.getLogger(__name__)


def check_run(config: RunConfig, environment: EnvironmentFactory) -> None:
    """Raise an error of one sentence for the first thing that would make this run fail or learn nothing."""
    require_trackers(config)
    # An environment that raises or hangs here is not refused: that costs a rollout, which reports it.
    watch = Watch(config.rollout.environment_timeout)
    flaw, _ = watch.call(partial(flaw_of, environment))
    if isinstance(flaw, str):
        raise ConfigError(flaw)
    made = environment()
    for effect in watch.effects():
        logger.warning(f"the environment {type(made).__name__}: {effect}")
    if config.lookahead == "environment" and not isinstance(made, OffersLookahead):
        raise ConfigError(
            f"the environment {type(made).__name__} has no lookahead_query, so nothing would ever be "
            "imagined; write one, or set lookahead=policy"
        )
    predicted_tools(made, config.world_model.predict)
    for split in config.eval.final_splits:
        tasks_of(made, split)  # an unknown split is better found now than after the last step
