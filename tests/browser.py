"""A headless Chromium for tests, controlled through a pipe by the DevTools protocol, without a driver or package.

    with Browser() as browser:
        page = browser.open(Path("report.html"), width=360)
        assert page.evaluate("document.title") == "lfo report"

`python tests/browser.py report.html picture.png [WIDTH HEIGHT light|dark]` takes a picture of a page.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PATIENCE = 60.0  # seconds for any answer, on a machine that others use too


def executable() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


class Browser:
    """One browser process with an empty profile of its own."""

    def __init__(self) -> None:
        path = executable()
        assert path, "there is no Chromium"
        self._profile = tempfile.mkdtemp(prefix="lfo-browser-")
        theirs_in, self._out = _high(os.pipe())
        self._in, theirs_out = _high(os.pipe())
        flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run")
        quiet = ("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe")
        self._process = os.posix_spawn(
            path,
            [path, *flags, *quiet, f"--user-data-dir={self._profile}", "about:blank"],
            os.environ,
            file_actions=[
                (os.POSIX_SPAWN_DUP2, theirs_in, 3),  # where Chromium reads commands
                (os.POSIX_SPAWN_DUP2, theirs_out, 4),  # where it answers
                (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0),
                (os.POSIX_SPAWN_OPEN, 2, os.devnull, os.O_WRONLY, 0),
            ],
            setpgroup=0,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._buffer = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        os.killpg(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    def open(self, path: Path | str, width: int = 1280, height: int = 900, dark: bool = False) -> Page:
        """A new tab with a file or an address in it, drawn to the end."""
        target = self.call("Target.createTarget", {"url": "about:blank"})["targetId"]
        session = self.call("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        page = Page(self, session, target)
        for domain in ("Page", "Runtime", "Network", "Log"):
            page.call(f"{domain}.enable")
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        page.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        page.call("Emulation.setEmulatedMedia", features=[scheme])
        page.call("Page.navigate", url=path if isinstance(path, str) else path.resolve().as_uri())
        while not page.happened("Page.loadEventFired"):
            self.events.append(self._read())
        page.settle()
        return page

    def call(self, method: str, params: dict[str, Any] | None = None, session: str | None = None) -> dict[str, Any]:
        self._last_id += 1
        message: dict[str, Any] = {"id": self._last_id, "method": method, "params": params or {}}
        if session:
            message["sessionId"] = session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == message["id"]:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _read(self) -> dict[str, Any]:
        deadline = time.monotonic() + PATIENCE
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._in], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(self._in, 1 << 20) if ready else b""
            assert chunk, "Chromium does not answer"
            self._buffer += chunk
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


class Page:
    """One tab: what is on it, and what happened in it."""

    def __init__(self, browser: Browser, session: str, target: str) -> None:
        self._browser, self._session, self._target = browser, session, target

    def close(self) -> None:
        self._browser.call("Target.closeTarget", {"targetId": self._target})

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        return self._browser.call(method, params, self._session)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; an exception in it fails the test."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def settle(self) -> None:
        """Let everything be laid out and drawn that is going to be; a tab behind others draws nothing."""
        self.call("Page.bringToFront")
        self.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def press(self, key: str, shift: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=8 if shift else 0)

    def happened(self, *methods: str) -> list[dict[str, Any]]:
        """Events of these names so far, in this tab."""
        return [
            event["params"]
            for event in self._browser.events
            if event.get("sessionId") == self._session and event["method"] in methods
        ]

    def picture(self, path: Path, height: int | None = None) -> None:
        """A PNG of the whole page, or of its top."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": height or size["height"], "scale": 1}
        answer = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
        path.write_bytes(base64.b64decode(answer["data"]))


def _high(ends: tuple[int, int]) -> tuple[int, int]:
    """The same pipe at numbers that cannot collide with 3 and 4, which Chromium wants."""
    high = tuple(fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends)
    for end in ends:
        os.close(end)
    return high[0], high[1]


if __name__ == "__main__":
    source, target, *rest = sys.argv[1:]
    wide, high, scheme = (*rest, *("1280", "0", "light")[len(rest) :])
    with Browser() as chromium:
        tab = chromium.open(source if "://" in source else Path(source), width=int(wide), dark=scheme == "dark")
        tab.picture(Path(target), height=int(high) or None)
