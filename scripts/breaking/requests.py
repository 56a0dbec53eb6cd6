"""Hostile requests to `lfo serve`: malformed bodies, unsupported options, megabytes, half-open connections.

A real server answers on the loopback, with the run's own look-ahead, and may open as many files as most shells allow.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import resource
import selectors
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from breaking import Outcome
from lfo.config import load_config, to_yaml
from lfo.serving.options import NEUTRAL

PATIENCE = 120.0  # seconds for any answer
SOON = 15.0  # seconds for an honest client beside hostile ones
SETTINGS = (
    *("preset=tiny", "steps=1", "eval.every=0", "rollout.prompts=1", "rollout.group_size=4", "rollout.max_turns=2"),
    *("rollout.mini_batch_prompts=1", "rollout.max_context=1024", "policy.max_resamples=0"),
)
LFO = (sys.executable, "-c", "from lfo.cli import main; main()")


def trials(folder: Path, *, short: bool) -> Iterator[Outcome]:
    run, options = _run(folder, short)
    with _served(run, *options, files=256 if short else 1024) as server:
        before = _said(server.ask(_conversation()))
        for kind, spoil in KINDS.items():
            yield _bodies(server, kind, spoil, 4 if short else 19)
        yield _options(server)
        yield _without_parameters(server)
        yield from _overlong(server)
        yield _half_open(server, 300 if short else 1_100, wait=not short)
        if not short:
            yield _memory(server, warm=2_000, total=5_000)
        after = _said(server.ask(_conversation()))
        held = before == after and after.startswith("200 ")
        yield Outcome(trial="the same answer after all of this", held=held, said="" if held else f"{before}; {after}")


# --- the server ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Server:
    url: str
    process: int
    http: httpx.Client

    def ask(self, body: Any) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.http.post(f"{self.url}/chat/completions", content=content)

    def megabytes(self) -> float:
        pages = int(Path(f"/proc/{self.process}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def _run(folder: Path, short: bool) -> tuple[Path, tuple[str, ...]]:
    """Return a run named `run` to serve, with options for `lfo serve`; the short form serves the untrained base."""
    run = folder / "run"
    if short:
        run.mkdir(parents=True)
        (run / "config.yaml").write_text(to_yaml(load_config([*SETTINGS])))
        return run, ("--adapter", "none")
    subprocess.run([*LFO, "train", *SETTINGS, f"output_dir={run}"], check=True, capture_output=True)
    return run, ()


@contextlib.contextmanager
def _served(run: Path, *options: str, files: int) -> Iterator[Server]:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = subprocess.Popen(
        [*LFO, "serve", str(run), "--port", "0", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard)),
    )
    try:
        assert process.stdout
        words = process.stdout.readline() + process.stdout.readline()
        found = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", words)
        if found is None:
            raise RuntimeError(f"lfo serve did not start: {words}")
        headers = {"Authorization": f"Bearer {found[2]}", "Content-Type": "application/json"}
        with httpx.Client(headers=headers, timeout=PATIENCE) as http:
            yield Server(url=found[1], process=process.pid, http=http)
    finally:
        process.terminate()
        process.wait()


def _said(answer: httpx.Response) -> str:
    """Return the status and the message of an answer, without its random ids."""
    if answer.status_code != 200:
        return f"{answer.status_code} {answer.text[:200]}"
    message = answer.json()["choices"][0]["message"]
    return f"200 {message['content']} {[call['function'] for call in message.get('tool_calls', ())]}"


def _error_of(answer: httpx.Response) -> dict[str, Any]:
    """Return the error in an answer, or nothing."""
    try:
        return answer.json().get("error") or {}
    except ValueError:
        return {}


# --- malformed bodies ----------------------------------------------------------------------------------------------


def _conversation() -> dict[str, Any]:
    """Return a valid request with two tools and a call."""
    call = {"id": "call_1", "type": "function", "function": {"name": "search_company", "arguments": '{"name": "Acme"}'}}
    search = {"name": "search_company", "description": "Look a company up.", "parameters": {"type": "object"}}
    return {
        "model": "run",
        "messages": [
            {"role": "system", "content": "You make phone calls."},
            {"role": "user", "content": "I need a copy of my invoice from Acme."},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": "Acme, bank\nDesk 555-1240: invoice copy"},
        ],
        "tools": [
            {"type": "function", "function": search},
            {"type": "function", "function": {"name": "hang_up", "parameters": {}}},
        ],
        "temperature": 0,
        "max_tokens": 4,
    }


JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 0.5, 2**70, "", "x", "\x00", [], [[]], {}, {"a": [{}]}, [None], [1, "a"]),
    *("<|im_end|>", "<tool_call>", "</tool_call>{", {"type": "text"}, {"role": "user"}, {"name": "look"}),
)
NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "1e-999", "9" * 400, "9" * 5_000, "1" + "0" * 400 + ".5")
HALVES = ("\ud800", "a\udfff", "\udc00\ud800 b", "<|im_\ud83d end|>")


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a JSON value."""
    found: list[tuple[Any, Any]] = []
    for key in value if isinstance(value, dict) else range(len(value)):
        found.append((value, key))
        if isinstance(value[key], dict | list):
            found += _places(value[key])
    return found


