"""Whether a practised base has learned the rules of an environment. It should not: it should act on what it reads.

    OMP_NUM_THREADS=1 PYTHONPATH=tests research/no_law.py runs/own-worlds/kiln/.bases/Kiln-1a2b3c4d worlds.kiln:Kiln

Plays training tasks at temperature 1: alone, with the true reply to the first decisive call, and with the reply that
another task would get. `chance` is the share of pairs of tasks with equal solutions: how often the reply to another
task is right by accident, and how often a base that knows the frequent solutions, but not the task, could be.
`random` is the share of valid random calls of the decisive tool that solve their task. `first_calls` is the success of
the first decisive call alone: knowledge of a rule would show there.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Sequence
from importlib import import_module
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path.cwd())]

from lfo.agent import batches, build_agent  # noqa: E402
from lfo.config import load_config  # noqa: E402
from lfo.env.random_play import random_call  # noqa: E402
from lfo.env.seeds import stream  # noqa: E402
from lfo.loading import environment_factory, limit_threads, load_base, load_tokenizer, pick_device  # noqa: E402
from lfo.play.ending_tools import guess_ending_tools  # noqa: E402
from lfo.play.episode import RolloutRequest  # noqa: E402
from lfo.play.predictors import shuffled_predictor  # noqa: E402
from lfo.protocol.schemas import misfit  # noqa: E402
from lfo.statistics import wilson  # noqa: E402
from lfo.tools.gate import shown_the_truth  # noqa: E402
from lfo.types import Rollout, ToolCall  # noqa: E402


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="a folder")
    parser.add_argument("env", help="module:Class, whose module has solution(task) or gold(task)")
    parser.add_argument("--tasks", type=int, default=192)
    options = parser.parse_args()
    print(json.dumps(knowledge(options.base, options.env, options.tasks)))


def knowledge(base: str, env: str, count: int) -> dict[str, Any]:
    config = shown_the_truth(load_config(["preset=tiny", f"model={base}", f"env={env}"]))
    make_environment = environment_factory(config)
    model = load_base(config.model, pick_device("cpu"))
    limit_threads(model)
    agent = build_agent(config, make_environment, load_tokenizer(config.model), model)
    tasks = agent.tasks("train")[:count]
    if agent.ending_tools is not None:
        agent.ending_tools.first_guess = guess_ending_tools(make_environment, tasks, config)
    assert agent.lookahead is not None
    predictor = agent.lookahead.predictor
    shuffled = dataclasses.replace(
        agent, lookahead=dataclasses.replace(agent.lookahead, predictor=shuffled_predictor(predictor))
    )

    def play(player: Any, look_ahead: bool) -> list[Rollout]:
        requests = [
            RolloutRequest(task=task, seeds=(1, index), look_ahead=look_ahead) for index, task in enumerate(tasks)
        ]
        return [each for batch in batches(requests) for each in player.run(batch, temperature=1.0)]

    gold = _gold(env, make_environment)
    last = [gold(task)[-1] for task in tasks]
    alone = play(agent, False)
    return {
        "tasks": len(tasks),
        "alone": _share([each.succeeded for each in alone]),
        "first_calls": _share(_first_calls(alone, last, agent.codec.tools)),
        "true_replies": _share([each.succeeded for each in play(agent, True)]),
        "replies_of_another_task": _share([each.succeeded for each in play(shuffled, True)]),
        "chance": fmean(a.arguments == b.arguments for a, b in combinations(last, 2)),
        "random": _random(last, agent.codec.tools),
        "valid_calls": _valid(alone, agent.codec.tools),
    }


def _gold(env: str, make_environment: Any) -> Any:
    """Return the function that solves a task."""
    return getattr(import_module(env.partition(":")[0]), "gold", None) or make_environment().solution


def _first_calls(rollouts: Sequence[Rollout], gold: Sequence[ToolCall], tools: Sequence[Any]) -> list[bool]:
    """Whether the first valid decisive call of each rollout has the arguments that the gold one names."""
    right = []
    for rollout, solution in zip(rollouts, gold, strict=True):
        calls = [turn.call for turn in rollout.turns if turn.call is not None and turn.call.name == solution.name]
        valid = [call for call in calls if misfit(call, tools) is None]
        right += [_agrees(valid[0], solution)] if valid else []
    return right


def _agrees(call: ToolCall, solution: ToolCall) -> bool:
    return all(call.arguments.get(name) == value for name, value in solution.arguments.items())


def _random(gold: Sequence[ToolCall], tools: Sequence[Any]) -> float:
    """Return how often a random valid call of the decisive tool is the gold one."""
    random = stream(0, "random")
    hits = []
    for solution in gold:
        of_tool = [tool for tool in tools if tool["function"]["name"] == solution.name]
        hits += [_agrees(random_call(of_tool, transcript="", random=random), solution) for _ in range(20)]
    return fmean(hits)


def _valid(rollouts: Sequence[Rollout], tools: Sequence[Any]) -> float:
    """Return the share of messages with a valid call."""
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    return fmean(turn.call is not None and misfit(turn.call, tools) is None for turn in turns)


def _share(successes: Sequence[bool]) -> dict[str, float]:
    if not successes:
        return {"n": 0}
    low, high = wilson(fmean(successes), len(successes))
    return {"success": round(fmean(successes), 3), "low": round(low, 3), "high": round(high, 3), "n": len(successes)}


if __name__ == "__main__":
    main()
