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
from typing import Any, Literal

from lfo.env.answers import asked_call
from lfo.env.interface import Environment, OffersLookahead
from lfo.env.patience import name_of
from lfo.errors import EnvironmentFailed
from lfo.play.episode import Episode, Mark, SamplerSlots, sample
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import OPENING, Tools, format_tool_call, read_tool_call
from lfo.protocol.schemas import listed_words, misfit, words_of
from lfo.protocol.shown import MARK, ShownForm
from lfo.protocol.world_model import WorldModelState, state_of
from lfo.types import MOST_IMAGINED, Message, Origin, Rollout, Speech, StopReason, ToolCall, Turn, exchanged

# Before a predicted reply. Environments read transcripts (`lookahead_query`): for them it always has this form.
EXPECTED = MARK.text("")
_TAG = re.compile(r"</?\w+>")
MAX_IMAGINED = 8  # imagined exchanges before one turn, at most, for environments that never stop asking


@dataclass(frozen=True, kw_only=True, slots=True)
class Question:
    """A question to the predictor: what is the reply to this call in this state?

    `messages` are the real messages of the rollout so far, so that a control can replay them in the environment.
    """

    task: Any
    state: WorldModelState
    call: ToolCall
    messages: tuple[str, ...]
    truth: bool = False  # the real reply answers it, whoever predicts: `Seat.truth`

    @classmethod
    def at(cls, task: Any, opening: Sequence[Message], turns: Sequence[Turn], call: ToolCall) -> Question:
        """Return the question that a call is after these turns of a rollout."""
        messages = tuple(turn.action for turn in turns if not turn.predicted)
        return cls(task=task, state=state_of(opening, turns), call=call, messages=messages)

    @property
    def key(self) -> Hashable:
        """Equal for two questions exactly if the world model gets the same prompt."""
        return format_tool_call(self.call), self.place

    @property
    def place(self) -> Hashable:
        """Equal for two questions exactly if they are asked in the same state."""
        return self.state.task, self.state.step, self.state.actions, tuple(self.state.collected.items())


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
        slots: SamplerSlots,
        *,
        form: ShownForm,
        max_turn_tokens: int,
        call_all: Callable[..., list[Any]],  # that of `RunnerConfig`
    ) -> None:
        self._lookahead, self._codec, self._slots, self._form = lookahead, codec, slots, form
        self._max_turn_tokens, self._call_all = max_turn_tokens, call_all

    # --- proposed by the policy ----------------------------------------------------------------------------------

    def reconsider(self, batch: Sequence[Episode], turn: int, temperature: float) -> None:
        """Let episodes imagine the reply to the turn that they just said, and say another turn."""
        sighted = [episode for episode in batch if episode.request.look_ahead]
        looking = [episode for episode in sighted if self._allowance(episode) > 0 or self._repeats_error(episode)]
        tried: dict[int, list[ToolCall | None]] = {episode.slot: [] for episode in looking}
        self._imagine_drafts(looking, tried, (turn, 0), temperature)
        picking = [episode for episode in batch if episode.request.picks and self._may_pick(episode)]
        waiting = [episode for episode in (*looking, *picking) if not self._settled(episode)]
        for candidate in range(1, self._lookahead.drafts):
            waiting = self._redraft(waiting, tried, (turn, MAX_IMAGINED * candidate), temperature)

    def _settled(self, episode: Episode) -> bool:
        """Whether no more candidates are needed: something was imagined; an explorer calls what others imagine."""
        return self._calls_imaginable(episode) if episode.request.picks else episode.imagined > 0

    def _redraft(
        self,
        waiting: Sequence[Episode],
        tried: dict[int, list[ToolCall | None]],
        numbers: tuple[int, int],
        temperature: float,
    ) -> list[Episode]:
        """Try another candidate for the turn; where it does not settle, restore the first and return the episode."""
        starts, firsts = [_before_speech(episode) for episode in waiting], [episode.speech for episode in waiting]
        for episode, start in zip(waiting, starts, strict=True):
            episode.take_back(start)
        # A greedy candidate would repeat the first one.
        for episode, speech in zip(waiting, self._decode(waiting, numbers, temperature or 1.0), strict=True):
            episode.say(speech)
        self._imagine_drafts([episode for episode in waiting if episode.slot in tried], tried, numbers, temperature)
        still_waiting = []
        for episode, start, first in zip(waiting, starts, firsts, strict=True):
            assert first is not None
            if self._settled(episode):
                episode.discarded_tokens += len(first.tokens)
                continue
            self._discard(episode, start)
            self._slots.extend([episode.slot], [first.tokens])
            episode.say(first)
            still_waiting.append(episode)
        return still_waiting

    def _allowance(self, episode: Episode) -> int:
        """Return how many exchanges this episode may still imagine."""
        most = self._lookahead.most if episode.request.imagine is None else episode.request.imagine
        return most - episode.imagined

    def _imagine_drafts(
        self,
        batch: Sequence[Episode],
        tried: dict[int, list[ToolCall | None]],
        numbers: tuple[int, int],
        temperature: float,
    ) -> None:
        """Imagine the drafts of these episodes while different calls follow."""
        turn, first = numbers
        for look in range(1, MAX_IMAGINED):
            drafts = [(episode, draft) for episode in batch if (draft := self._draft(episode)) is not None]
            asking = [(episode, draft) for episode, draft in drafts if draft.call not in tried[episode.slot]]
            if not asking:
                break
            for episode, draft in asking:
                tried[episode.slot].append(draft.call)
            marks = {episode.slot: episode.mark() for episode, _ in asking}
            questions = [_question(each, draft.call) for each, draft in asking if draft.call and draft.flaw is None]
            replies = iter(self._lookahead.predictor(questions) if questions else ())
            shown = [
                (episode, draft.call)
                for episode, draft in asking
                if self._show(episode, draft, next(replies) if draft.flaw is None else draft.flaw)
            ]
            speeches = self._decode([episode for episode, _ in shown], (turn, first + look), temperature)
            batch = []
            for (episode, call), speech in zip(shown, speeches, strict=True):
                episode.say(speech)
                if self._calls(speech) in ((), (call,)):
                    self._take_back(episode, marks[episode.slot])
                    continue
                batch.append(episode)
                if episode.on_turn is not None:
                    episode.on_turn(episode.turns[-1])

    def _draft(self, episode: Episode) -> _Draft | None:
        """Return the message just said if its reply may be imagined, or if something is wrong with it; else None."""
        call = self._imaginable(episode)
        if call is not None:
            flaw = misfit(call, self._codec.tools)
            return _Draft(call=call, flaw=flaw, told=None if flaw is None else self._form.refused(flaw))
        if self._repeats_error(episode):
            error = episode.turns[-1].observation
            return _Draft(call=None, flaw=error, told=self._form.failed(error))
        return None

    def _repeats_error(self, episode: Episode) -> bool:
        """Whether a message makes no call, but only repeats the reply to a call that did not fit its tool."""
        last, speech = episode.turns[-1] if episode.turns else None, episode.speech
        if not self._form.failure or last is None or last.predicted or speech is None or not speech.stopped:
            return False
        said = self._codec.read(speech.tokens)
        failed = OPENING in last.action if last.call is None else misfit(last.call, self._codec.tools) is not None
        return failed and not said.calls and _without_tags(said.text) == _without_tags(last.observation)

    def _imaginable(self, episode: Episode) -> ToolCall | None:
        """Return the drafted call of an episode if it may be imagined, else None."""
        call = self._call(episode.speech)
        allowed = call is not None and self._may_imagine(call) and self._allowance(episode) > 0
        return call if allowed and call is not None and not self._uses_prediction(episode, call) else None

    def _may_pick(self, episode: Episode) -> bool:
        """Whether an explorer has not yet made a real call of a tool that others imagine."""
        made = (turn.call for turn in episode.turns if turn.call is not None and not turn.predicted)
        return not any(map(self._may_imagine, made)) and not self._calls_imaginable(episode)

    def _calls_imaginable(self, episode: Episode) -> bool:
        call = self._call(episode.speech)
        return call is not None and self._may_imagine(call)

    def _may_imagine(self, call: ToolCall) -> bool:
        return self._lookahead.tools is None or call.name in self._lookahead.tools

    def _uses_prediction(self, episode: Episode, call: ToolCall) -> bool:
        real = [message.content for message in episode.transcript if not message.predicted]
        return uses_prediction(episode.turns, real, call, may_imagine=self._may_imagine, tools=self._codec.tools)

    def _call(self, speech: Speech | None) -> ToolCall | None:
        """Return the call of a message with exactly one call, else None; several calls are never imagined."""
        calls = self._calls(speech)
        return calls[0] if len(calls) == 1 else None

    def _calls(self, speech: Speech | None) -> tuple[ToolCall, ...]:
        return self._codec.read(speech.tokens).calls if speech is not None and speech.stopped else ()

    def _show(self, episode: Episode, draft: _Draft, reply: str) -> bool:
        """Append a predicted reply to an episode after its draft, or what is wrong with the draft.

        Return False, without a change, if there is no room.
        """
        assert episode.speech is not None
        said, told = self._codec.read(episode.speech.tokens), draft.told or self._form.text(reply)
        piece = self._codec.shown(told, self._form)
        end = len(episode.tokens)
        start = episode.write(piece)
        if start is None:
            return False
        episode.transcript += exchanged(said.message, EXPECTED + reply, draft.call, predicted=True)
        episode.turns.append(
            Turn(
                action=said.message,
                observation=reply,
                call=draft.call,
                action_start=end - len(episode.speech.tokens),
                action_end=end - 1,
                observation_start=start + piece.content_start,
                observation_end=start + piece.content_end,
                predicted=True,
                checked=draft.flaw is not None,
                thought=said.thought,
            )
        )
        return True

    def _take_back(self, episode: Episode, mark: Mark) -> None:
        """Take back the last imagined exchange of an episode; its draft becomes the turn."""
        imagined = episode.turns[-1]
        draft = Speech(
            tokens=tuple(episode.tokens[imagined.action_start : mark.tokens]),
            logprobs=tuple(episode.logprobs[imagined.action_start : mark.tokens]),
        )
        self._discard(episode, mark)
        episode.speech = draft
        at = imagined.action_start
        turn = replace(imagined, action_end=at, observation_start=at, observation_end=at, taken_back=True)
        episode.taken_back.append(turn)
        if episode.on_turn is not None:
            episode.on_turn(turn)

    def _discard(self, episode: Episode, mark: Mark) -> None:
        episode.discarded_tokens += sum(origin == Origin.SAMPLED for origin in episode.origins[mark.tokens :])
        episode.take_back(mark)

    def _decode(self, batch: Sequence[Episode], numbers: tuple[int, int], temperature: float) -> Sequence[Speech]:
        return sample(batch, self._slots, numbers, limit=self._max_turn_tokens, temperature=temperature)

    # --- proposed by the environment -----------------------------------------------------------------------------

    def look_ahead(self, batch: Sequence[Episode]) -> None:
        """Show episodes the predicted replies to the calls that their environments name."""
        asking = [each for each in batch if each.request.look_ahead and isinstance(each.environment, OffersLookahead)]
        for _ in range(MAX_IMAGINED):
            questions: list[tuple[Episode, Question]] = []
            queries = [partial(_environment_question, episode) for episode in asking]
            outcomes = self._call_all(queries, what=_query_of(asking))
            for episode, outcome in zip(asking, outcomes, strict=True):
                if isinstance(outcome, EnvironmentFailed):
                    episode.fail(outcome)
                elif outcome is not None:
                    questions.append((episode, outcome))
            if not questions:
                return
            replies = self._lookahead.predictor([question for _, question in questions])
            for (episode, question), reply in zip(questions, replies, strict=True):
                if not show_exchange(episode, self._codec, format_tool_call(question.call), reply, form=self._form):
                    episode.stop = StopReason.CONTEXT_OVERFLOW
            asking = [episode for episode, _ in questions if episode.stop is None]


