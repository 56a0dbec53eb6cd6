"""Run rollouts: tasks in, finished rows of tokens out, against any environment and any sampler.

All rollouts of a batch go in step, turn by turn: look-ahead, the policy speaks, the environments answer at the
same time. Within a turn a rollout that has finished speaking leaves the sampler's batch, and a finished rollout
leaves for good. Going in step makes a batch a pure function of its seeds, however fast an environment answers.

An environment that raises or hangs ends its own rollout, with the reason: this is the one place that catches it.

Look-ahead: before each turn of the policy the environment may name a call (`lookahead_query`, from what the
policy has seen). What the predictor expects to hear is written into the row as an exchange in the shape of a
real one, marked in words, and never trained on. An inquiry makes such a call for real, in the policy's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any, Protocol

import numpy as np

from lfo.config import RunConfig
from lfo.env.interface import Environment, EnvironmentFactory, OffersLookahead, describe_with
from lfo.errors import EnvironmentFailed, WorkError
from lfo.protocol.chat import ChatCodec, Tokens
from lfo.protocol.hermes import format_tool_call, read_tool_call
from lfo.protocol.world_model import WorldModelState, state_of
from lfo.rollout.patience import EnvironmentTimedOut, call_all
from lfo.types import Message, Origin, ReplyFacts, Rollout, StepResult, StopReason, ToolCall, Turn

EXPECTED = "(expected) "  # how an imagined reply is marked
MAX_IMAGINED = 8  # exchanges before one turn; an environment that never has enough is cut off here
BROKEN_OFF = frozenset({StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT})  # not the policy's fault


class Speech(Protocol):
    """What one row said."""

    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def logprobs(self) -> tuple[float, ...]: ...
    @property
    def stopped(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Dictated:
    """What was said for a row."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...] = ()
    stopped: bool = True


class Rows(Protocol):
    """Rows of tokens that a sampler continues; `lfo.model.sampler.Session` is one."""

    def extend(self, rows: Sequence[int], chunks: Sequence[Sequence[int]]) -> None: ...
    def room(self, row: int) -> int: ...
    def decode(
        self, rows: Sequence[int], *, max_new_tokens: Sequence[int], temperature: float, uniforms: Any
    ) -> Sequence[Speech]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """What look-ahead asks: what will be heard, in this state, after this call?

    `messages` are what the rollout has said for real so far, so that a control can ask the environment itself.
    """

    task: Any
    state: WorldModelState
    call: ToolCall
    messages: tuple[str, ...]


