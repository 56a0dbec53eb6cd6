"""Everything that can be set about a run (`knobs`, `presets`), and how settings are read and checked (`checks`).

    load_config(["preset=tiny", "coupling=shared", "world_model.weight=0.5"]) -> RunConfig

Later settings win over earlier ones: defaults, then the preset, then what the algorithm implies, then the
file named by `config=FILE`, then the overrides in their order. OmegaConf parses and merges (so
`output_dir=runs/${algo}-${seed}` works); what comes out is a tree of frozen dataclasses whose annotations are
checked (`settings`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lfo.config.checks import validate
from lfo.config.knobs import (
    LEAVES,
    OLD_NAMES,
    OLD_VALUES,
    PARTS,
    SHIPPED_ENVIRONMENTS,
    SHORT_FORMS,
    RunConfig,
    by_name,
    flatten,
)
from lfo.config.presets import ALGORITHMS, PRESETS
from lfo.errors import ConfigError
from lfo.settings import assign, dotted, hints_of, nearest, parse, read_yaml, typed


def load_config(overrides: Sequence[str] = ()) -> RunConfig:
    """The config that `name=value` settings describe, checked; `preset=` and `config=FILE` may be among them."""
    files: list[tuple[str, Any]] = []  # what they say gives way to what is typed beside them
    assignments: list[tuple[str, Any]] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise ConfigError(f"a setting is written name=value, which {override!r} is not")
        if name == "config":
            files += _read_assignments(Path(text))
        else:
            assignments.append((name, parse(text, _annotation(name))))
    return _resolve(files, assignments)


def from_yaml(path: str | Path, *, known_only: bool = False) -> RunConfig:
    """Read a saved or hand-written file; what it leaves out comes from its preset and the defaults.

    `known_only` passes over settings that there are not, for reading runs of an older version.
    """
    return _resolve(_read_assignments(Path(path), known_only=known_only))


def from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """The config whose `dataclasses.asdict` this is, checked."""
    config = typed(settings, RunConfig, "")
    validate(config)
    return config


def to_yaml(config: RunConfig) -> str:
    return OmegaConf.to_yaml(OmegaConf.create(dataclasses.asdict(config)))


def differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configs differ, by dotted name."""
    ones, others = flatten(one), flatten(other)
    names = {**ones, **others}
    return {name: (ones.get(name), others.get(name)) for name in names if ones.get(name) != others.get(name)}


# Settings that do not change the experiment, but for the seed, over which experiments are repeated.
BESIDE_THE_EXPERIMENT = (
    "seed",
    "output_dir",
    "preset",
    "device",
    "threads",
    "micro_batch_tokens",
    "checkpoint_every",
    "trackers",
    "eval.every",
)


def fingerprint(config: RunConfig, without: Sequence[str] = BESIDE_THE_EXPERIMENT) -> str:
    """16 hex digits that two configs share exactly when they agree in all settings but `without`.

    The default leaves out what does not change the experiment, so runs that differ by seed alone belong together.
    A part's name ("eval") leaves out all of it.
    """
    settings = flatten(config)
    for name in without:
        dropped = [key for key in settings if key == name or key.startswith(f"{name}.")]
        if not dropped:
            raise ConfigError(_unknown(name))
        for key in dropped:
            del settings[key]
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def experiment(config: RunConfig) -> str:
    """The fingerprint by which runs are one experiment; plain DAPO asks no world model, so its settings do not count,
    and how often a run is evaluated counts only where that sets the world model's weight."""
    without = {*BESIDE_THE_EXPERIMENT, *(("world_model",) if config.is_plain_dapo else ())}
    if config.world_model.adaptive_weight:
        without.remove("eval.every")
    return fingerprint(config, sorted(without))


# The machinery: names, values, types