def uses_prediction(
    turns: Sequence[Turn], real: Sequence[str], call: ToolCall, *, may_imagine: Callable[[ToolCall], bool], tools: Tools
) -> bool:
    """Whether a call uses what was imagined, so that it is made for real instead of imagined again.

    This holds after a real turn that followed the predicted reply, until the next real call of such a tool, and if the
    call contains a word that first occurred in a predicted reply. `real` are the texts of all real messages.
    """
    imagined = [index for index, turn in enumerate(turns) if turn.predicted and not turn.checked]
    if not imagined:
        return False
    since = [turn for turn in turns[imagined[-1] + 1 :] if not turn.checked]
    if since:
        return not any(turn.call is not None and may_imagine(turn.call) for turn in since)
    drafted = [turn.action for turn in turns if turn.predicted]
    predicted = [turn.observation for turn in turns if turn.predicted and not turn.checked]
    # A reply that lists every allowed value says nothing about which of them is right.
    said = {word for reply in predicted for word in words_of(reply) - listed_words(reply, tools)}
    return not (said - words_of(*real, *drafted)).isdisjoint(words_of(format_tool_call(call)))


def _without_tags(text: str) -> list[str]:
    """
    >>> _without_tags("<tool_response>\\nNo such  tool.\\n</tool_response>")
    ['No', 'such', 'tool.']
    """
    return _TAG.sub(" ", text).split()


