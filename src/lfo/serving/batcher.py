"""Answer the requests of many conversations: all waiting requests are decoded in one batch of the sampler.

One thread owns the model. It takes all waiting requests, decodes them together, turn by turn as in a rollout, with the
look-ahead of `play/look_ahead.py`, and returns each message. A conversation that continues reuses the cache of the
sampler's slot in which it was continued last.
"""

from __future__ import annotations

import json
import logging
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from lfo.errors import LfoError, UsageError
from lfo.play.episode import Episode, RolloutRequest
from lfo.play.look_ahead import Deliberation
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import without_calls
from lfo.serving.conversations import Answered, Context, Conversations, packed
from lfo.serving.fresh import Listener
from lfo.serving.speaker import Speaker, SpeakingSlots
from lfo.serving.upstream import Failed
from lfo.serving.wire import ChatRequest, RefusedRequest, Reply, message_of, read_message
from lfo.types import Message, Origin, StopReason

SLOTS = 64  # conversations in parallel
WAITING = 4096  # requests; more are refused
CODECS = 16  # cached codecs, one for each set of tools
# More characters for each token of the context than any text has: such a request is refused before it is tokenised,
# which would keep the model waiting. The template may write less of the tools than they have.
CHARS_A_TOKEN = 16
TOOL_CHARS = 100_000
# Requests sent together arrive one after the other: wait a short time for more.
PAUSE, LONGEST_WAIT = 0.005, 0.05

logger = logging.getLogger(__name__)


class Key(NamedTuple):
    """What the requests of one batch must have in common."""

    tools: str
    temperature: float
    limit: int  # tokens of the message


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Job:
    request: ChatRequest
    answer: Future[Reply]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Ready:
    """A job whose conversation is in a slot of the sampler."""

    job: Job
    context: Context
    episode: Episode


