"""Look-ahead: show the policy predicted replies before it commits to a turn. Two ways to choose the imagined calls:

policy        The policy drafts its turn. If the draft calls a tool that may be imagined, the predictor predicts the
              reply, and the policy speaks again after it. If it now makes a different call, the imagined exchange stays
              and the new call is the next draft. Otherwise the exchange is taken back and the first draft is the turn.
              A call that uses what was imagined before is made for real and not imagined again. A draft that does
              not fit the schema of its tool needs no prediction: the policy is told what does not fit. Small
              instruct models repeat the error of a real call instead of making another one: they are told so.
environment   The environment names calls (`lookahead_query`, a function of the transcript). Each is shown with its
              predicted reply before the policy speaks. This is a control in evaluation: nothing is trained so.

    P0  D0 (expected) I0  A0  E0 ...       D0: draft, I0: predicted reply, A0: the real action after it
    P0  D0  E0 ...                         the exchange was taken back, because no different call followed I0

How the policy is told of an imagined reply depends on the base (`lfo.protocol.shown`): like a real one, with the mark
`(expected)`, or in words. The environment never sees an imagined exchange. No loss trains predicted replies, nor the
words around them; drafts are sampled by the policy and trained like its other messages.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Protocol

import numpy as np

from lfo.env.answers import asked_call
from lfo.env.interface import Environment, OffersLookahead
from lfo.env.patience import name_of
from lfo.errors import EnvironmentFailed
from lfo.play.episode import Dictated, Mark, Row, SamplerRows, Speech
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import OPENING, format_tool_call, read_tool_call
from lfo.protocol.schemas import listed_words, misfit, words_of
from lfo.protocol.shown import MARK, ShownForm
from lfo.protocol.world_model import WorldModelState, state_of
from lfo.types import MOST_IMAGINED, Message, Origin, Rollout, StopReason, ToolCall, Turn

EXPECTED = MARK.text("")  # the text before a predicted reply that is marked
_TAG = re.compile(r"</?\w+>")
MAX_IMAGINED = 8  # imagined exchanges before one turn, at most, for environments that never stop asking


class CallAll(Protocol):
    """`RunnerConfig.call_all`."""

    def __call__(self, calls: Sequence[Callable[[], Any]], *, what: str) -> list[Any]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question to the predictor: what is the reply to this call in this state?

    `messages` are the real messages of the rollout so far, so that a control can replay them in the environment.
    """

    task: Any
    state: WorldModelState
    call: ToolCall
    messages: tuple[str, ...]

    @property
    def key(self) -> Hashable:
        """Equal for two questions exactly if the world model gets the same prompt."""
        state = self.state
        return format_tool_call(self.call), state.task, state.step, state.actions, tuple(state.collected.items())


Predictor = Callable[[Sequence[Question]], Sequence[str]]


@dataclass(frozen=True, kw_only=True, slots=True)
class LookAhead:
    """How the rollouts of a run look ahead."""

    predictor: Predictor
    proposed_by: Literal["policy", "environment"] = "policy"
    tools: Container[str] | None = None  # the tools that the policy may imagine; None: all
    most: int = MOST_IMAGINED  # imagined exchanges in one rollout, if the policy proposes them
    drafts: int = 1  # candidates for a turn; try the next until one is worth imagining


@dataclass(frozen=True, kw_only=True, slots=True)
class _Draft:
    """A message that is answered before it counts; `call` is None if it only repeats an error."""

    call: ToolCall | None
    flaw: str | None  # what is wrong with it; None: its reply is predicted
    told: str | None  # the flaw in the form of the base