def show_exchange(
    episode: Episode, codec: ChatCodec, action: str, reply: str, *, form: ShownForm, feedback: bool = False
) -> bool:
    """Append an exchange that did not happen in this rollout to an episode; return False if there is no room.

    Feedback has the form of a predicted reply: this rollout would receive it, but has not received it."""
    call = read_tool_call(action)
    piece = codec.imagined(action, form.text(reply), form)
    start = episode.write(piece)
    if start is None:
        return False
    (action_span, observation_span) = piece.spans
    episode.transcript += exchanged(action, EXPECTED + reply, call, predicted=True)
    episode.add(
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


def _before_speech(episode: Episode) -> Mark:
    """Return the mark before the last message of an episode."""
    assert episode.speech is not None
    return episode.mark()._replace(tokens=len(episode.tokens) - len(episode.speech.tokens))


def _question(episode: Episode, call: ToolCall) -> Question:
    request = episode.request
    asked = Question.at(request.task, episode.opening, episode.turns, call)
    return replace(asked, truth=True) if request.truth else asked


def imagined(rollout: Rollout, task: Any = None) -> Iterator[tuple[Question, str]]:
    """Yield the imagined calls that stayed in a rollout, each with its predicted reply."""
    for index, turn in enumerate(rollout.turns):
        if turn.predicted and not turn.checked and turn.call is not None:
            yield asked_at(rollout, index, task), turn.observation


def asked_at(rollout: Rollout, index: int, task: Any = None) -> Question:
    """Return the call of one turn of a rollout as a question."""
    call = rollout.turns[index].call
    assert call is not None
    return Question.at(task, rollout.opening, rollout.turns[:index], call)


def _query_of(batch: Sequence[Episode]) -> str:
    return f"lookahead_query of {name_of(batch[0].environment)}" if batch else ""


def _environment_question(episode: Episode) -> Question | None:
    """Return the question that the environment names next, or None."""
    assert isinstance(episode.environment, OffersLookahead)
    call = asked_call(episode.environment, episode.transcript)
    return None if call is None else _question(episode, call)


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
        messages += exchanged(format_tool_call(call), EXPECTED, call, predicted=True)
    return found


def is_asked(environment: Environment, transcript: Sequence[Message], message: str) -> bool:
    """Whether a message makes a call that `lookahead_query` would name if nothing had been imagined."""
    call = read_tool_call(message)
    return call is not None and call in questions(environment, transcript)
