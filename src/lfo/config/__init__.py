"""Everything that can be set about a run (`knobs`, `presets`), and how settings are read and checked (`checks`).

    load_config(["preset=tiny", "coupling=shared", "world_model.weight=0.5"]) -> RunConfig

Later settings win over earlier ones: defaults, then the preset, then what the algorithm implies, then the
file named by `config=FILE`, then the overrides in their order. OmegaConf parses and merges (so
`output_dir=runs/${algo}-${seed}` works), pydantic checks types and ranges.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from lfo.config.knobs import KNOBS, PARTS, SHIPPED_ENVIRONMENTS, RunConfig, by_name, flatten, marked
from lfo.config.older import GONE, MERGED, OLD_NAMES, modern, unsaid
from lfo.config.presets import ALGORITHMS, PRESETS
from lfo.errors import ConfigError
from lfo.settings import assign, did_you_mean, dotted, nearest, parse, read_yaml

logger = logging.getLogger(__name__)
_RUN = TypeAdapter(RunConfig)
LEVELS = "levels"  # short for env_args.levels
BESIDE_THE_EXPERIMENT = marked("beside")


def load_config(overrides: Sequence[str] = ()) -> RunConfig:
    """The config that `name=value` settings describe, checked; `preset=` and `config=FILE` may be among them."""
    files: list[tuple[str, Any]] = []  # what they say gives way to what is typed beside them
    typed: list[tuple[str, Any]] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        if not equals or not name:
            raise ConfigError(f"a setting is written name=value, which {override!r} is not")
        if name == "config":  # what no run has today was told, and is left out
            files += [each for each in _read(Path(text)) if not _is_older(each[0])]
        else:
            typed.append((name, parse(text, _type_of(name))))
    for name, _ in typed:
        if _is_older(name):
            raise ConfigError(f"there is no setting {name!r}: only saved runs of older versions have it")
        if name in MERGED:
            raise ConfigError(f"{name} is no longer a setting: {MERGED[name]}")
    typed, lost = modern(typed)
    for name in lost:
        raise ConfigError(f"{name} is no longer a setting; it is {GONE[name]} in every run")
    return _resolve(files, typed)


def from_yaml(path: str | Path, *, known_only: bool = False) -> RunConfig:
    """Read a saved or hand-written file; what it leaves out comes from its preset and the defaults.

    `known_only` passes over settings that there are not, for reading runs of an older version.
    """
    return _resolve(_read(Path(path), known_only=known_only))


def from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """The config whose `dataclasses.asdict` this is, checked."""
    try:
        return _RUN.validate_json(json.dumps(settings))  # in JSON a list is a tuple, and a mapping a group
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from error


def to_yaml(config: RunConfig) -> str:
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name != "older" or value}
    return OmegaConf.to_yaml(OmegaConf.create(settings))


def differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """The settings in which two configs differ, by dotted name."""
    ones, others = flatten(one), flatten(other)
    return {
        name: (ones.get(name), others.get(name)) for name in {**ones, **others} if ones.get(name) != others.get(name)
    }


def fingerprint(config: RunConfig, without: Iterable[str] = BESIDE_THE_EXPERIMENT) -> str:
    """16 hex digits that two configs share exactly when they agree in all settings but `without`.

    The default leaves out what does not change the experiment, so runs that differ by seed alone belong together.
    A part's name ("eval") leaves out all of it.
    """
    left_out = set(without)
    for name in left_out - PARTS:
        _type_of(name)  # refuses one that there is not
    kept = {name: value for name, value in flatten(config).items() if not {name, name.partition(".")[0]} & left_out}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def experiment(config: RunConfig) -> str:
    """The fingerprint by which runs are one experiment; plain DAPO asks no world model, so its settings do not count,
    and how often a run is evaluated counts only where that sets the world model's weight."""
    without = {*BESIDE_THE_EXPERIMENT, *(("world_model",) if config.is_plain_dapo else ())}
    return fingerprint(config, without - ({"eval.every"} if config.world_model.adaptive_weight else set()))