class Deliberation:
    """Runs look-ahead in one batch of rollouts."""

    def __init__(
        self,
        lookahead: LookAhead,
        codec: ChatCodec,
        rows: SamplerRows,
        *,
        form: ShownForm,
        max_turn_tokens: int,
        call_all: CallAll,
    ) -> None:
        self._lookahead, self._codec, self._rows, self._form = lookahead, codec, rows, form
        self._max_turn_tokens, self._call_all = max_turn_tokens, call_all

    # --- proposed by the policy ----------------------------------------------------------------------------------

    def reconsider(self, batch: Sequence[Row], turn: int, temperature: float) -> None:
        """Let rows imagine the reply to the turn that they just said, and say another turn."""
        sighted = [row for row in batch if row.request.look_ahead]
        looking = [row for row in sighted if self._allowance(row) > 0 or self._repeats_error(row)]
        tried: dict[int, list[ToolCall | None]] = {row.index: [] for row in looking}
        self._imagine_drafts(looking, tried, (turn, 0), temperature)
        picking = [row for row in batch if row.request.picks and self._may_pick(row)]
        waiting = [row for row in (*looking, *picking) if not self._settled(row)]
        for candidate in range(1, self._lookahead.drafts):
            waiting = self._redraft(waiting, tried, (turn, MAX_IMAGINED * candidate), temperature)

    def _settled(self, row: Row) -> bool:
        """Whether a row needs no more candidates: it has imagined something; an explorer calls what others imagine."""
        return self._calls_imaginable(row) if row.request.picks else row.imagined > 0

    def _redraft(
        self,
        waiting: Sequence[Row],
        tried: dict[int, list[ToolCall | None]],
        numbers: tuple[int, int],
        temperature: float,
    ) -> list[Row]:
        """Try another candidate for the turn; restore the first one, and return the row, where it does not settle."""
        starts, firsts = [_before_speech(row) for row in waiting], [row.speech for row in waiting]
        for row, start in zip(waiting, starts, strict=True):
            row.take_back(start)
        # A greedy candidate would repeat the first one.
        for row, speech in zip(waiting, self._decode(waiting, numbers, temperature or 1.0), strict=True):
            row.say(speech)
        self._imagine_drafts([row for row in waiting if row.index in tried], tried, numbers, temperature)
        still_waiting = []
        for row, start, first in zip(waiting, starts, firsts, strict=True):
            assert first is not None
            if self._settled(row):
                row.discarded_tokens += len(first.tokens)
                continue
            self._discard(row, start)
            self._rows.extend([row.index], [first.tokens])
            row.say(first)
            still_waiting.append(row)
        return still_waiting

    def _allowance(self, row: Row) -> int:
        """Return how many exchanges this row may still imagine."""
        most = self._lookahead.most if row.request.imagine is None else row.request.imagine
        return most - row.imagined

    def _imagine_drafts(
        self,
        batch: Sequence[Row],
        tried: dict[int, list[ToolCall | None]],
        numbers: tuple[int, int],
        temperature: float,
    ) -> None:
        """Imagine the drafts of these rows while different calls follow."""
        turn, first = numbers
        for look in range(1, MAX_IMAGINED):
            drafts = [(row, draft) for row in batch if (draft := self._draft(row)) is not None]
            asking = [(row, draft) for row, draft in drafts if draft.call not in tried[row.index]]
            if not asking:
                break
            for row, draft in asking:
                tried[row.index].append(draft.call)
            marks = {row.index: row.mark() for row, _ in asking}
            questions = [_question(row, draft.call) for row, draft in asking if draft.call and draft.flaw is None]
            replies = iter(self._lookahead.predictor(questions) if questions else ())
            shown = [
                (row, draft.call)
                for row, draft in asking
                if self._show(row, draft, next(replies) if draft.flaw is None else draft.flaw)
            ]
            speeches = self._decode([row for row, _ in shown], (turn, first + look), temperature)
            batch = []
            for (row, call), speech in zip(shown, speeches, strict=True):
                row.say(speech)
                if self._calls(speech) in ((), (call,)):
                    self._take_back(row, marks[row.index])
                    continue
                batch.append(row)
                if row.on_turn is not None:
                    row.on_turn(row.turns[-1])

    def _draft(self, row: Row) -> _Draft | None:
        """Return the message of a row if its reply may be imagined, or if something is wrong with it; else None."""
        call = self._imaginable(row)
        if call is not None:
            flaw = misfit(call, self._codec.tools)
            return _Draft(call=call, flaw=flaw, told=None if flaw is None else self._form.refused(flaw))
        if self._repeats_error(row):
            error = row.turns[-1].observation
            return _Draft(call=None, flaw=error, told=self._form.failed(error))
        return None

    def _repeats_error(self, row: Row) -> bool:
        """Whether a message makes no call, but only repeats the reply to a call that did not fit its tool."""
        last = row.turns[-1] if row.turns else None
        if not self._form.failure or last is None or last.predicted or row.speech is None or not row.speech.stopped:
            return False
        said = self._codec.read(row.speech.tokens)
        failed = OPENING in last.action if last.call is None else misfit(last.call, self._codec.tools) is not None
        return failed and not said.calls and _without_tags(said.text) == _without_tags(last.observation)

    def _imaginable(self, row: Row) -> ToolCall | None:
        """Return the drafted call of a row if it may be imagined, else None."""
        call = self._call(row.speech)
        allowed = call is not None and self._may_imagine(call) and self._allowance(row) > 0
        return call if allowed and call is not None and not self._uses_prediction(row, call) else None

    def _may_pick(self, row: Row) -> bool:
        """Whether an explorer has not yet made a real call of a tool that others imagine."""
        made = any(turn.call is not None and not turn.predicted and self._may_imagine(turn.call) for turn in row.turns)
        return not made and not self._calls_imaginable(row)

    def _calls_imaginable(self, row: Row) -> bool:
        call = self._call(row.speech)
        return call is not None and self._may_imagine(call)

    def _may_imagine(self, call: ToolCall) -> bool:
        return self._lookahead.tools is None or call.name in self._lookahead.tools

    def _uses_prediction(self, row: Row, call: ToolCall) -> bool:
        """Whether a call uses what the row has imagined, so that it is made for real instead of imagined again.

        This holds after a real turn that followed the predicted reply, until the next real call of such a tool, and if
        the call contains a word that first occurred in a predicted reply.
        """
        last = max((index for index, turn in enumerate(row.turns) if turn.predicted and not turn.checked), default=None)
        if last is None:
            return False
        since = [turn for turn in row.turns[last + 1 :] if not turn.checked]
        if since:
            return not any(turn.call is not None and self._may_imagine(turn.call) for turn in since)
        real = [message.content for message in row.transcript if not message.predicted]
        drafted = [turn.action for turn in row.turns if turn.predicted]
        predicted = [turn.observation for turn in row.turns if turn.predicted and not turn.checked]
        # A reply that lists every allowed value says nothing about which of them is right.
        said = {word for reply in predicted for word in words_of(reply) - listed_words(reply, self._codec.tools)}
        return not (said - words_of(*real, *drafted)).isdisjoint(words_of(format_tool_call(call)))

    def _call(self, speech: Speech | None) -> ToolCall | None:
        """Return the call of a message with exactly one call, else None; several calls are never imagined."""
        calls = self._calls(speech)
        return calls[0] if len(calls) == 1 else None

    def _calls(self, speech: Speech | None) -> tuple[ToolCall, ...]:
        return self._codec.read(speech.tokens).calls if speech is not None and speech.stopped else ()

    def _show(self, row: Row, draft: _Draft, reply: str) -> bool:
        """Append a predicted reply to a row after its draft, or what is wrong with the draft.

        Return False, without a change, if there is no room.
        """
        assert row.speech is not None
        said, told = self._codec.read(row.speech.tokens), draft.told or self._form.text(reply)
        piece = self._codec.shown(told, self._form)
        end = len(row.tokens)
        start = row.write(piece)
        if start is None:
            return False
        row.transcript += _not_made(said.message, reply, draft.call)
        row.turns.append(
            Turn(
                action=said.message,
                observation=reply,
                call=draft.call,
                action_start=end - len(row.speech.tokens),
                action_end=end - 1,
                observation_start=start + piece.content_start,
                observation_end=start + piece.content_end,
                predicted=True,
                checked=draft.flaw is not None,
                thought=said.thought,
            )
        )
        return True

    def _take_back(self, row: Row, mark: Mark) -> None:
        """Take back the last imagined exchange of a row; its draft becomes the turn."""
        imagined = row.turns[-1]
        draft = Dictated(
            tokens=tuple(row.tokens[imagined.action_start : mark.tokens]),
            logprobs=tuple(row.logprobs[imagined.action_start : mark.tokens]),
        )
        self._discard(row, mark)
        row.speech = draft
        at = imagined.action_start
        turn = replace(imagined, action_end=at, observation_start=at, observation_end=at, taken_back=True)
        row.taken_back.append(turn)
        if row.on_turn is not None:
            row.on_turn(turn)

    def _discard(self, row: Row, mark: Mark) -> None:
        row.discarded_tokens += sum(origin == Origin.SAMPLED for origin in row.origins[mark.tokens :])
        row.take_back(mark)

    def _decode(self, batch: Sequence[Row], numbers: tuple[int, int], temperature: float) -> Sequence[Speech]:
        if not batch:
            return ()
        limit = self._max_turn_tokens
        return self._rows.decode(
            [row.index for row in batch],
            max_new_tokens=[limit] * len(batch),
            temperature=temperature,
            uniforms=[np.random.default_rng([*row.request.seeds, *numbers]).random(limit) for row in batch],
        )

    # --- proposed by the environment -----------------------------------------------------------------------------

    def look_ahead(self, batch: Sequence[Row]) -> None:
        """Show rows the predicted replies to the calls that their environments name."""
        asking = [row for row in batch if row.request.look_ahead and isinstance(row.environment, OffersLookahead)]
        for _ in range(MAX_IMAGINED):
            questions: list[tuple[Row, Question]] = []
            outcomes = self._call_all([partial(_environment_question, row) for row in asking], what=_query_of(asking))
            for row, outcome in zip(asking, outcomes, strict=True):
                if isinstance(outcome, EnvironmentFailed):
                    row.fail(outcome)
                elif outcome is not None:
                    questions.append((row, outcome))
            if not questions:
                return
            replies = self._lookahead.predictor([question for _, question in questions])
            for (row, question), reply in zip(questions, replies, strict=True):
                if not show_exchange(row, self._codec, format_tool_call(question.call), reply, form=self._form):
                    row.stop = StopReason.CONTEXT_OVERFLOW
            asking = [row for row, _ in questions if row.stop is None]


