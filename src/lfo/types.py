"""The data types that all parts of the system share. Plain data, no torch.

The flow of the data:

    Task -> Environment <-> runner -> Rollout -> advantages -> TrainingSample -> losses

A rollout is one sequence of token ids. Each token has an origin:

    text      P0  A0  E0  I0  A1  E1
    origin    PROMPT SAMPLED ENVIRONMENT PREDICTED SAMPLED ENVIRONMENT
    policy     0   1   0   0   1   0      <- tokens that the policy loss trains
    world      0   0   1   0   0   1      <- tokens that the inline world-model loss trains; never predicted text

All streams of a rollout have as many entries as it has tokens. Entry t belongs to token t and to the prediction of
token t from the tokens before it, so entry 0 of every stream of weights is 0.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Literal

Role = Literal["system", "user", "assistant", "tool"]


class Origin(IntEnum):
    """Where a token came from."""

    PROMPT = 0  # system and user messages, the template around every message, and calls made for the policy
    SAMPLED = 1  # sampled from the policy
    ENVIRONMENT = 2  # a reply of the environment
    PREDICTED = 3  # a reply that this rollout did not receive: predicted for look-ahead, or shown as feedback


class StopReason(StrEnum):
    """Why a rollout ended."""

    DONE = "done"  # the environment ended it
    MAX_TURNS = "max_turns"
    CONTEXT_OVERFLOW = "context_overflow"  # the next tokens do not fit into the context
    TURN_OVERFLOW = "turn_overflow"  # one message reached its token limit
    ENVIRONMENT_ERROR = "environment_error"  # it raised, or returned something invalid
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

    `content` of an assistant message is its full text as the model wrote it, including the tool call.
    """

    role: Role
    content: str
    name: str | None = None
    predicted: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Speech:
    """The tokens of one message: `Speech(tokens=(17, 2), logprobs=(-0.3, -0.1), stopped=True)`.

    `stopped`: the last token is an end token; otherwise the limit was reached. Log-probs are at the sampling
    temperature (at temperature 1 for greedy decoding); there are none if it was not sampled.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    stopped: bool = True


def exchanged(action: str, reply: str, call: ToolCall | None, *, predicted: bool = False) -> tuple[Message, Message]:
    """Return a message to an environment and its reply, as messages of a transcript."""
    told = Message(role="tool", content=reply, name=call.name if call else None, predicted=predicted)
    return Message(role="assistant", content=action, predicted=predicted), told


@dataclass(frozen=True, kw_only=True, slots=True)
class StepResult:
    """What an environment returns for one message."""

    observation: str
    reward: float = 0.0
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyFacts:
    """The meaning of a reply, for evaluation only: `ReplyFacts(category="auth_failure", facts=("pin",))`."""

    category: str
    facts: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Turn:
    """One exchange of a rollout: a message to the environment and its reply.

    `action` is the message that the environment received: one call, without the thought, always in Hermes format.
    The spans are half-open token ranges in the rollout. `tokens[action_start:action_end]` is the sampled
    message of the assistant without the template around it; the observation's span works the same way. A message with
    several calls gives several turns: the first has the span of the message, the others have empty action spans.
    `predicted` marks an exchange that did not happen in this rollout. The world model predicted its observation or, if
    `feedback` is set, another rollout of the task received it; if `checked` is set, it says why the call does not fit
    its tool. An exchange that was taken back is not in the rollout: its spans are empty and mark its former position.
    """

    action: str
    observation: str
    call: ToolCall | None  # None: the message calls no tool, or the call cannot be parsed
    action_start: int = 0
    action_end: int = 0
    observation_start: int = 0
    observation_end: int = 0
    predicted: bool = False
    taken_back: bool = False
    feedback: bool = False
    checked: bool = False
    asked: bool = False  # a real call that look-ahead also imagines in this state
    facts: ReplyFacts | None = None  # of a real observation, if the environment describes replies
    thought: str = ""  # the policy's reasoning before the message; the environment and the world model never see it

    @property
    def imagined(self) -> bool:
        """Whether the reply was predicted: it is neither real, nor feedback, nor a check of the schema."""
        return self.predicted and not self.feedback and not self.checked


MOST_IMAGINED = 2  # exchanges that stay in one rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class Seat:
    """How one rollout of a group is played: by whom, and with how much look-ahead."""

    look_ahead: bool = True
    imagine: int | None = None  # how many exchanges it may imagine; None: the limit of the run
    picks: bool = False  # the first candidate turn that other rollouts would imagine is made for real
    player: Literal["policy", "base"] = "policy"  # base: without the policy adapter
    truth: bool = (
        False  # what it imagines is answered by a copy of the environment: what a perfect prediction would give
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Observed:
    """How much the tokens of each observation count for a world model that learns on the samples of the policy.

    Every observation that this rollout received has one of three sources. What it did not receive counts nothing.
    """

    tools: Collection[str] | None = frozenset()  # replies to calls of these tools count 1 (None: of all)
    user_turns: float = 0.0  # answers to messages that call no tool
    other: float = 0.0  # replies to other calls, and to those that cannot be parsed

    def weight(self, turn: Turn) -> float:
        if turn.predicted:
            return 0.0
        if turn.call is None:
            return self.other if "<tool_call>" in turn.action else self.user_turns
        return 1.0 if self.tools is None or turn.call.name in self.tools else self.other


NOTHING = Observed()


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
    """What a plan depends on besides config and step: the state of a run when a step begins, and its environment."""

    success_tasks: int = 0  # tasks with a success that could be imitated
    train_tasks: int | None = None  # None: an endless stream
    predicted_tools: Collection[str] | None = frozenset()  # None: all
    outcomes: Sequence[Mapping[str, Any]] = ()  # of each earlier step, where the plans name their seats


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """Who plays in a step, what is shown to whom, what is trained, and what an evaluation after it measures.

    The algorithm computes it once (`lfo.algorithms`); all others are handed it and ask nothing else.

    Plain DAPO with groups of two:

        StepPlan(step=17, seats=(Seat(look_ahead=False),) * 2, draws=2, reinforces=True)
    """

    step: int
    seats: tuple[Seat, ...] = ()  # of each group
    draws: int = 0  # how often tasks are drawn at most, until enough groups are informative; 0: nothing is rolled out
    first_wave: int = 0  # with `feedback`: the seats that play first
    feedback: Literal["off", "own", "other_task"] = "off"  # whose real replies the other seats are shown
    selects: bool = True  # groups whose rewards are equal do not count: dynamic sampling
    reinforces: bool = False  # the policy learns from its own rollouts
    imitates: bool = False  # the policy learns from rollouts of earlier steps that succeeded
    predicts: bool = False  # the world model learns
    observed: Observed | None = None  # what it learns on the policy's own samples; None: it has its own
    listens: bool = True  # replies, and rollouts to imitate, are stored
    looks_ahead: bool = True  # an evaluation after this step looks ahead too, if the run does
    rate: float = 1.0  # multiplies every learning rate
    phase: str = ""  # of a run that has phases
    kinds: tuple[str, ...] = ()  # names of the seats, whose outcomes are recorded by them; (): nothing is recorded
    imitated_from: float | None = None  # least reward of what is imitated, successes or not; None: all that is stored
    agent: str = ""  # who acts, and what was given up and why, in words


@dataclass(frozen=True, kw_only=True, slots=True)
class Rollout:
    """One attempt at one task. A failed attempt is also a rollout and has a stop reason.

    >>> Rollout(task_id="t", tokens=(5, 6, 7), origins=(0, 1, 2), logprobs=(0.0, -0.1, 0.0), turns=(),
    ...         opening=(), reward=1.0, stop=StopReason.DONE).sampled_count
    1
    """

    task_id: str
    opening: tuple[Message, ...]  # system and user messages
    tokens: tuple[int, ...] = ()  # none if it was read from a text
    origins: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()  # of the sampled tokens, under the policy that sampled them; 0 elsewhere
    turns: tuple[Turn, ...]
    reward: float
    stop: StopReason
    error: str = ""  # one sentence, if the environment failed
    taken_back: tuple[Turn, ...] = ()  # imagined exchanges that were removed from the rollout
    discarded_tokens: int = 0  # sampled tokens that were removed with them
    look_ahead: bool = True  # it could look ahead, if the run does
    imagine: int | None = None  # how many exchanges it was allowed to imagine; None: the limit of the run
    untrained: bool = False  # the base acted without the policy adapter
    feedback: bool = False  # it was requested with feedback from another rollout of the task
    cut: int = 0  # replies of the environment that were cut because they could never fit into the context
    info: Mapping[str, Any] = field(default_factory=dict)  # plain values of the last `info`: level, mistakes, ...

    def __post_init__(self) -> None:
        if not len(self.tokens) == len(self.origins) == len(self.logprobs):
            raise ValueError("tokens, origins and logprobs of a rollout must have the same length")

    @property
    def succeeded(self) -> bool:
        return self.reward >= 1.0

    @property
    def sampled_count(self) -> int:
        """The number of tokens that the policy sampled, including those that were removed."""
        return sum(origin == Origin.SAMPLED for origin in self.origins) + self.discarded_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutGroup:
    """All rollouts of one task in one step. Advantages compare rollouts with the same condition."""

    task_id: str
    rollouts: tuple[Rollout, ...]
    bonuses: tuple[float, ...] = ()  # added to the advantages; empty: none

    @property
    def rewards(self) -> tuple[float, ...]:
        return tuple(rollout.reward for rollout in self.rollouts)

    @property
    def conditions(self) -> tuple[tuple[bool, int | None, bool], ...]:
        """The condition of each rollout: whether it looks ahead, how many exchanges it may imagine, and feedback."""
        return tuple((rollout.look_ahead, rollout.imagine, rollout.feedback) for rollout in self.rollouts)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingSample:
    """One sample to train on. The trainer knows no algorithm: an algorithm decides how the streams are filled.

    A policy sample of three tokens, prompt, sampled, environment, with advantage 0.5:

    >>> sample = TrainingSample(tokens=(5, 6, 7), adapters=("policy",), logprobs=(0.0, -0.1, 0.0),
    ...     advantages=(0.0, 0.5, 0.0), policy_weights=(0.0, 1.0, 0.0), world_model_weights=(0.0, 0.0, 0.0))

    A world-model sample (state form) has zeros as `policy_weights` and 1 on every token of the reply, or less on those
    that only word it (`world_model.wording`). An imitation sample has `imitation_weights` on the tokens that the policy
    should say; `()` means no imitation loss.
    """

    tokens: Sequence[int]
    adapters: tuple[str, ...]  # the active adapters in this sample's forward pass
    logprobs: Sequence[float]
    advantages: Sequence[float]
    policy_weights: Sequence[float]
    world_model_weights: Sequence[float]
    imitation_weights: Sequence[float] = ()

    @classmethod
    def supervised(
        cls,
        tokens: Sequence[int],
        *,
        adapters: tuple[str, ...],
        world_model_weights: Sequence[float] = (),
        imitation_weights: Sequence[float] = (),
    ) -> TrainingSample:
        """Return a sample without a policy loss; `()` means that it has no such loss."""
        zeros = [0.0] * len(tokens)
        return cls(
            tokens=tokens,
            adapters=adapters,
            logprobs=zeros,
            advantages=zeros,
            policy_weights=zeros,
            world_model_weights=world_model_weights or zeros,
            imitation_weights=imitation_weights,
        )

    def __post_init__(self) -> None:
        streams = [self.logprobs, self.advantages, self.policy_weights, self.world_model_weights]
        streams += [self.imitation_weights] if self.imitation_weights else []
        if any(len(stream) != len(self.tokens) for stream in streams):
            raise ValueError("all streams of a training sample must have as many entries as it has tokens")
        if self.tokens and any(stream[0] for stream in streams[2:]):
            raise ValueError("the first token of a row must have weight 0: no token before it predicts it")


@dataclass(frozen=True, kw_only=True, slots=True)
class ReplyScore:
    """How well the world model predicts a true reply, token by token, given the true tokens before each."""

    tokens: int
    hits: int  # tokens that had the highest probability
    loss: float  # sum of the negative log-probs