def _resolve(files: Sequence[tuple[str, Any]], overrides: Sequence[tuple[str, Any]] = ()) -> RunConfig:
    """Lay the settings over the tables that they choose, and check what comes out."""
    given = dict((*files, *overrides))
    arguments = SHIPPED_ENVIRONMENTS.get(str(given.get("env", RunConfig().env)), {})
    if LEVELS not in arguments:  # older files name levels whatever their environment is
        files = [each for each in files if each[0] != LEVELS]
    tree = dataclasses.asdict(RunConfig(env_args=dict(arguments)))
    preset, algorithm = (str(given.get(name, KNOBS[name].default)) for name in ("preset", "algo"))
    tables = (*PRESETS.get(preset, {}).items(), *ALGORITHMS.get(algorithm, {}).items())
    for name, value in (*tables, *_spelled_out((*files, *overrides))):
        assign(tree, name, value)
    try:
        return from_mapping(OmegaConf.to_container(OmegaConf.create(tree), resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ConfigError(f"a setting cannot be resolved: {str(error).splitlines()[0]}") from error


def _spelled_out(settings: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The long name of levels, and each argument of an environment by itself."""
    for name, value in settings:
        if name == LEVELS:
            yield f"env_args.{LEVELS}", value if isinstance(value, list) else [value]
        elif name == "env_args" and isinstance(value, Mapping):
            yield from ((f"env_args.{key}", argument) for key, argument in value.items())
        else:
            yield name, value


def _read(path: Path, *, known_only: bool = False) -> list[tuple[str, Any]]:
    """The settings in a file, as they are called today."""
    tree = read_yaml(path)
    settings, lost = modern(by_name(tree), saved=True)
    for name, value in lost.items():
        logger.warning("%s: %s=%s is no longer a setting, and runs of today do without it", path, name, value)
        settings.append((f"older.{name}", value))
    if known_only:
        settings = [each for each in settings if each[0] in KNOBS or each[0] == LEVELS or _is_older(each[0])]
    else:  # settings of verl one by one, so that a file adds to those of its preset, as the command line does
        settings = [
            each for name, value in settings for each in (dotted({name: value}) if name == "verl" else [(name, value)])
        ]
    for name, _ in settings:
        try:
            _type_of(name)
        except ConfigError as error:
            raise ConfigError(f"{error} (in {path})") from error
    # Of levels and env_args.levels the long name wins, wherever it stands.
    return [*unsaid(tree, {name for name, _ in settings}), *sorted(settings, key=lambda each: each[0] != LEVELS)]


def _is_older(name: str) -> bool:
    """Whether it is a value that only runs of older versions have."""
    return name.partition(".")[0] == "older"


def _type_of(name: str) -> Any:
    if name in KNOBS:
        return KNOBS[name].annotation
    if name == LEVELS:
        return tuple[int, ...]
    if name in OLD_NAMES or name.startswith(("env_args.", "verl.")) or _is_older(name):
        return Any
    if name in PARTS:
        inner = ", ".join(leaf for leaf in KNOBS if leaf.startswith(f"{name}."))
        raise ConfigError(f"{name} is a group of settings; set one of {inner}")
    raise ConfigError(f"there is no setting {name!r}; the nearest is {nearest(name, (*KNOBS, LEVELS))}")


def _sentence(error: ValidationError) -> str:
    """`steps must be a valid integer, not 'abc'`"""
    first = error.errors(include_url=False)[0]
    name = ".".join(part for part in first["loc"] if isinstance(part, str))
    if first["type"] == "json_invalid":
        return "a setting holds text that is not valid Unicode"
    if first["type"] == "string_pattern_mismatch":  # of the only knob with a pattern
        return f"{name} must be joint, alternating, world_model_first:N or hierarchical:N, not {first['input']!r}"
    if first["type"] == "too_short":
        return f"{name} must name at least one"
    choices = re.findall(r"'([^']+)'", first.get("ctx", {}).get("expected", ""))
    words = re.sub(r"^\w+ should", f"{name} must", first["msg"]).replace("an object", "a mapping")
    words = words if words.startswith(name) else f"{name}: {words}"
    return f"{words}, not {first['input']!r}{did_you_mean(str(first['input']), choices)}"
