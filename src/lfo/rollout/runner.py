"""Run rollouts: tasks in, finished rows of tokens out, against any environment and any sampler.

All rollouts of a batch go in step, turn by turn: the policy speaks, deliberates where it looks ahead (`deliberation`),
and the environments answer at the same time. Within a turn a rollout that has finished speaking leaves the sampler's
batch, and a finished rollout leaves for good. Going in step makes a batch a pure function of its seeds, however fast an
environment answers.

An environment that raises or hangs ends its own rollout, with the reason: this is the one place that catches it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from lfo.config import RunConfig
from lfo.env.interface import Environment, EnvironmentFactory, describe_with
from lfo.errors import EnvironmentFailed, WorkError
from lfo.protocol.chat import ChatCodec, Said, Tokens
from lfo.protocol.hermes import read_tool_call
from lfo.rollout.deliberation import Deliberation, LookAhead, is_asked, show_exchange
from lfo.rollout.patience import call_all
from lfo.rollout.row import RolloutRequest, Row, Rows
from lfo.types import Message, ReplyFacts, Rollout, StepResult, StopReason, ToolCall, Turn

BROKEN_OFF = frozenset({StopReason.ENVIRONMENT_ERROR, StopReason.ENVIRONMENT_TIMEOUT})  # not the policy's fault


RETRIES = 2  # how often a call of an environment that raised is made again; a late one is not


@dataclass(frozen=True, kw_only=True, slots=True)
class RunnerSettings:
    max_turns: int = 16
    max_turn_tokens: int = 160
    environment_timeout: float = 30.0
    temperature: float = 1.0
    environment_retries: int = RETRIES
    environment_workers: int = 16  # environments that step at the same time

    @classmethod
    def of_run(cls, config: RunConfig, **others: Any) -> RunnerSettings:
        """The settings of a run's rollouts, with `others` in place of some."""
        own = ("max_turns", "max_turn_tokens", "environment_timeout")
        settings = {name: getattr(config.rollout, name) for name in own} | {"environment_retries": RETRIES}
        return cls(**(settings | others))

    def call_all(self, calls: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run calls of environments: each result, in order, or the `EnvironmentFailed` that stands for it."""
        return call_all(
            calls,
            timeout=self.environment_timeout,
            retries=self.environment_retries,
            workers=self.environment_workers,
        )


class Runner:
    """Runs batches of rollouts; `lookahead` None: nobody looks ahead."""

    def __init__(
        self,
        environment: EnvironmentFactory,
        codec: ChatCodec,
        *,
        settings: RunnerSettings,
        lookahead: LookAhead | None = None,
    ) -> None:
        self._environment = environment
        self._codec = codec
        self.settings = settings
        self._lookahead = lookahead

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
        heat = self.settings.temperature if temperature is None else temperature
        batch = [Row(index=index, request=request, rows=rows, watch=watch) for index, request in enumerate(requests)]
        self._open(batch)
        asks = self._lookahead.proposed_by if self._lookahead else None
        deliberation = self._deliberation(rows)
        for turn in range(self.settings.max_turns):
            alive = [row for row in batch if row.stop is None]
            if not alive:
                break
            self._remind(alive)
            dictated: set[int] = set()
            if deliberation and asks == "environment":
                deliberation.look_ahead(alive)
                dictated = deliberation.inquire([row for row in alive if row.stop is None])
            self._speak([row for row in alive if row.stop is None and row.index not in dictated], rows, turn, heat)
            if deliberation and asks == "policy":
                deliberation.reconsider([row for row in alive if row.stop is None], turn, heat)
            self._listen([row for row in alive if row.stop is None])
        for row in batch:
            row.stop = row.stop or StopReason.MAX_TURNS
        return [row.finished() for row in batch]

    def _deliberation(self, rows: Rows) -> Deliberation | None:
        if self._lookahead is None:
            return None
        limit, call = self.settings.max_turn_tokens, self.settings.call_all
        return Deliberation(self._lookahead, self._codec, rows, max_turn_tokens=limit, call_all=call)

    def _open(self, batch: Sequence[Row]) -> None:
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
            if row.write(self._codec.opening(row.opening)) is None:
                row.stop = StopReason.CONTEXT_OVERFLOW

    def _remind(self, alive: Sequence[Row]) -> None:
        """Show rows what another rollout of their task heard, after as many exchanges, where there is room."""
        for row in alive:
            feedback, real = row.request.feedback, sum(not turn.predicted for turn in row.turns)
            if feedback is not None and feedback.after <= real and not any(turn.feedback for turn in row.turns):
                show_exchange(row, self._codec, feedback.action, feedback.observation, feedback=True)

    def _speak(self, batch: Sequence[Row], rows: Rows, turn: int, temperature: float) -> None:
        if not batch:
            return
        limit = self.settings.max_turn_tokens
        speeches = rows.decode(
            [row.index for row in batch],
            max_new_tokens=[limit] * len(batch),
            temperature=temperature,
            uniforms=[np.random.default_rng([*row.request.seeds, turn]).random(limit) for row in batch],
        )
        for row, speech in zip(batch, speeches, strict=True):
            row.say(speech)
            if not speech.stopped:
                full = rows.room(row.index) <= 0
                row.stop = StopReason.CONTEXT_OVERFLOW if full else StopReason.TURN_OVERFLOW
                said = self._codec.read(speech.tokens)
                self._note(row, said, [_Exchange(message=said.message)], None)

    def _listen(self, alive: Sequence[Row]) -> None:
        """Tell each environment what its row has said, call by call, and write down what it answered.

        All environments hear their first call at the same time, then those that go on their second, and so on.
        """
        said = {row.index: self._codec.read(row.speech.tokens) for row in alive if row.speech is not None}
        messages = {index: each.messages for index, each in said.items()}
        heard: dict[int, list[_Exchange]] = {row.index: [] for row in alive}
        for place in range(max(map(len, messages.values()), default=0)):
            calling = [row for row in alive if row.stop is None and place < len(messages[row.index])]
            steps = [partial(self._step, row, messages[row.index][place]) for row in calling]
            for row, outcome in zip(calling, self.settings.call_all(steps), strict=True):
                exchange = _Exchange(message=messages[row.index][place])
                if isinstance(outcome, EnvironmentFailed):
                    row.fail(outcome)
                else:
                    result, exchange.facts, exchange.asked = outcome
                    exchange.result = result
                    row.info = dict(result.info)
                    row.reward += float(result.reward)
                    row.stop = StopReason.DONE if result.done else None
                heard[row.index].append(exchange)
                row.transcript += exchange.messages
        for row in alive:
            self._write_down(row, said[row.index], heard[row.index])

    def _step(self, row: Row, message: str) -> tuple[StepResult, ReplyFacts | None, bool]:
        assert row.environment is not None
        # Where the policy proposes, what is asked about is known when the whole group has played.
        named = self._lookahead is not None and self._lookahead.proposed_by == "environment"
        asked = named and is_asked(row.environment, row.transcript, message)
        return *_hear(row.environment, message), asked

    def _write_down(self, row: Row, said: Said, heard: Sequence[_Exchange]) -> None:
        """Write all that was answered to one message behind it, and the prompt for the next."""
        answered = [exchange.result.observation for exchange in heard if exchange.result is not None]
        if row.stop is StopReason.DONE and not answered[-1]:
            answered.pop()  # nothing to hear, and nobody speaks after it
        piece = self._codec.after_action(*answered, stopped=True) if answered else None
        if piece is None:
            written = None
        elif row.stop is None:
            written = row.write(piece)
            if written is None:
                row.stop = StopReason.CONTEXT_OVERFLOW
        else:  # kept for the world model; nobody speaks after it
            end = piece.content_end
            last = Tokens(ids=piece.ids[:end], origins=piece.origins[:end], spans=piece.spans)
            written = row.append(last) if end < row.rows.room(row.index) else None
        self._note(row, said, heard, None if written is None or piece is None else (written, piece))

    def _note(self, row: Row, said: Said, heard: Sequence[_Exchange], written: tuple[int, Tokens] | None) -> None:
        """Note the turns of one message: what was said, and, where it is in the row, where each observation stands."""
        assert row.speech is not None
        speech_end = written[0] if written else len(row.tokens)
        start, action_end = speech_end - len(row.speech.tokens), speech_end - (1 if row.speech.stopped else 0)
        spans = [(written[0] + begin, written[0] + end) for begin, end in written[1].spans] if written else []
        for place, exchange in enumerate(heard):
            begin, end = spans[place] if place < len(spans) else (len(row.tokens), len(row.tokens))
            row.add(
                Turn(
                    action=str(exchange.message),
                    observation=exchange.result.observation if exchange.result else "",
                    call=exchange.call,
                    action_start=begin if place else start,
                    action_end=begin if place else action_end,
                    observation_start=begin,
                    observation_end=end,
                    asked=exchange.asked,
                    facts=exchange.facts,
                    thought="" if place else said.thought,
                )
            )


@dataclass(kw_only=True, slots=True)
class _Exchange:
    """One message that an environment has heard, and what it answered; no result where it failed or was not asked."""

    message: str
    result: StepResult | None = None
    facts: ReplyFacts | None = None
    asked: bool = False

    @property
    def call(self) -> ToolCall | None:
        return read_tool_call(self.message)

    @property
    def messages(self) -> list[Message]:
        observation, call = self.result.observation if self.result else "", self.call
        return [
            Message(role="assistant", content=str(self.message)),
            Message(role="tool", content=observation, name=call.name if call else None),
        ]


def refuse_dead_environment(rollouts: Sequence[Rollout]) -> None:
    """One failed rollout is data; when all have failed, there is no use in going on."""
    if rollouts and all(rollout.stop in BROKEN_OFF for rollout in rollouts):
        raise WorkError(f"the environment failed in all {len(rollouts)} rollouts: {rollouts[0].error}")


def _hear(environment: Environment, message: str) -> tuple[StepResult, ReplyFacts | None]:
    """One step, checked: an answer that nobody could use is the environment's failure, and is not asked for again."""
    result = environment.step(message)
    if not isinstance(result, StepResult) or not isinstance(result.observation, str):
        raise EnvironmentFailed("step must answer a StepResult whose observation is text")
    if not isinstance(result.reward, int | float) or not math.isfinite(result.reward):
        raise EnvironmentFailed(f"step answered the reward {result.reward}")
    if not isinstance(result.info, Mapping):
        raise EnvironmentFailed(f"step answered an info that is no mapping but {str(result.info)[:80]}")
    return result, describe_with(environment, result.observation)
