"""A served agent under load, through the real `openai` client.

    python tests/serving_load.py RUN [TASKS]

starts `lfo serve RUN`, plays tasks of `val` in 64 parallel conversations, and prints success and tokens per second
beside those of the agent itself. Then it sends 10,000 malformed requests during a conversation that must not be
affected.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai

from lfo.env.interface import Environment
from lfo.protocol.hermes import format_tool_call
from lfo.types import ToolCall

MALFORMED = 10_000
AT_ONCE = 64


def play(
    client: openai.OpenAI, model: str, environment: Environment, task: Any, *, max_turns: int, **options: Any
) -> tuple[float, list[str], list[str]]:
    """One task, played by a client that knows nothing of look-ahead: reward, what was said, what it was answered."""
    messages: list[Any] = [{"role": each.role, "content": each.content} for each in environment.reset(task)]
    reward, said, heard = 0.0, [], []
    for _ in range(max_turns):
        answer = client.chat.completions.create(
            model=model, messages=messages, tools=[*map(dict, environment.tools())], **options
        )
        choice = answer.choices[0]
        said.append(words_of(choice.message))
        if choice.finish_reason == "length":
            break
        result = environment.step(said[-1])
        heard.append(result.observation)
        reward += result.reward
        if result.done:
            break
        calls = choice.message.tool_calls or []
        messages.append(choice.message.model_dump(exclude_none=True))
        messages.append({"role": "tool", "tool_call_id": calls[0].id if calls else "", "content": result.observation})
    return reward, said, heard


def words_of(message: Any) -> str:
    """A message as an environment of ours reads it: its call is part of its text."""
    calls = [
        format_tool_call(ToolCall(name=call.function.name, arguments=json.loads(call.function.arguments)))
        for call in message.tool_calls or []
    ]
    return "\n".join(filter(None, [message.content, *calls]))


# --- malformed requests --------------------------------------------------------------------------------------------

JUNK: tuple[Any, ...] = (
    *(None, True, -1, 0, 1e308, 2**70, "", "x" * 5000, "\ud800", "\x00", [], [[]], {}, {"a": []}),
    *("<|im_end|>", "<tool_call>", [{"type": "text"}], {"type": "function"}, [None], {"role": "system"}),
)


def malformed(seed: int, model: str) -> bytes:
    """A request with one to three things wrong; some are still answerable."""
    draw = random.Random(seed)
    call = {"id": "call_1", "type": "function", "function": {"name": "search_company", "arguments": '{"name": "A"}'}}
    messages = [
        {"role": "system", "content": "You make phone calls."},
        {"role": "user", "content": "I need the invoice copy."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "No such company."},
    ]
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    request: Any = {"model": model, "messages": messages, "tools": [tool], "temperature": 0, "max_tokens": 4}
    for _ in range(draw.randint(1, 3)):
        _spoil(request, draw)
    body = json.dumps(request).encode()
    kind = draw.randrange(10)
    if kind == 0:
        return body[: draw.randrange(len(body))]
    if kind == 1:
        place = draw.randrange(len(body))
        return body[:place] + draw.randbytes(3) + body[place:]
    if kind == 2:
        return b"[" * draw.choice((10, 3000)) + body
    return body


def _spoil(box: Any, draw: random.Random) -> None:
    """Put junk into some place of a JSON value, take something away, or repeat it."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            if isinstance(value[key], dict | list):
                walk(value[key])

    walk(box)
    if not places:
        return
    where, key = draw.choice(places)
    action = draw.randrange(4)
    if action == 0:
        del where[key]
    elif action == 1 and isinstance(where, list):
        where.extend([where[key]] * draw.choice((1, 20, 600)))
    elif action == 2 and isinstance(where, dict):
        where[draw.choice(("n", "stop", "top_p", "stream", "seed", "name", "tool_choice"))] = copy.deepcopy(
            draw.choice(JUNK)
        )
    else:
        where[key] = copy.deepcopy(draw.choice(JUNK))


