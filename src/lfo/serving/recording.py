"""Record conversations beside a proxy: one thread reads what passed through, and writes what has ended.

The proxy hands over the bytes of each answered request and never waits. An open conversation is only in memory; it is
written when it has been silent for a while, when its outcome is told, or at the end.
"""

from __future__ import annotations

import json
import logging
import queue
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lfo.play.chat_logs import Hide, action_of_call, chat_record, hidden
from lfo.serving.answers import read_answer
from lfo.serving.book import Book, OpenConversation
from lfo.serving.log_writer import LogWriter

MOST_QUEUED = 256_000_000  # bytes of exchanges that wait to be read; more are not recorded
HIDDEN = "[hidden]"
SHORTEST_KEY = 8  # characters of a key that is hidden in texts
TICK = 1.0  # seconds between two looks for conversations that have ended

MOST_COMPLAINTS = 1000
_NOTHING = ()  # came for a while

# The messages of a conversation -> its outcome, 1 for success; None if nobody knows.
Outcome = Callable[[Sequence[Mapping[str, Any]]], float | None]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Passed:
    """A request to the chat endpoint and its answer, as they passed through."""

    request: bytes
    answer: bytes
    streamed: bool
    encoding: str = ""  # of the answer
    name: str = ""  # of the conversation, if the client gave one
    outcome: float | None = None  # so far, if the client told one
    key: str = ""  # of the client, to be hidden in texts


@dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """An outcome that a client told afterwards."""

    name: str
    outcome: float | None
    messages: Sequence[Mapping[str, Any]] = ()  # after the last answer, such as the reply to its call
    answered: threading.Event = field(default_factory=threading.Event)
    known: list[bool] = field(default_factory=list)


