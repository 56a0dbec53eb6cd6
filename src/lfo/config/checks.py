"""What must hold between the knobs of a config, each with the sentence for a user whose config breaks it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lfo.env.adapters import ADAPTERS, adapter_word
from lfo.env.shipped import SHIPPED
from lfo.errors import ConfigError
from lfo.model.couplings import coupling_of, names_where
from lfo.settings import did_you_mean

if TYPE_CHECKING:
    from lfo.config.knobs import RunConfig


def check(config: RunConfig) -> None:
    """Raise a ConfigError for the first thing that does not hold."""
    for part in (_of_texts, _of_the_run, _of_rollouts, _of_the_world_model, _of_lookahead, _of_internalising):
        for holds, sentence in part(config):
            if not holds:
                raise ConfigError(sentence)


def _of_texts(c: RunConfig) -> Iterator[tuple[bool, str]]:
    for name, text in (("model", c.model), ("output_dir", c.output_dir)):  # YAML would not give all line breaks back
        yield bool(text.strip()) and text.isprintable(), f"{name} must be printable text, not {text!r}"
    for name, text in (("lora.targets", c.lora.targets), ("world_model.predict", c.world_model.predict)):
        yield all(map(str.strip, text.split(","))), f"{name} must be a word or names with commas, not {text!r}"
    for name, words in (("trackers", c.trackers), ("eval", (*c.eval.splits, *c.eval.final_splits))):
        yield len(set(words)) == len(words), f"{name} names something twice: {', '.join(words)}"


def _of_the_run(c: RunConfig) -> Iterator[tuple[bool, str]]:
    yield (
        c.env in SHIPPED or adapter_word(c.env) is not None or re.fullmatch(r"[\w.]+:\w+", c.env) is not None,
        f"env must be {', '.join(SHIPPED)}, package.module:Class or one of {', '.join(ADAPTERS)} with a colon and a "
        f"name, not {c.env!r}{did_you_mean(c.env.partition(':')[0], (*SHIPPED, *ADAPTERS))}",
    )
    yield c.eval.every > 0 or not c.eval.final_splits, "eval.final_splits needs eval.every above 0"
    yield (
        c.engine != "verl" or c.lora.alpha.is_integer(),
        f"lora.alpha must be a whole number with engine=verl, not {c.lora.alpha:g}",
    )


def _of_rollouts(c: RunConfig) -> Iterator[tuple[bool, str]]:
    r, room = c.rollout, f"must be below rollout.max_context={c.rollout.max_context}"
    yield r.prompts % r.mini_batch_prompts == 0, "rollout.mini_batch_prompts must divide rollout.prompts"
    yield r.max_turn_tokens < r.max_context, f"rollout.max_turn_tokens={r.max_turn_tokens} {room}"
    yield (
        c.world_model.reply_tokens < r.max_context,
        f"world_model.reply_tokens={c.world_model.reply_tokens} {room}",
    )
    yield c.policy.overlong_buffer < r.max_context, f"policy.overlong_buffer={c.policy.overlong_buffer} {room}"


def _of_the_world_model(c: RunConfig) -> Iterator[tuple[bool, str]]:
    w, coupling = c.world_model, coupling_of(c.coupling)  # which refuses a name that there is not
    inline = " or ".join(f"coupling={name}" for name in names_where(lambda row: row.reads_inline))
    yield w.input != "inline" or coupling.reads_inline, f"world_model.input=inline needs {inline}"
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
        w.from_logs is None or (c.policy.frozen and w.replay and w.input == "state"),
        "world_model.from_logs needs policy.frozen=true, world_model.replay=true and world_model.input=state",
    )


def _of_lookahead(c: RunConfig) -> Iterator[tuple[bool, str]]:
    r, w, share = c.rollout, c.world_model, c.exploration.blind_share
    yield (
        not c.looks_ahead or c.policy.frozen or r.group_size - round(r.group_size * share) != 1,
        f"rollout.group_size={r.group_size} with exploration.blind_share={share:g} leaves one "
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
    i, group = c.internalise, c.rollout.group_size
    yield not (i.rows and c.policy.frozen), "internalise.rows trains the policy, which policy.frozen=true forbids"
    yield not (i.until and c.policy.frozen), "internalise.until goes on with DAPO, which policy.frozen=true forbids"
    yield i.rows > 0 or not i.hindsight, "internalise.hindsight=true needs internalise.rows above 0"
    yield (
        not i.rows or i.teacher != "base" or c.looks_ahead or c.feedback or i.hindsight,
        "internalise.rows with internalise.teacher=base needs look-ahead, feedback=true or internalise.hindsight=true: "
        "the base alone succeeds no more often than it did",
    )
    yield (
        not c.feedback or c.world_model.from_logs is None,
        "feedback=true needs rollouts, and world_model.from_logs rolls nothing out",
    )
    yield (
        not c.feedback or round(group * c.exploration.blind_share) < group,
        "feedback=true needs rollouts that are shown what others heard: set exploration.blind_share below 1",
    )
    yield c.feedback_source == "own" or c.feedback, f"feedback_source={c.feedback_source} needs feedback=true"
    yield (
        c.feedback_source == "own" or c.rollout.prompts > 1,
        f"feedback_source={c.feedback_source} needs rollout.prompts of at least 2: one task has no other",
    )
