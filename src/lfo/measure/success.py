"""Metrics of a step: success and behaviour in its rollouts, means over its updates, and warnings about both."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any

from lfo.env.interface import MEASURES
from lfo.play.episode import CHARS_A_TOKEN
from lfo.play.runner import ENVIRONMENT_FAILURES, opening_is_too_long
from lfo.runs.trends import MOST_RATIO
from lfo.types import Rollout

BROKEN_ROLLOUTS = "the environment failed in some rollouts: `stops` counts them, and lfo rollouts shows the reason"
NO_CALLS = "no rollout called a tool of this environment: set model= to a base that can call tools"
NO_ROOM = "opening and tools of some tasks exceed rollout.max_context: raise it; lfo check-env shows their length"
CUT_REPLIES = (
    f"some replies are longer than {CHARS_A_TOKEN} characters for each token of rollout.max_context and were cut: "
    "`replies_cut` counts them"
)
LARGE_GAP = 0.02  # mean difference of log-probs; between bf16 servers and trainer 0.0006 to 0.006 were measured
POLICY_SILENT = "gradient_ratio is below 1:10: the policy hardly learns beside the world model; run lfo advise"
WORLD_MODEL_SILENT = "gradient_ratio is above 10:1: the world model hardly learns beside the policy; run lfo advise"
SAMPLER_DIFFERS = (
    "logprob_gap_mean is above 0.02: the sampler computes other log-probs than the trainer; "
    "check the precision of rollout servers, and whether they have the adapters of the trainer"
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
    sighted = [rollout for rollout in rollouts if rollout.look_ahead]
    if not sighted:
        return {}
    kept = sum(turn.imagined for rollout in sighted for turn in rollout.turns)
    drafts = kept + sum(turn.imagined for rollout in sighted for turn in rollout.taken_back)
    return {"drafts": drafts / len(sighted), **({"drafts_kept": kept / drafts} if drafts else {})}


def step_metrics(rollouts: Sequence[Rollout], tools: Collection[str]) -> tuple[dict[str, Any], list[str]]:
    """Return the metrics of the rollouts of a training step, and warnings."""
    sighted = [rollout.reward for rollout in rollouts if rollout.look_ahead]
    alone = [rollout.reward for rollout in rollouts if not rollout.look_ahead]
    metrics = rollout_metrics(rollouts) | draft_metrics(rollouts)
    if sighted and alone:
        metrics |= {"success_sighted": fmean(sighted), "success_blind": fmean(alone)}
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


# --- updates ---------------------------------------------------------------------------------------------------------


def judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return additions to a row of metrics: those of `gradient_balance`, and a warning if the sampler disagrees.

    >>> judged({"logprob_gap_mean": 0.001})
    {}
    """
    added = gradient_balance(row)
    if row.get("logprob_gap_mean", 0.0) > LARGE_GAP:
        added["warnings"] = [*added.get("warnings", row.get("warnings", ())), SAMPLER_DIFFERS]
    return added


def gradient_balance(row: Mapping[str, Any]) -> dict[str, Any]:
    """Return additions to a row of metrics: `gradient_ratio`, policy over world model, and a warning outside
    1:10..10:1.

    Return nothing if one of the adapters does not exist or was not trained in this step, or if the policy imitated:
    that gradient gets small because the policy has learned.
    """
    policy, world_model = row.get("gradient_norm/policy", 0.0), row.get("gradient_norm/world_model", 0.0)
    if not (policy > 0 and world_model > 0) or "imitation_loss" in row:
        return {}
    ratio = policy / world_model
    warnings = [POLICY_SILENT] * (ratio < 1 / MOST_RATIO) + [WORLD_MODEL_SILENT] * (ratio > MOST_RATIO)
    return {"gradient_ratio": ratio, **({"warnings": [*row.get("warnings", ()), *warnings]} if warnings else {})}


def mean_of_each(updates: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each metric over the updates that have it.

    >>> mean_of_each([{"loss": 1.0, "norm": 3.0}, {"loss": 2.0}])
    {'loss': 1.5, 'norm': 3.0}
    """
    values: dict[str, list[float]] = defaultdict(list)
    for update in updates:
        for name, value in update.items():
            values[name].append(value)
    return {name: fmean(each) for name, each in values.items()}
