"""Measure how fast the world model learns, from recorded replies and with the updates of training.

    python -m research.world_model_bench                                          the preset, on level 2, one seed
    python -m research.world_model_bench --seeds 5 world_model.swap_names=0       another config, on five seeds
    python -m research.world_model_bench --seeds 5 --rivals-only env_args.law=1   the baselines of `rivals.py` alone

A trial is a run without rollouts, of 60 steps by default. For every task that the run would draw, the calls that
look-ahead asks about are made in a copy of the environment and added to the replay buffer. Then `Trainer.rows` and
`Backend.learn` make the updates of a step. So every change of world-model training can be measured without rollouts.
The world model then predicts the held-out calls greedily; a prediction is right if it means the same as the true reply.
The baselines of `rivals.py` get the same replies.
"""

from __future__ import annotations

import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch

from lfo.algorithms import draw_tasks
from lfo.config import RunConfig, load_config
from lfo.engines import create_trainer
from lfo.engines.local import LocalBackend
from lfo.env.interface import Environment, EnvironmentFactory, OffersLookahead, describe_with, same_meaning, tasks_of
from lfo.env.worlds.oracle import OracleCodes, OracleTask
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.tasks import Task
from lfo.errors import UsageError
from lfo.loading import environment_factory, load_tokenizer
from lfo.objectives.advantages import Collected, DynamicSamplingReport
from lfo.play.records import rollout_from_texts, transcript_at
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import ObservedCall, state_of
from lfo.train.loop import Trainer
from lfo.types import Message, ToolCall
from research.world_model_bench.rivals import NAMES, TOP, Asked, Judge, Vectors, fit_rivals, frozen_embedding
from research.world_model_bench.variants import Ask, make_variant

POINTS = (40, 80, 160, 320)
CALLS = 200  # held-out tasks of each split
SAMPLES = 8  # replies to a call, for the test by the likeliest facts
SPLITS = {
    PhoneCalls: ("val", "test_unseen_companies", "test_unseen_rules"),
    OracleCodes: ("val", "test_unseen_oracles"),
}
_NOTHING = Collected(groups=(), kept={}, report=DynamicSamplingReport(kept=0, all_failed=0, all_succeeded=0))

Say = Callable[[str], None]
Shares = dict[str, dict[str, list[float]]]  # name -> split -> the share of right predictions after each point


@dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """A call that look-ahead asks about, with its reply and its cell of the law."""

    observed: ObservedCall
    cell: tuple[str, ...]


def bench_world_model(
    overrides: Sequence[str] = (),
    *,
    seeds: int = 1,
    points: Sequence[int] = POINTS,
    calls: int = CALLS,
    variant: str = "none",
    rivals_only: bool = False,
    say: Say = lambda words: None,
) -> dict[str, Any]:
    """Return the share of right predictions by tasks, for the world model and its rivals, by seed and as mean."""
    all_overrides = ["preset=tiny", "policy.frozen=true", "steps=60", *overrides]
    first = load_config(all_overrides).seed
    configs = [load_config([*all_overrides, f"seed={seed}"]) for seed in range(first, first + seeds)]
    steps, prompts = configs[0].steps, configs[0].rollout.prompts
    if max(points) > steps * prompts:
        raise UsageError(f"steps={steps} draws fewer than {max(points)} tasks; raise it, or name fewer with --tasks")
    if odd := [point for point in points if point % prompts]:
        raise UsageError(f"--tasks must be multiples of rollout.prompts={prompts}, not {odd[0]}")
    if rivals_only and variant != "none":
        raise UsageError(f"--rivals-only trains no world model, so --variant {variant} changes nothing; leave one out")
    torch.set_num_threads(1)
    make_environment = environment_factory(configs[0])
    held_out = {
        split: record(make_environment, tasks_of(make_environment(), split)[:calls])
        for split in SPLITS[_kind(make_environment)]
    }
    run = partial(rival_trial if rivals_only else partial(trial, variant=variant), embed=frozen_embedding(configs[0]))
    names = NAMES if rivals_only else ("world_model", *NAMES)
    trials = []
    for config in configs:
        trials.append(run(config, make_environment, held_out, points=points))
        say(f"seed {config.seed}: {names[0]} {in_words(trials[-1][names[0]])}")
    result = {
        "settings": list(overrides),
        "variant": variant,
        "env": configs[0].env,
        "env_args": dict(configs[0].env_args),
        "calls": {split: len(some) for split, some in held_out.items()},
        "tasks": list(points),
        "trials": trials,
        "mean": {name: _mean([each[name] for each in trials]) for name in names},
    }
    if rivals_only:
        return result
    return {
        **result,
        "seconds_a_step": fmean(each["seconds_a_step"] for each in trials),
        "world_model_top4": fmean(each["top4"] for each in trials),
    }


