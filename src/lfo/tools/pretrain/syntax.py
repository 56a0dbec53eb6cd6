"""Let a base practise the tools of an environment: their syntax, and to act on what replies say, but no law.

    lfo pretrain env=my_world:Safes --output-dir base
    lfo pretrain env=my_world:Safes --check --model base

What is practised: `practice`. Only the tokens of calls have a loss, and all weights are trained. Tasks are those of
`train`, and they and all rollouts are counted. The check measures how often a turn is a valid call, and that the base
is not better than random play.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lfo.atomic import write_folder_atomic
from lfo.base_form import forms_of, stored_form
from lfo.env.answers import tools_of
from lfo.env.interface import EnvironmentFactory, tasks_of
from lfo.env.random_play import random_message
from lfo.loading import EMBEDDED, GENERAL, load_base, load_tokenizer
from lfo.measure.environment_check import Playthrough, play
from lfo.model.adapters import DualAdapterModel
from lfo.model.sampler import Sampler
from lfo.play.call_monitor import CallMonitor
from lfo.play.episode import RolloutRequest
from lfo.play.runner import Runner, RunnerConfig
from lfo.protocol.chat import ChatCodec
from lfo.protocol.shown import SHOWN_FORMS
from lfo.statistics import wilson
from lfo.tools.models import note_warm_up
from lfo.tools.pretrain.drill import MAX_TURNS, TIMEOUT
from lfo.tools.pretrain.general import rehearsal
from lfo.tools.pretrain.practice import FEWER_TOKENS, TOKENS, practise
from lfo.tools.pretrain.recipe import PretrainConfig, Progress, end_of, train_model
from lfo.tools.pretrain.unfinished import Unfinished
from lfo.types import Rollout

# Zero conversations or steps: as many as are needed.
SYNTAX = PretrainConfig(conversations=0, row=1_024, batch=8, steps=0, learning_rate=5e-4, warmup=20)
RATES = {EMBEDDED: 2e-3, GENERAL: 1e-3}  # learning rates of the bases of this package, which have most to learn
READABLE = 0.9  # least share of turns that are valid calls

logger = logging.getLogger(__name__)


def teach_syntax(
    base: str,
    make_environment: EnvironmentFactory,
    config: PretrainConfig,
    output_dir: Path,
    *,
    device: str,
    progress: Progress,
    reading: bool = True,
    timeout: float = TIMEOUT,
    about: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """Let a base practise in an environment, and save it as a model folder.

    A practice that was stopped goes on where it was: what it has so far is kept beside the folder. `about` names the
    environment: a practice in another one does not go on.
    """
    tokenizer = load_tokenizer(base)
    if base in RATES:
        config = replace(config, learning_rate=RATES[base])
    codec = ChatCodec(tokenizer, tools_of(make_environment()))
    form = stored_form(base) or forms_of(codec)[0]
    settings = {**(about or {}), "base": base, "reading": reading, "form": form, **asdict(config)}
    begun = Unfinished.beside(output_dir, settings)
    practice = begun.practice()
    if practice is None:
        shown = SHOWN_FORMS[form]
        practice = practise(
            make_environment,
            tokenizer,
            config,
            form=shown,
            progress=progress,
            reading=reading,
            timeout=timeout,
            budget=FEWER_TOKENS if base == GENERAL else TOKENS,
        )
        if base == GENERAL:
            practice = rehearsal(tokenizer, practice, config.seed)
        begun.keep(practice)
    for warning in practice.warnings:
        logger.warning("%s", warning)
    model = load_base(base, torch.device("cpu"))  # fp32 on a CPU
    config = replace(config, steps=practice.steps)
    loss = train_model(
        model,
        practice.tokens,
        config,
        end=end_of(tokenizer),
        device=device,
        progress=progress,
        wanted=practice.wanted,
        snapshots=begun.snapshots,
    )
    figures, acts = dict(practice.figures), form if practice.figures.get("lessons") else stored_form(base)

    def write(folder: Path) -> None:
        model.to("cpu", torch.bfloat16).save_pretrained(folder)  # pyright: ignore[reportArgumentType]
        tokenizer.save_pretrained(folder)
        note_warm_up(base, folder, {**asdict(config), **figures}, form=acts, name=output_dir.name)

    write_folder_atomic(output_dir, write)
    begun.remove()
    return {"output_dir": str(output_dir), "loss": loss, **figures, "warnings": list(practice.warnings)}


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
    rollouts = rollouts_of_base(runner, sampler, chosen, batch=batch)
    monitor = CallMonitor(30.0)
    random = [
        play(make_environment, task, monitor, max_turns=MAX_TURNS, next_message=partial(random_message, tools, index))
        for index, task in enumerate(chosen)
    ]
    return _verdict(model, rollouts, random, {tool["function"]["name"] for tool in tools})


def rollouts_of_base(
    runner: Runner, sampler: Sampler, tasks: Sequence[Any], *, batch: int, temperature: float | None = None
) -> list[Rollout]:
    """Let a base without adapters play each task once."""
    rollouts: list[Rollout] = []
    for start in range(0, len(tasks), batch):
        part = tasks[start : start + batch]
        requests = [RolloutRequest(task=task, seeds=(0, start + index)) for index, task in enumerate(part)]
        rollouts += runner.run(requests, sampler.session(slots=len(part), adapters=()), temperature=temperature)
    return rollouts


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
