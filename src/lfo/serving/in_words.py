"""Look-ahead in front of any chat-completions server: predictions travel as words, and the server's model redrafts.

    client -> draft of the upstream -> the world model predicts its reply -> the upstream is told, and speaks again

The world model runs here, on its own base. The upstream sees the exchange as a call and a tool message in words
(`protocol/shown.py`); if it then makes another call, the exchange stays in what it is sent from now on, otherwise the
draft is the turn. The client sees the final turn only. The rules are those of `play/look_ahead.py`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from lfo.base_form import TOOLS, Case, drawn_cases
from lfo.play.chat_logs import action_of_call, calls_of, chat_rollout, text_of
from lfo.play.look_ahead import MAX_IMAGINED, Predictor, Question, uses_prediction
from lfo.protocol.hermes import read_tool_call
from lfo.protocol.schemas import misfit
from lfo.protocol.shown import SHOWN_FORMS, ShownForm
from lfo.protocol.world_model import state_of
from lfo.serving.book import digests_of
from lfo.serving.proxy import EVENTS, JSON, Ask, Given
from lfo.serving.wire import RefusedRequest
from lfo.types import MOST_IMAGINED, ToolCall, Turn

KEPT = 4096  # answered conversations whose imagined exchanges are known
MODELS = 64  # of the upstream, whose forms are known
AT_ONCE = 64  # questions that the world model answers together
ANSWER_TOKENS = 64  # of an answer in the probe

Messages = list[Mapping[str, Any]]
logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Imagined:
    """An imagined exchange, before the message `at` of the client's conversation."""

    at: int
    exchange: tuple[Mapping[str, Any], ...]
    turn: Turn


class InWords:
    """The `Answerer` of `lfo serve RUN --upstream URL`. `tools`: those whose replies are predicted; None: all."""

    def __init__(self, predictor: Predictor, *, tools: Collection[str] | None, first_form: str = "tool") -> None:
        self._ask_world_model = Questions(predictor)
        self._tools = tools
        self._names = ("mark", "tool") if first_form == "mark" else ("tool", "mark")
        self._forms: OrderedDict[str, asyncio.Future[ShownForm]] = OrderedDict()  # of each model of the upstream
        self._kept: OrderedDict[str, list[Imagined]] = OrderedDict()

    async def __call__(self, body: bytes, ask: Ask) -> Given | None:
        wanted = _wanted(body)
        if wanted is None:
            return None
        plain = {key: value for key, value in wanted.items() if key not in ("stream", "stream_options")}
        form = await self._form_of(plain, ask)
        given = await _Talk(self, plain, ask, form).answer()
        if given.status != 200 or not wanted.get("stream"):
            return given
        options = wanted.get("stream_options")
        usage = isinstance(options, dict) and options.get("include_usage") is True
        try:
            return Given(200, [(b"content-type", EVENTS)], as_stream(given.body, usage=usage))
        except (ValueError, LookupError, TypeError, AttributeError):
            raise RefusedRequest("the upstream's answer is no chat completion", status=502) from None

    def may_imagine(self, call: ToolCall) -> bool:
        return self._tools is None or call.name in self._tools

    async def predict(self, question: Question) -> str:
        return await self._ask_world_model(question)

    def recall(self, messages: Messages) -> list[Imagined]:
        """Return the exchanges that were imagined in this conversation and have stayed."""
        digests = digests_of(messages)
        ends = (digests[at] for at in reversed(range(len(messages))) if messages[at].get("role") == "assistant")
        return list(next((self._kept[end] for end in ends if end in self._kept), ()))

    def keep(self, messages: Messages, imagined: Sequence[Imagined]) -> None:
        if imagined:
            self._kept[digests_of(messages)[-1]] = list(imagined)
        while len(self._kept) > KEPT:
            self._kept.popitem(last=False)

    # --- in which form this upstream is told -------------------------------------------------------------------------

    async def _form_of(self, wanted: Mapping[str, Any], ask: Ask) -> ShownForm:
        """Return the form on which a model of the upstream acts; it is probed once, with the first request."""
        model = str(wanted.get("model"))
        if model not in self._forms:
            self._forms[model] = asyncio.ensure_future(self._probed(wanted.get("model"), ask))
            while len(self._forms) > MODELS:
                self._forms.popitem(last=False)
        probe = self._forms[model]
        try:
            return await asyncio.shield(probe)
        except RefusedRequest:
            self._forms.pop(model, None)
            raise

    async def _probed(self, model: Any, ask: Ask) -> ShownForm:
        shares = {name: await self._share(model, SHOWN_FORMS[name], ask) for name in self._names}
        name = max(shares, key=lambda each: shares[each])  # the first of the best
        words = ", ".join(f"{each} in {share:.0%}" for each, share in shares.items())
        logger.warning(
            "model %r is told of predictions in the form %s (it acted on %s of the cases)", model, name, words
        )
        return SHOWN_FORMS[name]

    async def _share(self, model: Any, form: ShownForm, ask: Ask) -> float:
        return fmean(await asyncio.gather(*(self._acts(case, model, form, ask) for case in drawn_cases())))

    async def _acts(self, case: Case, model: Any, form: ShownForm, ask: Ask) -> bool:
        drafted = {"name": case.drafted.name, "arguments": json.dumps(case.drafted.arguments)}
        call = {"id": f"call_{secrets.token_hex(12)}", "type": "function", "function": drafted}
        messages = [
            {"role": "user", "content": case.request},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": form.text(case.reply)},
        ]
        options = {"model": model, "temperature": 0, "max_tokens": ANSWER_TOKENS}
        given = await ask({**options, "messages": messages, "tools": list(TOOLS)})
        message = _message_of(given)
        return message is not None and _calls(message)[:1] == [case.right]