def _resolve(files: Sequence[tuple[str, Any]], overrides: Sequence[tuple[str, Any]] = ()) -> RunConfig:
    """Lay the assignments over the tables that they choose, and check what comes out."""
    hints, given = hints_of(RunConfig), dict((*files, *overrides))
    preset = typed(given.get("preset", "default"), hints["preset"], "preset")
    algo = typed(given.get("algo", "dual-lora"), hints["algo"], "algo")
    arguments = SHIPPED_ENVIRONMENTS.get(given.get("env", RunConfig().env), {})
    if "levels" not in arguments:  # older files name levels whatever their environment is
        files = [each for each in files if each[0] != "levels"]
    tree = dataclasses.asdict(RunConfig(env_args=arguments))
    for name, value in (*PRESETS[preset].items(), *ALGORITHMS[algo].items(), *_spelled_out((*files, *overrides))):
        assign(tree, name, value)
    try:
        settings = OmegaConf.to_container(OmegaConf.create(tree), resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"a setting cannot be resolved: {str(error).splitlines()[0]}") from error
    config = typed(settings, RunConfig, "")
    validate(config)
    return config


def _spelled_out(assignments: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Long names for short ones, new values for old ones, and each argument of an environment by itself."""
    for name, value in assignments:
        if name in SHORT_FORMS:
            long, annotation = SHORT_FORMS[name]
            yield long, list(typed(value, annotation, name))
        elif name == "env_args" and isinstance(value, Mapping):
            yield from ((f"env_args.{key}", argument) for key, argument in value.items())
        else:
            old = OLD_VALUES.get(name, {})
            word = str(value).lower() if isinstance(value, bool) else value
            yield OLD_NAMES.get(name, name), old.get(word, value) if isinstance(word, str) else value


def _read_assignments(path: Path, *, known_only: bool = False) -> list[tuple[str, Any]]:
    tree = read_yaml(path)
    if tree.get("lookahead") is True and "lookahead_source" in tree and "imagine" not in tree:
        tree["lookahead"] = "environment"  # a run of an older version, where nobody else could propose
    settings = by_name(tree) if known_only else _merging(by_name(tree))
    assignments = [
        (name, value) for name, value in settings if name in (*LEAVES, *SHORT_FORMS, *OLD_NAMES) or not known_only
    ]
    for name, _ in assignments:
        try:
            _annotation(name)
        except ConfigError as error:
            raise ConfigError(f"{error} (in {path})") from error
    return [
        *_unknown_then(tree, {name for name, _ in assignments}),
        *sorted(assignments, key=lambda each: each[0] not in SHORT_FORMS),  # the long name wins, wherever it stands
    ]


def _unknown_then(tree: Mapping[Any, Any], named: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Settings that a saved run does not name, because they are newer, at their defaults: what its preset says of them
    today was not so then. A file that someone wrote by hand names few settings, and gets today's preset."""
    if tree.keys() >= {"preset", "algo", "lora", "rollout", "policy", "world_model", "optimizer", "eval"}:
        usual, preset = flatten(RunConfig()), PRESETS.get(tree["preset"], {})
        yield from ((name, usual[name]) for name in preset if name in usual and name not in named)


def _merging(settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Settings of verl one by one, so that a file adds to those of its preset, as the command line does."""
    for name, value in settings:
        yield from dotted({name: value}) if name == "verl" else [(name, value)]


def _annotation(name: str) -> Any:
    name = OLD_NAMES.get(name, name)
    if name in LEAVES:
        return LEAVES[name]
    if name in SHORT_FORMS:
        return SHORT_FORMS[name][1]
    if name.startswith(("env_args.", "verl.")):
        return Any
    if name in PARTS:
        inner = ", ".join(leaf for leaf in LEAVES if leaf.startswith(f"{name}."))
        raise ConfigError(f"{name} is a group of settings; set one of {inner}")
    raise ConfigError(_unknown(name))


def _unknown(name: str) -> str:
    return f"there is no setting {name!r}; the nearest is {nearest(name, (*LEAVES, *SHORT_FORMS))}"
