"""Teach a base the call syntax of the tools of an environment, and nothing else.

    lfo pretrain --env textarena:FrozenLake-v0 --base tiny --output-dir base
    lfo pretrain --env textarena:FrozenLake-v0 --check --model base

Random calls, drawn from the schemas or from the moves of the environment, are played in real rollouts; only the tokens
of calls have a loss. Rollouts are not filtered by success, and the tasks, which are those of `train`, are counted. The
check measures how often a turn is a valid call, and that the base is not better than random play.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from lfo.base_form import stored_form
from lfo.env.interface import EnvironmentFactory, NamesMoves, tasks_of
from lfo.env.random_play import random_call, random_message
from lfo.env.seeds import stream
from lfo.errors import ConfigError, WorkError
from lfo.evaluation.environment_check import Playthrough, play
from lfo.loading import EMBEDDED, load_base, load_tokenizer
from lfo.model.adapters import DualAdapterModel
from lfo.model.sampler import Sampler
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.rollout.call_monitor import CallMonitor
from lfo.rollout.row import RolloutRequest
from lfo.rollout.runner import Runner, RunnerConfig
from lfo.statistics import wilson
from lfo.tools.models import note_warm_up
from lfo.tools.pretrain.recipe import PretrainConfig, Progress, end_of, train_model
from lfo.types import Rollout

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

SYNTAX = PretrainConfig(conversations=400, row=1_024, batch=8, steps=200, learning_rate=5e-4, warmup=20)
SMALL_RATE = 2e-3  # learning rate of the embedded base, which has most to learn
READABLE = 0.9  # least share of turns that are valid calls
MAX_TURNS = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Drill:
    """Rows of random play; `wanted` marks the tokens of calls and their ends."""

    tokens: np.ndarray  # rows x row
    wanted: np.ndarray
    tasks: int  # different ones
    turns: int
    broken: int  # rollouts in which the environment failed


def drill(
    make_environment: EnvironmentFactory, tokenizer: PreTrainedTokenizerBase, config: PretrainConfig, progress: Progress
) -> Drill:
    """Play at random and encode the rollouts as the policy would see them."""
    environment = make_environment()
    codec, tasks = ChatCodec(tokenizer, environment.tools()), tasks_of(environment, "train")
    end = end_of(tokenizer)
    tokens = np.full((config.conversations, config.row), end, dtype=np.int32)
    wanted = np.zeros(tokens.shape, dtype=bool)
    used: set[str] = set()
    rows = turns = broken = 0
    for number in range(config.conversations):
        task = tasks[stream(config.seed, "task", number).randrange(len(tasks))]
        try:
            ids, mask, played = _rollout(make_environment, codec, task, config, number)
        except Exception as error:  # foreign code
            broken += 1
            if broken == config.conversations:
                raise WorkError(f"every rollout of random play failed: {type(error).__name__}: {error}") from error
            continue
        used.add(str(task.id))
        if played:
            tokens[rows, : len(ids)], wanted[rows, : len(ids)] = ids, mask
            rows, turns = rows + 1, turns + played
        progress("random play", number + 1, config.conversations, f"{turns} calls")
    if rows < config.batch:
        raise ConfigError(
            f"{config.conversations} rollouts gave {rows} rows with a call, fewer than a batch of {config.batch}: "
            f"an opening and a call must fit into {config.row} tokens; try more --conversations or a larger --row"
        )
    return Drill(tokens=tokens[:rows], wanted=wanted[:rows], tasks=len(used), turns=turns, broken=broken)


def _rollout(
    make_environment: EnvironmentFactory, codec: ChatCodec, task: Any, config: PretrainConfig, number: int
) -> tuple[list[int], list[bool], int]:
    """Return token ids, the mask of the calls, and the number of complete calls."""
    environment = make_environment()
    tools, opening = environment.tools(), tuple(environment.reset(task))
    transcript = "\n".join(message.content for message in opening)
    ids = list(codec.opening(opening).ids)
    mask, played = [False] * len(ids), 0
    for turn in range(MAX_TURNS):
        moves = environment.moves() if isinstance(environment, NamesMoves) else ()
        call = random_call(tools, transcript=transcript, random=stream(config.seed, number, turn), moves=moves)
        message = format_tool_call(call)
        said = [*codec.encode_message(message), codec.end_of_turn]
        if len(ids) + len(said) >= config.row:
            break
        ids, mask, played = [*ids, *said], mask + [True] * len(said), played + 1
        result = environment.step(message)
        if result.done:
            break
        transcript = f"{transcript}\n{result.observation}"
        after = codec.after_action(result.observation, stopped=True).ids
        ids, mask = [*ids, *after], mask + [False] * len(after)
    return ids[: config.row], mask[: config.row], played


def teach_syntax(
    base: str,
    make_environment: EnvironmentFactory,
    config: PretrainConfig,
    output_dir: Path,
    *,
    device: str,
    progress: Progress,
) -> dict[str, Any]:
    """Train a base on the calls of an environment, and save it as a model folder."""
    tokenizer = load_tokenizer(base)
    if base == EMBEDDED:
        config = replace(config, learning_rate=SMALL_RATE)
    rows = drill(make_environment, tokenizer, config, progress)
    model = load_base(base, torch.device("cpu"))  # fp32 on a CPU
    loss = train_model(
        model, rows.tokens, config, end=end_of(tokenizer), device=device, progress=progress, wanted=rows.wanted
    )
    model.to("cpu", torch.bfloat16).save_pretrained(output_dir)
    tokenizer.save_pretrained(output_dir)
    figures = {"tasks": rows.tasks, "rollouts": len(rows.tokens), "calls": rows.turns, "broken": rows.broken}
    note_warm_up(base, output_dir, {**asdict(config), **figures}, form=stored_form(base))  # calls do not change it
    return {"output_dir": str(output_dir), "loss": loss, **figures}


# --- the check ---------------------------------------------------------------------------------------------


def check_syntax(
    model: str,
    make_environment: EnvironmentFactory,
    *,
    episodes: int = 500,
    device: torch.device | None = None,
    max_context: int = 1_024,
    batch: int = 64,
) -> dict[str, Any]:
    """Return the share of sampled turns that are valid calls, and the reward beside that of random play."""
    tokenizer, environment = load_tokenizer(model), make_environment()
    codec, tools = ChatCodec(tokenizer, environment.tools()), list(environment.tools())
    tasks = list(tasks_of(environment, "val"))
    chosen = [tasks[number % len(tasks)] for number in range(episodes)]
    dual = DualAdapterModel.build(load_base(model, device or torch.device("cpu")), coupling="separate", seed=0, rank=1)
    sampler = Sampler(dual, max_context=max_context, eos_ids=codec.ends)
    runner = Runner(make_environment, codec, config=RunnerConfig(max_turns=MAX_TURNS))
    rollouts: list[Rollout] = []
    for start in range(0, episodes, batch):
        part = chosen[start : start + batch]
        requests = [RolloutRequest(task=task, seeds=(0, start + index)) for index, task in enumerate(part)]
        rollouts += runner.run(requests, sampler.session(rows=len(part), adapters=()))
    monitor = CallMonitor(30.0)
    random = [
        play(make_environment, task, monitor, max_turns=MAX_TURNS, next_message=partial(random_message, tools, index))
        for index, task in enumerate(chosen)
    ]
    return _verdict(model, rollouts, random, {tool["function"]["name"] for tool in tools})


def _verdict(model: str, rollouts: Sequence[Rollout], random: Sequence[Playthrough], names: set[str]) -> dict[str, Any]:
    turns = [turn for rollout in rollouts for turn in rollout.turns]
    readable = sum(turn.call is not None and turn.call.name in names for turn in turns) / max(1, len(turns))
    ours = _player([rollout.reward for rollout in rollouts])
    theirs = _player([played.reward for played in random])
    problems = []
    if readable < READABLE:
        problems.append(f"{readable:.0%} of its turns are valid calls, fewer than {READABLE:.0%}")
    if ours["low"] > theirs["high"]:
        problems.append(f"it succeeds in {ours['success']:.1%}, above the {theirs['success']:.1%} of random play")
    return {
        "ok": not problems,
        "problems": problems,
        "model": model,
        "readable": readable,
        "turns": len(turns),
        "base": ours,
        "random": theirs,
    }


def _player(rewards: Sequence[float]) -> dict[str, float]:
    success = sum(reward >= 1 for reward in rewards) / len(rewards)
    low, high = wilson(success, len(rewards))
    mean = sum(rewards) / len(rewards)
    return {"reward": mean, "success": success, "low": low, "high": high, "n": len(rewards)}