def rival_trial(
    config: RunConfig,
    make_environment: EnvironmentFactory,
    held_out: dict[str, list[Heard]],
    *,
    points: Sequence[int],
    embed: Vectors,
) -> dict[str, Any]:
    """One seed of the rivals: `{"memory": {split: [share after each point]}, ...}`"""
    steps = max(points) // config.rollout.prompts
    tasks = [task for step in range(steps) for task in draw_tasks(config, make_environment(), step, 0)]
    shares = _no_shares(NAMES, held_out)
    for point in points:
        _judge(fit_rivals(record(make_environment, tasks[:point]), make_environment, embed), held_out, shares)
    return {"seed": config.seed, **shares}


def trial(
    config: RunConfig,
    make_environment: EnvironmentFactory,
    held_out: dict[str, list[Heard]],
    *,
    points: Sequence[int],
    embed: Vectors,
    variant: str = "none",
) -> dict[str, Any]:
    """One seed: `{"world_model": {split: [share after each point]}, "memory": ..., "seconds_a_step": 1.3}`"""
    trainer = create_trainer(config, make_environment, load_tokenizer(config.model))
    way = make_variant(variant, trainer)
    shares = _no_shares(("world_model", *NAMES), held_out)
    heard: list[Heard] = []
    seconds = 0.0
    step = 0
    while step * config.rollout.prompts < max(points):
        started = time.process_time()
        tasks = draw_tasks(config, make_environment(), step, 0)
        seconds += time.process_time() - started
        new = [record(make_environment, [task]) for task in tasks]
        heard += [each for some in new for each in some]
        started = time.process_time()
        _learn(trainer, step, new)
        seconds += time.process_time() - started
        step += 1
        if step * config.rollout.prompts in points:
            if step * config.rollout.prompts == max(points):
                for more in range(step, way.again * step):
                    _learn(trainer, more, [])
            trainer.backend.sync(step)
            rivals = fit_rivals(heard, make_environment, embed)
            _judge({"world_model": partial(share_right, trainer, ask=way.ask), **rivals}, held_out, shares)
    first_split = next(iter(held_out.values()))
    return {
        "seed": config.seed,
        **shares,
        "seconds_a_step": seconds / step,
        "top4": share_among_likeliest(trainer.make_environment(), first_split, sample(trainer, first_split, way.ask)),
    }


def _no_shares(names: Iterable[str], held_out: Iterable[str]) -> Shares:
    return {name: {split: [] for split in held_out} for name in names}


def _judge(judges: Mapping[str, Judge], held_out: Mapping[str, Sequence[Heard]], shares: Shares) -> None:
    for name, judge in judges.items():
        for split, asked in held_out.items():
            shares[name][split].append(judge(asked))


def _learn(trainer: Trainer, step: int, heard: Sequence[Sequence[Heard]]) -> None:
    """Make the updates of one step as in training."""
    examples = [
        [trainer.codec.example(each.state, each.call, each.reply, asked=True) for each in observed]
        for observed in ([each.observed for each in some] for some in heard)
    ]
    for of_task in examples:
        trainer.mini_batches.replay.add(of_task)
    plan = trainer.plan(step)
    trainer.learn(plan, trainer.samples(plan, _NOTHING, examples))


def share_right(trainer: Trainer, asked: Sequence[Asked], *, ask: Ask) -> float:
    """Return the share of predictions with the meaning of the true reply."""
    calls, judge = [each.observed for each in asked], trainer.make_environment()
    written = trainer.backend.complete([ask(each) for each in calls])
    replies = map(trainer.codec.decode, written)
    return fmean(bool(same_meaning(judge, said, each.reply)) for said, each in zip(replies, calls, strict=True))


