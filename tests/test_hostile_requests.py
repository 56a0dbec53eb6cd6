"""What a server must bear: numbers that no float holds, options that it lacks, megabytes, clients that say nothing."""

import contextlib
import copy
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from lfo.agent import Agent
from lfo.serving import app, connections
from lfo.serving.app import listen, make_app, make_server
from lfo.serving.batcher import Batcher
from lfo.serving.connections import most_connections
from lfo.serving.options import NEUTRAL
from lfo.serving.speaker import local_speaker
from lfo.serving.wire import RefusedRequest, parse_request
from test_serving import MODEL, TOKEN, opening, request, small_agent

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
USER = {"role": "user", "content": "Hi."}


@pytest.fixture(scope="module")
def agent() -> Agent:
    return small_agent()


@pytest.fixture(scope="module")
def batcher(agent: Agent) -> Iterator[Batcher]:
    with Batcher(local_speaker(agent)) as batcher:
        yield batcher


@contextlib.contextmanager
def served(batcher: Batcher) -> Iterator[tuple[str, int]]:
    """The address of a server, whose limits a test has set before."""
    with listen("127.0.0.1", 0) as bound:
        server = make_server(make_app(batcher.submit, model=MODEL, token=TOKEN))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [bound]})
        thread.start()
        try:
            yield bound.getsockname()
        finally:
            server.should_exit = True
            thread.join()


def status_of(address: tuple[str, int], body: Any) -> tuple[int, str]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    url = f"http://{address[0]}:{address[1]}/v1/chat/completions"
    answer = httpx.post(url, content=content, headers=HEADERS, timeout=60)
    return answer.status_code, answer.json().get("error", {}).get("message", "")


def calling(arguments: str) -> list[Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": arguments}}
    return [
        USER,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "x"},
    ]


# --- numbers and halves of characters --------------------------------------------------------------------------------

NUMBERS = ("1e999", "-1e999", "NaN", "Infinity", "-Infinity", "9" * 400, "9" * 5_000, "1" + "0" * 400 + ".5")
PLACES = {
    "temperature": '{"model": "run", "messages": [MESSAGE], "temperature": NUMBER}',
    "seed": '{"model": "run", "messages": [MESSAGE], "seed": NUMBER}',
    "max_tokens": '{"model": "run", "messages": [MESSAGE], "max_tokens": NUMBER}',
    "an unknown option": '{"model": "run", "messages": [MESSAGE], "metadata": {"a": [NUMBER]}}',
    "a schema": '{"model": "run", "messages": [MESSAGE], "tools": [{"type": "function", "function": '
    '{"name": "look", "parameters": {"properties": {"a": {"maximum": NUMBER}}}}}]}',
    "arguments": '{"model": "run", "messages": CALLING}',
}


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: number[:10])
@pytest.mark.parametrize("place", PLACES)
def test_a_number_that_no_float_holds_is_one_sentence(place: str, number: str):
    body = PLACES[place].replace("CALLING", json.dumps(calling('{"at": NUMBER}'))).replace("MESSAGE", json.dumps(USER))
    with pytest.raises(RefusedRequest, match=r"is (too large|not a JSON value)$") as refused:
        parse_request(body.replace("NUMBER", number).encode(), model=MODEL)
    assert refused.value.status == 400
    assert number[:40] in str(refused.value)


def test_the_server_says_so_with_400(batcher: Batcher):
    with served(batcher) as address:
        for arguments in ('{"at": 1e999}', '{"at": NaN}'):
            status, sentence = status_of(address, {"model": MODEL, "messages": calling(arguments)})
            assert (status, sentence.count("in the request is")) == (400, 1)


def test_numbers_that_floats_hold_are_read():
    read = request(calling(json.dumps({"at": [2**70, -(10**300), 1e308, 5e-324]})), seed=2**70, max_tokens=2**70)
    assert (read.seed, read.max_tokens) == (2**70 % 2**63, 2**70)
    assert str(2**70) in read.messages[1].content


def test_half_a_character_is_replaced_in_text_and_refused_in_calls_and_tools():
    for content in ("cut \ud83d", [{"type": "text", "text": "cut \ud83d"}]):
        assert request([{"role": "user", "content": content}]).messages[0].content == "cut ?"
    with pytest.raises(RefusedRequest, match=r"^messages\[1\].tool_calls\[0\] contains half of a Unicode surrogate"):
        request(calling('{"at": "\\ud83d"}'))
    with pytest.raises(RefusedRequest, match="JSON object in UTF-8"):
        parse_request(json.dumps({"model": MODEL, "messages": [USER]}).encode("utf-16"), model=MODEL)


# --- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NEUTRAL)
def test_an_option_is_refused_by_name_unless_it_asks_for_nothing(name: str):
    for asked in ({"anything": 7}, "other", 0.123, -7, ["x"]):
        with pytest.raises(RefusedRequest, match=f"^{name} (can only be .*|is not supported)$") as refused:
            request([USER], **{name: asked})
        assert (refused.value.param, refused.value.status) == (name, 400)
    for neutral in (None, *NEUTRAL[name]):
        assert request([USER], **{name: neutral})


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"parallel_tool_calls": False}, "parallel_tool_calls can only be true"),
        ({"top_k": 5}, "top_k can only be -1 or 0"),
        ({"min_p": 0.1}, "min_p can only be 0"),
        ({"repetition_penalty": 1.2}, "repetition_penalty can only be 1"),
        ({"top_logprobs": 3}, "top_logprobs can only be 0"),
        ({"guided_json": {"type": "object"}}, "guided_json is not supported"),
        ({"response_format": {"type": "json_object"}}, 'response_format can only be {"type": "text"}'),
        ({"stream": 1}, "stream must be true or false"),
    ],
)
def test_the_sentence_names_what_is_possible(wrong: dict[str, Any], sentence: str):
    with pytest.raises(RefusedRequest) as refused:
        request([USER], **wrong)
    assert str(refused.value) == sentence


