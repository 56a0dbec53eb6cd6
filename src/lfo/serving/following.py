"""A world model that is served while it goes on learning: it takes the newest checkpoint of its run, without a restart.

lfo train --resume runs/x steps=400        in another process; each checkpoint is taken when it is complete
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from lfo.agent import Agent, adapters_of, load_models, run_and_checkpoint
from lfo.checkpoints import is_checkpoint, newest_checkpoint
from lfo.errors import LfoError, UsageError
from lfo.play.look_ahead import Question
from lfo.play.predictors import world_model_predictor

LOOK_EVERY = 2.0  # seconds between two looks for a newer checkpoint

logger = logging.getLogger(__name__)


class FollowingWorldModel:
    """A `Predictor`. A run given as one of its checkpoints stays at that one."""

    def __init__(self, run: Path, *, adapter: str = "last", device: str = "auto") -> None:
        self.agent: Agent = load_models(run, adapter="best" if adapter == "best" else "last", device=device)
        self.agent.require_world_model()
        if self.agent.config.lookahead_source not in ("world_model", "memory_first"):
            source = self.agent.config.lookahead_source
            raise UsageError(f"this run looks ahead by lookahead_source={source}, and only a world model can be served")
        self._run, checkpoint = run_and_checkpoint(run)
        self._follows = checkpoint is None and adapter == "last"
        self._looked = time.monotonic()
        self._predict = world_model_predictor(self.agent.world_model_codec, self.agent.complete)
        self.loaded = self.agent.adapters_folder
        self._refused: Path | None = None

    def __call__(self, questions: Sequence[Question]) -> Sequence[str]:
        self.take_newest()
        return self._predict(questions)

    def take_newest(self) -> None:
        if not self._follows or time.monotonic() - self._looked < LOOK_EVERY:
            return
        self._looked = time.monotonic()
        newest = newest_checkpoint(self._run)
        if newest is None or newest in (self.loaded, self._refused) or not is_checkpoint(newest):
            return
        try:
            self.agent.load(adapters_of(newest))
        except (LfoError, OSError) as error:
            self._refused = newest
            logger.warning("%s is not taken: %s", newest, error)
            return
        self.loaded = newest
        logger.warning("the world model is now that of %s", newest.name)
