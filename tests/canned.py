"""A model server with canned answers, for what stands in front of one: plain asyncio, so that it costs little.

    python tests/canned.py PORT [SECONDS [SPREAD]]      an answer takes SECONDS, give or take that share

The answer depends on the messages only: the first is a call of `look`, after a reply of the tool comes a text.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

CHUNKS = 20  # of a streamed answer


def answer_to(body: bytes) -> dict[str, Any] | None:
    """The completion for a request; None if it is none."""
    try:
        asked = json.loads(body)
        messages = asked["messages"]
        roles = [message["role"] for message in messages]
        text = json.dumps(messages, sort_keys=True)
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    number = hashlib.sha256(text.encode()).hexdigest()[:24]
    message: dict[str, Any] = {"role": "assistant", "content": None}
    if roles and roles[-1] == "tool":
        message["content"] = f"It says {number}: grüß Gott."
    else:
        arguments = json.dumps({"at": f"safe {number}"})
        call = {"id": f"call_{number}", "type": "function", "function": {"name": "look", "arguments": arguments}}
        message["tool_calls"] = [call]
    finish = "tool_calls" if message["content"] is None else "stop"
    choice = {"index": 0, "message": message, "finish_reason": finish}
    return {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": 1, "model": "m", "choices": [choice]}


def events_of(answer: dict[str, Any]) -> list[bytes]:
    """A completion as a stream, cut in the middle of words and of characters."""
    message = answer["choices"][0]["message"]
    deltas: list[dict[str, Any]] = [{"role": "assistant", "content": message["content"] and ""}]
    for call in message.get("tool_calls", ()):
        whole = call["function"]["arguments"]
        deltas.append({"tool_calls": [{"index": 0, **call, "function": {"name": "look", "arguments": ""}}]})
        deltas += [{"tool_calls": [{"index": 0, "function": {"arguments": part}}]} for part in whole]
    deltas += [{"content": letter} for letter in message["content"] or ""]
    frame = {"id": answer["id"], "object": "chat.completion.chunk", "created": 1, "model": "m"}
    chunks = [{**frame, "choices": [{"index": 0, "delta": each, "finish_reason": None}]} for each in deltas]
    chunks.append(
        {**frame, "choices": [{"index": 0, "delta": {}, "finish_reason": answer["choices"][0]["finish_reason"]}]}
    )
    text = "".join(f"data: {json.dumps(each, ensure_ascii=False)}\n\n" for each in chunks) + "data: [DONE]\n\n"
    data = text.encode()
    step = -(-len(data) // CHUNKS)
    return [data[start : start + step] for start in range(0, len(data), step)]


class Canned:
    def __init__(self, seconds: float = 0.0, spread: float = 0.0) -> None:
        self.seconds, self.spread = seconds, spread
        self.heads: list[str] = []
        self.writers: list[asyncio.StreamWriter] = []

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
                self.heads.append(head)
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                await self.reply(head, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def reply(self, head: str, body: bytes, writer: asyncio.StreamWriter) -> None:
        if not head.startswith("POST /v1/chat/completions"):
            self.whole(writer, 404, b'{"error": "no such path"}')
        elif (answer := answer_to(body)) is None:
            self.whole(writer, 400, b'{"error": "cannot read that"}')
        elif json.loads(body).get("stream"):
            writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
            parts = events_of(answer)
            for part in parts:
                await asyncio.sleep(self.duration(answer) / len(parts))
                writer.write(b"%x\r\n%b\r\n" % (len(part), part))
                await writer.drain()
            writer.write(b"0\r\n\r\n")
        else:
            await asyncio.sleep(self.duration(answer))
            self.whole(writer, 200, json.dumps(answer).encode())
        await writer.drain()

    def duration(self, answer: dict[str, Any]) -> float:
        """The same for equal requests."""
        drawn = int(answer["id"].removeprefix("chatcmpl-")[:6], 16) / 16**6
        return self.seconds * (1 + self.spread * (2 * drawn - 1))

    def whole(self, writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\nx-own: yes\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


async def main(port: int, seconds: float = 0.0, spread: float = 0.0) -> None:
    server = await asyncio.start_server(Canned(seconds, spread).serve, "127.0.0.1", port, limit=2**24, backlog=512)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), *map(float, sys.argv[2:])))