Predictor = Callable[[Sequence[Question]], Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutRequest:
    """One rollout to run; `seeds` name its random numbers: `RolloutRequest(task=task, seeds=(0, 17, 3, 5))`."""

    task: Any
    seeds: tuple[int, ...]
    blind: bool = False  # no look-ahead
    inquiry: int = 0  # of a blind rollout: which of look-ahead's questions, counted in turns, is asked for real in it


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    max_turns: int = 16
    max_turn_tokens: int = 160
    temperature: float = 1.0
    environment_timeout: float = 30.0
    environment_retries: int = 2
    environment_workers: int = 16

    @classmethod
    def of_run(cls, config: RunConfig, **others: Any) -> RunnerSettings:
        """The settings of a run's rollouts, with `others` in place of some."""
        return cls(**({field.name: getattr(config.rollout, field.name) for field in fields(cls)} | others))

    def call_all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run calls of environments: each result, in order, or the `EnvironmentFailed` that stands for it."""
        return call_all(
            calls,
            timeout=self.environment_timeout,
            retries=self.environment_retries,
            workers=self.environment_workers,
        )


@dataclass(slots=True)
class _Row:
    """A rollout in progress."""

    place: int  # in the sampler's rows
    request: RolloutRequest
    environment: Environment | None = None
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
    asked: bool = False  # whether the call in `speech` is one that look-ahead asks about
    inquired: bool | None = None  # whether a question of look-ahead was asked for real; None = there was none yet
    watch: Callable[[Turn], None] | None = None

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)
        if self.watch is not None:
            self.watch(turn)

    def append(self, piece: Tokens) -> int:
        """Write a piece at the end of the row; answers where it starts."""
        start = len(self.tokens)
        self.tokens += piece.ids
        self.origins += piece.origins
        self.logprobs += [0.0] * len(piece.ids)
        return start

    def fail(self, error: EnvironmentFailed) -> None:
        timed_out = isinstance(error, EnvironmentTimedOut)
        self.stop = StopReason.ENVIRONMENT_TIMEOUT if timed_out else StopReason.ENVIRONMENT_ERROR
        self.error = str(error)

    def finished(self) -> Rollout:
        assert self.stop is not None
        return Rollout(
            task_id=str(self.request.task.id),
            opening=self.opening,
            tokens=tuple(self.tokens),
            origins=tuple(self.origins),
            logprobs=tuple(self.logprobs),
            turns=tuple(self.turns),
            reward=self.reward,
            stop=self.stop,
            error=self.error,
            blind=self.request.blind,
            inquired=bool(self.inquired),
            info=self._level() | self.info,
        )

    def _level(self) -> dict[str, Any]:
        """Of a task that has one. A rollout may end before its environment says so, and failed on that level too."""
        level = getattr(self.request.task, "level", None)
        return {} if level is None else {"level": level}


class Runner:
    """Runs batches of rollouts."""

    def __init__(
        self,
        environment: EnvironmentFactory,
        codec: ChatCodec,
        *,
        settings: RunnerSettings,
        predictor: Predictor | None = None,
    ) -> None:
        self._environment = environment
        self._codec = codec
        self.settings = settings
        self._predictor = predictor

    def run(
        self,
        requests: Sequence[RolloutRequest],
        rows: Rows,
        *,
        temperature: float | None = None,
        watch: Callable[[Turn], None] | None = None,
    ) -> list[Rollout]:
        """One rollout for each request, in order; `rows` are fresh rows of a sampler, as many as requests.

        `watch` is told each turn, imagined ones too, at the moment when it is over.
        """
        batch = [_Row(place=place, request=request, watch=watch) for place, request in enumerate(requests)]
        self._open(batch, rows)
        for turn in range(self.settings.max_turns):
            alive = [row for row in batch if row.stop is None]
            if not alive:
                break
            self._look_ahead([row for row in alive if not row.request.blind], rows)
            inquiring = self._inquire([row for row in alive if row.request.inquiry and row.inquired is None], rows)
            speaking = [row for row in alive if row.stop is None and row.place not in inquiring]
            self._speak(speaking, rows, turn, self.settings.temperature if temperature is None else temperature)
            self._listen([row for row in alive if row.stop is None], rows)
        for row in batch:
            row.stop = row.stop or StopReason.MAX_TURNS
        return [row.finished() for row in batch]

    def _open(self, batch: Sequence[_Row], rows: Rows) -> None:
        def start(task: Any) -> tuple[Environment, tuple[Message, ...]]:
            environment = self._environment()
            return environment, tuple(environment.reset(task))

        outcomes = self.settings.call_all([partial(start, row.request.task) for row in batch])
        for row, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, EnvironmentFailed):
                row.fail(outcome)
                continue
            row.environment, row.opening = outcome
            row.transcript = list(row.opening)
            self._extend(row, rows, self._codec.opening(row.opening))

    def _extend(self, row: _Row, rows: Rows, piece: Tokens) -> int:
        """Write a piece into the row and the sampler; a piece that would leave no room to speak ends the rollout."""
        if len(piece.ids) >= rows.room(row.place):
            row.stop = StopReason.CONTEXT_OVERFLOW
            return -1
        rows.extend([row.place], [piece.ids])
        return row.append(piece)

    # --- look-ahead --------------------------------------------------------------------------------------------

    def _look_ahead(self, batch: Sequence[_Row], rows: Rows) -> None:
        if self._predictor is None:
            return
        asking = [row for row in batch if isinstance(row.environment, OffersLookahead)]
        for _ in range(MAX_IMAGINED):
            questions: list[tuple[_Row, Question]] = []
            outcomes = self.settings.call_all([partial(self._question, row) for row in asking])
            for row, outcome in zip(asking, outcomes, strict=True):
                if isinstance(outcome, EnvironmentFailed):
                    row.fail(outcome)
                elif outcome is not None:
                    questions.append((row, outcome))
            if not questions:
                return
            replies = self._predictor([question for _, question in questions])
            for (row, question), reply in zip(questions, replies, strict=True):
                self._imagine(row, rows, question.call, reply)
            asking = [row for row, _ in questions if row.stop is None]

    def _question(self, row: _Row) -> Question | None:
        assert isinstance(row.environment, OffersLookahead)
        call = row.environment.lookahead_query(tuple(row.transcript))
        if call is None:
            return None
        said = tuple(turn.action for turn in row.turns if not turn.predicted)
        return Question(task=row.request.task, state=state_of(row.opening, row.turns), call=call, messages=said)

    def _imagine(self, row: _Row, rows: Rows, call: ToolCall, reply: str) -> None:
        action, observation = format_tool_call(call), EXPECTED + reply
        piece = self._codec.imagined(action, observation)
        start = self._extend(row, rows, piece)
        if row.stop is not None:
            return
        (action_span, observation_span) = piece.spans
        row.transcript.append(Message(role="assistant", content=action, predicted=True))
        row.transcript.append(Message(role="tool", content=observation, name=call.name, predicted=True))
        row.add(
            Turn(
                action=action,
                observation=reply,
                call=call,
                action_start=start + action_span[0],
                action_end=start + action_span[1],
                observation_start=start + observation_span[0],
                observation_end=start + observation_span[1],
                predicted=True,
            )
        )

    def _inquire(self, batch: Sequence[_Row], rows: Rows) -> set[int]:
        """Where look-ahead has questions for the first time, let rows ask for real what others only imagine; answers
        which rows do. The first question is left to the policy. The words are not its own, and never trained on."""
        inquiring: set[int] = set()
        if self._predictor is None:
            return inquiring
        batch = [row for row in batch if isinstance(row.environment, OffersLookahead)]
        outcomes = self.settings.call_all([partial(_questions_of, row) for row in batch])
        for row, outcome in zip(batch, outcomes, strict=True):
            if isinstance(outcome, EnvironmentFailed):
                row.fail(outcome)
            elif outcome:
                place = row.request.inquiry % len(outcome)
                row.inquired = place > 0
                if row.inquired:
                    message = (*self._codec.encode(format_tool_call(outcome[place])), self._codec.end_of_turn)
                    self._extend(row, rows, Tokens(ids=message, origins=(int(Origin.PROMPT),) * len(message), spans=()))
                    row.speech = _Dictated(tokens=message)
                    inquiring.add(row.place)
        return inquiring

    # --- one turn ----------------------------------------------------------------------------------------------

    def _speak(self, alive: Sequence[_Row], rows: Rows, turn: int, temperature: float) -> None:
        if not alive:
            return
        limit = self.settings.max_turn_tokens
        speeches = rows.decode(
            [row.place for row in alive],
            max_new_tokens=[limit] * len(alive),
            temperature=temperature,
            uniforms=[np.random.default_rng([*row.request.seeds, turn]).random(limit) for row in alive],
        )
        for row, speech in zip(alive, speeches, strict=True):
            row.speech = speech
            if not speech.stopped:
                full = rows.room(row.place) <= 0
                row.stop = StopReason.CONTEXT_OVERFLOW if full else StopReason.TURN_OVERFLOW
            start = len(row.tokens)
            row.tokens += speech.tokens
            row.origins += [int(Origin.SAMPLED)] * len(speech.tokens)
            row.logprobs += speech.logprobs
            if row.stop is not None:
                self._record(row, start)

    def _listen(self, alive: Sequence[_Row], rows: Rows) -> None:
        def step(row: _Row) -> tuple[StepResult, ReplyFacts | None, bool]:
            assert row.environment is not None
            assert row.speech is not None
            message = self._codec.decode(row.speech.tokens)
            asked = self._predictor is not None and is_asked(row.environment, row.transcript, message)
            return *_hear(row.environment, message), asked

        for row, outcome in zip(alive, self.settings.call_all([partial(step, row) for row in alive]), strict=True):
            assert row.speech is not None
            start = len(row.tokens) - len(row.speech.tokens)
            if isinstance(outcome, EnvironmentFailed):
                row.fail(outcome)
                self._record(row, start)
                continue
            result, facts, row.asked = outcome
            row.info = dict(result.info)
            row.reward += float(result.reward)
            piece = self._codec.after_action(result.observation, stopped=True)
            if result.done:
                row.stop = StopReason.DONE
                if result.observation:  # kept for the world model; nobody speaks after it
                    end = piece.content_end
                    room = end < rows.room(row.place)
                    last = Tokens(ids=piece.ids[:end], origins=piece.origins[:end], spans=piece.spans)
                    self._record(row, start, result, facts, (row.append(last), piece) if room else None)
                else:
                    self._record(row, start, result, facts)
                continue
            written = self._extend(row, rows, piece)
            self._record(row, start, result, facts, (written, piece) if row.stop is None else None)

    def _record(
        self,
        row: _Row,
        start: int,
        result: StepResult | None = None,
        facts: ReplyFacts | None = None,
        heard: tuple[int, Tokens] | None = None,
    ) -> None:
        """Note the turn: what was said from `start` on, and, where it fits, where the observation stands."""
        assert row.speech is not None
        action = self._codec.decode(row.speech.tokens)
        call = read_tool_call(action)
        observation = result.observation if result else ""
        action_end = start + len(row.speech.tokens) - (1 if row.speech.stopped else 0)
        begin, piece = heard if heard else (len(row.tokens), None)
        row.add(
            Turn(
                action=action,
                observation=observation,
                call=call,
                action_start=start,
                action_end=action_end,
                observation_start=begin + piece.content_start if piece else begin,
                observation_end=begin + piece.content_end if piece else begin,
                asked=row.asked,
                facts=facts,
            )
        )
        row.transcript.append(Message(role="assistant", content=action))
        row.transcript.append(Message(role="tool", content=observation, name=call.name if call else None))


def refuse_dead_environment(rollouts: Sequence[Rollout]) -> None:
    """One failed rollout is data; when all have failed, there is no use in going on."""
    if rollouts and all(rollout.stop in BROKEN_OFF for rollout in rollouts):
        raise WorkError(f"the environment failed in all {len(rollouts)} rollouts: {rollouts[0].error}")


def _hear(environment: Environment, message: str) -> tuple[StepResult, ReplyFacts | None]:
    """One step, checked: an answer that nobody could use is the environment's failure, and is not asked for again."""
    result = environment.step(message)
    if not isinstance(result, StepResult) or not isinstance(result.observation, str):
        raise EnvironmentFailed("step must answer a StepResult whose observation is text")
    if not math.isfinite(result.reward):
        raise EnvironmentFailed(f"step answered the reward {result.reward}")
    return result, describe_with(environment, result.observation)


def _questions_of(row: _Row) -> list[ToolCall]:
    assert row.environment is not None
    return questions(row.environment, row.transcript)


def questions(environment: Environment, transcript: Sequence[Message]) -> list[ToolCall]:
    """What look-ahead asks one after the other at this point, each once; what it would hear is left empty."""
    found: list[ToolCall] = []
    if not isinstance(environment, OffersLookahead):
        return found
    imagined = [message for message in transcript if not message.predicted]
    while len(found) < MAX_IMAGINED:
        call = environment.lookahead_query(tuple(imagined))
        if call is None or call in found:
            break
        found.append(call)
        imagined.append(Message(role="assistant", content=format_tool_call(call), predicted=True))
        imagined.append(Message(role="tool", content=EXPECTED, name=call.name, predicted=True))
    return found


def is_asked(environment: Environment, transcript: Sequence[Message], message: str) -> bool:
    """Whether a message makes a call that look-ahead would ask about if nothing had been imagined yet."""
    call = read_tool_call(message)
    return call is not None and call in questions(environment, transcript)