def _without_tags(text: str) -> list[str]:
    """
    >>> _without_tags("<tool_response>\\nNo such  tool.\\n</tool_response>")
    ['No', 'such', 'tool.']
    """
    return _TAG.sub(" ", text).split()


def _not_made(action: str, reply: str, call: ToolCall | None) -> tuple[Message, Message]:
    """Return an exchange that did not happen as messages of a transcript.

    Environments read transcripts (`lookahead_query`). For them the reply has one form, whatever the policy is told.
    """
    told = Message(role="tool", content=EXPECTED + reply, name=call.name if call else None, predicted=True)
    return Message(role="assistant", content=action, predicted=True), told


def show_exchange(
    row: Row, codec: ChatCodec, action: str, reply: str, *, form: ShownForm, feedback: bool = False
) -> bool:
    """Append an exchange that did not happen in this rollout to a row; return False if there is no room.

    Feedback has the form of a predicted reply: this rollout would receive it, but has not received it.
    """
    call = read_tool_call(action)
    piece = codec.imagined(action, form.text(reply), form)
    start = row.write(piece)
    if start is None:
        return False
    (action_span, observation_span) = piece.spans
    row.transcript += _not_made(action, reply, call)
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
            feedback=feedback,
        )
    )
    return True


def _before_speech(row: Row) -> Mark:
    """Return the mark before the last message of a row."""
    assert row.speech is not None
    return row.mark()._replace(tokens=len(row.tokens) - len(row.speech.tokens))