def _put(request: Any, draw: random.Random, values: Sequence[Any]) -> bytes:
    """Put one to three of these values anywhere."""
    for _ in range(draw.randint(1, 3)):
        box, key = draw.choice(_places(request))
        box[key] = copy.deepcopy(draw.choice(values))
    return json.dumps(request).encode()


def _wrong_types(request: Any, draw: random.Random) -> bytes:
    return _put(request, draw, JUNK)


def _missing(request: Any, draw: random.Random) -> bytes:
    for _ in range(draw.randint(1, 3)):
        if places := _places(request):
            box, key = draw.choice(places)
            del box[key]
    return json.dumps(request).encode()


def _numbers(request: Any, draw: random.Random) -> bytes:
    """Write a number that no float holds, or no number at all: anywhere, also inside the arguments of a call."""
    number, mark = draw.choice(NUMBERS), '"a number"'
    if draw.random() < 0.3:
        request["messages"][2]["tool_calls"][0]["function"]["arguments"] = '{"name": %s}' % number  # noqa: UP031
        return json.dumps(request).encode()
    if draw.random() < 0.5:
        request[draw.choice(("temperature", "seed", "max_tokens", "top_p", "n", "top_k", "unknown"))] = "a number"
    else:
        box, key = draw.choice(_places(request))
        box[key] = "a number"
    return json.dumps(request).replace(mark, number).encode()


def _nested(request: Any, draw: random.Random) -> bytes:
    depth = draw.choice((9, 63, 70, 500, 20_000))
    opening, closing = draw.choice((("[", "]"), ('{"a":', "}")))
    deep = opening * depth + "1" + closing * depth
    if draw.random() < 0.3:
        request["messages"][2]["tool_calls"][0]["function"]["arguments"] = f'{{"name": {deep}}}'
        return json.dumps(request).encode()
    box, key = draw.choice(_places(request))
    box[key] = "deep"
    return json.dumps(request).replace('"deep"', deep).encode()


