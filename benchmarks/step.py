"""Measure the cost of a training step, on one CPU thread or on a GPU, by phase and beside the arithmetic floor.

Seconds are CPU time on a CPU and wall-clock time on a GPU. They are medians over repetitions in which the variants
alternate, so that other load affects all of them. A floor is the minimum time for the work at the peak speed of the
machine, measured in the same run.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

import torch

from benchmarks import speed
from lfo.config import load_config
from lfo.engines import create_trainer
from lfo.engines.local import LocalBackend
from lfo.loading import environment_factory, load_tokenizer
from lfo.model.adapters import DualAdapterModel
from lfo.objectives.advantages import Collected, DynamicSamplingReport
from lfo.train.loop import Trainer
from lfo.types import Origin, RolloutGroup

# The overrides of each variant; only look-ahead has different rollouts.
_NO_WORLD_MODEL = ("world_model.weight=0", "policy.frozen=false", "world_model.schedule=joint", "surprise=0")
VARIANTS: dict[str, tuple[str, ...]] = {
    "dapo": ("algo=dapo", "lookahead=off", *_NO_WORLD_MODEL),
    "dual": ("algo=dual-lora", "lookahead=off", "world_model.input=state"),
    "inline": ("algo=dual-lora", "lookahead=off", "coupling=shared", "world_model.input=inline"),
    "lookahead": ("algo=dual-lora", "lookahead=policy", "world_model.input=state"),
}
STEP_NOTE = (
    "Rollouts of the base policy, recorded once. Their rewards are replaced by alternating 0 and 1, so that every "
    "group is informative and the policy learns from every row. Rolling out is timed once for the variants "
    "without look-ahead, which sample from the same shapes."
)


@dataclass(slots=True)
class _Variant:
    """A trainer with recorded rollouts, and the seconds of its phases."""

    trainer: Trainer
    groups: Sequence[RolloutGroup]
    seconds: dict[str, list[float]]
    peak: int = 0  # bytes of memory in an update

    @property
    def backend(self) -> LocalBackend:
        return cast(LocalBackend, self.trainer.backend)

    @property
    def model(self) -> DualAdapterModel:
        return self.backend.agent.model

    @property
    def device(self) -> torch.device:
        return self.model.device


def bench_step(
    overrides: Sequence[str] = (), *, device: str = "cpu", repeats: int = 5, replayed_batches: int = 3
) -> dict[str, Any]:
    """Return the cost of a step (rollouts, examples, update) of each variant, and its ratio to plain DAPO."""
    variants = {name: _variant([*overrides, f"device={device}", *added]) for name, added in VARIANTS.items()}
    for variant in variants.values():
        _fill_replay(variant.trainer, replayed_batches)
    for repeat in range(repeats + 1):  # the first one is a warm-up
        for name, variant in variants.items():
            if name in ("dapo", "lookahead"):
                _timed(variant, "rollout", lambda trainer=variant.trainer: trainer.draw(trainer.plan(0), 0))
            _train(variant)
        if repeat == 0:
            for variant in variants.values():
                variant.seconds = {}
    for name in ("dual", "inline"):
        variants[name].seconds["rollout"] = variants["dapo"].seconds["rollout"]
    phases = {
        name: {phase: median(variant.seconds[phase]) for phase in ("rollout", "examples", "update")}
        for name, variant in variants.items()
    }
    totals = {name: sum(seconds.values()) for name, seconds in phases.items()}
    counts = {name: _count(variant) for name, variant in variants.items()}
    model = variants["dapo"].model
    rate = speed.arithmetic_rate(model.device, model.head.dtype)
    floors = {name: _floors(variant, counts[name], rate) for name, variant in variants.items()}
    return {
        "device": model.device.type,
        "model": variants["dapo"].trainer.config.model,
        "phases": phases,
        **{f"{name}_over_dapo": totals[name] / totals["dapo"] for name in ("dual", "inline", "lookahead")},
        "arithmetic_rate": rate,
        "floors": floors,
        "floor_fraction": {name: sum(floors[name].values()) / totals[name] for name in variants},
        "peak_memory": {name: variant.peak for name, variant in variants.items()},
        "tokens": counts,
        "examples_per_mini_batch": variants["dual"].trainer.config.world_model.examples_per_mini_batch,
        "repeats": repeats,
        "note": STEP_NOTE,
    }


def _variant(overrides: Sequence[str]) -> _Variant:
    config = load_config(["preset=tiny", *overrides])
    trainer = create_trainer(config, environment_factory(config), load_tokenizer(config.model))
    groups = trainer.draw(trainer.plan(0), 0)
    return _Variant(trainer=trainer, groups=[_mixed(group) for group in groups], seconds={})


def _floors(variant: _Variant, counts: dict[str, int], rate: float) -> dict[str, float]:
    """Return the minimum seconds of rollouts and updates, as if they were only matrix products."""
    rollouts = [rollout for group in variant.groups for rollout in group.rollouts]
    tokens, sampled = distinct(
        ("rollout", each.tokens, [origin == Origin.SAMPLED for origin in each.origins]) for each in rollouts
    )
    trained, predictions = counts["distinct_tokens"], counts["distinct_loss_tokens"]
    return {
        "rollout": speed.sampling_operations(variant.model, tokens=tokens, sampled=sampled) / rate,
        "update": speed.training_operations(variant.model, tokens=trained, predictions=predictions) / rate,
    }


def distinct(rows: Iterable[tuple[Hashable, Sequence[int], Sequence[object]]]) -> tuple[int, int]:
    """Count the tokens of rows (kind, tokens, marks): all, and those with a mark.

    Tokens with the same tokens before them, in rows of the same kind, count once.
    """
    nodes: dict[tuple[Hashable, int], int] = {}
    marked: set[Hashable] = set()
    for kind, tokens, marks in rows:
        node = kind
        for token, mark in zip(tokens, marks, strict=True):
            node = nodes.setdefault((node, token), len(nodes))
            if mark:
                marked.add(node)
    return len(nodes), len(marked)


def _mixed(group: RolloutGroup) -> RolloutGroup:
    rollouts = (replace(rollout, reward=float(index % 2)) for index, rollout in enumerate(group.rollouts))
    return replace(group, rollouts=tuple(rollouts))


def _collected(groups: Sequence[RolloutGroup]) -> Collected:
    report = DynamicSamplingReport(kept=len(groups), all_failed=0, all_succeeded=0)
    return Collected(groups=groups, kept=dict(enumerate(groups)), report=report)


def _fill_replay(trainer: Trainer, batches: int) -> None:
    """Fill the buffers as if some steps had been trained."""
    if trainer.state.weight and trainer.config.world_model.replay:
        for step in range(1, batches + 1):
            trainer.store_replies(trainer.draw(trainer.plan(step), 0))


def _train(variant: _Variant) -> None:
    """Measure examples and update, then restore the adapters, so that every repetition does the same work."""
    trainer, backend = variant.trainer, variant.backend
    parameters = [weight for weights in backend.learner.parameters.values() for weight in weights]
    before = [weight.detach().clone() for weight in parameters]
    trainer.codec.forget()  # in training every step has new texts
    examples = _timed(variant, "examples", lambda: trainer.store_replies(variant.groups))

    def update() -> None:
        plan = trainer.plan(0)
        trainer.learn(plan, trainer.samples(plan, _collected(variant.groups), examples))
        backend.sync(0)

    speed.reset_peak(variant.device)
    _timed(variant, "update", update)
    variant.peak = speed.peak_memory(variant.device)
    with torch.no_grad():
        for weight, old in zip(parameters, before, strict=True):
            weight.copy_(old)
    backend.sync(0)


def _timed(variant: _Variant, phase: str, work: Callable[[], Any]) -> Any:
    seconds, result = speed.seconds_of(work, variant.device)
    variant.seconds.setdefault(phase, []).append(seconds)
    return result


def _count(variant: _Variant) -> dict[str, int]:
    """Return the rows and tokens of one step, by loss, and how many of the tokens no update needs to compute twice."""
    trainer = variant.trainer
    update = trainer.samples(trainer.plan(0), _collected(variant.groups), trainer.store_replies(variant.groups))
    learnt = [row for rows in update for row in rows]
    parts = [
        distinct((row.adapters, row.tokens, [*map(max, row.policy_weights, row.world_model_weights)]) for row in rows)
        for rows in update
    ]
    policy = [row for row in learnt if any(row.policy_weights)]
    other = [row for row in learnt if not any(row.policy_weights)]
    return {
        "rollouts": sum(len(group.rollouts) for group in variant.groups),
        "policy_rows": len(policy),
        "policy_row_tokens": sum(len(row.tokens) for row in policy),
        "policy_loss_tokens": round(sum(sum(row.policy_weights) for row in learnt)),
        "world_model_rows": len(other),
        "world_model_row_tokens": sum(len(row.tokens) for row in other),
        "world_model_loss_tokens": round(sum(sum(row.world_model_weights) for row in learnt)),
        "distinct_tokens": sum(tokens for tokens, _ in parts),
        "distinct_loss_tokens": sum(predicted for _, predicted in parts),
    }
