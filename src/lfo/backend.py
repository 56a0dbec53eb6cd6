"""The seam between the training loop and whoever holds the model: the verbs that differ between engines.

`engines/local.py` is one process on a CPU or a GPU, `engines/verl/backend.py` is a cluster. Which tasks are drawn, what
is kept, which rows are made, when to evaluate and what is written is not theirs: see `training.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from lfo.rollout.ending_tools import EndingTools
from lfo.rollout.reply_store import ReplyStore
from lfo.rollout.row import RolloutRequest
from lfo.types import ReplyScore, Rollout, TrainingSample


class Backend(Protocol):
    """Rollouts, predictions and updates of one run."""

    @property
    def reply_store(self) -> ReplyStore | None:
        """The store that answers look-ahead in the control without a world model; None in other runs."""
        ...

    @property
    def ending_tools(self) -> EndingTools | None:
        """Whose calls may be imagined, where the run has to find out."""
        ...

    def running(self, run: Path) -> AbstractContextManager[None]:
        """Everything below is called inside; what breaks the model or a process becomes one sentence."""
        ...

    def roll_out(
        self, requests: Sequence[RolloutRequest], *, temperature: float | None = None, untrained: bool = False
    ) -> list[Rollout]:
        """One rollout for each request, in order; `untrained` is the base without adapters and look-ahead."""
        ...

    def complete(
        self, prompts: Sequence[Sequence[int]], uniforms: Sequence[Sequence[float]] | None = None
    ) -> list[tuple[int, ...]]:
        """What the world model says after each prompt: greedily, or drawn at temperature 1 by numbers for each."""
        ...

    def score(self, rows: Sequence[TrainingSample]) -> list[ReplyScore]:
        """How well the world model predicts the reply of each row, without training."""
        ...

    def learn(
        self, mini_batches: Sequence[Sequence[TrainingSample]], *, world_model_weight: float, rate_factor: float
    ) -> list[dict[str, float]]:
        """One optimizer update for each mini-batch; returns what to watch in each."""
        ...

    def sync(self, step: int) -> None:
        """Roll out with the trained weights from now on."""
        ...

    def save(self, folder: Path) -> None:
        """Write adapters and optimizer."""
        ...

    def save_adapters(self, folder: Path) -> None:
        """Write what acting needs."""
        ...

    def load(self, folder: Path) -> None:
        """Read what `save` wrote."""
        ...
