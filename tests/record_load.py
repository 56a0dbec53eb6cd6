"""`lfo record` under load, in front of canned answers: what it costs, and what is left after kill -9.

    python tests/record_load.py [SECONDS [SPREAD]]      an answer takes SECONDS (0.5), give or take that share (0.5)

64 conversations at once, directly and through the proxy in turn; then 200 malformed requests, then kill -9 while 64
conversations are open. A plain asyncio client, because the `openai` client costs more than what is measured.
"""

from __future__ import annotations

import asyncio
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from lfo.play.records import read_rollouts
from serving_load import malformed

AT_ONCE, ROUNDS, MALFORMED = 64, 6, 200
HERE = Path(__file__).parent
PATH = "/v1/chat/completions"


def first_request(number: str, stream: bool) -> dict[str, Any]:
    return {"model": "m", "stream": stream, "messages": [{"role": "user", "content": f"Conversation {number}. " * 40}]}


async def post(port: int, streams: Any, body: bytes) -> bytes:
    """One request on a kept connection; the bytes of the answer's body, as they came on the wire."""
    reader, writer = streams
    head = f"POST {PATH} HTTP/1.1\r\nhost: 127.0.0.1:{port}\r\ncontent-type: application/json\r\n"
    writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
    fields = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    if length := re.search(r"content-length: (\d+)", fields):
        return await reader.readexactly(int(length[1]))
    parts = []
    while size := int(await reader.readline(), 16):
        parts.append((await reader.readexactly(size + 2))[:-2])
    await reader.readline()
    return b"".join(parts)


async def converse(port: int, number: str, stream: bool, times: list[float], turns: int = 2) -> bytes:
    streams = await asyncio.open_connection("127.0.0.1", port)
    asked, heard = first_request(number, stream), b""
    for turn in range(turns):
        started = time.perf_counter()
        said = await post(port, streams, json.dumps(asked).encode())
        times.append(time.perf_counter() - started)
        heard += said
        call = {"id": f"c{turn}", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        message = {"role": "assistant", "tool_calls": [call]} if stream else json.loads(said)["choices"][0]["message"]
        reply = {"role": "tool", "tool_call_id": message.get("tool_calls", [{}])[0].get("id"), "content": "A red safe."}
        asked["messages"] += [message, reply]
    streams[1].close()
    return heard


async def round_of(port: int, name: str, stream: bool) -> tuple[float, float, list[bytes]]:
    """The median of a request in seconds, requests in a second, and what was heard."""
    times: list[float] = []
    started = time.perf_counter()
    heard = await asyncio.gather(*(converse(port, f"{name}-{index}", stream, times) for index in range(AT_ONCE)))
    return median(times), len(times) / (time.perf_counter() - started), heard


def measure(direct: int, proxied: int, stream: bool) -> None:
    rows: dict[int, list[tuple[float, float]]] = {direct: [], proxied: []}
    same = True
    for number in range(ROUNDS + 1):
        heard = {}
        for port in (direct, proxied) if number % 2 else (proxied, direct):
            middle, rate, heard[port] = asyncio.run(round_of(port, f"{stream}{number}", stream))
            if number:  # the first round opens connections and imports modules
                rows[port].append((middle, rate))
        same = same and heard[direct] == heard[proxied]
    (alone, rate), (passed, passed_rate) = (
        (median(each[0] for each in rows[port]), median(each[1] for each in rows[port])) for port in (direct, proxied)
    )
    kind = "streamed" if stream else "whole"
    print(
        f"{kind}: median {alone * 1e3:.1f} -> {passed * 1e3:.1f} ms ({(passed - alone) * 1e3:+.1f}), "
        f"{rate:.1f} -> {passed_rate:.1f} requests/s ({passed_rate / rate - 1:+.1%}), same bytes: {same}"
    )


def started(folder: Path, upstream: int) -> tuple[subprocess.Popen[str], int]:
    command = ["record", "--upstream", f"http://127.0.0.1:{upstream}/v1", "--port", "0", "--output", str(folder)]
    code = "from lfo.cli import main; main()"
    process = subprocess.Popen([sys.executable, "-c", code, *command], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    text = process.stdout.readline() + process.stdout.readline()
    found = re.search(r"127\.0\.0\.1:(\d+)/v1\n", text)
    assert found, text
    return process, int(found[1])


def main(seconds: float = 0.5, spread: float = 0.5) -> None:
    port = free_port()
    canned = subprocess.Popen([sys.executable, str(HERE / "canned.py"), str(port), str(seconds), str(spread)])
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        process, proxied = started(logs, port)
        for stream in (False, True):
            measure(port, proxied, stream)
        statuses = Counter[int]()
        with httpx.Client() as client:
            for seed in range(MALFORMED):
                body = malformed(seed, "m")
                statuses[client.post(f"http://127.0.0.1:{proxied}{PATH}", content=body).status_code] += 1
            print("malformed:", dict(statuses), client.get(f"http://127.0.0.1:{proxied}/lfo/status").json())
        process.send_signal(signal.SIGINT)
        process.wait()
        print(f"after Ctrl-C: {len(read_rollouts(logs, None))} conversations in the logs")
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        process, proxied = started(logs, port)
        ended = 100
        with httpx.Client() as client:
            for number in range(ended):
                given = client.post(f"http://127.0.0.1:{proxied}{PATH}", json=first_request(f"e{number}", False)).json()
                client.post(f"http://127.0.0.1:{proxied}/lfo/outcome", json={"id": given["id"], "reward": 1})
        asyncio.run(killed(proxied, process))
        print(f"kill -9 with {AT_ONCE} open: {len(read_rollouts(logs, None))} of {ended} ended ones in the logs")
    canned.kill()
    canned.wait()


async def killed(port: int, process: subprocess.Popen[str]) -> None:
    """Kill the proxy while conversations are open."""
    times: list[float] = []
    talks = [asyncio.ensure_future(converse(port, f"k{index}", True, times, 4)) for index in range(AT_ONCE)]
    await asyncio.sleep(1.2)
    process.kill()
    process.wait()
    failed = await asyncio.gather(*talks, return_exceptions=True)
    assert any(isinstance(each, Exception) for each in failed)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as bound:
        return bound.getsockname()[1]


if __name__ == "__main__":
    main(*map(float, sys.argv[1:]))
