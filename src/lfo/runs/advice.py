"""Find known problems in the metrics of a run, each with a figure and the option to change.

    lfo advise runs/x

Pure functions of rows and config. They compare the first third of a run with its last third, because single steps are
noisy. A problem is reported only if it matters: a policy that solves its tasks may have a low entropy, and a world
model that predicts well may have a flat loss. The result is not a proof, but says where to look first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median, variance
from typing import Any

from lfo.config import RunConfig
from lfo.config.couplings import coupling_of
from lfo.play.runner import ENVIRONMENT_FAILURES
from lfo.runs.correlation import ACCURACY_KEYS, LOOKAHEAD, VAL
from lfo.runs.costs import MetricsRows
from lfo.runs.rule_change import noticed_in
from lfo.runs.trends import FAR, GAIN, LATELY, MOST_RATIO, Trends, evaluated_tasks, far_below, numbers
from lfo.types import StopReason

MIN_STEPS = 20  # steps before anything is reported: with fewer, a third is a few noisy rows
# With a higher success, no problem of the policy is reported: most of any ceiling of the shipped levels.
SOLVED = 0.7
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
HINDERS = 0.05  # how much higher success without look-ahead is, on the same tasks, over the last `LATELY` evaluations
LOW_RATE = 3e-5  # LoRA hardly learns below
BROKEN = 0.05  # share of rollouts in which the environment failed
# Share of rollouts that end in a turn without an end. Of 394 kept runs 12 have more, and none of them solves its tasks.
ENDLESS = 0.2
RECOVERED = 0.9  # of the share of right predictions before the rules changed
FEW_DRAFTS = 0.05  # imagined calls per rollout with look-ahead: fewer are as good as none
FEW_KEPT = 0.1  # share of imagined calls that were kept: below, predictions hardly ever change the calls
# Sampled rollouts of every kept run have more than half of the success of greedy ones; those of small instruct models
# at temperature 1 have a tenth.
BREAKS, NOTABLE = 1 / 3, 0.2
MEASURE_GATE = "lfo check-env --run RUN"


@dataclass(frozen=True, kw_only=True, slots=True)
class Trouble:
    """`Trouble(name="entropy collapse", figure="entropy fell to 0.004 ...", knob="lower policy.learning_rate")`"""

    name: str = ""  # its key in `_LOOKS`
    figure: str  # the evidence
    knob: str  # the option to change


def advise(rows: MetricsRows, config: RunConfig, gate: Mapping[str, Any] | None = None) -> list[Trouble]:
    """Return all problems in the rows, causes before consequences; a short run can only have a failed `gate` and rules
    that have changed."""
    training = [row for row in rows if row["step"] > 0]
    run = Trends(rows=rows, training=training, config=config, gate=gate)
    names = _LOOKS if len(training) >= MIN_STEPS else ("gate failed", "rules changed")
    found = {name: trouble for name in names if (trouble := _LOOKS[name](run)) is not None}
    told = [name for name in found if found.keys().isdisjoint(EXPLAINED_BY.get(name, ()))]
    return [replace(found[name], name=name) for name in told]


# The problems


def _gate_failed(run: Trends) -> Trouble | None:
    if run.gate is None or run.gate["helps"] is not False or not run.config.looks_ahead or run.success >= SOLVED:
        return None
    return Trouble(
        figure=run.gate["verdict"],
        knob="take a base that acts on what it reads, or train without look-ahead (lookahead=off); docs/YOUR_MODEL.md",
    )


def _rules_changed(run: Trends) -> Trouble | None:
    alarms = noticed_in(run.rows)
    if not alarms:
        return None
    step, noticed = alarms[-1]
    since = numbers([row for row in run.training if row["step"] > step], "fresh_right")[-LATELY:]
    if len(since) == LATELY and fmean(since) >= RECOVERED * noticed.before:
        return None
    return Trouble(
        figure=f"at step {step} {noticed.words}",
        knob="what was heard before is forgotten, so look-ahead recovers by itself; if steps run out first, go on "
        "with lfo train --from RUN policy.frozen=true (docs/TRAINING.md, When the rules change)",
    )


def _environment_fails(run: Trends) -> Trouble | None:
    broken, count = run.stopped_lately(ENVIRONMENT_FAILURES)
    if not count or broken / count < BROKEN:
        return None
    return Trouble(
        figure=f"the environment failed in {broken} of the last {count} rollouts ({broken / count:.0%})",
        knob="look at `error` in rollouts/*.jsonl; raise rollout.environment_timeout where it is slow",
    )


def _endless_turns(run: Trends) -> Trouble | None:
    endless, count = run.stopped_lately([StopReason.TURN_OVERFLOW])
    if not count or endless / count < ENDLESS or run.success >= SOLVED:
        return None
    return Trouble(
        figure=f"{endless} of the last {count} rollouts ({endless / count:.0%}) ended in a turn of "
        f"{run.config.rollout.max_turn_tokens} tokens without an end",
        knob="if the first steps had such turns too, raise rollout.max_turn_tokens; if not, penalise length "
        "(policy.overlong_buffer, with rollout.max_context little above the length of good rollouts) or lower "
        "policy.learning_rate",
    )


def _nothing_to_learn_from(run: Trends) -> Trouble | None:
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
    return Trouble(figure=f"{how}, so the policy learned from {kept / groups:.0%} of them", knob=knob)


def _entropy_collapse(run: Trends) -> Trouble | None:
    early, lately = run.early("entropy"), run.lately("entropy")
    if not run.learns_policy or not lately or fmean(lately) >= COLLAPSED or run.success >= SOLVED:
        return None
    before = f" from {fmean(early):.3f}" if early else ""
    return Trouble(
        figure=f"entropy went{before} to {fmean(lately):.3f} at {run.success:.0%} success: the policy gives one answer "
        "to everything",
        knob="lower policy.learning_rate",
    )


def _world_model_not_learning(run: Trends) -> Trouble | None:
    config = run.config
    if not run.learns_world_model:
        if not config.looks_ahead or config.lookahead_source != "world_model":
            return None
        setting = "world_model.weight=0" if config.world_model.weight == 0 else "world_model.predict=none"
        return Trouble(
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
        figure=f"its loss went from {fmean(losses[0]):.3f} to {fmean(losses[1]):.3f}, and it {seen}",
        knob="raise world_model.learning_rate or world_model.examples_per_mini_batch, keep world_model.replay=true, "
        "and let more rollouts explore (exploration.blind_share)",
    )


def _imagines_nothing(run: Trends) -> Trouble | None:
    drafts, _ = _drafts(run)
    if not drafts or fmean(drafts) >= FEW_DRAFTS or run.success >= SOLVED:
        return None
    return Trouble(
        figure=f"rollouts that look ahead imagine {fmean(drafts):.2f} calls each, at {run.success:.0%} success",
        knob="the policy calls no tool that may be imagined; check world_model.predict",
    )


def _takes_back(run: Trends) -> Trouble | None:
    drafts, kept = _drafts(run)
    if not drafts or fmean(drafts) < FEW_DRAFTS or not kept or fmean(kept) >= FEW_KEPT or run.success >= SOLVED:
        return None
    return Trouble(
        figure=f"of {fmean(drafts):.1f} calls that a rollout imagines {fmean(kept):.0%} are kept, at {run.success:.0%} "
        "success: what the world model predicts does not change what the policy does",
        knob=f"measure whether true replies help this base here ({MEASURE_GATE}), also with another imagine.form; read "
        "some with lfo rollouts; name in world_model.predict only tools whose replies matter, raise imagine.drafts, or "
        "let more rollouts explore (exploration.blind_share) where predicted replies are wrong",
    )


def _drafts(run: Trends) -> tuple[list[float], list[float]]:
    """Return recent imagined calls per rollout and the share kept; nothing without look-ahead."""
    if not run.config.looks_ahead:
        return [], []
    where = "eval/val/" if run.lately("eval/val/drafts") else ""
    return run.lately(f"{where}drafts"), run.lately(f"{where}drafts_kept")


def _weight_too_high(run: Trends) -> Trouble | None:
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
        figure=f"with weight {weight:g} the world model is right in {fmean(tokens):.0%} of the trained tokens, by "
        f"weight, while success on val is {run.val[-1]:.0%} (best {max(run.val):.0%})",
        knob="lower world_model.weight (0.01 to 0.05 where one adapter carries both losses), or set "
        "world_model.schedule=adaptive",
    )


def _success_lost(run: Trends) -> Trouble | None:
    evaluations = [row for row in run.training if numbers([row], run.judged_by)]
    before, lately = (numbers(rows, run.judged_by) for rows in (evaluations[:-LATELY], evaluations[-LATELY:]))
    if not run.learns_policy or not before:
        return None
    best, tasks = max(before), evaluated_tasks(evaluations[-1], at_most=run.config.eval.tasks)
    if not far_below(best, max(lately), tasks=tasks):
        return None
    figure = f"success on val was {best:.0%} and is {fmean(lately):.0%} over the last {LATELY} evaluations"
    right = numbers(evaluations, LOOKAHEAD) or [math.nan]
    best_right, now_right = max(right), fmean(right[-LATELY:])
    # A shared adapter has the learning rate of the policy.
    has_own_rate = run.learns_world_model and not coupling_of(run.config.coupling).is_shared
    if has_own_rate and best_right - now_right >= FAR:
        figure += f"; look-ahead was right in {best_right:.0%} of cases and is in {now_right:.0%}"
        knob = "lower world_model.learning_rate"
    else:
        figure += "" if math.isnan(now_right) else f", while look-ahead is right in {now_right:.0%} of cases"
        knob = "lower policy.learning_rate (to a third)"
    return Trouble(figure=figure, knob=f"{knob}; the best checkpoint is kept: lfo eval --adapter best")


def _lookahead_hinders(run: Trends) -> Trouble | None:
    if run.config.leaves_policy_alone or run.config.is_auto or run.config.lookahead_source != "world_model":
        return None
    sighted, blind = run.both_ways()
    helped = any(with_it > without for with_it, without in zip(sighted, blind, strict=True))
    if len(sighted) < LATELY or helped or fmean(blind) - fmean(sighted) < HINDERS:
        return None
    return Trouble(
        figure=f"over the last {LATELY} evaluations success on val is {fmean(sighted):.0%} with look-ahead and "
        f"{fmean(blind):.0%} without",
        knob="use the policy without it (lfo eval --no-lookahead), or train with lookahead=off; a reply that does not "
        "say what the policy needs cannot help it (lfo probe)",
    )


def _changes_nothing(run: Trends) -> Trouble | None:
    """Look-ahead whose predictions the policy does not use: it succeeds as often without, at a success that is low."""
    if run.config.leaves_policy_alone or run.config.is_auto or not run.config.looks_ahead or run.success >= SOLVED:
        return None
    sighted, blind = run.both_ways()
    differ = any(abs(one - other) >= GAIN for one, other in zip(sighted, blind, strict=True))
    if len(sighted) < LATELY or differ:
        return None
    return Trouble(
        figure=f"over the last {LATELY} evaluations success on val is {fmean(sighted):.0%} with look-ahead and "
        f"{fmean(blind):.0%} without",
        knob=f"measure whether true replies help this base here ({MEASURE_GATE}); if they do, predictions are wrong or "
        "come too late: read some with lfo inspect",
    )


def _sampled_calls_break(run: Trends) -> Trouble | None:
    sampled, greedy = run.lately("success_sighted"), numbers(run.rows, VAL)[-LATELY:]
    if not sampled or len(greedy) < LATELY or fmean(greedy) < NOTABLE or fmean(sampled) > fmean(greedy) * BREAKS:
        return None
    temperature = run.config.rollout.temperature
    return Trouble(
        figure=f"greedy rollouts with look-ahead succeed in {fmean(greedy):.0%} of val, those of training, sampled at "
        f"temperature {temperature:g}, in {fmean(sampled):.0%}",
        knob=f"lower rollout.temperature, as to {temperature / 2:g}; {MEASURE_GATE} measures how many calls are valid",
    )


def _never_rises(run: Trends) -> Trouble | None:
    if len(run.val) <= LATELY or run.success >= SOLVED or max(run.val[1:]) - run.val[0] >= GAIN:
        return None
    return Trouble(
        figure=f"success on val began at {run.val[0]:.0%} and was at most {max(run.val[1:]):.0%} in "
        f"{len(run.val) - 1} evaluations",
        knob=f"measure what this base can do here ({MEASURE_GATE}): alone, with true replies, with feedback",
    )


def _losses_flat(run: Trends) -> Trouble | None:
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
        figure=f"policy loss {fmean(policy[0]):.3f} to {fmean(policy[1]):.3f}, world-model loss {fmean(world[0]):.3f} "
        f"to {fmean(world[1]):.3f}, success {run.success:.0%}, at learning rates {rates[0]:g} and {rates[1]:g}",
        knob=knob,
    )


def _gradient_imbalance(run: Trends) -> Trouble | None:
    pairs = [
        (row["gradient_norm/policy"], row["gradient_norm/world_model"])
        for row in run.training[-(len(run.training) // 3) :]
        if "imitation_loss" not in row  # imitation has another learning rate
        and numbers([row], "gradient_norm/policy")
        and numbers([row], "gradient_norm/world_model")
    ]
    ratios = [policy / world for policy, world in pairs if policy > 0 and world > 0]
    if not ratios or run.success >= SOLVED:
        return None
    ratio = median(ratios)
    if 1 / MOST_RATIO <= ratio <= MOST_RATIO:
        return None
    if ratio < 1:
        return Trouble(
            figure=f"the gradient of the world model was {1 / ratio:.0f} times the policy's, {_over(ratios)}",
            knob="raise policy.learning_rate, or lower world_model.weight with coupling=shared",
        )
    return Trouble(
        figure=f"the gradient of the policy was {ratio:.0f} times the world model's, {_over(ratios)}",
        knob="raise world_model.learning_rate or world_model.examples_per_mini_batch",
    )


_LOOKS: Mapping[str, Callable[[Trends], Trouble | None]] = {
    "gate failed": _gate_failed,
    "rules changed": _rules_changed,
    "environment errors": _environment_fails,
    "endless turns": _endless_turns,
    "nothing to learn from": _nothing_to_learn_from,
    "entropy collapse": _entropy_collapse,
    "both losses flat": _losses_flat,
    "world model not learning": _world_model_not_learning,
    "imagines nothing": _imagines_nothing,
    "takes back what it imagines": _takes_back,
    "weight too high": _weight_too_high,
    "success lost": _success_lost,
    "look-ahead hinders": _lookahead_hinders,
    "look-ahead changes nothing": _changes_nothing,
    "sampled calls break": _sampled_calls_break,
    "val never rises": _never_rises,
    "gradient imbalance": _gradient_imbalance,
}

# A problem hides its consequences.
EXPLAINED_BY: Mapping[str, set[str]] = {
    "world model not learning": {"both losses flat"},
    "takes back what it imagines": {"world model not learning", "gate failed"},
    "look-ahead changes nothing": {
        *("gate failed", "world model not learning", "imagines nothing", "takes back what it imagines")
    },
    "val never rises": {
        *("gate failed", "environment errors", "endless turns", "nothing to learn from", "entropy collapse"),
        *("world model not learning", "weight too high", "imagines nothing", "takes back what it imagines"),
        *("success lost", "rules changed"),
    },
    "success lost": {"rules changed", "environment errors", "endless turns", "entropy collapse", "weight too high"},
    "gradient imbalance": {"nothing to learn from", "success lost"},
}


# Figures


def _meaning(run: Trends) -> float | None:
    """Return the share of replies that the world model understands at the last evaluation; None if not measured."""
    for key in ACCURACY_KEYS:
        values = numbers(run.rows, key)
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