# --- megabytes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["message", "reply", "schema"])
def test_megabytes_are_refused_before_anything_is_tokenised(agent: Agent, where: str):
    text = "word " * 700_000
    tool = {"type": "function", "function": {"name": "look", "description": text if where == "schema" else ""}}
    messages = copy.deepcopy(calling("{}"))
    if where != "schema":
        messages[{"message": 0, "reply": 2}[where]]["content"] = text
    batcher = Batcher(local_speaker(agent))  # its thread, which tokenises, is not started
    with pytest.raises(RefusedRequest, match="characters, and the run's context ends at 1024 tokens") as refused:
        batcher.submit(request(messages, tools=[tool]))
    named = "tools" if where == "schema" else "messages"
    assert (refused.value.status, refused.value.code, refused.value.param) == (400, "context_length_exceeded", named)


def test_what_may_fit_is_tokenised(agent: Agent, batcher: Batcher):
    """A request at the bound is counted in tokens, and tools of which the template writes little may be long."""
    with pytest.raises(RefusedRequest, match=r"has \d+ tokens, and the run's context ends at 1024"):
        batcher.submit(request([{"role": "user", "content": "x" * 16 * 1024}])).result()
    tool = {"type": "function", "function": {"name": "look", "description": "word " * 15_000}}
    assert batcher.submit(request(opening(agent), tools=[tool], max_tokens=1)).result().finish


# --- connections -----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def half_open(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Connections that have sent a part of a head."""
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(socket.create_connection(address, 60)) for _ in range(count)]
        for each in opened:
            each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
        yield opened


def whole(agent: Agent) -> dict[str, Any]:
    return {"model": MODEL, "messages": opening(agent), "temperature": 0, "max_tokens": 1}


def closed_by_server(connection: socket.socket, drip: bytes = b"") -> bool:
    """Whether the server closes the connection, to which a byte is sent again and again."""
    connection.settimeout(0.05)
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if drip:
                connection.sendall(drip)
            if connection.recv(100_000) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize("drip", [b"", b"x"], ids=["silent", "dripping"])
def test_who_does_not_finish_a_head_is_disconnected(batcher: Batcher, monkeypatch, drip: bytes):
    monkeypatch.setattr(connections, "PATIENCE", 0.3)
    with served(batcher) as address, half_open(address, 1) as (opened,):
        assert closed_by_server(opened, drip)


def test_so_is_who_has_asked_before_or_sends_a_body_that_nobody_reads(batcher: Batcher, monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE", 0.3)
    with served(batcher) as address:
        for head in (b"GET /v1/models HTTP/1.1\r\n", b"POST /v1/models HTTP/1.1\r\nContent-Length: 99999\r\n"):
            with socket.create_connection(address, 60) as connection:
                connection.sendall(head + b"Host: x\r\n\r\n")
                assert connection.recv(20).startswith(b"HTTP/1.1 403"), "no token"
                connection.settimeout(60)
                while b"}}" not in connection.recv(1000):
                    pass
                assert closed_by_server(connection, b"x")


def test_half_open_connections_make_room_for_an_honest_client(agent: Agent, batcher: Batcher, monkeypatch):
    monkeypatch.setattr(connections, "PATIENCE", 1e6)
    monkeypatch.setattr(app, "most_connections", lambda: 8)
    with served(batcher) as address, half_open(address, 30) as opened:
        assert status_of(address, whole(agent))[0] == 200
        assert closed_by_server(opened[0]), "the oldest has made room"
        opened[-1].settimeout(0.05)
        with pytest.raises(TimeoutError):
            opened[-1].recv(1)


def test_a_request_that_is_being_answered_makes_room_for_nobody(agent: Agent, batcher: Batcher, monkeypatch):
    monkeypatch.setattr(app, "most_connections", lambda: 8)
    release, entered, real = threading.Event(), threading.Event(), Batcher._speak

    def held(self: Batcher, *arguments: Any) -> None:
        entered.set()
        release.wait()
        real(self, *arguments)

    monkeypatch.setattr(Batcher, "_speak", held)
    body = json.dumps(whole(agent)).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    with served(batcher) as address, socket.create_connection(address, 60) as busy:
        monkeypatch.setattr(connections, "PATIENCE", 0.1)
        busy.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        entered.wait()
        try:
            with half_open(address, 1) as (later,):
                assert closed_by_server(later)
            monkeypatch.setattr(connections, "PATIENCE", 1e6)
            with half_open(address, 30) as opened:
                url = f"http://{address[0]}:{address[1]}/v1/models"
                assert httpx.get(url, headers=HEADERS, timeout=60).status_code == 200
                assert closed_by_server(opened[0]), "not the busy one, which is older"
            monkeypatch.setattr(connections, "PATIENCE", 0.1)
        finally:
            release.set()
        assert busy.recv(12) == b"HTTP/1.1 200"
        assert closed_by_server(busy, b"x"), "silent again"


def test_connections_leave_half_of_the_open_files(monkeypatch):
    for files, most in ((256, 128), (1024, 512), (10**6, connections.MOST), (connections.resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(connections.resource, "getrlimit", lambda _, files=files: (files, files))
        assert most_connections() == most