class Batcher:
    """Answers requests; use it in a `with` block, which ends its thread."""

    def __init__(self, speaker: Speaker, *, lookahead: bool = True, slots: int = SLOTS) -> None:
        self._lookahead = speaker.lookahead if lookahead else None
        if self._lookahead is not None and speaker.config.source.is_control:
            source = speaker.config.lookahead_source
            raise UsageError(
                f"this run looks ahead by lookahead_source={source}, a control that needs the environment's own tasks; "
                "serve it with --no-lookahead"
            )
        self._speaker, self._count = speaker, slots
        self.listener = Listener(self._lookahead, speaker.make_environment())
        self._default_tools = _name_of(speaker.make_environment().tools())
        self._codec = lru_cache(maxsize=CODECS)(self._make_codec)
        self._conversations = Conversations()
        self._waiting: queue.Queue[Job | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._work, name="batcher", daemon=True)
        self._slots = Slots(speaker.new_slots(slots), slots)
        self.batches = 0  # for measurements

    def __enter__(self) -> Batcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._waiting.put(None)
        self._thread.join()

    def submit(self, request: ChatRequest) -> Future[Reply]:
        """Return a future of the reply; cancelling it while it waits costs nothing."""
        self._refuse_overlong(request)
        job = Job(request=request, answer=Future())
        try:
            self._waiting.put_nowait(job)
        except queue.Full:
            raise RefusedRequest("too many requests wait; try again", code="overloaded", status=503) from None
        return job.answer

    def _refuse_overlong(self, request: ChatRequest) -> None:
        context = self._speaker.config.rollout.max_context
        parts = {
            "messages": (sum(len(each.content) for each in request.messages), CHARS_A_TOKEN * context),
            "tools": (len(_name_of(request.tools or ())), max(CHARS_A_TOKEN * context, TOOL_CHARS)),
        }
        for name, (length, most) in parts.items():
            if length > most:
                sentence = f"the {name} have {length:,} characters, and the run's context ends at {context} tokens"
                raise RefusedRequest(sentence, param=name, code="context_length_exceeded")

    # --- the thread --------------------------------------------------------------------------------------------

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            jobs, ended = self._gather(first)
            by_key: dict[Key, list[Job]] = {}
            for job in jobs:
                if job.answer.set_running_or_notify_cancel():
                    with _failing(job):
                        by_key.setdefault(self._key(job.request), []).append(job)
            for key, group in by_key.items():
                self._serve(key, group)
            if ended:
                return

    def _gather(self, first: Job) -> tuple[list[Job], bool]:
        """Return all waiting jobs, and those that arrive shortly after."""
        jobs, latest = [first], time.monotonic() + LONGEST_WAIT
        while len(jobs) < self._count:
            late = time.monotonic() >= latest
            try:
                job = self._waiting.get_nowait() if late else self._waiting.get(timeout=PAUSE)
            except queue.Empty:
                break
            if job is None:
                return jobs, True
            jobs.append(job)
        return jobs, False

    def _key(self, request: ChatRequest) -> Key:
        runner_config = self._speaker.runner_config
        return Key(
            tools=self._default_tools if request.tools is None else _name_of(request.tools),
            temperature=runner_config.temperature if request.temperature is None else request.temperature,
            limit=min(request.max_tokens or runner_config.max_turn_tokens, runner_config.max_turn_tokens),
        )

    def _serve(self, key: Key, jobs: Sequence[Job]) -> None:
        """Answer jobs of one kind; an error in one job fails only that job."""
        ready: list[Ready] = []
        with _failing(*jobs):
            codec = self._codec(key.tools)
            self._slots.begin()
            for job in jobs:
                with _failing(job):
                    ready.append(self._prepare(job, codec, key))
            try:
                self._speak(ready, codec, key)
            except Exception:
                # The state of the old slots is unknown.
                self._slots = Slots(self._speaker.new_slots(self._count), self._count)
                raise
            for each in ready:
                with _failing(each.job):
                    each.job.answer.set_result(self._reply(each, codec, key))
            self.listener.hear([each.context for each in ready])

    def _make_codec(self, tools: str) -> ChatCodec:
        if tools == self._default_tools:
            return self._speaker.codec
        try:
            thinking = self._speaker.config.rollout.thinking
            return ChatCodec(self._speaker.tokenizer, json.loads(tools), thinking=thinking)
        except LfoError as error:
            raise RefusedRequest(f"these tools cannot be described to the model: {error}", param="tools") from error

    def _prepare(self, job: Job, codec: ChatCodec, key: Key) -> Ready:
        try:
            context = self._conversations.context(job.request, codec, key.tools)
        except LfoError as error:
            sentence = f"these messages cannot be written for the model: {error}"
            raise RefusedRequest(sentence, param="messages") from error
        most = self._speaker.config.rollout.max_context
        if len(context.tokens) >= most:
            sentence = f"the conversation has {len(context.tokens)} tokens, and the run's context ends at {most}"
            raise RefusedRequest(sentence, param="messages", code="context_length_exceeded")
        seed = secrets.randbits(63) if job.request.seed is None else job.request.seed
        episode = Episode(
            slot=self._slots.assign(context),
            request=RolloutRequest(task=None, seeds=(seed, len(context.turns))),
            slots=self._slots.sampler,
            environment=self._speaker.make_environment(),
            opening=context.opening,
            transcript=list(context.transcript),
            tokens=list(context.tokens),
            origins=[int(Origin.PROMPT)] * len(context.tokens),
            logprobs=[0.0] * len(context.tokens),
            turns=list(context.turns),
        )
        return Ready(job=job, context=context, episode=episode)

    def _speak(self, ready: Sequence[Ready], codec: ChatCodec, key: Key) -> None:
        """Let all episodes say their turn, with look-ahead as in a rollout."""
        episodes = [each.episode for each in ready]
        look = self._lookahead
        deliberation = None
        if look is not None:
            runner = self._speaker.runner_config
            deliberation = Deliberation(
                look, codec, self._slots.sampler, form=runner.shown, max_turn_tokens=key.limit, call_all=runner.call_all
            )
        speeches = self._slots.sampler.decode(
            [episode.slot for episode in episodes],
            max_new_tokens=[key.limit] * len(episodes),
            temperature=key.temperature,
            uniforms=[np.random.default_rng([*episode.request.seeds, 0]).random(key.limit) for episode in episodes],
        )
        for episode, speech in zip(episodes, speeches, strict=True):
            episode.say(speech)
            if not speech.stopped:
                episode.stop = StopReason.TURN_OVERFLOW
        if deliberation is not None:
            deliberation.reconsider([episode for episode in episodes if episode.stop is None], 0, key.temperature)
        self.batches += 1

    def _reply(self, ready: Ready, codec: ChatCodec, key: Key) -> Reply:
        """Return the message of an episode for the client, and keep its tokens for the next request."""
        episode, request = ready.episode, ready.job.request
        assert episode.speech is not None
        if isinstance(episode.speech, Failed):
            raise episode.speech.error
        said = codec.read(episode.speech.tokens)
        content, finish = said.text, "stop" if episode.speech.stopped else "length"
        calls = said.calls if episode.speech.stopped else ()  # the client gets calls that cannot be parsed as text
        if calls:
            content, finish = without_calls(said.message), "tool_calls"
        own = episode.turns[len(ready.context.turns) :]
        reply = Reply(
            content=content,
            calls={f"call_{secrets.token_hex(12)}": call for call in calls},
            finish=finish,
            prompt_tokens=len(ready.context.tokens),
            completion_tokens=len(episode.speech.tokens),
            imagined=tuple(own + episode.taken_back),
        )
        if calls:
            answer, _ = read_message(message_of(reply), {}, "the reply")
            context = Context(
                opening=episode.opening,
                tokens=packed(episode.tokens),
                turns=tuple(episode.turns),
                transcript=(*episode.transcript, Message(role="assistant", content=str(said.message))),
                slot=episode.slot,
            )
            answered = Answered(messages=(*request.messages, answer), tools=key.tools, context=context)
            self._conversations.keep(next(iter(reply.calls)), answered)
        return reply