def _halves(request: Any, draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        request["messages"][2]["tool_calls"][0]["function"]["arguments"] = json.dumps({"name": draw.choice(HALVES)})
    return _put(request, draw, HALVES)


def _truncated(request: Any, draw: random.Random) -> bytes:
    body = json.dumps(request).encode()
    return body[: draw.randrange(len(body))]


def _bytes(request: Any, draw: random.Random) -> bytes:
    """Insert bytes that are not UTF-8, or write the body in another encoding."""
    body = json.dumps(request)
    if draw.random() < 0.3:
        return body.encode(draw.choice(("utf-16", "utf-32", "utf-8-sig")))
    place = draw.randrange(len(body))
    return body[:place].encode() + draw.choice((b"\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\x00")) + body[place:].encode()


def _huge(request: Any, draw: random.Random) -> bytes:
    text = draw.choice(("x", "word ", "<|im_end|>", "<tool_call>\n", "{", "😀", " ")) * draw.choice((1_000, 100_000))
    return _put(request, draw, (text, [text], {text: 1}, [{}] * 5_000))


def _twice(request: Any, draw: random.Random) -> bytes:
    """Write a key twice, with another value."""
    box, key = draw.choice([(box, key) for box, key in _places(request) if isinstance(key, str)])
    box[key], kept = "a mark", box[key]
    pair = f'{json.dumps(kept)}, "{key}": {json.dumps(draw.choice(JUNK))}'
    return json.dumps(request).replace('"a mark"', pair).encode()


def _roles(request: Any, draw: random.Random) -> bytes:
    roles = ("system", "user", "assistant", "tool", "developer", "function", "root", "", None, 1, ["user"])
    request["messages"] = [
        {"role": draw.choice(roles), "content": "Hello.", "tool_call_id": draw.choice(("call_1", "", None))}
        for _ in range(draw.choice((1, 2, 5, 511, 600)))
    ]
    return json.dumps(request).encode()


def _calls(request: Any, draw: random.Random) -> bytes:
    """Spoil calls and tools: what a client of an agent gets wrong."""
    message, tool = request["messages"][2], request["tools"][draw.randrange(2)]
    call = message["tool_calls"][0]
    arguments = ("", "null", "[]", '"x"', "{", "{}{}", '{"a": 1, "a": 2}', {}, {"name": 1}, None, "{}" * 5_000)
    shapes: tuple[Callable[[], Any], ...] = (
        lambda: call["function"].update(arguments=draw.choice(arguments)),
        lambda: call["function"].update(name=draw.choice(("", "no such tool", "<|im_end|>", None, 7, "é" * 9_999))),
        lambda: call.update(id=draw.choice((None, 5, "", "call_2", "x" * 9_999)), function=draw.choice((None, [], {}))),
        lambda: message.update(tool_calls=draw.choice((call, [call] * 300, [[call]], {}, [None], "calls", 1))),
        lambda: request["messages"][3].update(tool_call_id=draw.choice((None, 5, "another", ["call_1"]))),
        lambda: request["messages"].extend([request["messages"][3]] * draw.choice((1, 5, 400))),
        lambda: tool.update(type=draw.choice((None, "web_search", 1)), function=draw.choice((None, [], {"name": 1}))),
        lambda: tool["function"].update(parameters=draw.choice(({"properties": 5}, {"properties": [1]}, [], "x", 1))),
        lambda: tool["function"].update(parameters={"properties": {"a": draw.choice(JUNK)}, "required": 3}),
        lambda: request.update(tools=[tool] * draw.choice((2, 128, 129))),
    )
    for shape in draw.sample(shapes, draw.randint(1, 2)):
        with contextlib.suppress(TypeError, AttributeError, KeyError):  # the first has removed what the second spoils
            shape()
    return json.dumps(request).encode()


KINDS: dict[str, Callable[[Any, random.Random], bytes]] = {
    "values of wrong types": _wrong_types,
    "fields missing": _missing,
    "numbers out of range": _numbers,
    "nested deeply": _nested,
    "halves of surrogate pairs": _halves,
    "truncated": _truncated,
    "not UTF-8": _bytes,
    "huge strings and lists": _huge,
    "a key twice": _twice,
    "wrong roles": _roles,
    "calls and tools of wrong shapes": _calls,
}


def _bodies(server: Server, kind: str, spoil: Callable[[Any, random.Random], bytes], count: int) -> Outcome:
    """Send bodies of one kind; each must get an answer or one sentence, and no status from 500 on."""
    statuses: Counter[int] = Counter()
    broken = ""
    for seed in range(count):
        body = spoil(_conversation(), random.Random(f"{kind} {seed}"))
        answer = server.ask(body)
        statuses[answer.status_code] += 1
        sentence = _error_of(answer).get("message")
        if answer.status_code not in (200, 400, 404, 413) or (answer.status_code != 200 and not sentence):
            broken = broken or f"body {seed} got {answer.status_code} {sentence}: {body[:200]!r}"
    figures = {str(status): number for status, number in sorted(statuses.items())}
    return Outcome(trial=f"{count} bodies: {kind}", held=not broken, said=broken, figures=figures)


# --- options, megabytes --------------------------------------------------------------------------------------------


def _options(server: Server) -> Outcome:
    """Every unsupported option is refused by its name."""
    wrong: list[str] = []
    for name in NEUTRAL:
        answer = server.ask({**_conversation(), name: {"anything": 7}})
        error = _error_of(answer)
        if (answer.status_code, error.get("param")) != (400, name) or name not in error["message"]:
            wrong.append(name)
    said = f"not refused: {', '.join(wrong)}" if wrong else ""
    return Outcome(
        trial="unsupported options are refused by name", held=not wrong, said=said, figures={"options": len(NEUTRAL)}
    )


def _without_parameters(server: Server) -> Outcome:
    function = {"name": "hang_up"}
    statuses = [
        server.ask({**_conversation(), "tools": [{"type": "function", "function": {**function, **more}}]}).status_code
        for more in ({}, {"parameters": None}, {"parameters": {}})
    ]
    held = statuses == [200, 200, 200]
    return Outcome(trial="tools without parameters", held=held, said="" if held else f"statuses {statuses}")


def _overlong(server: Server) -> Iterator[Outcome]:
    """Megabytes are refused before they are tokenised: at once, with the code that clients know."""
    text = "word é 1\n" * 300_000
    tool = {"type": "function", "function": {"name": "look", "parameters": {"properties": {"a": {"title": text}}}}}
    conversation = _conversation()
    bodies = {
        "a message": {**conversation, "messages": [{"role": "user", "content": text}]},
        "a reply of a tool": {
            **conversation,
            "messages": [*conversation["messages"][:3], {"role": "tool", "tool_call_id": "call_1", "content": text}],
        },
        "a schema": {**conversation, "tools": [tool]},
    }
    for name, body in bodies.items():
        content = json.dumps(body, ensure_ascii=False).encode()
        begin = time.monotonic()
        answer = server.ask(content)
        seconds = time.monotonic() - begin
        error = _error_of(answer)
        held = (answer.status_code, error.get("code")) == (400, "context_length_exceeded") and seconds < SOON / 3
        yield Outcome(
            trial=f"{name} of {len(content) / 1e6:.1f} MB",
            held=held,
            said=str(error.get("message", answer.text[:200])),
            figures={"seconds": seconds},
        )


# --- half-open connections -----------------------------------------------------------------------------------------


def _half_open(server: Server, count: int, *, wait: bool) -> Outcome:
    """Open connections that send half of a head and then nothing, or a byte a second; an honest client is answered.

    `wait`: also until the server has closed them all.
    """
    address = httpx.URL(server.url)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * count + 200)), hard))
    with contextlib.ExitStack() as stack:
        opened = []
        for _ in range(count):
            opened.append(stack.enter_context(socket.create_connection((address.host, address.port or 80), PATIENCE)))
            with contextlib.suppress(OSError):  # closed already
                opened[-1].sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX-Drip: ")
        begin = time.monotonic()
        status: int | str = ""
        while not status and time.monotonic() < begin + SOON:
            try:
                with httpx.Client(headers=server.http.headers, timeout=SOON) as http:
                    status = http.post(f"{server.url}/chat/completions", json=_conversation()).status_code
            except httpx.TransportError as error:
                status = repr(error)
        seconds = time.monotonic() - begin
        figures = {"seconds": seconds}
        closed = count
        if wait:
            closed = _closed(opened, dripping=count // 4, until=begin + 3 * SOON)
            figures |= {"closed": closed, "closed after seconds": time.monotonic() - begin}
    held = status == 200 and seconds < SOON and closed == count
    return Outcome(
        trial=f"one honest client beside {count} half-open connections",
        held=held,
        said="" if held else f"answered {status}, {closed} of {count} closed",
        figures=figures,
    )


def _closed(opened: Sequence[socket.socket], *, dripping: int, until: float) -> int:
    """Return how many connections the server closes; the last `dripping` ones send a byte each second."""
    waiting, drips = set(opened), opened[-dripping:]
    with selectors.DefaultSelector() as selector:
        for each in opened:
            each.setblocking(False)
            selector.register(each, selectors.EVENT_READ)
        dripped = time.monotonic()
        while waiting and time.monotonic() < until:
            for key, _ in selector.select(0.2):
                selector.unregister(key.fileobj)
                waiting.discard(key.fileobj)  # type: ignore[arg-type]
            if time.monotonic() > dripped + 1:
                dripped = time.monotonic()
                for each in drips:
                    with contextlib.suppress(OSError):
                        each.sendall(b"x")
    return len(opened) - len(waiting)


# --- memory --------------------------------------------------------------------------------------------------------


def _memory(server: Server, *, warm: int, total: int) -> Outcome:
    """Send different requests, some of them malformed; after the caches are full, memory must not grow."""
    kinds = list(KINDS.values())

    def send(number: int) -> int:
        draw = random.Random(number)
        body: Any = _conversation()
        body["messages"][1]["content"] = f"I need invoice {draw.randrange(10**9)} from Acme."
        body["tools"][1]["function"]["name"] = f"hang_up_{number % 50}"
        return server.ask(kinds[number % len(kinds)](body, draw) if number % 5 == 0 else body).status_code

    statuses: Counter[int] = Counter()
    with ThreadPoolExecutor(16) as pool:
        statuses.update(pool.map(send, range(warm)))
        before = server.megabytes()
        statuses.update(pool.map(send, range(warm, total)))
    after = server.megabytes()
    failed = sum(number for status, number in statuses.items() if status >= 500)
    held = after < 1.05 * before and not failed
    figures = {f"MB after {warm}": before, f"MB after {total}": after, "5xx": failed}
    return Outcome(trial=f"memory over {total} requests", held=held, figures=figures)
