"""Check what must hold between settings. Each relation has the sentence that a user reads if it does not hold."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lfo.config.algorithms import ALGORITHMS
from lfo.config.couplings import coupling_of
from lfo.env.adapters import ADAPTERS, adapter_word
from lfo.env.worlds.shipped import SHIPPED
from lfo.errors import ConfigError
from lfo.settings import did_you_mean

if TYPE_CHECKING:
    from lfo.config.knobs import RunConfig

Relation = tuple[bool, str]  # whether it holds, and the error message if not


def check(config: RunConfig) -> None:
    """Raise a ConfigError for the first relation that does not hold."""
    for part in (_of_texts, _of_rollouts, _of_the_world_model, _of_lookahead, _of_internalising):
        for holds, sentence in part(config):
            if not holds:
                raise ConfigError(sentence)


def _of_texts(c: RunConfig) -> Iterator[Relation]:
    known = c.env in SHIPPED or adapter_word(c.env) is not None or re.fullmatch(r"[\w.]+:\w+", c.env) is not None
    yield not _names_file(c.env), f"env={c.env} names a file; name its module and class: env={_of_module(c.env)}"
    words = f"{', '.join(SHIPPED)}, package.module:Class or one of {', '.join(ADAPTERS)} with a colon and a name"
    algorithms = f"algo must be one of {', '.join(ALGORITHMS)}, not {c.algo!r}"
    yield c.algo in ALGORITHMS, f"{algorithms}{did_you_mean(c.algo, tuple(ALGORITHMS))}"
    yield known, f"env must be {words}, not {c.env!r}{did_you_mean(c.env.partition(':')[0], (*SHIPPED, *ADAPTERS))}"
    for name, text in (("model", c.model), ("output_dir", c.output_dir)):  # YAML does not preserve every line break
        yield bool(text.strip()) and text.isprintable(), f"{name} must be printable text, not {text!r}"
    for name, text in (("lora.targets", c.lora.targets), ("world_model.predict", c.world_model.predict)):
        yield all(map(str.strip, text.split(","))), f"{name} must be a word or names with commas, not {text!r}"
    for name, words in (("trackers", c.trackers), ("eval", (*c.eval.splits, *c.eval.final_splits))):
        yield len(set(words)) == len(words), f"{name} names something twice: {', '.join(words)}"


def _names_file(env: str) -> bool:
    place = env.partition(":")[0]
    return adapter_word(env) is None and place.endswith(".py")


def _of_module(env: str) -> str:
    """`my_world:Safes` for `./my_world.py:Safes`."""
    place, _, name = env.partition(":")
    module = ".".join(part for part in place.removesuffix(".py").split("/") if part.strip("."))
    return f"{module}:{name or 'Class'}"


def _of_rollouts(c: RunConfig) -> Iterator[Relation]:
    r, tokens = c.rollout, c.rollout.max_context
    yield r.prompts % r.mini_batch_prompts == 0, "rollout.mini_batch_prompts must divide rollout.prompts"
    for name, part in (
        ("rollout.max_turn_tokens", r.max_turn_tokens),
        ("world_model.reply_tokens", c.world_model.reply_tokens),
        ("policy.overlong_buffer", c.policy.overlong_buffer),
    ):
        yield part < tokens, f"{name}={part} must be below rollout.max_context={tokens}"
    yield c.eval.every > 0 or not c.eval.final_splits, "eval.final_splits needs eval.every above 0"


def _of_the_world_model(c: RunConfig) -> Iterator[Relation]:
    w, inline = c.world_model, c.world_model.input == "inline"
    models = [name for name, algorithm in ALGORITHMS.items() if algorithm.has_world_model]
    first = re.fullmatch(r"world_model_first:(\d+)", w.schedule)
    asked = c.looks_ahead and c.source.is_learned
    learns = w.weight > 0 and not inline and w.predict != "none"
    for name, used in (
        (f"lookahead={c.lookahead}", c.looks_ahead),
        (f"world_model.weight={w.weight:g}", w.weight > 0),
        ("policy.frozen=true", c.policy.frozen),
        ("world_model.schedule=adaptive", w.schedule == "adaptive"),
        (f"surprise={c.surprise:g}", c.surprise > 0),
    ):
        yield c.has_world_model or not used, f"{name} needs algo={' or algo='.join(models)}"
    yield coupling_of(c.coupling).is_shared or not inline, "world_model.input=inline needs coupling=shared"
    yield not (inline and asked), "world_model.input=inline trains no world model for look-ahead: set lookahead=off"
    for name, factor in (("user_turns", w.user_turns), ("other_replies", w.other_replies)):
        yield inline or not factor, f"world_model.{name} needs world_model.input=inline (algo=echo)"
    yield (
        first is None or int(first[1]) <= c.steps,
        f"world_model.schedule={w.schedule} needs steps={first and first[1]} or more",
    )
    yield w.schedule != "adaptive" or c.eval.every > 0, "world_model.schedule=adaptive needs eval.every above 0"
    remembers = c.looks_ahead and c.source.remembers and not c.source.is_learned  # a memory learns without weights
    learner = "policy.frozen=true needs world_model.weight above 0, or lookahead_source=memory: else nothing learns"
    yield not c.policy.frozen or w.weight > 0 or remembers, learner
    yield not c.policy.frozen or w.predict != "none", "policy.frozen=true has nothing to learn with predict=none"
    yield not c.surprise or learns, "surprise needs world_model.weight above 0, input=state and predict other than none"
    if w.from_logs is not None:
        logs = "world_model.from_logs needs policy.frozen=true, world_model.replay=true and world_model.input=state"
        yield c.policy.frozen and w.replay and not inline, logs
        nothing = "world_model.from_logs rolls nothing out: set lookahead_source other than memory, and feedback=off"
        yield not c.source.remembers and not c.has_feedback, nothing


def _of_lookahead(c: RunConfig) -> Iterator[Relation]:
    group, share = c.rollout.group_size, c.exploration.blind_share
    yield (
        not c.looks_ahead or c.policy.frozen or group - round(group * share) != 1,
        f"rollout.group_size={group} with exploration.blind_share={share:g} leaves one rollout with look-ahead, "
        "which has no other to compare with; use a larger group or a smaller share",
    )
    source = f"lookahead_source={c.lookahead_source} needs lookahead=policy"
    yield c.looks_ahead or c.lookahead_source == "world_model", source
    untrained = f"lookahead_source={c.lookahead_source} needs a world model that is trained: world_model.weight above 0"
    yield not (c.source.remembers and c.source.is_learned) or c.world_model.weight > 0, untrained
    shown = f"feedback={c.feedback} needs rollouts to be shown what others heard: set exploration.blind_share below 1"
    yield not c.has_feedback or round(group * share) < group, shown
    first, second = c.first_wave, group - c.first_wave
    yield (
        not c.has_feedback or c.policy.frozen or c.internalise.rows > 0 or min(first, second) > 1,
        f"feedback={c.feedback} divides rollout.group_size={group} into waves of {first} and {second}, and a rollout "
        "alone in its wave has no other to compare with; use a larger group, or imitate with internalise.rows",
    )
    compared = "algo=auto compares what helps and imitates it: set rollout.group_size to 4 or more"
    yield not c.is_auto or group >= 4, compared
    yield not c.is_auto or (c.feedback == "own" and c.imitates), "algo=auto needs feedback=own and internalise.rows"
    yield c.feedback != "other_task" or c.rollout.prompts > 1, "feedback=other_task needs rollout.prompts above 1"


def _of_internalising(c: RunConfig) -> Iterator[Relation]:
    i, frozen = c.internalise, c.policy.frozen
    yield not (i.rows and frozen), "internalise.rows trains the policy, which policy.frozen=true forbids"
    yield not (i.until and frozen), "internalise.until goes on with DAPO, which policy.frozen=true forbids"
    yield i.rows > 0 or i.teacher != "hindsight", "internalise.teacher=hindsight needs internalise.rows above 0"
    yield i.rows > 0 or not i.swap_names, "internalise.swap_names needs internalise.rows above 0"
    yield (
        not i.rows or i.teacher != "base" or c.looks_ahead or c.has_feedback,
        "internalise.rows with internalise.teacher=base needs look-ahead or feedback: the base alone does not improve",
    )