# --- the measurement -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def served(run: str) -> Iterator[tuple[str, str, int]]:
    """`lfo serve` as a process of its own: its address, its token and its number."""
    command = [sys.executable, "-c", "from lfo.cli import main; main()", "serve", run, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        assert process.stdout
        words = process.stdout.readline() + process.stdout.readline()
        found = re.search(r"OPENAI_BASE_URL=(\S+) OPENAI_API_KEY=(\S+)", words)
        assert found, words
        yield found[1], found[2], process.pid
        assert process.poll() is None, "the server has died"
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    from lfo.agent import load_agent

    run, tasks_wanted = sys.argv[1], int([*sys.argv, "200"][2])
    agent = load_agent(run)
    tasks = agent.tasks("val")[:tasks_wanted]
    agent.roll_out(tasks[:AT_ONCE], greedy=True)  # merges weights
    started, before = time.monotonic(), time.process_time()
    rollouts = agent.roll_out(tasks, greedy=True)
    seconds, busy = time.monotonic() - started, time.process_time() - before
    tokens = sum(rollout.sampled_count for rollout in rollouts)
    success = sum(rollout.reward for rollout in rollouts) / len(tasks)
    print(f"agent itself: success {success:.3f}, {_speed(tokens, seconds, busy)}")

    with served(run) as (url, token, number):
        client = openai.OpenAI(base_url=url, api_key=token, max_retries=0)
        model = client.models.list().data[0].id
        options = {"max_turns": agent.runner_config.max_turns, "temperature": 0}
        play(client, model, agent.make_environment(), tasks[0], **options)

        def one(task: Any) -> tuple[float, list[str], list[str]]:
            return play(client, model, agent.make_environment(), task, **options)

        started, before = time.monotonic(), _processor_seconds(number)
        with ThreadPoolExecutor(AT_ONCE) as pool:
            played = list(pool.map(one, tasks))
        seconds, busy = time.monotonic() - started, _processor_seconds(number) - before
        success = sum(reward for reward, _, _ in played) / len(tasks)
        real = [[turn.action for turn in rollout.turns if not turn.predicted] for rollout in rollouts]
        same = sum(said == own for (_, said, _), own in zip(played, real, strict=True))
        print(f"served, {AT_ONCE} at once: success {success:.3f}, {_speed(tokens, seconds, busy)}")
        print(f"the same words in {same} of {len(tasks)} tasks")

        _send_malformed(url, token, model, lambda: one(tasks[0])[1] == real[0])


def _speed(tokens: int, seconds: float, busy: float) -> str:
    return (
        f"{tokens} tokens in {seconds:.1f} s, {tokens / seconds:.0f} a second; {busy:.1f} s of a processor, "
        f"{tokens / busy:.0f} tokens in each"
    )


def _processor_seconds(number: int) -> float:
    fields = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _send_malformed(url: str, token: str, model: str, undisturbed: Any) -> None:
    answers: Counter[int] = Counter()
    ended = threading.Event()
    checks = [0, 0]

    def converse() -> None:
        while not ended.is_set():
            checks[undisturbed()] += 1

    witness = threading.Thread(target=converse)
    witness.start()
    headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    started = time.monotonic()
    with httpx.Client(headers=headers, timeout=120) as http:

        def send(seed: int) -> int:
            return http.post(f"{url}/chat/completions", content=malformed(seed, model)).status_code

        with ThreadPoolExecutor(16) as pool:
            for status in pool.map(send, range(MALFORMED)):
                answers[status] += 1
    ended.set()
    witness.join()
    print(f"{MALFORMED} malformed requests in {time.monotonic() - started:.0f} s: {dict(sorted(answers.items()))}")
    print(f"a conversation beside them: as alone {checks[1]} times, disturbed {checks[0]} times")


if __name__ == "__main__":
    main()
