"""How the cost of single steps grows with the length of a run: CPU seconds at two sizes, and the exponent between them.

    lfo bench growth            an exponent of 1 is linear, of 2 quadratic, of 0 does not grow

Runs, replies and rollouts are made up; nothing is trained and no model is loaded, only a tokenizer.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lfo.config import load_config, to_yaml
from lfo.loading import load_tokenizer
from lfo.play.reply_store import ReplyStore
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import ObservedCall, WorldModelCodec, WorldModelExample, WorldModelState
from lfo.report.page import render
from lfo.report.payload import build, find_runs_and_studies
from lfo.report.watch import LivePage
from lfo.rows.replay import Practice, ReplayBuffer
from lfo.runs.reading import read_run
from lfo.runs.sample_efficiency import compare
from lfo.types import Message, Rollout, StopReason, ToolCall, Turn

ROWS = (10_000, 100_000)  # of metrics, a tenth of them evaluations
TURNS = (125, 500)
EXAMPLES = (10_000, 100_000)
REPLIES = (1_000, 10_000)
MINI_BATCHES, DRAWN, NEW = 8, 10, 64  # of one step: mini-batches, examples in each, replies that are new

Measured = tuple[str, tuple[int, int], tuple[float, float]]


def growth() -> Iterator[Measured]:
    """Yield what was measured, the two sizes, and the CPU seconds at both."""
    for name, sizes, measure in (
        ("examples of a rollout, by turns", TURNS, examples_of_rollout),
        ("replay in a step, by examples", EXAMPLES, replay_step),
        ("a new reply and a question to the memory, by replies", REPLIES, memory_reply),
        ("lfo compare, by rows of metrics", ROWS, compare_run),
        ("lfo report, by rows of metrics", ROWS, report_run),
        ("lfo watch after one more row, by rows of metrics", ROWS, watch_run),
    ):
        small, large = (measure(size) for size in sizes)
        yield name, sizes, (small, large)


def exponent(sizes: tuple[int, int], seconds: tuple[float, float]) -> float:
    """
    >>> exponent((10, 100), (1.0, 100.0))
    2.0
    """
    return math.log(max(seconds[1], 1e-9) / max(seconds[0], 1e-9)) / math.log(sizes[1] / sizes[0])


def cpu_seconds(work: Callable[[], Any]) -> float:
    started = time.process_time()
    work()
    return time.process_time() - started


# --- what a run does ---------------------------------------------------------------------------------------------


def examples_of_rollout(turns: int) -> float:
    codec = WorldModelCodec(load_tokenizer("tiny"), state_tokens=112)
    rollout = made_rollout(turns)
    return cpu_seconds(lambda: codec.examples_of(rollout, predict=None))


def made_rollout(turns: int) -> Rollout:
    calls = [ToolCall(name="look_up", arguments={"number": f"5{index:04}"}) for index in range(turns)]
    return Rollout(
        task_id="long",
        opening=(Message(role="user", content="Find the right drawer."),),
        turns=tuple(
            Turn(
                action=format_tool_call(call),
                observation=f"Drawer {call.arguments['number']} is shut. Its label says {index * 37 % 1000}.",
                call=call,
                action_start=0,
                action_end=0,
                observation_start=0,
                observation_end=0,
            )
            for index, call in enumerate(calls)
        ),
        tokens=(),
        origins=(),
        logprobs=(),
        reward=0.0,
        stop=StopReason.MAX_TURNS,
    )


def replay_step(count: int) -> float:
    """One step on a buffer that has been counted: new replies come, and each mini-batch draws."""
    codec = WorldModelCodec(load_tokenizer("tiny"), state_tokens=112)
    buffer = ReplayBuffer({each.key: each for each in (made_example(codec, index) for index in range(count))})
    practice = Practice(codec, swap_names=0.9, wording=0.05)
    practice.of([], buffer, (0, 0))

    def step() -> None:
        buffer.add(made_example(codec, count + index) for index in range(NEW))
        for index in range(MINI_BATCHES):
            drawn = buffer.draw(DRAWN, (0, 1, index), asked_first=True)
            practice.of(drawn, buffer, (0, 1, index))

    return cpu_seconds(step)


def made_example(codec: WorldModelCodec, index: int) -> WorldModelExample:
    state = WorldModelState(task=f"Open the drawer {index}.", step=1, actions=(), collected={})
    return codec.example(state, made_call(index), f"It wants the code {index % 997}.", asked=index % 2 == 0)


def made_call(index: int) -> ToolCall:
    return ToolCall(name="open_drawer", arguments={"number": str(index)})


def memory_reply(count: int) -> float:
    """A reply is stored and the next question asked."""

    def observed(index: int) -> ObservedCall:
        state = WorldModelState(task=f"Open the drawer of company {index % 499}.", step=1, actions=(), collected={})
        return ObservedCall(state=state, call=made_call(index), reply=f"It wants {index % 97}.", facts=None, asked=True)

    store = ReplyStore()
    store.add(map(observed, range(count)))
    asked = observed(count + 1)
    store.recall([(asked.state, asked.call)])

    def work() -> None:
        store.add([observed(count)])
        store.recall([(asked.state, asked.call)])

    return cpu_seconds(work)


# --- what readers of runs do -------------------------------------------------------------------------------------


def compare_run(rows: int) -> float:
    with made_run(rows) as folder:
        return cpu_seconds(lambda: compare([read_run(folder)]))


def report_run(rows: int) -> float:
    with made_run(rows) as folder:
        return cpu_seconds(lambda: render(build(find_runs_and_studies([folder])), live=False))


def watch_run(rows: int) -> float:
    with made_run(rows) as folder:
        page = LivePage([folder], every=0)
        version = page.news(0)["version"]
        with (folder / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(made_row(rows)) + "\n")
        return cpu_seconds(lambda: page.news(version))


class made_run(tempfile.TemporaryDirectory):  # noqa: N801 - used as a function
    """The folder of a run with this many rows of metrics."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self._rows = rows

    def __enter__(self) -> Any:
        folder = Path(super().__enter__())
        config = load_config(["preset=tiny", "algo=dapo", f"steps={2 * self._rows}", f"output_dir={folder}"])
        (folder / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
        val = {"tasks": 200, "fingerprint": "made", "ceiling": 1.0}
        data = {"environment": "phone-calls", "levels": [2], "splits": {"val": val}}
        (folder / "data.json").write_text(json.dumps(data), encoding="utf-8")
        lines = (json.dumps(made_row(step)) for step in range(self._rows))
        (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        return folder


def made_row(step: int) -> dict[str, Any]:
    success = 0.5 + 0.4 * math.sin(step / 1000)
    row = {
        "step": step,
        "tasks_seen": 8 * step,
        "success": success,
        "sampled_tokens": 1000,
        "seconds/rollout": 1.0,
        **dict.fromkeys(("entropy", "turns", "policy_loss", "gradient_norm/policy", "tokens_per_second"), success),
    }
    if step % 10 == 0:
        row |= {"eval/val/success": success, "eval/val/lookahead_accuracy": 1 - success, "seconds/eval": 9.0}
    return row
