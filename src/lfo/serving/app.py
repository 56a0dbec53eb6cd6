"""The HTTP server of `lfo serve`: authentication, limits and endpoints.

Starlette and uvicorn handle what is easy to get wrong: hostile HTTP, streams with backpressure, and clients that
disconnect. Both are small and pure Python, and vLLM uses them too; they are the pip extra `serve`.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future

import uvicorn
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from lfo.errors import LfoError, UsageError
from lfo.serving import wire
from lfo.serving.connections import Connection, most_connections
from lfo.serving.wire import ChatRequest, RefusedRequest, Reply

MAX_BODY = 4_000_000  # bytes
PATIENCE = 30.0  # seconds for a client to send the body of its request
BACKLOG = 128  # connections that are accepted in one go, before the limit counts them
CLIENT_GONE = 499  # the client has disconnected and reads no status

Submit = Callable[[ChatRequest], "Future[Reply]"]


def make_app(submit: Submit, *, model: str, token: str, figures: Callable[[], str] = str) -> ASGIApp:
    """Return the application with the endpoints of one served model; `figures` returns what /metrics shows."""

    async def chat(request: Request) -> Response:
        wanted = wire.parse_request(await _body(request), model=model)
        reply = await _answer(request, submit(wanted))
        if reply is None:
            return Response(status_code=CLIENT_GONE)
        if not wanted.stream:
            return JSONResponse(wire.completion(reply, model=model))
        events = _events(reply, model=model, usage=wanted.usage_in_stream)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})

    async def models(request: Request) -> Response:
        return JSONResponse(wire.models(model))

    async def metrics(request: Request) -> Response:
        return PlainTextResponse(figures())

    async def refused(request: Request, error: Exception) -> Response:
        known = error if isinstance(error, RefusedRequest) else RefusedRequest(str(error), status=500)
        return JSONResponse(known.body(), status_code=known.status)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=CLIENT_GONE)

    async def not_found(request: Request, error: Exception) -> Response:
        status = getattr(error, "status_code", 404)
        known = RefusedRequest("this server only has /v1/chat/completions, /v1/models and /metrics", status=status)
        return JSONResponse(known.body(), status_code=status)

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/models", models, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
    ]
    handlers = {LfoError: refused, ClientDisconnect: gone, 404: not_found, 405: not_found}
    return Guarded(Starlette(routes=routes, exception_handlers=handlers), token)


class Guarded:
    """Returns 403 on every path without the token."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._expected = app, f"Bearer {token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not secrets.compare_digest(given, self._expected):
                error = RefusedRequest("this needs the server's token as the API key", code="no_token", status=403)
                await JSONResponse(error.body(), status_code=403)(scope, receive, send)
                return
        await self._app(scope, receive, send)


async def _body(request: Request) -> bytes:
    """Read the body of a request, with limits of size and time."""

    async def read() -> bytes:
        parts, size = [], 0
        async for part in request.stream():
            size += len(part)
            if size > MAX_BODY:
                raise RefusedRequest(f"the request is larger than {MAX_BODY:,} bytes", status=413)
            parts.append(part)
        return b"".join(parts)

    try:
        return await asyncio.wait_for(read(), PATIENCE)
    except TimeoutError:
        raise RefusedRequest(f"the request did not arrive within {PATIENCE:g} seconds", status=408) from None


async def _answer(request: Request, future: Future[Reply]) -> Reply | None:
    """Return the reply, or None if the client has disconnected; a waiting request is then dropped."""
    answer = asyncio.wrap_future(future)
    gone = asyncio.ensure_future(request.receive())  # after the body, only a disconnect can arrive
    try:
        await asyncio.wait({answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        return answer.result() if answer.done() else None
    finally:
        gone.cancel()
        answer.cancel()


async def _events(reply: Reply, *, model: str, usage: bool) -> AsyncIterator[str]:
    for chunk in wire.chunks(reply, model=model, usage=usage):
        yield f"data: {json.dumps(chunk)}\n\n"
    yield "data: [DONE]\n\n"


def listen(host: str, port: int) -> socket.socket:
    """Return a socket to listen on; port 0 selects a free port."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {host} port {port}: {reason}; choose another --port or --host") from error


def make_server(app: ASGIApp, *, passes_through: bool = False) -> uvicorn.Server:
    """Return a server; one that passes answers through adds no headers, and tells the app when it starts and ends."""
    config = uvicorn.Config(
        app,
        server_header=not passes_through,
        date_header=not passes_through,
        log_level="warning",
        access_log=False,
        lifespan="on" if passes_through else "off",
        http=Connection,
        ws="none",
        limit_concurrency=most_connections(),
        backlog=BACKLOG,
        timeout_graceful_shutdown=5,
    )
    return uvicorn.Server(config)