class Recorder:
    """Use it in a `with` block, which writes the open conversations at its end."""

    def __init__(
        self,
        folder: Path,
        *,
        idle: float,
        most_bytes: int,
        hide: Sequence[re.Pattern[str]] = (),
        outcome: Outcome | None = None,
    ) -> None:
        self._writer = LogWriter(folder, most_bytes=most_bytes)
        self._idle, self._patterns, self._outcome = idle, tuple(hide), outcome
        self._keys: dict[str, None] = {}
        self._book = Book()
        self._queue: queue.Queue[Any] = queue.Queue()
        self._queued = 0
        self._complained: set[str] = set()
        self._thread = threading.Thread(target=self._work, name="recorder", daemon=True)
        self.answers = self.unread = self.overlooked = 0

    def __enter__(self) -> Recorder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._queue.put(None)
        self._thread.join()

    @property
    def status(self) -> dict[str, int]:
        return {
            "answers": self.answers,  # of the chat endpoint that were recorded
            "unread": self.unread,  # that were none of chat-completions
            "overlooked": self.overlooked,  # because too many waited
            "open": len(self._book),
            "written": self._writer.written,
            "lost": self._writer.lost,  # because the disk was full
        }

    def passed(self, passed: Passed) -> None:
        """Take over an exchange; returns at once."""
        size = len(passed.request) + len(passed.answer)
        if self._queued + size > MOST_QUEUED:
            self.overlooked += 1
            return
        self._queued += size
        self._queue.put(passed)

    def told(self, told: Told) -> bool:
        """Take over an outcome; return whether the conversation is known. Blocks until all earlier answers are read."""
        self._queue.put(told)
        return told.answered.wait(timeout=30) and bool(told.known)

    def write(self, conversation: OpenConversation) -> None:
        """Write a conversation that has ended, which nobody passed through."""
        self._queue.put(conversation)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        ended, looked = False, time.monotonic()
        while not ended:
            try:
                given = self._queue.get(timeout=TICK)
            except queue.Empty:
                given = _NOTHING
            ended = given is None
            with _complaining(self._complained):
                if isinstance(given, Passed):
                    self._queued -= len(given.request) + len(given.answer)
                    self._read(given)
                elif isinstance(given, Told):
                    self._tell(given)
                elif isinstance(given, OpenConversation):
                    self._write(given)
            if ended or time.monotonic() - looked >= TICK:
                looked = time.monotonic()
                for conversation in self._book.due(silent_since=float("inf") if ended else looked - self._idle):
                    with _complaining(self._complained):
                        self._write(conversation)
        self._writer.close()

    def _read(self, passed: Passed) -> None:
        try:
            request = json.loads(passed.request)
        except (ValueError, RecursionError):
            request = None
        messages = request.get("messages") if isinstance(request, dict) else None
        answer = read_answer(passed.answer, streamed=passed.streamed, encoding=passed.encoding)
        if answer is None or not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
            self.unread += 1
            return
        assert isinstance(request, dict)
        if len(passed.key) >= SHORTEST_KEY:
            self._keys[passed.key] = None
        size = len(passed.request) + len(passed.answer)
        conversation = self._book.heard(messages, answer.message, now=time.monotonic(), size=size)
        tools = request.get("tools")
        conversation.tools = tools if isinstance(tools, list) else conversation.tools
        conversation.model = str(request.get("model", ""))
        conversation.name = passed.name or conversation.name
        conversation.outcome = conversation.outcome if passed.outcome is None else passed.outcome
        conversation.imagined += [(len(messages), each) for each in answer.imagined]
        ids = [call.get("id") for call in answer.message.get("tool_calls") or () if isinstance(call, dict)]
        names = [each for each in (answer.completion_id, passed.name, *ids) if isinstance(each, str)]
        self._book.call_it(conversation, *names)
        self.answers += 1

    def _tell(self, told: Told) -> None:
        try:
            number, conversation = self._book.find(told.name)
            if conversation is not None:
                conversation.outcome = told.outcome
                conversation.messages += told.messages
                self._write(self._book.close(conversation))
            elif number is not None:
                self._writer.write_outcome({"conversation": number, "reward": told.outcome})
            told.known.extend([True] * (number is not None))
        finally:
            told.answered.set()

    def _write(self, conversation: OpenConversation) -> None:
        outcome = conversation.outcome
        if outcome is None and self._outcome is not None:
            with _complaining(self._complained):
                given = self._outcome(conversation.messages)
                outcome = None if given is None else float(given)
        hide = self._hider()
        record = chat_record(conversation.messages, hide)
        for at, each in reversed(conversation.imagined):
            before = len(chat_record(conversation.messages[:at])["turns"])
            record["turns"].insert(before, _imagined_turn(each, hide))
        self._writer.write(
            {
                "task_id": hide(conversation.name) or conversation.conversation,
                "reward": outcome,
                "stop": "done",
                "conversation": conversation.conversation,
                **({"continues": conversation.continues} if conversation.continues else {}),
                "model": conversation.model,
                "written": round(time.time(), 3),
                **record,
                "tools": hidden(conversation.tools, hide),
            }
        )

    def _hider(self) -> Hide:
        keys = [re.compile(re.escape(key)) for key in self._keys]

        def hide(text: str) -> str:
            for pattern in (*self._patterns, *keys):
                text = pattern.sub(HIDDEN, text)
            return text

        return hide


def _imagined_turn(each: Mapping[str, Any], hide: Hide) -> dict[str, Any]:
    call = {"function": {"name": each.get("name"), "arguments": each.get("arguments")}}
    return {
        "predicted": True,
        "taken_back": not each.get("kept"),
        **({"checked": True} if each.get("checked") else {}),
        "action": action_of_call(call, hide),
        "observation": hide(str(each.get("expected"))),
        "tool": each.get("name"),
    }


@contextmanager
def _complaining(complained: set[str]) -> Iterator[None]:
    """Log an exception, each sentence once, and go on: one conversation must not end the recording."""
    try:
        yield
    except Exception as error:
        sentence = f"{type(error).__name__}: {error}"[:300]
        if sentence not in complained and len(complained) < MOST_COMPLAINTS:
            complained.add(sentence)
            logger.warning("a conversation could not be recorded as it should: %s", sentence)
