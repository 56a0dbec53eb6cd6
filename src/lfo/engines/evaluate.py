"""An agent on the fixed tasks of a split: greedily once, and sampled k times. What `lfo eval` computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lfo.agent import Agent, batches
from lfo.evaluation.fixed_tasks import evaluate_tasks, lookahead_accuracy
from lfo.evaluation.repeated_tasks import judge
from lfo.rollout.runner import refuse_dead_environment
from lfo.types import Rollout, RolloutGroup


def evaluate(
    agent: Agent,
    tasks: Sequence[Any],
    *,
    k: int,
    lookahead: bool = True,
    seed: int = 0,
    on_rollouts: Callable[[int], None] = lambda ended: None,
) -> dict[str, Any]:
    """`{"greedy": ..., "sampled": ...}`, each as `repeated_tasks.judge` tells it; greedy as during training."""
    levels = [getattr(task, "level", None) for task in tasks]
    greedy, accuracy = _greedy(agent, tasks, lookahead=lookahead, on_rollouts=on_rollouts)
    refuse_dead_environment(greedy)
    sampled = agent.roll_out(tasks, greedy=False, lookahead=lookahead, samples=k, seed=seed, on_batch=on_rollouts)
    refuse_dead_environment(sampled)
    result = {
        "greedy": judge(_groups(greedy, 1), levels),
        "sampled": judge(_groups(sampled, k), levels),
    }
    if accuracy is not None:
        result["greedy"]["behaviour"]["lookahead_accuracy"] = accuracy
    return result


def _greedy(
    agent: Agent, tasks: Sequence[Any], *, lookahead: bool, on_rollouts: Callable[[int], None]
) -> tuple[list[Rollout], float | None]:
    """One greedy rollout of each task, and how often look-ahead was told what would really have been said."""
    rollouts: list[Rollout] = []
    asked = []
    predictor = agent.predictor if lookahead else None
    for batch in batches(tasks):
        evaluation = evaluate_tasks(
            batch,
            agent.sampler.session(rows=len(batch), adapters=agent.model.policy_adapters),
            environment=agent.environment,
            codec=agent.codec,
            settings=agent.settings,
            predictor=predictor,
        )
        rollouts += evaluation.rollouts
        asked += evaluation.asked
        on_rollouts(len(batch))
    told = predictor is not None and agent.config.lookahead_source != "truth"
    return rollouts, lookahead_accuracy(asked, agent.environment, agent.settings) if told else None


def _groups(rollouts: Sequence[Rollout], size: int) -> list[RolloutGroup]:
    """Rollouts that stand task by task, as groups."""
    parts = [tuple(rollouts[start : start + size]) for start in range(0, len(rollouts), size)]
    return [RolloutGroup(task_id=part[0].task_id, rollouts=part) for part in parts]
