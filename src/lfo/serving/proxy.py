"""Pass requests through to a model server, byte for byte, and hand what was said to a recorder.

    agent -> http://127.0.0.1:8010/v1/chat/completions -> http://upstream/v1/chat/completions

Every path is passed through, and every answer, errors included. Only answers of the chat endpoint are recorded. Two
headers of a request are for the recorder and go no further: `x-lfo-conversation`, a name, and `x-lfo-outcome`, a
number. Below `/lfo/` are our own endpoints: `POST /lfo/outcome` and `GET /lfo/status`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import httpx

from lfo.serving.recording import Passed, Recorder, Told
from lfo.serving.wire import RefusedRequest

logger = logging.getLogger(__name__)

MAX_BODY = 64_000_000  # bytes of a request: images are in it
MOST_RECORDED = 64_000_000  # bytes of an answer; a larger one is passed through only
PATIENCE = 60.0  # seconds for a client to send its request
CONNECTING = 10.0  # seconds until the upstream must accept a connection
CHAT = "/chat/completions"
JSON, EVENTS = b"application/json", b"text/event-stream"
CONVERSATION, OUTCOME = "x-lfo-conversation", "x-lfo-outcome"
# Of one connection, not of the message (RFC 9110), and what the sender of the next one sets itself.
_HOP_BY_HOP = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "proxy-authenticate", "proxy-authorization", "te", "trailer"),
        *("transfer-encoding", "upgrade", "host", "expect", "content-length"),
    }
)
_OF_BODY = (b"content-length", b"content-encoding")
_CODINGS = ("gzip", "deflate", "identity")  # of answers, that the recorder can read

Scope = Mapping[str, Any]
Receive = Callable[[], Awaitable[Any]]
Send = Callable[[Any], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]


class Given(NamedTuple):
    """An answer as a whole."""

    status: int
    headers: Headers
    body: bytes


Ask = Callable[[Any], Awaitable[Given]]  # a chat request -> the upstream's answer
Answerer = Callable[[bytes, Ask], Awaitable[Given | None]]  # the body of a chat request -> our answer, if we have one


class Proxy:
    """An ASGI application. `key`: the upstream's, or "" for none; None: the client's own is passed on."""

    def __init__(
        self, url: str, recorder: Recorder | None, *, key: str | None = None, answerer: Answerer | None = None
    ) -> None:
        self.base = base_of(url)
        self._recorder, self._key, self._answerer = recorder, key, answerer
        self._idle: list[httpx.AsyncClient] = []
        self._trust: ssl.SSLContext | None = None
        self._url = httpx.URL(self.base)

    @asynccontextmanager
    async def _connection(self) -> AsyncIterator[httpx.AsyncClient]:
        """Lend a client with one connection: a pool of httpx looks at all its connections for every request."""
        client = self._idle.pop() if self._idle else self._new_client()
        try:
            yield client
        finally:
            self._idle.append(client)

    def _new_client(self) -> httpx.AsyncClient:
        self._trust = self._trust or httpx.create_ssl_context()
        timeout = httpx.Timeout(None, connect=CONNECTING)
        return httpx.AsyncClient(timeout=timeout, limits=httpx.Limits(max_connections=1), verify=self._trust)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._live(receive, send)
            return
        try:
            await self._answered(scope, receive, send)
        except RefusedRequest as error:
            await _send_json(send, error.body(), error.status)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        for client in self._idle:
            await client.aclose()
        await send({"type": "lifespan.shutdown.complete"})

    async def _answered(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = await _body(receive)
        if scope["path"].startswith("/lfo/"):
            await self._own(scope, body, send)
            return
        work = asyncio.ensure_future(self._pass(scope, body, send))
        gone = asyncio.ensure_future(receive())  # after the body, only a disconnect can arrive
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
        finally:
            gone.cancel()
            work.cancel()

    async def _pass(self, scope: Scope, body: bytes, send: Send) -> None:
        headers = self._headers(scope["headers"])
        if self._answerer is not None and self._is_chat(scope):
            try:
                given = await self._answerer(body, partial(self._ask, scope, headers))
            except RefusedRequest:
                raise
            except Exception:  # whatever a client has sent: the upstream answers it by itself
                logger.exception("a request is passed through without look-ahead")
                given = None
            if given is not None:
                await _send_given(send, given)
                if given.status == 200:
                    streamed = dict(given.headers)[b"content-type"] == EVENTS
                    self._record(scope, body, given.body, streamed, "")
                return
        async with self.asked(scope["method"], _target(scope), headers, body) as answer:
            await self._pass_on(scope, body, answer, send)

    async def _ask(self, scope: Scope, headers: Headers, wanted: Any) -> Given:
        """Return the upstream's answer to another chat request with the same headers."""
        plain = [each for each in headers if each[0] != b"accept-encoding"]
        async with self.asked("POST", _target(scope), plain, json.dumps(wanted).encode()) as answer:
            body = await answer.aread()
            kept = [each for each in _own_headers(answer.headers.raw) if each[0] not in _OF_BODY]
            return Given(answer.status_code, kept, body)

    async def _pass_on(self, scope: Scope, body: bytes, answer: httpx.Response, send: Send) -> None:
        recorded = answer.status_code == 200 and self._is_chat(scope) and self._recorder is not None
        parts, size = [], 0
        head = {"status": answer.status_code, "headers": _own_headers(answer.headers.raw)}
        await send({"type": "http.response.start", **head})
        try:
            async for part in answer.aiter_raw():
                await send({"type": "http.response.body", "body": part, "more_body": True})
                size += len(part)
                if recorded and size <= MOST_RECORDED:
                    parts.append(part)
        except httpx.HTTPError:
            return  # the connection to the client ends unfinished too, as it would without us
        if recorded and size <= MOST_RECORDED:
            streamed = answer.headers.get("content-type", "").startswith("text/event-stream")
            self._record(scope, body, b"".join(parts), streamed, answer.headers.get("content-encoding", ""))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    @staticmethod
    def _is_chat(scope: Scope) -> bool:
        return scope["method"] == "POST" and scope["path"].endswith(CHAT)

    @asynccontextmanager
    async def asked(self, method: str, target: bytes, headers: Headers, body: bytes) -> AsyncIterator[httpx.Response]:
        """Send a request to the upstream and yield its answer, whose body has not been read."""
        async with self._connection() as client:
            try:
                url = self._url.copy_with(raw_path=self._url.raw_path.rstrip(b"/") + target)
                answer = await client.send(httpx.Request(method, url, headers=headers, content=body), stream=True)
            except (httpx.InvalidURL, UnicodeError, ValueError):
                raise RefusedRequest("the path of this request is not a path of an address") from None
            except httpx.HTTPError as error:
                sentence = f"{self.base} cannot be reached: {error or type(error).__name__}"
                raise RefusedRequest(sentence, code="upstream_unreachable", status=502) from None
            try:
                yield answer
            finally:
                await answer.aclose()

    def _headers(self, given: Headers) -> Headers:
        """Return the headers for the upstream."""
        ours = {CONVERSATION.encode(), OUTCOME.encode()}
        named = {each.strip().lower() for name, value in given if name == b"connection" for each in value.split(b",")}
        kept = []
        for name, value in given:
            if name.decode("latin-1") in _HOP_BY_HOP or name in ours or name in named:
                continue
            if name == b"authorization" and self._key is not None:
                continue
            if name == b"accept-encoding" and self._recorder is not None:
                wanted = value.decode("latin-1").lower()
                value = ", ".join(coding for coding in _CODINGS if coding in wanted).encode() or b"identity"
            kept.append((name, value))
        return [*kept, *([(b"authorization", f"Bearer {self._key}".encode())] if self._key else [])]

    def _record(self, scope: Scope, body: bytes, answer: bytes, streamed: bool, encoding: str) -> None:
        if self._recorder is None:
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        self._recorder.passed(
            Passed(
                request=body,
                answer=answer,
                streamed=streamed,
                encoding=encoding,
                name=headers.get(CONVERSATION, "")[:200],
                outcome=_number(headers.get(OUTCOME)),
                key=headers.get("authorization", "").rpartition(" ")[2],
            )
        )

    # --- our own endpoints -------------------------------------------------------------------------------------------

    async def _own(self, scope: Scope, body: bytes, send: Send) -> None:
        if self._recorder is None:
            raise RefusedRequest("nothing is recorded here", status=404)
        if (scope["method"], scope["path"]) == ("GET", "/lfo/status"):
            await _send_json(send, self._recorder.status)
            return
        if (scope["method"], scope["path"]) != ("POST", "/lfo/outcome"):
            raise RefusedRequest("below /lfo/ there are only POST /lfo/outcome and GET /lfo/status", status=404)
        told = read_outcome(body)
        if not await asyncio.get_running_loop().run_in_executor(None, partial(self._recorder.told, told)):
            sentence = f"no conversation of the last ones is named {told.name[:80]!r}"
            raise RefusedRequest(sentence, param="id", code="unknown_conversation", status=404)
        await _send_json(send, {"recorded": True})