class _Talk:
    """The answer to one request: a draft, and what becomes of it."""

    def __init__(self, owner: InWords, wanted: Mapping[str, Any], ask: Ask, form: ShownForm) -> None:
        self._owner, self._wanted, self._ask, self._form = owner, wanted, ask, form
        self._messages: Messages = list(wanted["messages"])
        self._kept = owner.recall(self._messages)
        self._new: list[Turn] = []  # imagined for this answer, kept or taken back
        self._usage: dict[str, int] = {}
        self._real = chat_rollout(self._messages)
        self._texts = [f"{text_of(each)} {' '.join(map(action_of_call, calls_of(each)))}" for each in self._messages]

    async def answer(self) -> Given:
        given = await self._speak()
        message = _message_of(given)
        if message is None:
            return given
        tried: list[ToolCall] = []
        while len(tried) < MAX_IMAGINED and (call := self._imaginable(message)) is not None and call not in tried:
            tried.append(call)
            imagined = await self._imagine(message, call)
            self._kept.append(imagined)
            redrafted = await self._redraft()
            said = None if redrafted is None else _message_of(redrafted)
            if redrafted is None or said is None or _calls(said) in ([], [call]):
                self._kept.pop()
                self._new.append(replace(imagined.turn, taken_back=True))
                break
            self._new.append(imagined.turn)
            given, message = redrafted, said
        self._owner.keep([*self._messages, message], self._kept)
        return self._with_what_was_imagined(given)

    async def _speak(self) -> Given:
        given = await self._ask({**self._wanted, "messages": self._seen()})
        usage = _object_of(given).get("usage")
        for name, count in (usage if isinstance(usage, dict) else {}).items():
            if isinstance(count, int):
                self._usage[name] = self._usage.get(name, 0) + count
        return given

    async def _redraft(self) -> Given | None:
        """Return the next draft; None, so that the last one stands, if the upstream fails."""
        try:
            return await self._speak()
        except RefusedRequest as error:
            logger.warning("%s", error)
            return None

    def _seen(self) -> Messages:
        """Return the client's messages with the imagined exchanges at their places."""
        seen: Messages = []
        for at in range(len(self._messages) + 1):
            seen += [message for each in self._kept if each.at == at for message in each.exchange]
            seen += self._messages[at : at + 1]
        return seen

    def _imaginable(self, message: Mapping[str, Any]) -> ToolCall | None:
        calls, turns = _calls(message), self._turns()
        if len(calls) != 1 or len(calls_of(message)) != 1 or not self._owner.may_imagine(calls[0]):
            return None
        if sum(turn.imagined for turn in turns) >= MOST_IMAGINED:
            return None
        used = uses_prediction(
            turns, self._texts, calls[0], may_imagine=self._owner.may_imagine, tools=self._wanted["tools"]
        )
        return None if used else calls[0]

    def _turns(self) -> list[Turn]:
        """Return all turns so far in order, imagined ones included."""
        turns = list(self._real.turns)
        for each in reversed(self._kept):
            turns.insert(len(chat_rollout(self._messages[: each.at]).turns), each.turn)
        return turns

    async def _imagine(self, message: Mapping[str, Any], call: ToolCall) -> Imagined:
        flaw = misfit(call, self._wanted["tools"])
        if flaw is None:
            state = state_of(self._real.opening, self._real.turns)
            reply = await self._owner.predict(Question(task=None, state=state, call=call, messages=()))
        else:
            reply = flaw
        told = self._form.text(reply) if flaw is None else self._form.refused(flaw)
        (written,) = calls_of(message)
        answer = {"role": "tool", "tool_call_id": written.get("id"), "content": told}
        spans = dict.fromkeys(("action_start", "action_end", "observation_start", "observation_end"), 0)
        action = action_of_call(written)
        turn = Turn(action=action, observation=reply, call=call, predicted=True, checked=flaw is not None, **spans)
        return Imagined(at=len(self._messages), exchange=(message, answer), turn=turn)

    def _with_what_was_imagined(self, given: Given) -> Given:
        about = [
            {
                "name": turn.call and turn.call.name,
                "arguments": turn.call and dict(turn.call.arguments),
                "expected": turn.observation,
                "kept": not turn.taken_back,
                "checked": turn.checked,
            }
            for turn in self._new
        ]
        usage = {"usage": self._usage} if self._usage else {}
        answer = {**_object_of(given), **usage, "lfo": {"imagined": about}}
        return Given(200, [(b"content-type", JSON)], json.dumps(answer, ensure_ascii=False).encode())


