"""Find known problems in the metrics of a run, each with a figure and the option to change.

    lfo advise runs/x

Pure functions of rows and config. They compare the first third of a run with its last third, because single steps are
noisy. A problem is reported only if it matters: a policy that solves its tasks may have a low entropy, and a world
model that predicts well may have a flat loss. The result is not a proof, but says where to look first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median, variance

from lfo.config import RunConfig
from lfo.evaluation.balance import MOST
from lfo.evaluation.correlation import ACCURACY_KEYS, LOOKAHEAD, VAL
from lfo.evaluation.costs import MetricsRows
from lfo.evaluation.success import FAR, evaluated_tasks, far_below
from lfo.model.couplings import coupling_of
from lfo.rollout.runner import ENVIRONMENT_FAILURES
from lfo.types import StopReason

MIN_STEPS = 20  # steps before anything is reported: with fewer, a third is a few noisy rows
# With a higher success, no problem of the policy is reported: most of any ceiling of the shipped levels.
SOLVED = 0.7
GAIN = 0.02  # in success on val: the least that 100 tasks can show
# Groups with equal rewards teach nothing. Below one informative group in ten, most steps of 8 tasks update the policy
# from one task or not at all.
FEW_GROUPS = 0.1
# Nats per token. A healthy policy of the shipped base has 0.05 to 0.15; collapsed ones had 0.004.
COLLAPSED = 0.02
FLAT = 0.05  # relative change of a loss from the first third to the last
# A world model below this share of replies understood is still poor, above it is good: the thresholds of
# `world_model.schedule=adaptive`. The share of trained tokens that are right starts high (most of a reply is wording),
# so its bar is higher. It is weighted: with `world_model.wording` below 1 wording counts less, and it starts lower.
POOR_MEANING, GOOD_TOKENS = 0.3, 0.8
POOR_TOKENS = 0.9
# If both losses train one adapter, a weight of 0.2 was seen to destroy the policy; lower weights were not.
HIGH_WEIGHT = 0.1
LOST = 0.1  # below the best success on val; well outside the noise of 100 tasks
LATELY = 3  # evaluations that must all be far below the best one (`success.far_below`): one may be bad luck
HINDERS = 0.05  # how much higher success without look-ahead is, on the same tasks, over the last `LATELY` evaluations
LOW_RATE = 3e-5  # LoRA hardly learns below
BROKEN = 0.05  # share of rollouts in which the environment failed
# Share of rollouts that end in a turn without an end. Of 394 kept runs 12 have more, and none of them solves its tasks.
ENDLESS = 0.2
FEW_DRAFTS = 0.05  # imagined calls per rollout with look-ahead: fewer are as good as none
FEW_KEPT = 0.1  # share of imagined calls that were kept: below, predictions hardly ever change the calls


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """`Trouble(name="entropy collapse", figure="entropy fell to 0.004 ...", knob="lower policy.learning_rate")`"""

    name: str
    figure: str  # the evidence
    knob: str  # the option to change


def advise(rows: MetricsRows, config: RunConfig) -> list[Trouble]:
    """Return all problems in the rows, causes before consequences; none for a run that is too short."""
    training = [row for row in rows if row["step"] > 0]
    if len(training) < MIN_STEPS:
        return []
    run = _Run(rows=rows, training=training, config=config)
    found = [trouble for look in _LOOKS if (trouble := look(run)) is not None]
    names = {trouble.name for trouble in found}
    return [trouble for trouble in found if not names & _EXPLAINED_BY.get(trouble.name, set())]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Run:
    rows: MetricsRows
    training: MetricsRows
    config: RunConfig

    def early(self, key: str) -> list[float]:
        return _numbers(self.training[: len(self.training) // 3], key)

    def lately(self, key: str) -> list[float]:
        return _numbers(self.training[-(len(self.training) // 3) :], key)

    def stopped_lately(self, reasons: Collection[str]) -> tuple[int, int]:
        """Return how many recent rollouts ended for one of these reasons, and for any."""
        rows = self.training[-(len(self.training) // 3) :]
        stops = [row["stops"] for row in rows if isinstance(row.get("stops"), Mapping)]
        return sum(each.get(name, 0) for each in stops for name in reasons), sum(sum(each.values()) for each in stops)

    @property
    def judged_by(self) -> str:
        """The metric of success on val, as the trained policy acts: with look-ahead or alone."""
        return f"{VAL}_blind" if self.config.leaves_policy_alone else VAL

    @property
    def val(self) -> list[float]:
        return _numbers(self.rows, self.judged_by)

    @property
    def success(self) -> float:
        """The success of the policy now: on val, or in training if nothing was evaluated."""
        lately = self.lately("success")
        return self.val[-1] if self.val else fmean(lately) if lately else 0.0

    @property
    def gains(self) -> bool:
        """Whether success rises from the first third to the last."""
        values = self.val if len(self.val) >= 3 else _numbers(self.training, "success")
        third = max(1, len(values) // 3)
        return len(values) >= 2 and fmean(values[-third:]) - fmean(values[:third]) >= GAIN

    @property
    def learns_policy(self) -> bool:
        return not self.config.policy.frozen

    @property
    def learns_world_model(self) -> bool:
        return self.config.world_model.weight > 0 and self.config.world_model.predict != "none"


# The problems


def _environment_fails(run: _Run) -> Trouble | None:
    broken, count = run.stopped_lately(ENVIRONMENT_FAILURES)
    if not count or broken / count < BROKEN:
        return None
    return Trouble(
        name="environment errors",
        figure=f"the environment failed in {broken} of the last {count} rollouts ({broken / count:.0%})",
        knob="look at `error` in rollouts/*.jsonl; raise rollout.environment_timeout where it is slow",
    )


def _endless_turns(run: _Run) -> Trouble | None:
    endless, count = run.stopped_lately([StopReason.TURN_OVERFLOW])
    if not count or endless / count < ENDLESS or run.success >= SOLVED:
        return None
    return Trouble(
        name="endless turns",
        figure=f"{endless} of the last {count} rollouts ({endless / count:.0%}) ended in a turn of "
        f"{run.config.rollout.max_turn_tokens} tokens without an end",
        knob="if the first steps had such turns too, raise rollout.max_turn_tokens; if not, penalise length "
        "(policy.overlong_buffer, with rollout.max_context little above the length of good rollouts) or lower "
        "policy.learning_rate",
    )


def _nothing_to_learn_from(run: _Run) -> Trouble | None:
    kept, failed, succeeded = (sum(run.lately(f"groups_{name}")) for name in ("kept", "all_failed", "all_succeeded"))
    groups = kept + failed + succeeded
    if not run.learns_policy or not groups or kept / groups >= FEW_GROUPS or run.success >= SOLVED:
        return None
    if failed >= succeeded:
        how = f"in {failed / groups:.0%} of the last {groups:.0f} groups every rollout failed"
        knob = (
            "begin with easier levels, or raise rollout.group_size or policy.max_resamples"
            if run.config.looks_ahead
            else "train with look-ahead (algo=dual-lora), begin with easier levels, or raise rollout.group_size"
        )
    else:
        how = f"in {succeeded / groups:.0%} of the last {groups:.0f} groups every rollout succeeded"
        knob = "train on harder levels; success in training does not carry over to val"
    return Trouble(
        name="nothing to learn from", figure=f"{how}, so the policy learned from {kept / groups:.0%} of them", knob=knob
    )


def _entropy_collapse(run: _Run) -> Trouble | None:
    early, lately = run.early("entropy"), run.lately("entropy")
    if not run.learns_policy or not lately or fmean(lately) >= COLLAPSED or run.success >= SOLVED:
        return None
    before = f" from {fmean(early):.3f}" if early else ""
    return Trouble(
        name="entropy collapse",
        figure=f"entropy went{before} to {fmean(lately):.3f} at {run.success:.0%} success: the policy gives one answer "
        "to everything",
        knob="lower policy.learning_rate",
    )


def _world_model_not_learning(run: _Run) -> Trouble | None:
    config = run.config
    if not run.learns_world_model:
        if not config.looks_ahead or config.lookahead_source != "world_model":
            return None
        setting = "world_model.weight=0" if config.world_model.weight == 0 else "world_model.predict=none"
        return Trouble(
            name="world model not learning",
            figure=f"{setting}, so an untrained world model speaks in the look-ahead",
            knob="unless this is the control, set world_model.weight=1 and world_model.predict=default",
        )
    meaning = _meaning(run)
    tokens = run.lately("world_model_accuracy")
    poor = meaning < POOR_MEANING if meaning is not None else bool(tokens) and fmean(tokens) < POOR_TOKENS
    losses = run.early("world_model_loss"), run.lately("world_model_loss")
    if not poor or not all(losses) or not (_flat(*losses) or fmean(losses[1]) > fmean(losses[0])):
        return None
    seen = (
        f"understands {meaning:.0%} of the replies"
        if meaning is not None
        else f"is right in {fmean(tokens):.0%} of the trained tokens, by weight"
    )
    return Trouble(
        name="world model not learning",
        figure=f"its loss went from {fmean(losses[0]):.3f} to {fmean(losses[1]):.3f}, and it {seen}",
        knob="raise world_model.learning_rate or world_model.examples_per_mini_batch, keep world_model.replay=true, "
        "and let more rollouts explore (exploration.blind_share)",
    )


def _imagines_nothing(run: _Run) -> Trouble | None:
    drafts, _ = _drafts(run)
    if not drafts or fmean(drafts) >= FEW_DRAFTS or run.success >= SOLVED:
        return None
    return Trouble(
        name="imagines nothing",
        figure=f"rollouts that look ahead imagine {fmean(drafts):.2f} calls each, at {run.success:.0%} success",
        knob="the policy calls no tool that may be imagined; check world_model.predict",
    )


def _takes_back(run: _Run) -> Trouble | None:
    drafts, kept = _drafts(run)
    if not drafts or fmean(drafts) < FEW_DRAFTS or not kept or fmean(kept) >= FEW_KEPT or run.success >= SOLVED:
        return None
    return Trouble(
        name="takes back what it imagines",
        figure=f"of {fmean(drafts):.1f} calls that a rollout imagines {fmean(kept):.0%} are kept, at {run.success:.0%} "
        "success: what the world model predicts does not change what the policy does",
        knob="read some with lfo rollouts; name in world_model.predict only tools whose replies matter, raise "
        "imagine.drafts, or let more rollouts explore (exploration.blind_share) where predicted replies are wrong",
    )


def _drafts(run: _Run) -> tuple[list[float], list[float]]:
    """Return recent imagined calls per rollout and the share kept; nothing without look-ahead."""
    if not run.config.looks_ahead:
        return [], []
    where = "eval/val/" if run.lately("eval/val/drafts") else ""
    return run.lately(f"{where}drafts"), run.lately(f"{where}drafts_kept")


def _weight_too_high(run: _Run) -> Trouble | None:
    weights, tokens = run.lately("world_model_weight"), run.lately("world_model_accuracy")
    # With two adapters the world-model loss cannot affect the policy.
    if (
        not coupling_of(run.config.coupling).is_shared
        or not run.learns_policy
        or not weights
        or not tokens
        or not run.val
    ):
        return None
    weight, lost = weights[-1], max(run.val) - run.val[-1]
    if weight < HIGH_WEIGHT or fmean(tokens) < GOOD_TOKENS or run.success >= SOLVED or (run.gains and lost < LOST):
        return None
    return Trouble(
        name="weight too high",
        figure=f"with weight {weight:g} the world model is right in {fmean(tokens):.0%} of the trained tokens, by "
        f"weight, while success on val is {run.val[-1]:.0%} (best {max(run.val):.0%})",
        knob="lower world_model.weight (0.01 to 0.05 where one adapter carries both losses), or set "
        "world_model.schedule=adaptive",
    )


def _success_lost(run: _Run) -> Trouble | None:
    evaluations = [row for row in run.training if _numbers([row], run.judged_by)]
    before, lately = (_numbers(rows, run.judged_by) for rows in (evaluations[:-LATELY], evaluations[-LATELY:]))
    if not run.learns_policy or not before:
        return None
    best, tasks = max(before), evaluated_tasks(evaluations[-1], at_most=run.config.eval.tasks)
    if not far_below(best, max(lately), tasks=tasks):
        return None
    figure = f"success on val was {best:.0%} and is {fmean(lately):.0%} over the last {LATELY} evaluations"
    right = _numbers(evaluations, LOOKAHEAD) or [math.nan]
    best_right, now_right = max(right), fmean(right[-LATELY:])
    # A shared adapter has the learning rate of the policy.
    has_own_rate = run.learns_world_model and not coupling_of(run.config.coupling).is_shared
    if has_own_rate and best_right - now_right >= FAR:
        figure += f"; look-ahead was right in {best_right:.0%} of cases and is in {now_right:.0%}"
        knob = "lower world_model.learning_rate"
    else:
        figure += "" if math.isnan(now_right) else f", while look-ahead is right in {now_right:.0%} of cases"
        knob = "lower policy.learning_rate (to a third)"
    return Trouble(
        name="success lost", figure=figure, knob=f"{knob}; the best checkpoint is kept: lfo eval --adapter best"
    )


def _lookahead_hinders(run: _Run) -> Trouble | None:
    if run.config.leaves_policy_alone or run.config.lookahead_source != "world_model":
        return None
    evaluated = [row for row in run.training if _numbers([row], VAL) and _numbers([row], f"{VAL}_blind")][-LATELY:]
    sighted, blind = _numbers(evaluated, VAL), _numbers(evaluated, f"{VAL}_blind")
    helped = any(with_it > without for with_it, without in zip(sighted, blind, strict=True))
    if len(evaluated) < LATELY or helped or fmean(blind) - fmean(sighted) < HINDERS:
        return None
    return Trouble(
        name="look-ahead hinders",
        figure=f"over the last {LATELY} evaluations success on val is {fmean(sighted):.0%} with look-ahead and "
        f"{fmean(blind):.0%} without",
        knob="use the policy without it (lfo eval --no-lookahead), or train with lookahead=off; a reply that does not "
        "say what the policy needs cannot help it (lfo probe)",
    )


def _losses_flat(run: _Run) -> Trouble | None:
    policy = run.early("policy_loss"), run.lately("policy_loss")
    world = run.early("world_model_loss"), run.lately("world_model_loss")
    if not all((*policy, *world)) or not (_flat(*policy) and _flat(*world)):
        return None
    meaning = _meaning(run)
    if run.gains or run.success >= SOLVED or (meaning is not None and meaning >= SOLVED):
        return None
    rates = run.config.policy.learning_rate, run.config.world_model.learning_rate
    if min(rates) < LOW_RATE:
        knob = "raise policy.learning_rate and world_model.learning_rate: LoRA wants 3e-5 and more, 1e-6 does not learn"
    else:
        knob = (
            "try larger groups (rollout.group_size=64) or imitation of successes (algo=dapo internalise.rows=8 "
            "internalise.teacher=policy): the rates are usual ones"
        )
    return Trouble(
        name="both losses flat",
        figure=f"policy loss {fmean(policy[0]):.3f} to {fmean(policy[1]):.3f}, world-model loss {fmean(world[0]):.3f} "
        f"to {fmean(world[1]):.3f}, success {run.success:.0%}, at learning rates {rates[0]:g} and {rates[1]:g}",
        knob=knob,
    )


def _gradient_imbalance(run: _Run) -> Trouble | None:
    pairs = [
        (row["gradient_norm/policy"], row["gradient_norm/world_model"])
        for row in run.training[-(len(run.training) // 3) :]
        if "imitation_loss" not in row  # imitation has another learning rate
        and _numbers([row], "gradient_norm/policy")
        and _numbers([row], "gradient_norm/world_model")
    ]
    ratios = [policy / world for policy, world in pairs if policy > 0 and world > 0]
    if not ratios or run.success >= SOLVED:
        return None
    ratio = median(ratios)
    if 1 / MOST <= ratio <= MOST:
        return None
    if ratio < 1:
        return Trouble(
            name="gradient imbalance",
            figure=f"the gradient of the world model was {1 / ratio:.0f} times the policy's, {_over(ratios)}",
            knob="raise policy.learning_rate, or lower world_model.weight with coupling=shared",
        )
    return Trouble(
        name="gradient imbalance",
        figure=f"the gradient of the policy was {ratio:.0f} times the world model's, {_over(ratios)}",
        knob="raise world_model.learning_rate or world_model.examples_per_mini_batch",
    )


_LOOKS: Sequence[Callable[[_Run], Trouble | None]] = (
    _environment_fails,
    _endless_turns,
    _nothing_to_learn_from,
    _entropy_collapse,
    _losses_flat,
    _world_model_not_learning,
    _imagines_nothing,
    _takes_back,
    _weight_too_high,
    _success_lost,
    _lookahead_hinders,
    _gradient_imbalance,
)

# A problem hides its consequences.
_EXPLAINED_BY: Mapping[str, set[str]] = {
    "world model not learning": {"both losses flat"},
    "takes back what it imagines": {"world model not learning"},
    "success lost": {"environment errors", "endless turns", "entropy collapse", "weight too high"},
    "gradient imbalance": {"nothing to learn from", "success lost"},
}


# Figures


def _meaning(run: _Run) -> float | None:
    """Return the share of replies that the world model understands at the last evaluation; None if not measured."""
    for key in ACCURACY_KEYS:
        values = _numbers(run.rows, key)
        honest = key.startswith("world_model_eval/") or run.config.lookahead_source == "world_model"
        if values and honest:
            return values[-1]
    return None


def _flat(early: Sequence[float], lately: Sequence[float]) -> bool:
    """Whether there is no clear change: less than a twentieth, or within two standard errors of 0."""
    change = abs(fmean(lately) - fmean(early))
    error = math.sqrt(sum(variance(each) / len(each) for each in (early, lately) if len(each) > 1))
    return change <= FLAT * abs(fmean(early)) or change <= 2 * error


def _over(values: Sequence[float]) -> str:
    return f"in the median of {len(values)} steps"


def _numbers(rows: MetricsRows, key: str) -> list[float]:
    """Return the values of a metric, in order, of the rows that have it."""
    return [row[key] for row in rows if isinstance(row.get(key), int | float) and math.isfinite(row[key])]
