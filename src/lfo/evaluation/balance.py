"""Warnings about a step: an adapter hardly learns, or sampler and trainer disagree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

MOST = 10.0  # largest ratio of the gradient norms without a warning

LARGE_GAP = 0.02  # mean difference of log-probs; between bf16 servers and trainer 0.0006 to 0.006 were measured

POLICY_SILENT = "gradient_ratio is below 1:10: the policy hardly learns beside the world model; run lfo advise"
WORLD_MODEL_SILENT = "gradient_ratio is above 10:1: the world model hardly learns beside the policy; run lfo advise"

SAMPLER_DIFFERS = (
    "logprob_gap_mean is above 0.02: the sampler computes other log-probs than the trainer; "
    "check the precision of rollout servers, and whether they have the adapters of the trainer"
)


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
    warnings = [POLICY_SILENT] * (ratio < 1 / MOST) + [WORLD_MODEL_SILENT] * (ratio > MOST)
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
