"""What configs of older versions say otherwise than those of today, and what becomes of it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lfo.config.knobs import RunConfig, flatten
from lfo.config.presets import PRESETS

# Knobs that are gone, each with the value that every run has today.
GONE: Mapping[str, Any] = {
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
# Knobs that became part of another, and what to set instead.
MERGED: Mapping[str, str] = {
    "lora.alpha": "it is 2 * lora.rank",
    "feedback_source": "set feedback=own or feedback=other_task",
    "policy.dynamic_sampling": "policy.max_resamples=-1 uses groups that teach nothing",
    "world_model.first_steps": "set world_model.schedule=world_model_first:N",
    "world_model.every": "set world_model.schedule=hierarchical:N",
    "internalise.hindsight": "set internalise.teacher=hindsight",
}
# Other names and values of knobs that there are.
RENAMED: Mapping[str, str] = {"world_model.only": "policy.frozen"}
OLD_VALUES: Mapping[str, Mapping[Any, str]] = {
    "lookahead": {"true": "policy", "True": "policy", True: "policy", "false": "off", "False": "off", False: "off"},
    "feedback": {"true": "own", "True": "own", True: "own", "false": "off", "False": "off", False: "off"},
    "world_model.predict": {"phone": "default", "phone_form": "make_phone_call,auth_info_form"},
}
OLD_NAMES = frozenset((*GONE, *MERGED, *RENAMED))


def modern(settings: Iterable[tuple[str, Any]], *, saved: bool = False) -> tuple[list[tuple[str, Any]], dict[str, Any]]:
    """The settings as they are called today, and those with a value that no run has today.

    `saved`: they are all that a file has to say.
    """
    found = {RENAMED.get(name, name): value for name, value in settings}
    imagines = any(name.startswith("imagine.") for name in found)
    if saved and found.get("lookahead") is True and "lookahead_source" in found and not imagines:
        found["lookahead"] = "environment"  # nobody else could propose then
    for name, words in OLD_VALUES.items():
        if isinstance(value := found.get(name), str | bool):
            found[name] = words.get(value, value)
    lost = {name: found.pop(name) for name in GONE if name in found and found[name] != GONE[name]}
    if "lora.alpha" in found and found["lora.alpha"] != 2 * found.get("lora.rank", 16):
        lost["lora.alpha"] = found["lora.alpha"]
    if found.get("feedback") == "own" and found.get("feedback_source") == "other_task":
        found["feedback"] = "other_task"
    for schedule, number in (("world_model_first", "world_model.first_steps"), ("hierarchical", "world_model.every")):
        if found.get("world_model.schedule") == schedule:
            found["world_model.schedule"] = f"{schedule}:{found.get(number, 'N')}"
    if found.get("policy.dynamic_sampling") is False:
        if found.get("policy.max_resamples", 1) > 0:  # tasks were numbered with room for redraws
            lost["policy.dynamic_sampling"] = False
        found["policy.max_resamples"] = -1
    if found.get("internalise.hindsight") is True:
        if found.get("internalise.teacher") == "policy":  # there the policy acted
            lost["internalise.teacher"] = "policy"
        found["internalise.teacher"] = "hindsight"
    return [(name, value) for name, value in found.items() if name not in OLD_NAMES], lost


def unsaid(tree: Mapping[Any, Any], named: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Settings that a saved run does not name, because they are newer, at their defaults: what its preset says of them
    today was not so then. A file that someone wrote by hand names few settings, and gets today's preset."""
    if tree.keys() >= {"preset", "algo", "lora", "rollout", "policy", "world_model", "optimizer", "eval"}:
        usual, preset = flatten(RunConfig()), PRESETS.get(tree["preset"], {})
        yield from ((name, usual[name]) for name in preset if name in usual and name not in named)