def sample(trainer: Trainer, asked: Sequence[Heard], ask: Ask) -> list[list[str]]:
    """Return several sampled replies to each call; its prompt seeds the random numbers."""
    agent, limit = cast(LocalBackend, trainer.backend).agent, trainer.config.world_model.reply_tokens
    sampled = []
    for prompt in (ask(each.observed) for each in asked):
        seed = zlib.crc32(np.asarray(prompt, dtype=np.int64).tobytes())
        answers = agent.sampler.generate(
            [prompt] * SAMPLES,
            adapters=agent.model.world_model_adapters,
            max_new_tokens=limit,
            temperature=1.0,
            uniforms=np.random.default_rng(seed).random((SAMPLES, limit)),
        )
        sampled.append([trainer.codec.decode(answer.tokens) for answer in answers])
    return sampled


def share_among_likeliest(judge: Environment, asked: Sequence[Heard], sampled: Sequence[Sequence[str]]) -> float:
    """Judge the world model as `linear_top4`: all true facts are among the four that most sampled replies name."""
    # Sorted, because `most_common` keeps the order of equals, and that of a set differs between processes.
    told = [Counter(fact for reply in some for fact in sorted(facts_in(judge, reply))) for some in sampled]
    likeliest = [{fact for fact, _ in counts.most_common(TOP)} for counts in told]
    true = [facts_in(judge, each.observed.reply) for each in asked]
    return fmean(facts <= among for facts, among in zip(true, likeliest, strict=True))


def facts_in(judge: Environment, reply: str) -> set[str]:
    described = describe_with(judge, reply)
    return set(described.facts) if described else set()


# --- what is recorded ------------------------------------------------------------------------------------------------


def record(make_environment: EnvironmentFactory, tasks: Iterable[Any]) -> list[Heard]:
    """Return, for each task, the calls that look-ahead asks about after the first question is answered, each made for
    real in a new environment."""
    return [each for task in tasks for each in _record(make_environment, task)]


def _record(make_environment: EnvironmentFactory, task: Any) -> list[Heard]:
    asker = make_environment()
    opening = asker.reset(task)
    first = format_tool_call(_first_question(task))
    told = asker.step(first).observation
    rollout = rollout_from_texts(asker, task_id=str(task.id), opening=opening, exchanges=[(first, told)])
    transcript = list(transcript_at(rollout, 1))
    state = state_of(rollout.opening, rollout.turns)
    heard: list[Heard] = []
    if not isinstance(asker, OffersLookahead):
        return heard
    while (call := asker.lookahead_query(transcript)) is not None:
        said = format_tool_call(call)
        transcript += [
            Message(role="assistant", content=said, predicted=True),
            Message(role="tool", content="", name=call.name, predicted=True),
        ]
        copy = make_environment()
        copy.reset(task)
        copy.step(first)
        reply = copy.step(said).observation
        facts = describe_with(asker, reply)
        observed = ObservedCall(state=state, call=call, reply=reply, facts=facts, asked=True)
        heard.append(Heard(observed=observed, cell=_cell(asker, task, len(heard))))
    return heard


def _first_question(task: Any) -> ToolCall:
    if isinstance(task, Task):
        return ToolCall(name="search_company", arguments={"name": task.company_name})
    return ToolCall(name="ask_oracle", arguments={"oracle": task.oracle})


def _cell(environment: Any, task: Any, place: int) -> tuple[str, ...]:
    """Return the visible facts that the law depends on."""
    if isinstance(task, OracleTask):
        return task.order, task.colour
    return environment.company.industry, task.errands[place].service


def _kind(make_environment: EnvironmentFactory) -> type:
    made = make_environment()
    kind = next((each for each in SPLITS if isinstance(made, each)), None)
    if kind is None:
        raise UsageError(
            f"the world-model bench records phone-calls and oracle-codes, not {type(made).__name__}; train a short run "
            "with policy.frozen=true instead and read world_model_eval/semantic_accuracy"
        )
    return kind


# --- figures ---------------------------------------------------------------------------------------------------------


def _mean(trials: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    return {split: [fmean(at) for at in zip(*(each[split] for each in trials), strict=True)] for split in trials[0]}


def in_words(shares: dict[str, list[float]]) -> str:
    """
    >>> in_words({"val": [0.06, 0.48], "test_unseen_rules": [0.0, 0.04]})
    'val 6 48, test_unseen_rules 0 4 %'
    """
    parts = (f"{split} {' '.join(map(percent, some))}" for split, some in shares.items())
    return ", ".join(parts) + " %"


def percent(share: float) -> str:
    return f"{100 * share:.0f}"