def _question(row: Row, call: ToolCall) -> Question:
    messages = tuple(turn.action for turn in row.turns if not turn.predicted)
    return Question(task=row.request.task, state=state_of(row.opening, row.turns), call=call, messages=messages)


def imagined(rollout: Rollout, task: Any = None) -> Iterator[tuple[Question, str]]:
    """Yield the imagined calls that stayed in a rollout, each with its predicted reply."""
    for index, turn in enumerate(rollout.turns):
        if turn.predicted and not turn.checked and turn.call is not None:
            yield asked_at(rollout, index, task), turn.observation


def asked_at(rollout: Rollout, index: int, task: Any = None) -> Question:
    """Return the call of one turn of a rollout as a question."""
    turn, before = rollout.turns[index], rollout.turns[:index]
    assert turn.call is not None
    messages = tuple(each.action for each in before if not each.predicted)
    return Question(task=task, state=state_of(rollout.opening, before), call=turn.call, messages=messages)


def _query_of(rows: Sequence[Row]) -> str:
    return f"lookahead_query of {name_of(rows[0].environment)}" if rows else ""


def _environment_question(row: Row) -> Question | None:
    """Return the question that the environment names next, or None."""
    assert isinstance(row.environment, OffersLookahead)
    call = asked_call(row.environment, row.transcript)
    return None if call is None else _question(row, call)


def questions(environment: Environment | None, transcript: Sequence[Message]) -> list[ToolCall]:
    """Return the calls that an environment asks about at this point, as if every reply were empty; each call once."""
    found: list[ToolCall] = []
    if not isinstance(environment, OffersLookahead):
        return found
    messages = [message for message in transcript if not message.predicted]
    while len(found) < MAX_IMAGINED:
        call = asked_call(environment, messages)
        if call is None or call in found:
            break
        found.append(call)
        messages.append(Message(role="assistant", content=format_tool_call(call), predicted=True))
        messages.append(Message(role="tool", content=EXPECTED, name=call.name, predicted=True))
    return found


def is_asked(environment: Environment, transcript: Sequence[Message], message: str) -> bool:
    """Whether a message makes a call that `lookahead_query` would name if nothing had been imagined."""
    call = read_tool_call(message)
    return call is not None and call in questions(environment, transcript)