@contextmanager
def _failing(*jobs: Job) -> Iterator[None]:
    """Turn an error into the reply of all jobs that have none yet; the thread continues."""
    try:
        yield
    except Exception as error:
        if not isinstance(error, LfoError):
            logger.exception("requests failed")
            error = RefusedRequest("the server failed on this request; its log says why", status=500)
        for job in jobs:
            if not job.answer.done():
                job.answer.set_exception(error)


class Slots:
    """Slots of a sampler with their cached tokens; a conversation that continues finds its own."""

    def __init__(self, sampler: SpeakingSlots, count: int) -> None:
        self.sampler = sampler
        self._oldest_first = OrderedDict.fromkeys(range(count))
        self._taken: set[int] = set()

    def begin(self) -> None:
        """Start a new batch: all slots are free."""
        self._taken.clear()

    def assign(self, context: Context) -> int:
        """Write a conversation into a free slot, its own if possible; return the slot."""
        own = context.slot
        slot = (
            next(each for each in self._oldest_first if each not in self._taken) if own in (None, *self._taken) else own
        )
        assert slot is not None
        self._taken.add(slot)
        self._oldest_first.move_to_end(slot)
        shared = _common_prefix(self.sampler.tokens(slot), context.tokens)
        self.sampler.rewind(slot, shared)
        self.sampler.extend([slot], [context.tokens[shared:]])
        return slot


def _common_prefix(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the length of the common prefix.

    >>> _common_prefix((1, 2, 3), (1, 2, 4, 5))
    2
    """
    return next(
        (index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other))
    )


def _name_of(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return a key of these tools; the order of keys matters, because the model reads it."""
    return json.dumps(list(tools))
