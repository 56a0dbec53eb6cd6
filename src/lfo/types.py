"""The words that all parts of the system share. Plain data, no torch.

The way of the data:

    Task -> Environment <-> runner -> Rollout -> advantages -> TrainingSample -> losses

A rollout is one row of token ids in which every token knows where it came from:

    text      P0  A0  E0  I0  A1  E1
    origin    PROMPT SAMPLED ENVIRONMENT PREDICTED SAMPLED ENVIRONMENT
    policy     0   1   0   0   1   0      <- tokens that the policy loss may train
    world      0   0   1   0   0   1      <- observation tokens (inline world model); predicted text never

All streams of a row have the length of its tokens. The entry at index t belongs to token t and to the
prediction of token t from the tokens before it, so entry 0 of every weight is 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


class Origin(IntEnum):
    """Where a token came from."""

    PROMPT = 0  # system and user messages, the template around every message, and calls made in the policy's place
    SAMPLED = 1  # drawn from the policy
    ENVIRONMENT = 2  # said by the environment
    PREDICTED = 3  # an exchange that did not happen in this rollout: imagined by look-ahead, or shown as feedback


class StopReason(StrEnum):
    """Why a rollout ended."""

    DONE = "done"  # the environment said so
    MAX_TURNS = "max_turns"
    CONTEXT_OVERFLOW = "context_overflow"  # the next tokens would not fit
    TURN_OVERFLOW = "turn_overflow"  # one message ran past its token limit
    ENVIRONMENT_ERROR = "environment_error"  # it raised, retries included
    ENVIRONMENT_TIMEOUT = "environment_timeout"


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCall:
    """One call of a tool: `ToolCall(name="search_company", arguments={"name": "Acme Bank"})`."""

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Message:
    """One message of a transcript.

    `Message(role="tool", content="No such company.", name="search_company")`

    `content` of an assistant message is its whole text, tool call included, as the model wrote it.
    """

    role: Role
    content: str
    name: str | None = None
    predicted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an environment answers to one message."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyFacts:
    """What a reply means, for evaluation only: `ReplyFacts(category="auth_failure", facts=("pin",))`."""

    category: str
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One exchange inside a rollout: what was said to the environment and what came back.

    `action` is what the environment heard: without the thought, one call, in Hermes' form whatever the model's own is.
    The spans are half-open token ranges in the rollout's row: `tokens[action_start:action_end]` is the assistant's
    message as it was sampled, without the template around it, and likewise the observation. A message with several
    calls makes several turns; it is the action's span of the first, and those of the others are empty.
    `predicted` marks an exchange that did not happen in this rollout. Its observation was written by the world model
    or, with `feedback`, heard by another rollout of the task. One that was taken back is not in the row: its spans are
    empty, and say where it was.
    """

    action: str
    observation: str
    call: ToolCall | None  # None: no tool was called, or the call could not be read
    action_start: int
    action_end: int
    observation_start: int
    observation_end: int
    predicted: bool = False
    taken_back: bool = False
    feedback: bool = False
    asked: bool = False  # a real call that look-ahead asks about at this point
    facts: ReplyFacts | None = None  # of a real observation, when the environment can tell
    thought: str = ""  # what the policy thought before it spoke: in no state, no record of another and no call


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One attempt at one task; a failed attempt is a rollout too, with its reason.

    >>> Rollout(task_id="t", tokens=(5, 6, 7), origins=(0, 1, 2), logprobs=(0.0, -0.1, 0.0), turns=(),
    ...         opening=(), reward=1.0, stop=StopReason.DONE).sampled_count
    1
    """

    task_id: str
    opening: tuple[Message, ...]  # system and user messages
    tokens: tuple[int, ...]
    origins: tuple[int, ...]
    logprobs: tuple[float, ...]  # of sampled tokens under the policy that sampled them; 0 elsewhere
    turns: tuple[Turn, ...]
    reward: float
    stop: StopReason
    error: str = ""  # one sentence, when the environment failed
    taken_back: tuple[Turn, ...] = ()  # exchanges that were imagined and left the row again
    discarded_tokens: int = 0  # sampled, and taken back with them
    blind: bool = False  # explored without look-ahead
    imagine: int | None = None  # exchanges that it might imagine; None: as many as the run allows
    inquired: bool = False  # explored by asking what look-ahead would have imagined: not the policy's own doing
    untrained: bool = False  # the base acted, without the policy adapter
    feedback: bool = False  # it was to be shown what another rollout of the task heard
    info: Mapping[str, Any] = field(default_factory=dict)  # the environment's last words: level, mistakes, ...

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.origins) == len(self.logprobs):
            raise ValueError("tokens, origins and logprobs of a rollout must have one length")

    @property
    def succeeded(self) -> bool:
        return self.reward >= 1.0

    @property
    def sampled_count(self) -> int:
        """Tokens that the policy sampled, those that left the row included."""
        return sum(origin == Origin.SAMPLED for origin in self.origins) + self.discarded_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All rollouts of one task in one step; advantages are relative to those under the same condition."""

    task_id: str
    rollouts: tuple[Rollout, ...]

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(rollout.reward for rollout in self.rollouts)

    @property
    def conditions(self) -> tuple[tuple[bool, int | None, bool], ...]:
        """Which rollouts may be compared: those that may imagine equally much and were told as much."""
        return tuple((rollout.blind, rollout.imagine, rollout.feedback) for rollout in self.rollouts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """One row for the trainer, which is blind to algorithms: an algorithm is how the streams are filled.

    A policy row of three tokens, prompt, sampled, environment, with advantage 0.5:

    >>> row = TrainingSample(tokens=(5, 6, 7), adapters=("policy",), logprobs=(0.0, -0.1, 0.0),
    ...     advantages=(0.0, 0.5, 0.0), policy_weights=(0.0, 1.0, 0.0), world_model_weights=(0.0, 0.0, 0.0))

    A world-model row (state form) has `policy_weights` of zeros and 1 on every token of the reply. A row to be imitated
    has `imitation_weights` on what the policy should say; without them nothing is imitated in a row.
    """

    tokens: Sequence[int]
    adapters: tuple[str, ...]  # the adapters that are active in this row's forward pass
    logprobs: Sequence[float]
    advantages: Sequence[float]
    policy_weights: Sequence[float]
    world_model_weights: Sequence[float]
    imitation_weights: Sequence[float] = ()

    def __post_init__(self) -> None:
        streams = [self.logprobs, self.advantages, self.policy_weights, self.world_model_weights]
        streams += [self.imitation_weights] if self.imitation_weights else []
        if any(len(stream) != len(self.tokens) for stream in streams):
            raise ValueError("all streams of a training sample must have the length of its tokens")
        if self.tokens and any(stream[0] for stream in streams[2:]):
            raise ValueError("the first token of a row has nothing before it to be predicted from")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyScore:
    """How a true reply was predicted, each token after all true ones before it."""

    tokens: int
    hits: int  # tokens that were the likeliest
    loss: float  # sum of the negative log-probs
