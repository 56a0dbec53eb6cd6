"""What files of older versions say otherwise than those of today."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from lfo.config.knobs import RunConfig, flatten
from lfo.config.presets import PRESETS

# Knobs that have another name today, and values that are written otherwise; command lines may have them too.
OLD_NAMES: Mapping[str, str] = {"world_model.only": "policy.frozen"}
OLD_VALUES: Mapping[str, Mapping[Any, str]] = {
    "lookahead": {"true": "policy", "True": "policy", True: "policy", "false": "off", "False": "off", False: "off"},
    "world_model.predict": {"phone": "default", "phone_form": "make_phone_call,auth_info_form"},
}


def modern(settings: Iterable[tuple[str, Any]], saved: Mapping[Any, Any] | None = None) -> list[tuple[str, Any]]:
    """The settings as they are called today; `saved` is the whole file that they stand in, where they do."""
    found: list[tuple[str, Any]] = []
    for name, value in settings:
        if name == "lookahead" and value is True and saved and "lookahead_source" in saved and "imagine" not in saved:
            value = "environment"  # nobody else could propose then
        known = OLD_VALUES.get(name, {})
        found.append((OLD_NAMES.get(name, name), known.get(value, value) if isinstance(value, str | bool) else value))
    return found


def unsaid(tree: Mapping[Any, Any], named: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Settings that a saved run does not name, because they are newer, at their defaults: what its preset says of them
    today was not so then. A file that someone wrote by hand names few settings, and gets today's preset."""
    if tree.keys() >= {"preset", "algo", "lora", "rollout", "policy", "world_model", "optimizer", "eval"}:
        usual, preset = flatten(RunConfig()), PRESETS.get(tree["preset"], {})
        yield from ((name, usual[name]) for name in preset if name in usual and name not in named)
