"""Dual-LoRA DAPO with look-ahead: the whole training loop in one file, on the embedded base and one CPU core.

    python examples/minimal_loop.py --steps 60

One frozen base has two LoRA adapters: `policy` acts, `world_model` predicts what the environment replies to a call.
Look-ahead connects them: the policy drafts a call, reads the predicted reply, and may then make another call.

    tasks -> groups of rollouts --> rewards -> advantages -> policy samples -------.
                  ^             '-> replies -> replay buffer -> world-model samples --> one loss, one AdamW step
                  '-------------------------- both adapters <-------------------------------------'

The task, level 2 of the phone-call world: call a department with the details that it requires. No text says which; its
refusal does, but then the task is lost. So the reward is 0 for every rollout at first, and RL alone has nothing to
learn from. The refusals teach the world model, and with their predictions the policy succeeds on new tasks.

One run, a few minutes: 34, 68, 82, 84 % of 50 tasks of `val` after 80, 160, 320, 480 tasks; without look-ahead 0 %,
because nothing here puts what the world model knows into the policy (`algo=internalise` does).

These are the updates of `lfo train preset=tiny`: a test compares the weights bit by bit. Left out are checkpoints,
resuming, redrawn tasks, environments that fail, and other algorithms (`src/lfo/train/loop.py` has them).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from statistics import fmean
from typing import Any

import torch

from lfo.agent import Agent, build_agent
from lfo.algorithms.dapo import rate_of
from lfo.config import load_config
from lfo.env.interface import predicted_tools
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.loading import limit_threads, load_base, load_tokenizer
from lfo.measure.fixed_tasks import lookahead_accuracy
from lfo.measure.success import mean_of_each
from lfo.model.learner import Learner
from lfo.objectives.advantages import select_groups
from lfo.play.episode import RolloutRequest
from lfo.rows.replay import Practice, ReplayBuffer, examples_of_groups
from lfo.rows.samples import mark_imagined, policy_samples, world_model_sample
from lfo.types import RolloutGroup, Seat, TrainingSample

SEED = 0
SHOWN = ("tasks_seen", "informative", "replies", "success", "success_blind", "lookahead_accuracy")  # of each row
LEVEL_2 = partial(PhoneCalls, levels=(2,))  # makes the environment of each rollout: one department, one try
SETTINGS = (
    "preset=tiny",  # it sets all the numbers below except those of `eval`; they stand here to be read
    "rollout.prompts=8",  # tasks in a step
    "policy.learning_rate=5e-4",
    "world_model.learning_rate=1e-3",
    "world_model.lora_plus=8.0",  # its B matrices learn at 8e-3
    "world_model.examples_per_mini_batch=10",
    "optimizer.warmup_steps=3",  # then a cosine to a tenth of the rates
    "eval.every=5",  # steps
    "eval.tasks=50",
)

# A group: eight rollouts of one task. Look-ahead replaces the very call that it asks about: who reads a predicted
# refusal calls differently, and nobody hears the real one. If all looked ahead, the world model would never learn
# whether it was right. So half of the group explores: explorers make for real the call that the others imagine. Two
# are blind; two imagine one call and make the next one for real, because a task can have more than one decision.
EXPLORERS = (Seat(look_ahead=False), Seat(imagine=1)) * 2
GROUP = EXPLORERS + (Seat(),) * 4


def train(
    steps: int, settings: Sequence[str] = (), make_environment: Any = LEVEL_2
) -> tuple[Agent, list[dict[str, Any]]]:
    """Train and return the agent and one row of metrics for each evaluation."""
    config = load_config([*SETTINGS, *settings, f"steps={steps}", f"seed={SEED}"])
    base = load_base(config.model, torch.device("cpu"))
    limit_threads(base)  # with a million parameters one thread is the fastest
    agent = build_agent(config, make_environment, load_tokenizer(config.model), base)
    learner = Learner(agent.model, config)  # AdamW over both adapters, each with its own learning rate
    environment = make_environment()
    stream = environment.stream("train", 1 + SEED)  # endless: no task comes twice
    tools = predicted_tools(environment)  # make_phone_call: other replies only show a directory or a profile
    replay = ReplayBuffer()  # every distinct reply so far: old replies stay true, because the environment is stationary
    world = config.world_model
    practice = Practice(agent.world_model_codec, swap_names=world.swap_names, wording=world.wording)

    rows, kept = [{"step": 0, "tasks_seen": 0, **evaluate(agent)}], 0
    for step in range(steps):
        # 1. Draw tasks and roll out a group of each.
        first = step * config.rollout.prompts
        tasks = [stream.task(number) for number in range(first, first + config.rollout.prompts)]
        groups = roll_out_groups(agent, tasks, step)

        # 2. Policy samples, from informative groups only (DAPO's dynamic sampling). The advantage of a rollout is
        # relative to peers that saw as much as it did: looking ahead is no merit of the policy. In this world few
        # groups are informative: those who look ahead read the same prediction, and mostly all succeed or all fail.
        informative, _ = select_groups(groups)
        kept += len(informative)
        policy = [policy_samples(group, adapters=agent.model.policy_adapters) for group in informative]
        policy += [[]] * (len(groups) - len(policy))

        # 3. World-model examples (state, call, reply), from all groups. A group that failed as a whole has no
        # advantages, but its refusals say what would have been right; in the first steps there is nothing else. Only
        # real replies become examples. A predicted one is the output of the world model: as a target it would
        # confirm its own errors. It is no target of the policy either, whose samples train sampled tokens only.
        for examples in examples_of_groups(groups, agent.world_model_codec, predict=tools):
            replay.add(examples)

        # 4. Update: one backward pass and one AdamW step for each mini-batch. There is one for each task, whether its
        # group was informative or not: many small updates teach the world model most for the same work.
        rate = rate_of(step, warmup=config.optimizer.warmup_steps, total=steps, until=0)
        learnt: list[dict[str, float]] = []
        for index, policy_part in enumerate(policy):
            world_part = draw_replies(agent, replay, practice, seeds=(SEED, step, index))
            # total = policy loss + 1.0 * world-model loss, each the mean over its own tokens. With one common mean, the
            # number of sampled tokens, 0 where no informative group is left, would set the pace of the world model.
            # For the same reason gradients are clipped per adapter. The policy loss is that of DAPO: the ratio to the
            # log-probs stored by the sampler is clipped to 0.8 ... 1.28, and there is no KL term.
            learnt.append(learner.update([*policy_part, *world_part], world_model_weight=1.0, rate_factor=rate))

        # 5. The sampler has its own copy of the weights; the next rollouts and predictions need the new ones.
        agent.sampler.refresh()

        if (step + 1) % config.eval.every == 0 or step + 1 == steps:
            seen = {"step": step + 1, "tasks_seen": first + len(tasks), "replies": len(replay)}
            rows.append({**seen, "informative": kept, **mean_of_each(learnt), **evaluate(agent)})
            print({name: rows[-1][name] for name in SHOWN}, flush=True)
    return agent, rows


def roll_out_groups(agent: Agent, tasks: Sequence[Any], step: int) -> list[RolloutGroup]:
    """Roll out all tasks of a step together; return a group for each task, with its asked calls marked."""
    requests = [
        RolloutRequest(task=task, seeds=(SEED, step, 0, index, member), **asdict(seat))
        for index, task in enumerate(tasks)
        for member, seat in enumerate(GROUP)
    ]
    rollouts = agent.run(requests)
    groups = [
        RolloutGroup(task_id=rollouts[start].task_id, rollouts=tuple(rollouts[start : start + len(GROUP)]))
        for start in range(0, len(rollouts), len(GROUP))
    ]
    # A real call is `asked` if another rollout of the group imagined the same call in the same state.
    return [mark_imagined(group) for group in groups]


def draw_replies(
    agent: Agent, replay: ReplayBuffer, practice: Practice, *, seeds: Sequence[int]
) -> list[TrainingSample]:
    """Return world-model samples from the replay buffer: asked calls first, then others."""
    # The world model will be asked about the calls that look-ahead imagines, so these come first: what it learns of
    # other replies helps nobody, and with a quarter of them in a mini-batch it learned half as fast.
    drawn = replay.draw(agent.config.world_model.examples_per_mini_batch, seeds, asked_first=True)
    # A small model memorises the reply that came with a name. So rare words of a state are swapped for others, and
    # words that all replies contain weigh less than those in which they differ.
    augmented = practice.of(drawn, replay.examples.values(), seeds)
    return [world_model_sample(example, adapters=agent.model.world_model_adapters) for example in augmented]


def evaluate(agent: Agent) -> dict[str, Any]:
    """Play the fixed tasks of `val` greedily, with look-ahead and without."""
    config = agent.config
    tasks = agent.tasks("val")[: config.eval.tasks]
    sighted = agent.roll_out(tasks, greedy=True)
    blind = agent.roll_out(tasks, greedy=True, lookahead=False)  # what the policy's weights alone know
    return {
        "success": fmean(rollout.reward for rollout in sighted),
        "success_blind": fmean(rollout.reward for rollout in blind),
        # How often a predicted reply that the policy acted on means the true one; None if it acted on none.
        "lookahead_accuracy": lookahead_accuracy(config, agent.make_environment, tasks, sighted),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train dual-LoRA with look-ahead on the embedded base.")
    parser.add_argument("--steps", type=int, default=60)
    train(parser.parse_args().steps)