class Questions:
    """Lets the world model answer all waiting questions in one batch, in a thread of its own."""

    def __init__(self, predictor: Predictor) -> None:
        self._predictor = predictor
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="world-model")
        self._waiting: list[tuple[Question, asyncio.Future[str]]] = []
        self._work: asyncio.Future[None] | None = None

    async def __call__(self, question: Question) -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        if self._work is None or self._work.done():
            self._work = asyncio.ensure_future(self._answer_all())
        return await answer

    async def _answer_all(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = self._waiting[:AT_ONCE], self._waiting[AT_ONCE:]
            try:
                replies = await loop.run_in_executor(self._thread, self._predictor, [each for each, _ in batch])
            except Exception:
                logger.exception("the world model failed; the upstream is told that nobody knows the reply")
                replies = [""] * len(batch)
            for (_, answer), reply in zip(batch, replies, strict=True):
                if not answer.done():
                    answer.set_result(reply)


def _wanted(body: bytes) -> dict[str, Any] | None:
    """Return a request in which something may be imagined; the upstream answers all others by itself."""
    try:
        wanted = json.loads(body)
    except (ValueError, RecursionError):
        return None
    if not isinstance(wanted, dict) or wanted.get("n") not in (None, 1):
        return None
    messages, tools = wanted.get("messages"), wanted.get("tools")
    free = wanted.get("tool_choice") in (None, "auto", "required")
    if not free or not _are_objects(messages) or not _are_objects(tools) or not tools:
        return None
    functions = [tool.get("function") for tool in tools]
    named = all(isinstance(each, dict) and isinstance(each.get("name"), str) for each in functions)
    return wanted if named and isinstance(wanted.get("model"), str) else None


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, dict) for each in value)


def _object_of(given: Given) -> dict[str, Any]:
    try:
        value = json.loads(given.body)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _message_of(given: Given) -> Mapping[str, Any] | None:
    """Return the message of a completion; None if it is none, or if it was cut."""
    choices = _object_of(given).get("choices") if given.status == 200 else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    cut = isinstance(choice, dict) and choice.get("finish_reason") == "length"
    return message if isinstance(message, dict) and not cut else None


def _calls(message: Mapping[str, Any]) -> list[ToolCall]:
    """Return the calls of a message that can be read."""
    return [call for each in calls_of(message) if (call := read_tool_call(action_of_call(each))) is not None]


def as_stream(body: bytes, *, usage: bool) -> bytes:
    """Return a completion as the events of a stream: it is sent when it is final."""
    answer = json.loads(body)
    frame = {**{key: answer.get(key) for key in ("id", "created", "model")}, "object": "chat.completion.chunk"}
    choice = answer["choices"][0]
    delta = dict(choice["message"])
    calls = delta.pop("tool_calls", None) or []
    if calls:
        delta["tool_calls"] = [{"index": index, **call} for index, call in enumerate(calls)]
    end = {"index": 0, "delta": {}, "finish_reason": choice.get("finish_reason")}
    chunks: list[dict[str, Any]] = [
        {**frame, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {**frame, "choices": [end], "lfo": answer.get("lfo")},
    ]
    chunks += [{**frame, "choices": [], "usage": answer.get("usage")}] if usage else []
    text = "".join(f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in chunks)
    return f"{text}data: [DONE]\n\n".encode()
