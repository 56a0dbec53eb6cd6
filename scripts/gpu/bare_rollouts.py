#!/usr/bin/env python3
"""Give vLLM alone the requests of scripted rollouts and compare its speed with that of runs: bare_rollouts.py RUN ...

The runs are those of rollouts.sh. A rollout of a run samples a message of fixed length in each turn, so its requests
follow from its task. vLLM gets all requests of a turn at once, and keeps its prefix cache between the turns.
"""

from __future__ import annotations

import json
import sys
import tempfile
from itertools import zip_longest
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from benchmarks.against_vllm import CACHE_ROOM
from benchmarks.bare_vllm import BareVllm
from benchmarks.speed import seconds_of
from lfo.config import RunConfig, from_yaml
from lfo.engines.verl.agent_loop import ScriptedSlot
from lfo.engines.verl.config import UNCOMPILED, is_small
from lfo.loading import environment_factory, load_tokenizer
from lfo.model.adapters import POLICY, DualAdapterModel
from lfo.play.episode import RolloutRequest
from lfo.play.runner import Runner, RunnerConfig
from lfo.protocol.chat import ChatCodec
from lfo.runs.folder import read_metrics
from lfo.tools.plan import cache_bytes_of_a_token, shape_of
from lfo.types import Speech

REPEATS = 3


def requests(config: RunConfig) -> list[list[list[int]]]:
    """Return the prompts of each turn of each rollout of a step."""
    make, tokenizer = environment_factory(config), load_tokenizer(config.model)
    codec = ChatCodec(tokenizer, make().tools(), thinking=config.rollout.thinking)
    found = []
    for task in make().tasks("train")[: config.rollout.prompts]:
        environment: Any = make()
        asked: list[list[int]] = []

        def ask(tokens: list[int], *_: Any, asked: list[list[int]] = asked, **options: Any) -> Speech:
            asked.append(list(tokens))
            return Speech(tokens=(0,) * options["limit"], logprobs=(0.0,) * options["limit"], stopped=False)

        loop = SimpleNamespace(
            run_config=config,
            adapter="policy",
            ask=ask,
            words=lambda text: (*codec.encode_message(text), codec.end_of_turn),
        )
        runner = Runner(
            lambda environment=environment: environment,
            codec,
            config=RunnerConfig.of_run(config, environment_workers=1),
            lookahead=None,
        )
        runner.run([RolloutRequest(task=task, seeds=(0,))], ScriptedSlot(loop, environment), temperature=1.0)
        found += [asked] * config.rollout.group_size
    return found


def bare_tokens_per_second(config: RunConfig) -> tuple[float, int]:
    """Return the speed of vLLM alone, and the tokens of a step."""
    rollouts, tokens = requests(config), config.rollout.max_turn_tokens
    rounds = [[prompt for prompt in turn if prompt] for turn in zip_longest(*rollouts)]
    with tempfile.TemporaryDirectory() as folder:
        base: Any = AutoModelForCausalLM.from_pretrained(config.model, dtype=torch.bfloat16)
        base.config.save_pretrained(folder)
        model = DualAdapterModel.build(base.to("cuda"), coupling="separate", seed=0, rank=config.lora.rank)
        model.export(Path(folder) / "policy", POLICY)
        cache = len(rollouts) * config.rollout.max_context * cache_bytes_of_a_token(shape_of(config.model))
        vllm = BareVllm(
            Path(folder),
            Path(folder) / "policy",
            rank=config.lora.rank,
            context=config.rollout.max_context,
            rows=len(rollouts),
            cache_bytes=int(CACHE_ROOM * cache),
            compilation=UNCOMPILED if is_small(config) else None,
        )

        def step() -> int:
            return sum((vllm.go_on if turn else vllm.speak)(prompts, tokens) for turn, prompts in enumerate(rounds))

        taken = [seconds_of(step, torch.device("cuda")) for _ in range(REPEATS + 1)][1:]
    said = taken[0][1]
    return said / median(seconds for seconds, _ in taken), said


def main() -> None:
    runs = [Path(each) for each in sys.argv[1:]]
    bare, tokens = bare_tokens_per_second(from_yaml(runs[0] / "config.yaml"))
    for run in runs:
        seconds = median(row["seconds/rollout"] for row in read_metrics(run)[1:])
        found = {"run": run.name, "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds}
        print(json.dumps(found | {"bare_tokens_per_second": bare, "share": tokens / seconds / bare}))


if __name__ == "__main__":
    main()
