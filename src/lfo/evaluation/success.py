"""Metrics of rollouts: success and behaviour."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from statistics import fmean
from typing import Any

from lfo.env.interface import MEASURES
from lfo.rollout.row import CHARS_A_TOKEN
from lfo.rollout.runner import ENVIRONMENT_FAILURES, opening_is_too_long
from lfo.types import Rollout

BROKEN_ROLLOUTS = "the environment failed in some rollouts: `stops` counts them, and lfo rollouts shows the reason"
NO_CALLS = "no rollout called a tool of this environment: set model= to a base that can call tools"
NO_ROOM = "opening and tools of some tasks exceed rollout.max_context: raise it; lfo check-env shows their length"
CUT_REPLIES = (
    f"some replies are longer than {CHARS_A_TOKEN} characters for each token of rollout.max_context and were cut: "
    "`replies_cut` counts them"
)


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Return the metrics of rollouts, without those that the environment does not report."""
    if not rollouts:
        return {}
    metrics: dict[str, Any] = {
        "success": fmean(rollout.reward for rollout in rollouts),
        "turns": fmean(sum(not turn.predicted for turn in rollout.turns) for rollout in rollouts),
        "tokens": fmean(len(rollout.tokens) for rollout in rollouts),
    }
    by_level: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        if "level" in rollout.info:
            by_level[str(rollout.info["level"])].append(rollout.reward)
    if by_level:
        metrics["success_by_level"] = {level: fmean(rewards) for level, rewards in sorted(by_level.items())}
    for key in MEASURES:
        values = [value for rollout in rollouts if isinstance(value := rollout.info.get(key), int | float)]
        if values:
            metrics[key] = fmean(values)
    if cut := sum(rollout.cut for rollout in rollouts):
        metrics["replies_cut"] = cut
    stops = Counter(rollout.stop.value for rollout in rollouts)
    return {**metrics, "stops": dict(sorted(stops.items()))}


def draft_metrics(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return how many calls sighted rollouts imagine, and which share stays because a different call followed the
    reply.

    Return nothing if no rollout looks ahead.
    """
    sighted = [rollout for rollout in rollouts if not rollout.blind]
    if not sighted:
        return {}
    kept = sum(turn.imagined for rollout in sighted for turn in rollout.turns)
    drafts = kept + sum(turn.imagined for rollout in sighted for turn in rollout.taken_back)
    return {"drafts": drafts / len(sighted), **({"drafts_kept": kept / drafts} if drafts else {})}


def step_metrics(rollouts: Sequence[Rollout], tools: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the metrics of the rollouts of a training step, and warnings."""
    sighted = [rollout.reward for rollout in rollouts if not rollout.blind]
    blind = [rollout.reward for rollout in rollouts if rollout.blind]
    metrics = rollout_metrics(rollouts) | draft_metrics(rollouts)
    if sighted and blind:
        metrics |= {"success_sighted": fmean(sighted), "success_blind": fmean(blind)}
    metrics["sampled_tokens"] = sum(rollout.sampled_count for rollout in rollouts)
    warnings = [BROKEN_ROLLOUTS] if any(rollout.stop in ENVIRONMENT_FAILURES for rollout in rollouts) else []
    if any(map(opening_is_too_long, rollouts)):
        warnings.append(NO_ROOM)
    if "replies_cut" in metrics:
        warnings.append(CUT_REPLIES)
    made = [turn.call for rollout in rollouts for turn in rollout.turns if not turn.predicted]
    if made and not any(call is not None and call.name in tools for call in made):
        warnings.append(NO_CALLS)
    return metrics, warnings
