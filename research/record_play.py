"""Play tasks of an environment through a served agent, and serve the controls of look-ahead in words.

    python -m research.record_play play URL --split train --tasks 200 [--temperature 1] [--outcomes]
    python -m research.record_play control RUN --upstream URL --port PORT --predictions shuffled|memory [--logs DIR]

`play` prints one line of JSON: tasks, successes, seconds. With `--outcomes` it tells each outcome, with the reply to
the last call, to the recorder at URL. It knows nothing of look-ahead.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from lfo.config import load_config
from lfo.env.interface import Environment
from lfo.loading import environment_factory
from lfo.play.look_ahead import Question
from lfo.play.records import read_rollouts
from lfo.play.reply_store import ReplyStore
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import observed_calls
from lfo.serving.app import Guarded, listen, make_server
from lfo.serving.following import FollowingWorldModel
from lfo.serving.in_words import InWords
from lfo.serving.proxy import Proxy
from lfo.statistics import wilson
from lfo.types import ToolCall

PREDICTED = ("make_phone_call",)


def post(url: str, value: Any) -> Any:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', '')}"}
    request = urllib.request.Request(url, json.dumps(value).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return json.load(answer)


def play_one(url: str, environment: Environment, task: Any, chosen: argparse.Namespace) -> float:
    """One task; the reward."""
    messages: list[Any] = [{"role": each.role, "content": each.content} for each in environment.reset(task)]
    reward, number, replies = 0.0, "", []
    options = {"model": chosen.model, "temperature": chosen.temperature, "tools": [*map(dict, environment.tools())]}
    done = False
    while not done and len(messages) < 2 * chosen.max_turns:
        answer = post(f"{url}/v1/chat/completions", {**options, "messages": messages})
        number, message = answer["id"], answer["choices"][0]["message"]
        calls = message.get("tool_calls") or []
        said = [format_tool_call(_call(each)) for each in calls] or [message["content"]]
        replies = []
        for index, each in enumerate(said):
            result = environment.step(each)
            reward += result.reward
            to = {"tool_call_id": calls[index]["id"]} if calls else {}
            replies.append({"role": "tool" if calls else "user", "content": result.observation, **to})
            done = result.done
            if done:
                break
        messages += [message, *replies]
    if chosen.outcomes:
        post(f"{url}/lfo/outcome", {"id": number, "reward": reward, "messages": replies})
    return reward


def _call(call: Any) -> ToolCall:
    return ToolCall(name=call["function"]["name"], arguments=json.loads(call["function"]["arguments"]))


def play(chosen: argparse.Namespace) -> None:
    make_environment = environment_factory(load_config(chosen.env))
    tasks = make_environment().tasks(chosen.split)[chosen.first : chosen.first + chosen.tasks]
    started = time.monotonic()
    url = chosen.url.rstrip("/").removesuffix("/v1")
    with ThreadPoolExecutor(chosen.at_once) as pool:
        rewards = list(pool.map(lambda task: play_one(url, make_environment(), task, chosen), tasks))
    won = sum(reward >= 1 for reward in rewards)
    interval = [round(each, 3) for each in wilson(won / len(rewards), len(rewards))]
    row = {"split": chosen.split, "tasks": len(rewards), "won": won, "interval": interval}
    print(json.dumps({**row, "seconds": round(time.monotonic() - started, 1)}), flush=True)


def control(chosen: argparse.Namespace) -> None:
    """Look-ahead with other predictions: those for another task, or what was recorded in the most similar situation."""
    if chosen.predictions == "memory":
        store = ReplyStore()
        for rollout in read_rollouts(chosen.logs, None):
            store.add(observed_calls(rollout, predict=PREDICTED))
        predictor = store.answer
    else:
        predictor = Shuffled(FollowingWorldModel(chosen.run))
    proxy = Proxy(
        chosen.upstream, None, key=chosen.key, answerer=InWords(predictor, tools=PREDICTED, first_form="mark")
    )
    with listen("127.0.0.1", chosen.port) as socket:
        make_server(Guarded(proxy, os.environ["LFO_TOKEN"]), passes_through=True).run(sockets=[socket])


class Shuffled:
    """The prediction that a question of another task got before."""

    def __init__(self, predictor: FollowingWorldModel) -> None:
        self._predictor = predictor
        self._last: dict[str, str] = {}  # task -> its newest prediction

    def __call__(self, questions: Sequence[Question]) -> list[str]:
        replies = self._predictor(questions)
        self._last |= {each.state.task: reply for each, reply in zip(questions, replies, strict=True)}
        return [self._other(each.state.task) for each in questions]

    def _other(self, task: str) -> str:
        others = [reply for each, reply in self._last.items() if each != task]
        return others[-1] if others else ""


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    parser = argparse.ArgumentParser()
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("play")
    one.set_defaults(run_command=play)
    one.add_argument("url")
    one.add_argument("--model", required=True)
    one.add_argument("--env", nargs="*", default=["levels=2"])
    one.add_argument("--split", default="train")
    for name, default in (("tasks", 200), ("first", 0), ("at-once", 16), ("max-turns", 8)):
        one.add_argument(f"--{name}", type=int, default=default)
    one.add_argument("--temperature", type=float, default=0.0)
    one.add_argument("--outcomes", action="store_true")
    other = commands.add_parser("control")
    other.set_defaults(run_command=control)
    other.add_argument("run", type=Path)
    other.add_argument("--upstream", required=True)
    other.add_argument("--key", default=os.environ.get("LFO_UPSTREAM_KEY", ""))
    other.add_argument("--port", type=int, required=True)
    other.add_argument("--predictions", choices=("shuffled", "memory"), required=True)
    other.add_argument("--logs", default="")
    chosen = parser.parse_args()
    chosen.run_command(chosen)


if __name__ == "__main__":
    main()
