"""A rollout in progress, and the interface that a sampler must have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np

from lfo.env.answers import id_of, plain_values
from lfo.env.interface import Environment
from lfo.env.patience import EnvironmentTimedOut
from lfo.errors import EnvironmentFailed
from lfo.protocol.chat import Tokens
from lfo.types import Message, Origin, Rollout, Seat, Speech, StopReason, Turn

# A text with more characters than this for each token of the context does not fit into it, by definition: it is cut and
# never tokenised. Ordinary text has about four.
CHARS_A_TOKEN = 64


class SamplerSlots(Protocol):
    """Sequences of tokens that a sampler continues, each in its slot, such as `lfo.model.sampler.Session`."""

    def extend(self, slots: Sequence[int], chunks: Sequence[Sequence[int]]) -> None: ...
    def rewind(self, slot: int, length: int) -> None: ...
    def room(self, slot: int) -> int: ...
    def decode(
        self, slots: Sequence[int], *, max_new_tokens: Sequence[int], temperature: float, uniforms: Any
    ) -> Sequence[Speech]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Feedback:
    """An exchange of another rollout of the task, shown after `after` real turns."""

    after: int
    action: str
    observation: str


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest(Seat):
    """One rollout to run; `seeds` seed its random numbers: `RolloutRequest(task=task, seeds=(0, 17, 3, 5))`."""

    task: Any
    seeds: tuple[int, ...]
    feedback: Feedback | None = None


class Mark(NamedTuple):
    """A point of an episode to which `take_back` can return."""

    tokens: int
    turns: int
    messages: int


@dataclass(slots=True, eq=False)
class Episode:
    """One rollout in progress; the sampler has the same tokens in slot `slot` of `slots`."""

    slot: int
    request: RolloutRequest
    slots: SamplerSlots
    environment: Environment | None = None
    most_chars: int = 0  # of a reply of the environment, or of its opening
    task_id: str = ""
    level: dict[str, Any] = field(default_factory=dict)  # of the task, if it has one
    opening: tuple[Message, ...] = ()
    transcript: list[Message] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    reward: float = 0.0
    stop: StopReason | None = None
    error: str = ""
    speech: Speech | None = None
    taken_back: list[Turn] = field(default_factory=list)
    discarded_tokens: int = 0
    cut: int = 0  # replies that are longer than `most_chars`; an opening counts as one
    on_turn: Callable[[Turn], None] | None = None

    @property
    def imagined(self) -> int:
        """The number of exchanges whose reply was predicted; feedback and checks of a schema do not count."""
        return sum(turn.imagined for turn in self.turns)

    def identify(self, what: str) -> None:
        """Read what the task says of itself; a task is foreign code too, and `what` names it in failures."""
        level = getattr(self.request.task, "level", None)  # for a rollout that ends before its first step
        self.level = {} if level is None else plain_values({"level": level})
        self.task_id = id_of(self.request.task, what)

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)
        if self.on_turn is not None:
            self.on_turn(turn)

    def write(self, piece: Tokens) -> int | None:
        """Append a piece, in the sampler too; return its start, or None if no room for a message remains."""
        if len(piece.ids) >= self.slots.room(self.slot):
            return None
        self.slots.extend([self.slot], [piece.ids])
        return self.append(piece)

    def append(self, piece: Tokens) -> int:
        """Append a piece, but not in the sampler, because no message follows; return its start."""
        start = len(self.tokens)
        self.tokens += piece.ids
        self.origins += piece.origins
        self.logprobs += [0.0] * len(piece.ids)
        return start

    def say(self, speech: Speech) -> None:
        """Append a message that the sampler already has in its slot."""
        self.speech = speech
        self.tokens += speech.tokens
        self.origins += [int(Origin.SAMPLED)] * len(speech.tokens)
        self.logprobs += speech.logprobs

    def mark(self) -> Mark:
        return Mark(len(self.tokens), len(self.turns), len(self.transcript))

    def take_back(self, mark: Mark) -> None:
        """Remove everything after a mark, in the sampler too."""
        self.slots.rewind(self.slot, mark.tokens)
        for stream in (self.tokens, self.origins, self.logprobs):
            del stream[mark.tokens :]
        del self.turns[mark.turns :], self.transcript[mark.messages :]

    def fail(self, error: EnvironmentFailed) -> None:
        timed_out = isinstance(error, EnvironmentTimedOut)
        self.stop = StopReason.ENVIRONMENT_TIMEOUT if timed_out else StopReason.ENVIRONMENT_ERROR
        self.error = str(error)

    def finished(self) -> Rollout:
        assert self.stop is not None
        return Rollout(
            task_id=self.task_id,
            opening=self.opening,
            tokens=tuple(self.tokens),
            origins=tuple(self.origins),
            logprobs=tuple(self.logprobs),
            turns=tuple(self.turns),
            taken_back=tuple(self.taken_back),
            discarded_tokens=self.discarded_tokens,
            reward=self.reward,
            stop=self.stop,
            error=self.error,
            look_ahead=self.request.look_ahead,
            imagine=self.request.imagine,
            untrained=self.request.player == "base",
            feedback=self.request.feedback is not None,
            cut=self.cut,
            info=self.level | self.info,
        )


def sample(
    batch: Sequence[Episode], slots: SamplerSlots, numbers: Sequence[int], *, limit: int, temperature: float
) -> Sequence[Speech]:
    """Sample a message for each episode; `numbers` end the seed of its random numbers."""
    if not batch:
        return ()
    return slots.decode(
        [episode.slot for episode in batch],
        max_new_tokens=[limit] * len(batch),
        temperature=temperature,
        uniforms=[np.random.default_rng([*episode.request.seeds, *numbers]).random(limit) for episode in batch],
    )
