"""Environments for runs in processes of their own, which find them by name; not a test."""

from __future__ import annotations

import zlib
from typing import Any

from lfo.env.phone_calls import PhoneCalls
from lfo.types import StepResult

LONG = "The line is bad. " * 40  # 680 characters: verl's own tools would cut a reply at 256, in its middle


class FussyWorld(PhoneCalls):
    """The phone-call world with a reward for an arbitrary half of all forms, and a rep who takes his time."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"levels": (2,), **options})

    def reward(self) -> float:
        return float(zlib.crc32(" ".join(self.form or ()).encode()) % 2)

    def check(self) -> None:
        pass


class TalkativeWorld(FussyWorld):
    def step(self, message: str) -> StepResult:
        result = super().step(message)
        if "make_phone_call" not in message:
            return result
        return StepResult(
            observation=LONG + result.observation, reward=result.reward, done=result.done, info=result.info
        )


class BreakingWorld(FussyWorld):
    """Raises in some rollouts, by what was said."""

    def step(self, message: str) -> StepResult:
        if zlib.crc32(message.encode()) % 5 == 0:
            raise RuntimeError("the line went dead")
        return super().step(message)
