"""Connections that have not asked for anything lock nobody out.

uvicorn waits without end for the head of a request, and counts such connections among those that it can serve. So who
does not send a whole head within seconds is disconnected, however often it sends a byte. When there are too many
connections, the one that has asked for nothing for the longest time makes room. Neither needs the token.
"""

from __future__ import annotations

import asyncio
import resource

from uvicorn.protocols.http.h11_impl import H11Protocol

PATIENCE = 10.0  # seconds for the head of a request
MOST = 1024


class Connection(H11Protocol):
    """One connection; the server's `limit_concurrency` is the number at which the oldest idle one is closed."""

    _since = 0.0  # when its turn to ask for something began
    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_head()
        others = [each for each in self.connections if isinstance(each, Connection) and each.idle and each is not self]
        if others and self.limit_concurrency and len(self.connections) >= self.limit_concurrency:
            min(others, key=lambda each: each._since).leave()

    def on_response_complete(self) -> None:
        self._await_head()
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether no request is being answered."""
        return self.cycle is None or self.cycle.response_complete

    def leave(self) -> None:
        """Close the connection if it is idle."""
        if self.idle:
            self.connections.discard(self)
            self.transport.close()

    def _await_head(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self._since = self.loop.time()
        self._deadline = self.loop.call_later(PATIENCE, self.leave)


def most_connections() -> int:
    """Return how many connections to serve: half of the files that this process may open, at most `MOST`."""
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MOST if files == resource.RLIM_INFINITY else min(MOST, files // 2)
