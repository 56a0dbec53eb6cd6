"""Translate settings of earlier versions, so that saved runs and old config files still open."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lfo.config.knobs import RunConfig, flatten
from lfo.config.presets import PRESETS
from lfo.errors import ConfigError
from lfo.settings import Setting

OLDER = "older"  # the part of a saved config that holds removed settings
# Removed settings, each with the value that every run uses now.
REMOVED: Mapping[str, Any] = {
    "rollout.environment_retries": 2,
    "rollout.environment_workers": 16,
    "policy.clip_low": 0.2,
    "policy.clip_high": 0.28,
    "policy.entropy": 0.0,
    "policy.entropy_share": 1.0,
    "policy.kl": 0.0,
    "policy.scale_by_std": True,
    "world_model.target_tokens": 512,
    "imagine.tools": "default",
    "imagine.most": 2,
    "imagine.certainty": False,
    "exploration.inquiries": True,
    "internalise.weight": 1.0,
    "internalise.first_tasks": 24,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.weight_decay": 0.1,
    "optimizer.clip": 1.0,
}
# Settings that others replace, with what to do instead.
REPLACED: Mapping[str, str] = {
    "lora.alpha": "it is 2 * lora.rank",
    "feedback_source": "set feedback=own or feedback=other_task",
    "policy.dynamic_sampling": "policy.max_resamples=-1 uses groups that teach nothing",
    "world_model.first_steps": "set world_model.schedule=world_model_first:N",
    "world_model.every": "set world_model.schedule=hierarchical:N",
    "world_model.adaptive_weight": "set world_model.schedule=adaptive",
    "exploration.blind_steps": "set world_model.schedule=explore_first:N",
    "internalise.hindsight": "set internalise.teacher=hindsight",
    "optimizer.separate": "one AdamW for each adapter gives the same weights as one for both",
    "threads": "set the environment variable OMP_NUM_THREADS",
}
RENAMED: Mapping[str, str] = {"world_model.only": "policy.frozen"}
OLD_VALUES: Mapping[str, Mapping[Any, str]] = {
    "lookahead": {"true": "policy", "True": "policy", True: "policy", "false": "off", "False": "off", False: "off"},
    "feedback": {"true": "own", "True": "own", True: "own", "false": "off", "False": "off", False: "off"},
    "world_model.predict": {"phone": "default", "phone_form": "make_phone_call,auth_info_form"},
}
OLD_NAMES = frozenset((*REMOVED, *REPLACED, *RENAMED))


def refuse_removed(names: Iterable[str]) -> None:
    for name in names:
        if name.partition(".")[0] == OLDER:
            raise ConfigError(f"there is no setting {name!r}: only saved runs of earlier versions have it")
        if name in REPLACED:
            raise ConfigError(f"{name} is no longer a setting: {REPLACED[name]}")
        if name in REMOVED:
            raise ConfigError(f"{name} is no longer a setting; it is {REMOVED[name]} in every run")


def modernise(settings: Iterable[Setting], *, complete: bool = False) -> tuple[list[Setting], dict[str, Any]]:
    """Return the settings by their present names, and those whose effect no present setting has.

    `complete`: these are all settings of a file, so a missing one has its earlier default.
    """
    found = {RENAMED.get(name, name): value for name, value in settings}
    imagines = any(name.startswith("imagine.") for name in found)
    if complete and found.get("lookahead") is True and "lookahead_source" in found and not imagines:
        found["lookahead"] = "environment"  # before there was `imagine`, only the environment proposed
    for name, words in OLD_VALUES.items():
        if isinstance(value := found.get(name), str | bool):
            found[name] = words.get(value, value)
    lost = {name: found.pop(name) for name in REMOVED if name in found and found[name] != REMOVED[name]}
    rank = found.get("lora.rank", 16)
    if "lora.alpha" in found and isinstance(rank, int) and found["lora.alpha"] != 2 * rank:
        lost["lora.alpha"] = found["lora.alpha"]
    if found.get("feedback") == "own" and found.get("feedback_source") == "other_task":
        found["feedback"] = "other_task"
    _modernise_schedule(found, lost)
    if found.get("policy.dynamic_sampling") is False:
        if found.get("policy.max_resamples", 1) not in (0, -1):  # such runs drew other tasks
            lost["policy.dynamic_sampling"] = False
        found["policy.max_resamples"] = -1
    if found.get("internalise.hindsight") is True:
        if found.get("internalise.teacher") == "policy":  # in such runs the policy acted, now the base does
            lost["internalise.teacher"] = "policy"
        found["internalise.teacher"] = "hindsight"
    return [(name, value) for name, value in found.items() if name not in OLD_NAMES], lost


def _modernise_schedule(found: dict[str, Any], lost: dict[str, Any]) -> None:
    """Write a schedule and the settings beside it as one."""
    name = "world_model.schedule"
    for schedule, number in (("world_model_first", "world_model.first_steps"), ("hierarchical", "world_model.every")):
        if found.get(name) == schedule:
            found[name] = f"{schedule}:{found.get(number, 'N')}"
    steps = found.get("exploration.blind_steps", 0)
    for old, schedule in (
        ("exploration.blind_steps", f"explore_first:{steps}"),
        ("world_model.adaptive_weight", "adaptive"),
    ):
        if found.get(old):
            if found.get(name, "joint") in ("joint", schedule):
                found[name] = schedule
            else:  # one run has one schedule now
                lost[old] = found[old]


def newer_than(tree: Mapping[Any, Any], named: Collection[str]) -> Iterator[Setting]:
    """Return the values that a saved run had of settings that were added after it.

    Its preset may set them today and did not then. A file written by hand names few settings, and gets today's preset.
    """
    if tree.keys() >= {"preset", "algo", "lora", "rollout", "policy", "world_model", "optimizer", "eval"}:
        defaults, preset = flatten(RunConfig()), PRESETS.get(tree["preset"], {})
        yield from ((name, defaults[name]) for name in preset if name in defaults and name not in named)
        if "imagine.form" not in named:
            yield "imagine.form", "mark"  # the only form then, whatever the base
