"""`lfo watch RUNS...`: serve the live report page to a browser on this machine.

    with LivePage([Path("runs/x")]).serving() as address: ...

The page requests updates every two seconds and gets only what has changed. Nothing is written and no lock is taken, so
the runs are not affected. The address contains a token, which every request needs. The server of the standard library
is enough for two pages and a few readers.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from lfo import __version__
from lfo.errors import LfoError, UsageError
from lfo.report import live
from lfo.report.machine import Machine, process_of
from lfo.report.page import content_policy, render
from lfo.report.payload import Found, build, find_runs_and_studies
from lfo.runs.reading import RunRecord, read_run

EVERY = 2.0  # seconds between two requests of a page
LOOPBACK = "127.0.0.1"
SLOW_CLIENT = 30.0  # seconds until a slow client is disconnected


class LivePage:
    """The live page of these folders."""

    def __init__(self, paths: Sequence[Path], every: float = EVERY) -> None:
        self._paths, self._every = list(paths), every
        self._machine = Machine()
        self._lock = threading.Lock()
        self._looked = 0.0
        self._seen: Any = None  # the state of the folders when the page was built
        self._records: list[RunRecord] = []
        self._read: dict[Path, tuple[Any, RunRecord]] = {}  # each run, and the state of its files when it was read
        self._payload: dict[str, Any] = {}
        self._version = 0
        self._changed: dict[str, tuple[bytes, int]] = {}  # part of the page -> digest, version of its last change

    def page(self) -> str:
        return render(self.news(0), live=True)

    def news(self, have: int) -> dict[str, Any]:
        """Return the parts of the page that have changed since a version."""
        with self._lock:
            # Read the folders only as often as one page needs, for any number of clients.
            if time.monotonic() - self._looked >= self._every / 2:
                self._look()
                self._looked = time.monotonic()
            news = {name: self._payload[name] for name, (_, changed) in self._changed.items() if changed > have}
            return {**news, "version": self._version}

    def _look(self) -> None:
        found = self._find()
        seen = [(path, *map(_stamp, _growing(path))) for path in found.runs], found.studies, found.problems
        if seen != self._seen:
            self._read = {path: self._reread(path, stamps) for path, *stamps in seen[0]}
            self._records = [record for _, record in self._read.values()]
            self._payload = build(found, self._records)
            self._seen = seen
        self._payload |= {
            "title": "lfo watch",
            "live": self._now(),
            "foot": f"Served by lfo watch {__version__}, which only reads. This page requests updates from this "
            f"machine every {self._every:g} seconds and connects to no other.",
        }
        digests = {name: hashlib.sha256(json.dumps(part).encode()).digest() for name, part in self._payload.items()}
        new = {name: digest for name, digest in digests.items() if self._changed.get(name, (b"",))[0] != digest}
        if new:
            self._version += 1
            self._changed |= {name: (digest, self._version) for name, digest in new.items()}

    def _reread(self, path: Path, stamps: Any) -> tuple[Any, RunRecord]:
        """Return a run with the state of its files; only one whose files have changed is read again."""
        known = self._read.get(path)
        return known if known is not None and known[0] == stamps else (stamps, read_run(path))

    def _find(self) -> Found:
        """Find runs; runs and folders may also appear later."""
        try:
            return find_runs_and_studies([path for path in self._paths if path.is_dir()])
        except LfoError:
            return Found(runs=(), studies=(), problems=())

    def _now(self) -> dict[str, Any]:
        cards = []
        for record in self._records:
            number = None if record.finished else process_of(record.path)
            cards.append(live.now(record, None if number is None else self._machine.process(number)))
        return {"runs": cards, "machine": self._machine.whole(), "every": self._every}

    @contextmanager
    def serving(self, host: str = LOOPBACK, port: int = 0, token: str | None = None) -> Iterator[str]:
        """Serve the page from a thread; yield its address."""
        token = token or secrets.token_urlsafe(24)
        try:
            server = _Server((host, port), _handler(self, token))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            words = f"cannot listen on {host} port {port}: {reason}; choose another --port or --host"
            raise UsageError(words) from error
        thread = threading.Thread(target=server.serve_forever, name="watch", daemon=True)
        thread.start()
        try:
            reached = {"0.0.0.0": LOOPBACK, "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
            yield f"http://{reached}:{server.server_port}/{token}/"
        finally:
            server.shutdown()
            server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or send invalid requests."""


def _handler(live_page: LivePage, token: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        timeout = SLOW_CLIENT  # one request for each connection, so that none outlives the server

        def do_GET(self) -> None:
            address = urlsplit(self.path)
            _, given, *rest = address.path.split("/")
            if not secrets.compare_digest(given.encode(), token.encode()):
                self._answer(
                    403, "text/plain", "This page needs the token in its address: see what lfo watch printed.\n"
                )
            elif rest == [""]:
                self._answer(200, "text/html", live_page.page())
            elif rest == ["data"]:
                self._answer(200, "application/json", json.dumps(live_page.news(_version(address.query))))
            else:
                self._answer(404, "text/plain", "There is nothing here; the page's address ends with a slash.\n")

        def _answer(self, status: int, kind: str, text: str) -> None:
            body = text.encode("utf-8", errors="replace")
            self.send_response(status)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("Content-Security-Policy", f"{content_policy(live=True)}; frame-ancestors 'none'")
            self.send_header("Referrer-Policy", "no-referrer")  # the address contains the token
            self.send_header("X-Content-Type-Options", "nosniff")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


def _version(query: str) -> int:
    with suppress(ValueError, KeyError):
        return int(parse_qs(query)["have"][0][:18])
    return 0


def _growing(run: Path) -> list[Path]:
    return [run / name for name in ("config.yaml", "metrics.jsonl", "data.json", "rollouts", "predictions")]


def _stamp(path: Path) -> tuple[int, int] | None:
    with suppress(OSError):
        found = path.stat()
        return found.st_mtime_ns, found.st_size
    return None
