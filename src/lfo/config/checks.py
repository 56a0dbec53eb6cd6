"""Whether a config can be run, as far as its settings tell: types, ranges, and what must hold between them."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from lfo.config.knobs import ABOVE_0, RANGES, SHIPPED_ENVIRONMENTS, RunConfig, flatten
from lfo.env.adapters import ADAPTERS, adapter_word
from lfo.errors import ConfigError
from lfo.model.couplings import coupling_of, names_where
from lfo.settings import did_you_mean, typed


def validate(config: RunConfig) -> None:
    """Raise a ConfigError, one sentence, for the first thing that is wrong with a config."""
    typed(dataclasses.asdict(config), RunConfig, "")
    settings = flatten(config)
    for name, (low, high) in RANGES.items():
        values = settings[name] if isinstance(settings[name], tuple) else (settings[name],)
        for value in values:
            if value < low or (high is not None and value > high):
                lower = "above 0" if low == ABOVE_0 else f"at least {low}"
                upper = "" if high is None else f" and at most {high}"
                raise ConfigError(f"{name} must be {lower}{upper}, not {value}")
    for holds, sentence in _relations(config):
        if not holds:
            raise ConfigError(sentence)


def _relations(c: RunConfig) -> Iterator[tuple[bool, str]]:
    """What must hold between settings, each with the sentence for a user whose config breaks it."""
    yield from _of_the_run(c)
    yield from _of_rollouts(c)
    yield from _of_the_world_model(c)
    yield from _of_lookahead(c)
    yield from _of_internalising(c)


def _of_the_run(c: RunConfig) -> Iterator[tuple[bool, str]]:
    yield (
        c.env in SHIPPED_ENVIRONMENTS
        or adapter_word(c.env) is not None
        or re.fullmatch(r"[\w.]+:\w+", c.env) is not None,
        f"env must be {', '.join(SHIPPED_ENVIRONMENTS)}, package.module:Class or one of "
        f"{', '.join(ADAPTERS)} with a colon and a name, not {c.env!r}"
        + did_you_mean(c.env.partition(":")[0], (*SHIPPED_ENVIRONMENTS, *ADAPTERS)),
    )
    yield bool(c.model.strip()), "model must name the embedded base (tiny), a folder or a hub id"
    yield bool(c.output_dir.strip()), "output_dir must name a folder"
    yield len(set(c.trackers)) == len(c.trackers), f"trackers names something twice: {', '.join(c.trackers)}"
    splits = (*c.eval.splits, *c.eval.final_splits)
    yield len(set(splits)) == len(splits), f"the splits of eval name something twice: {', '.join(splits)}"
    yield len(c.eval.splits) > 0, "eval.splits must name at least one split; eval.every=0 turns evaluation off"
    yield (
        c.eval.every > 0 or not c.eval.final_splits,
        "eval.every=0 turns evaluation off, that of eval.final_splits too; leave them out or set eval.every",
    )
    yield all(part.strip() for part in c.lora.targets.split(",")), "lora.targets must be all-linear or module names"
    yield (
        c.engine != "verl" or c.lora.alpha.is_integer(),
        f"lora.alpha must be a whole number with engine=verl, not {c.lora.alpha:g}",
    )


def _of_rollouts(c: RunConfig) -> Iterator[tuple[bool, str]]:
    r, w = c.rollout, c.world_model
    yield (
        r.prompts % r.mini_batch_prompts == 0,
        f"rollout.mini_batch_prompts={r.mini_batch_prompts} does not divide rollout.prompts={r.prompts}",
    )
    yield (
        r.max_turn_tokens < r.max_context,
        f"rollout.max_turn_tokens={r.max_turn_tokens} leaves no room in rollout.max_context={r.max_context}",
    )
    yield (
        w.reply_tokens < r.max_context,
        f"world_model.reply_tokens={w.reply_tokens} leaves no room in rollout.max_context={r.max_context}",
    )
    yield (
        c.policy.overlong_buffer < r.max_context,
        f"policy.overlong_buffer={c.policy.overlong_buffer} must be below rollout.max_context={r.max_context}",
    )


def _of_the_world_model(c: RunConfig) -> Iterator[tuple[bool, str]]:
    w, coupling = c.world_model, coupling_of(c.coupling)  # which refuses a name that there is not
    yield (
        all(name.strip() for name in w.predict.split(",")),
        "world_model.predict must be default, all, none or names of tools with commas",
    )
    yield (
        w.input != "inline" or coupling.reads_inline,
        "world_model.input=inline needs "
        f"{' or '.join(f'coupling={name}' for name in names_where(lambda row: row.reads_inline))}, and lookahead=off",
    )
    yield (
        w.input != "inline" or not c.looks_ahead or c.lookahead_source != "world_model",
        "world_model.input=inline trains no world model that look-ahead could ask: it needs lookahead=off",
    )
    yield (
        w.schedule != "world_model_first" or 1 <= w.first_steps <= c.steps,
        f"world_model.schedule=world_model_first needs world_model.first_steps from 1 to steps={c.steps}",
    )
    yield (
        w.first_steps == 0 or w.schedule == "world_model_first",
        "world_model.first_steps needs world_model.schedule=world_model_first",
    )
    yield (
        w.schedule != "hierarchical" or w.every >= 2,
        "world_model.schedule=hierarchical needs world_model.every of at least 2",
    )
    yield w.every == 1 or w.schedule == "hierarchical", "world_model.every needs world_model.schedule=hierarchical"
    yield not w.adaptive_weight or c.eval.every > 0, "world_model.adaptive_weight=true needs eval.every above 0"
    yield not c.policy.frozen or w.weight > 0, "policy.frozen=true needs world_model.weight above 0"
    yield (
        not c.policy.frozen or w.predict != "none",
        "policy.frozen=true has nothing to learn with world_model.predict=none",
    )
    yield (
        w.from_logs is None or c.policy.frozen,
        "world_model.from_logs needs policy.frozen=true: logs teach the world model and not the policy",
    )
    yield (
        w.from_logs is None or (w.replay and w.input == "state"),
        "world_model.from_logs needs world_model.replay=true and world_model.input=state",
    )


def _of_lookahead(c: RunConfig) -> Iterator[tuple[bool, str]]:
    r, w = c.rollout, c.world_model
    sighted = r.group_size - round(r.group_size * c.exploration.blind_share)
    yield (
        not c.looks_ahead or c.policy.frozen or sighted != 1,
        f"rollout.group_size={r.group_size} with exploration.blind_share={c.exploration.blind_share:g} leaves one "
        "rollout with look-ahead, which has none to be compared with; use a larger group or a smaller share",
    )
    yield (
        c.lookahead_source == "world_model" or c.looks_ahead,
        f"lookahead_source={c.lookahead_source} needs lookahead=policy or lookahead=environment",
    )
    yield (
        not c.imagine.certainty or (c.looks_ahead and c.lookahead_source == "world_model"),
        "imagine.certainty=true needs look-ahead that the world model answers: lookahead=policy or environment, and "
        "lookahead_source=world_model",
    )
    yield (
        c.lookahead_source != "memory" or w.from_logs is None,
        "lookahead_source=memory hears nothing with world_model.from_logs, which rolls nothing out",
    )
    for name, used in (
        (f"lookahead={c.lookahead}", c.looks_ahead),
        (f"world_model.weight={w.weight:g}", w.weight > 0),
        ("policy.frozen=true", c.policy.frozen),
        ("world_model.adaptive_weight=true", w.adaptive_weight),
        (f"surprise={c.surprise:g}", c.surprise > 0),
    ):
        yield not used or c.has_world_model, f"{name} needs algo=dual-lora or algo=internalise"
    yield (
        not c.surprise or (w.input == "state" and w.weight > 0 and w.predict != "none"),
        "surprise needs a world model that learns: world_model.weight above 0, world_model.input=state and "
        "world_model.predict other than none",
    )


def _of_internalising(c: RunConfig) -> Iterator[tuple[bool, str]]:
    i = c.internalise
    yield not (i.rows and c.policy.frozen), "internalise.rows trains the policy, which policy.frozen=true forbids"
    yield (
        not i.rows or i.teacher != "base" or c.looks_ahead or c.feedback or i.hindsight,
        "internalise.rows with internalise.teacher=base needs look-ahead, feedback=true or internalise.hindsight=true: "
        "the base alone succeeds no more often than it did",
    )
    yield i.rows > 0 or not i.hindsight, "internalise.hindsight=true needs internalise.rows above 0"
    yield not (i.until and c.policy.frozen), "internalise.until goes on with DAPO, which policy.frozen=true forbids"
    yield (
        not c.feedback or c.world_model.from_logs is None,
        "feedback=true needs rollouts, and world_model.from_logs rolls nothing out",
    )
    yield (
        not c.feedback or round(c.rollout.group_size * c.exploration.blind_share) < c.rollout.group_size,
        "feedback=true needs rollouts that are shown what others heard: set exploration.blind_share below 1",
    )
    yield (
        c.feedback_source == "own" or c.feedback,
        f"feedback_source={c.feedback_source} needs feedback=true",
    )
    yield (
        c.feedback_source == "own" or c.rollout.prompts > 1,
        f"feedback_source={c.feedback_source} needs rollout.prompts of at least 2: one task has no other",
    )
