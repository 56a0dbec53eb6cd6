"""Run folders with made-up contents, for tests of readers of runs; nothing is trained.

`python tests/made_runs.py FOLDER` writes 20 runs of 500 steps with 200 rollouts each and times the report of them.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from lfo.config import RunConfig, from_mapping, load_config, to_yaml
from lfo.env.worlds.shipped import SHIPPED
from lfo.loading import environment_factory
from lfo.runs.data import describe_data

CATEGORIES = ("auth_failure", "success", "wrong_department", "unclear")


def data_of(config: RunConfig) -> str:
    """What a run writes as `data.json`, for a shipped environment."""
    evaluation = {**asdict(config.eval), "every": min(1, config.eval.every)}
    predict = {"predict": config.world_model.predict}
    needed = {"env": config.env, "env_args": config.env_args, "eval": evaluation, "world_model": predict}
    return _data_of(json.dumps(needed))


@cache
def _data_of(needed: str) -> str:
    config = from_mapping(json.loads(needed))
    return json.dumps(describe_data(config, environment_factory(config)))


def write_run(
    path: Path,
    *overrides: str,
    success: Callable[[int], float] = lambda step: min(0.8, step / 50),
    steps: int = 20,
    every: int = 10,
    finished: bool = True,
    extra: Callable[[int], Mapping[str, Any]] = lambda step: {},
    rollouts: Mapping[int, Iterable[Mapping[str, Any]]] | None = None,
    predictions: Mapping[int, Iterable[Mapping[str, Any]]] | None = None,
) -> Path:
    """A run of 8 tasks and 2 seconds a step, evaluated on val at every `every`-th; `extra` adds to any row."""
    path.mkdir(parents=True)
    config = load_config(["preset=tiny", f"steps={steps}", f"eval.every={every}", *overrides])
    (path / "config.yaml").write_text(to_yaml(config))
    if config.env in SHIPPED:
        (path / "data.json").write_text(data_of(config))
    with open(path / "metrics.jsonl", "w", encoding="utf-8") as file:
        for step in range(steps + 1):
            row: dict[str, Any] = {"step": step, "tasks_seen": 8 * step}
            if step:
                row |= {"success": success(step), "entropy": 1 / step, "seconds/rollout": 1.5, "seconds/update": 0.5}
            if step % every == 0:
                value = success(step)
                row |= {"eval/val/success": value, "eval/val/success_by_level": {"2": value}, "seconds/eval": 9.0}
            file.write(json.dumps({**row, **extra(step)}) + "\n")
    for name, files in (("rollouts", rollouts), ("predictions", predictions)):
        for step, records in (files or {}).items():
            (path / name).mkdir(exist_ok=True)
            lines = (json.dumps(record) + "\n" for record in records)
            (path / name / f"step-{step:06d}.jsonl").write_text("".join(lines), encoding="utf-8")
    if finished:
        (path / "adapters").mkdir()
    return path


def rollout(
    task: str = "val-0", *, reply: str = "You are verified.", reward: float = 1.0, **fields: Any
) -> dict[str, Any]:
    """A record as `play/records.py` writes them: an imagined exchange, then a real one."""
    arguments = {"phone_number": "555-0100", "auth_info": {}}
    call = f"<tool_call>\n{json.dumps({'name': 'make_phone_call', 'arguments': arguments})}\n</tool_call>"
    turn = {"predicted": False, "action": call, "tool": "make_phone_call", "facts": []}
    return {
        "split": "val",
        "task_id": task,
        "reward": reward,
        "stop": "done",
        "error": "",
        "blind": False,
        "level": 2,
        "opening": [{"role": "system", "content": "You make phone calls."}, {"role": "user", "content": f"Do {task}."}],
        "turns": [
            {**turn, "predicted": True, "observation": "I need your pin.", "category": None},
            {**turn, "observation": reply, "category": "success" if reward else "auth_failure"},
        ],
        **fields,
    }


def prediction(predicted: str, actual: str, same: bool = True) -> dict[str, Any]:
    return {
        "state": "Task: call",
        "action": "make_phone_call",
        "predicted": predicted,
        "actual": actual,
        "category": "auth_failure",
        "same_meaning": same,
        "token_accuracy": 0.5,
    }


def world_model_row(step: int, accuracy: float) -> dict[str, Any]:
    """What an evaluation of the world model adds to a row."""
    figures = {"token_accuracy": accuracy, "perplexity": 2.0, "bleu": 100 * accuracy, "semantic_accuracy": accuracy}
    return {
        **{f"world_model_eval/{name}": value for name, value in figures.items()},
        "world_model_eval/by_category": {name: {"count": 10 + len(name), **figures} for name in CATEGORIES},
    }


def write_large_set(folder: Path, *, runs: int = 20, steps: int = 500, rollouts: int = 200) -> None:
    """As many runs, steps and rollouts as the report must bear, with texts as long as those of the phone-call world."""
    draw = random.Random(0)
    words = ("account", "pin", "signing date", "verified", "company", "refund", "contract", "department", "missing")

    def record(number: int) -> dict[str, Any]:
        made = rollout(f"val-L2-0-{number:06d}", reply=" ".join(draw.choices(words, k=12)), reward=number % 2)
        listing = "\n".join(" ".join(draw.choices(words, k=7)) for _ in range(7))
        made["turns"] = [{**made["turns"][1], "observation": listing, "tool": "search_company"}, *made["turns"] * 3]
        return made

    def extra(step: int) -> dict[str, Any]:
        names = ("policy_loss", "world_model_loss", "world_model_accuracy", "clip_fraction", "gradient_ratio", "turns")
        row: dict[str, Any] = {
            name: draw.random() for name in (*names, "gradient_norm/policy", "gradient_norm/world_model")
        }
        return row | (world_model_row(step, draw.random()) if step % 10 == 0 else {})

    for number in range(runs):
        files = {
            step: [record(step * 100 + each) for each in range(4)] for step in range(10, rollouts * 10 // 4 + 1, 10)
        }
        algo = ("algo=dapo", "algo=dual-lora", "coupling=shared", "policy.frozen=true")[number % 4]
        settings = (algo, f"seed={number // 4}", f"output_dir={folder / str(number)}")
        write_run(folder / f"run-{number:02d}", *settings, steps=steps, extra=extra, rollouts=files)


if __name__ == "__main__":
    from lfo.cli.report import write_report

    target = Path(sys.argv[1])
    write_large_set(target)
    start = time.monotonic()
    result = write_report([target], target / "report.html")
    seconds = time.monotonic() - start
    print(f"{result['runs']} runs, {result['rollouts']} rollouts: {seconds:.1f} s, {result['bytes'] / 1e6:.1f} MB")
