"""Record what a scripted player does in an environment."""

from __future__ import annotations

from typing import Any

from lfo.env.interface import Environment
from lfo.types import StepResult


class Recorder:
    """Passes the messages of a player on to an environment and records each with its reply."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.exchanges: list[tuple[str, str]] = []

    def step(self, message: str) -> StepResult:
        result = self.environment.step(message)
        self.exchanges.append((message, result.observation))
        return result

    def __getattr__(self, name: str) -> Any:
        return getattr(self.environment, name)
