"""The interface between the training loop and an engine: the operations that differ between engines.

`engines/local.py` runs in one process on a CPU or a GPU, `engines/verl/backend.py` on a cluster. `train/loop.py`
decides which tasks are drawn, which samples are made, when to evaluate and what is written.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from lfo.config import RunConfig
from lfo.play.ending_tools import EndingTools
from lfo.play.episode import RolloutRequest
from lfo.play.memory_first import MemoryFirst
from lfo.play.reply_store import ReplyStore
from lfo.types import ReplyScore, Rollout, TrainingSample


class Backend(Protocol):
    """Rollouts, predictions and updates of one run."""

    @property
    def config(self) -> RunConfig:
        """The config of the run; `imagine.form` is no longer `auto` if something is shown to the policy."""
        ...

    @property
    def reply_store(self) -> ReplyStore | MemoryFirst | None:
        """The memory that answers look-ahead instead of the world model, or before it; None in other runs."""
        ...

    @property
    def ending_tools(self) -> EndingTools | None:
        """The tools that look-ahead may imagine, if the run has to find them out; else None."""
        ...

    def running(self, run: Path) -> AbstractContextManager[None]:
        """Return the context in which all methods below are called; it turns a failed process into a `WorkError`."""
        ...

    def roll_out(
        self, requests: Sequence[RolloutRequest], *, temperature: float | None = None, untrained: bool = False
    ) -> list[Rollout]:
        """Return one rollout for each request, in order; `untrained`: the base without adapters and look-ahead."""
        ...

    def complete(self, prompts: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
        """Return what the world model writes after each prompt, greedily."""
        ...

    def score(self, samples: Sequence[TrainingSample]) -> list[ReplyScore]:
        """Score how well the world model predicts the reply of each sample, without training."""
        ...

    def learn(
        self, mini_batches: Sequence[Sequence[TrainingSample]], *, world_model_weight: float, rate_factor: float
    ) -> list[dict[str, float]]:
        """Make one optimizer update for each mini-batch; return the metrics of each."""
        ...

    def sync(self, step: int) -> None:
        """Make later rollouts use the trained adapters."""
        ...

    def save(self, folder: Path) -> None:
        """Write the adapters and the optimizer state."""
        ...

    def save_adapters(self, folder: Path) -> None:
        """Write what an agent needs to act: the adapters, and what look-ahead needs."""
        ...

    def load(self, folder: Path) -> None:
        """Load what `save` wrote."""
        ...
