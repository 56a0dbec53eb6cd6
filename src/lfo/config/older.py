"""Read the configs of older runs. What no present setting can say is kept apart, so that a run keeps its name."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lfo.config.knobs import RunConfig, flatten
from lfo.config.presets import PRESETS
from lfo.errors import ConfigError
from lfo.settings import Setting, dotted

OLDER = "older"  # the part of a config for what no present setting can say
# Retired values, and the last commits that have their code.
RETIRED = {"coupling": "stacked", "lookahead": "environment", "imagine.certainty": True}
COMMITS = {"coupling": "836ca30", "lookahead": "836ca30", "imagine.certainty": "2cf7692"}
_REMOVED = {  # settings, each with the value that sets no run apart
    "rollout": {"environment_retries": 2, "environment_workers": 16},
    "policy": {"clip_low": 0.2, "clip_high": 0.28, "entropy": 0.0, "entropy_share": 1.0, "kl": 0.0},
    "world_model": {"target_tokens": 512, "adaptive_weight": False},
    "imagine": {"tools": "default", "most": 2, "certainty": False},
    "exploration": {"inquiries": True},
    "internalise": {"weight": 1.0, "first_tasks": 24, "hindsight": False},
    "optimizer": {"betas": [0.9, 0.95], "weight_decay": 0.1, "clip": 1.0},
}
REMOVED = {**dict(dotted(_REMOVED)), "policy.scale_by_std": True, "policy.dynamic_sampling": True}
BLIND, SCHEDULE = "exploration.blind_steps", "world_model.schedule"
NUMBERS = {BLIND: "explore_first", "world_model.first_steps": "world_model_first", "world_model.every": "hierarchical"}
RENAMED = {"world_model.only": "policy.frozen"}
OLD_NAMES = {*REMOVED, *NUMBERS, *RENAMED, "lora.alpha", "feedback_source", "optimizer.separate", "threads"}
OLD_VALUES: Mapping[str, Mapping[str, str]] = {
    "lookahead": {"true": "policy", "false": "off"},
    "feedback": {"true": "own", "false": "off"},
    "world_model.predict": {"phone": "default", "phone_form": "make_phone_call,auth_info_form"},
}


def refuse_retired(settings: Iterable[Setting], where: str = "") -> None:
    """Raise a `ConfigError` for a retired value, and without a file that has it (`where`) for a removed name too."""
    for name, value in settings:
        if name in RETIRED and value == RETIRED[name]:
            words = "is retired and can only be read (research/LOG.md has its figures); its code is in commit"
            raise ConfigError(f"{where}{name}={value} {words} {COMMITS[name]}")
        if name in OLD_NAMES and name not in RENAMED and not where:
            raise ConfigError(f"{name} is no longer a setting: docs/TRAINING.md has those of today")


def modernise(settings: Iterable[Setting], *, complete: bool = False) -> tuple[list[Setting], dict[str, Any]]:
    """Return settings by their present names, and those without one. `complete`: they are all settings of a file."""
    found = {RENAMED.get(name, name): value for name, value in settings}
    imagines = any(name.startswith("imagine.") for name in found)
    if complete and found.get("lookahead") is True and "lookahead_source" in found and not imagines:
        found["lookahead"] = "environment"  # before there was `imagine`, only the environment proposed
    for name, words in OLD_VALUES.items():
        if name in found:
            found[name] = words.get(str(found[name]).lower(), found[name])
    if found.get("feedback") == "own" and found.get("feedback_source") == "other_task":
        found["feedback"] = "other_task"
    if found.get(BLIND) and found.get(SCHEDULE, "joint") == "joint":
        found[SCHEDULE] = NUMBERS[BLIND]
    for name, schedule in NUMBERS.items():
        if found.get(SCHEDULE) == schedule:
            found[SCHEDULE] = f"{schedule}:{found.get(name, 'N')}"
    usual = {**REMOVED, "lora.alpha": 2.0 * rank if isinstance(rank := found.get("lora.rank", 16), int) else None}
    if not str(found.get(SCHEDULE)).startswith(NUMBERS[BLIND]):
        usual[BLIND] = 0  # one run has one schedule now
    lost = {name: found[name] for name, value in usual.items() if name in found and found[name] != value}
    for name, value in RETIRED.items():
        if found.get(name) == value:
            lost[name], found[name] = value, {"coupling": "shared", "lookahead": "policy"}.get(name)  # the nearest
    return [(name, value) for name, value in found.items() if name not in OLD_NAMES], lost


def newer_than(tree: Mapping[Any, Any], named: Collection[str]) -> Iterator[Setting]:
    """Return the values that a saved run had of settings that were added after it: its preset may set them today."""
    if tree.keys() >= {"preset", "algo", "lora", "rollout", "policy", "world_model", "optimizer", "eval"}:
        defaults, preset = flatten(RunConfig()), PRESETS.get(tree["preset"], {})
        yield from ((name, defaults[name]) for name in preset if name in defaults and name not in named)
        if "imagine.form" not in named:
            yield "imagine.form", "mark"  # the only form then, whatever the base