def read_outcome(body: bytes) -> Told:
    """Read `{"id": "chatcmpl-5f", "reward": 1, "messages": [...]}`; messages may be left out."""
    try:
        given = json.loads(body)
    except (ValueError, RecursionError):
        given = None
    if not isinstance(given, dict) or not isinstance(given.get("id"), str):
        sentence = "the body must be a JSON object with id: that of a completion or of a call, or a name of your own"
        raise RefusedRequest(sentence, param="id")
    reward, messages = given.get("reward"), given.get("messages") or []
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool) and math.isfinite(reward)
    if reward is not None and not is_number:
        raise RefusedRequest("reward must be a number, 1 for success, or null", param="reward")
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise RefusedRequest("messages must be a list of messages that came after the last answer", param="messages")
    return Told(name=given["id"], outcome=None if reward is None else float(reward), messages=messages)


def base_of(url: str) -> str:
    """Return the address without `/v1`, which the paths of requests have."""
    return url.rstrip("/").removesuffix("/v1")


def _target(scope: Scope) -> bytes:
    query = scope.get("query_string") or b""
    return (scope.get("raw_path") or scope["path"].encode()) + (b"?" + query if query else b"")


def _own_headers(given: Headers) -> Headers:
    lowered = [(name.lower(), value) for name, value in given]
    return [(name, value) for name, value in lowered if name.decode("latin-1") not in _HOP_BY_HOP - {"content-length"}]


def _number(text: str | None) -> float | None:
    try:
        value = float(text) if text else None
    except ValueError:
        return None
    return value if value is not None and math.isfinite(value) else None


async def _body(receive: Receive) -> bytes:
    async def read() -> bytes:
        parts, size, more = [], 0, True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                raise RefusedRequest("the client has disconnected", status=499)
            parts.append(message.get("body", b""))
            size, more = size + len(parts[-1]), message.get("more_body", False)
            if size > MAX_BODY:
                raise RefusedRequest(f"the request is larger than {MAX_BODY:,} bytes", status=413)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), PATIENCE)
    except TimeoutError:
        raise RefusedRequest(f"the request did not arrive within {PATIENCE:g} seconds", status=408) from None


async def _send_given(send: Send, given: Given) -> None:
    headers = [*given.headers, (b"content-length", str(len(given.body)).encode())]
    await send({"type": "http.response.start", "status": given.status, "headers": headers})
    await send({"type": "http.response.body", "body": given.body, "more_body": False})


async def _send_json(send: Send, value: Any, status: int = 200) -> None:
    await _send_given(send, Given(status, [(b"content-type", JSON)], json.dumps(value).encode()))
