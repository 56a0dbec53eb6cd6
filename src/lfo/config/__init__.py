"""Read, check and compare the settings of a run.

    load_config(["preset=tiny", "coupling=shared", "world_model.weight=0.5"]) -> RunConfig

Settings override each other in this order: defaults, preset, algorithm, the file of `config=FILE`, command line.
OmegaConf parses and merges them, so `output_dir=runs/${algo}-${seed}` works. pydantic checks types and ranges.

    knobs      every setting with its default, range and help
    presets    the settings that `preset=` stands for; those of `algo=` are in `algorithms`
    checks     what must hold between settings
    older      the configs of older runs
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from lfo.config.algorithms import ALGORITHMS
from lfo.config.knobs import KNOBS, PARTS, SHIPPED_ENVIRONMENTS, RunConfig, by_name, flatten, marked
from lfo.config.older import OLD_NAMES, OLDER, RETIRED, modernise, newer_than, refuse_retired
from lfo.config.presets import PRESETS
from lfo.env.adapters import refuse_code_elsewhere
from lfo.env.by_name import hold_as_data
from lfo.errors import ConfigError
from lfo.settings import Setting, assign, did_you_mean, dotted, nearest, parse, read_yaml

logger = logging.getLogger(__name__)
_RUN = TypeAdapter(RunConfig)
METRICS = ("metrics.jsonl", "metrics.jsonl.gz")  # one of them lies beside the config of a run
LEVELS = "levels"  # short for env_args.levels
_FAMILIAR = {  # what other libraries call a setting -> what it is called here
    **dict.fromkeys(("lr", "learning_rate"), "policy.learning_rate"),
    **dict.fromkeys(("epochs", "num_epochs", "max_steps", "num_steps", "iterations"), "steps"),
    **dict.fromkeys(("batch_size", "train_batch_size"), "rollout.prompts"),
    **dict.fromkeys(("group_size", "num_generations"), "rollout.group_size"),
    **dict.fromkeys(("rank", "lora_rank", "r"), "lora.rank"),
    **dict.fromkeys(("model_name", "model_name_or_path", "base"), "model"),
    **dict.fromkeys(("environment", "env_name"), "env"),
    **dict.fromkeys(("output", "out", "output-dir"), "output_dir"),
    **dict.fromkeys(("algorithm", "method"), "algo"),
    "temperature": "rollout.temperature",
}
BESIDE_THE_EXPERIMENT = marked("beside")


def load_config(overrides: Sequence[str] = (), *, run: Path | None = None) -> RunConfig:
    """Return the checked config of `name=value` settings, which may include `preset=NAME` and `config=FILE`.

    `run` is a run folder whose saved config comes first, as for `lfo train --resume`. The config of a run, named either
    way, may be a stranger's: it has values only, and what could have code run must be typed again.
    """
    sources = [] if run is None else [run / "config.yaml"]
    typed: list[Setting] = []
    for position, override in enumerate(overrides):
        name, equals, text = override.partition("=")
        if not equals or not name:
            meant = _meant(override, [each for each in overrides[position + 1 :] if each != "="])
            raise ConfigError(f"a setting is written name=value, not {override!r}{meant and f': write {meant}'}")
        if name == "config":
            sources.append(Path(text))
        else:
            typed.append((name, parse(text, _type_of(name, text))))
    for name, _ in typed:
        if _is_older(name):
            raise ConfigError(f"there is no setting {name!r}: only saved runs of earlier versions have it")
    refuse_retired(typed)
    files: list[Setting] = []
    for path in sources:
        saved = path.parent == run or any((path.parent / name).exists() for name in METRICS)
        read = _read(path, saved=saved)
        # A new run ignores removed settings, of which `_read` has warned, but not retired ones.
        settings = [setting for setting in read if not _is_older(setting[0])]
        older = dotted({name: value for name, value in read if _is_older(name)})
        retired = ((name.removeprefix(f"{OLDER}."), value) for name, value in older)
        refuse_retired((each for each in retired if each[0] not in dict(typed)), f"{path}: ")
        if saved:
            hold_as_data(path.parent)
            _refuse_code(path, settings, {name for name, _ in typed})
        files += settings
    return _resolve(files, modernise(typed)[0])


def from_yaml(path: str | Path, *, known_only: bool = False) -> RunConfig:
    """Read the config of a run; its preset and the defaults supply what it omits.

    `known_only` skips unknown settings, so that runs of other versions can be read.
    """
    return _resolve(_read(Path(path), known_only=known_only, saved=True))


def from_mapping(settings: Mapping[str, Any]) -> RunConfig:
    """Return the checked config of nested mappings: the inverse of `dataclasses.asdict`."""
    try:
        return _RUN.validate_json(json.dumps(settings))  # strict validation accepts JSON lists as tuples
    except ValidationError as error:
        raise ConfigError(_sentence(error)) from error


def to_yaml(config: RunConfig) -> str:
    settings = {name: value for name, value in dataclasses.asdict(config).items() if name != OLDER or value}
    return OmegaConf.to_yaml(OmegaConf.create(settings))


def differences(one: RunConfig, other: RunConfig) -> dict[str, tuple[Any, Any]]:
    """Return the settings in which two configs differ, by dotted name."""
    ones, others = flatten(one), flatten(other)
    return {
        name: (ones.get(name), others.get(name)) for name in {**ones, **others} if ones.get(name) != others.get(name)
    }


def fingerprint(config: RunConfig, without: Iterable[str] = BESIDE_THE_EXPERIMENT) -> str:
    """Return 16 hex digits that are equal if two configs agree in all settings except `without`.

    The default excludes settings that do not change the experiment, and the seed. A group's name ("eval") excludes
    all of its settings.
    """
    excluded = set(without)
    for name in excluded - PARTS:
        _type_of(name)  # raises a ConfigError if the name is unknown
    kept = {name: value for name, value in flatten(config).items() if not {name, name.partition(".")[0]} & excluded}
    return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]


def experiment(config: RunConfig) -> str:
    """Return the fingerprint that the runs of one experiment share.

    Settings of the world model do not count for plain DAPO, which has none; `imagine.form` does not count if nothing is
    shown in it. `steps` does not count with a constant rate: a longer run begins as a shorter one does. `eval.every`
    counts only if evaluations change the world model's weight.
    """
    without = set(BESIDE_THE_EXPERIMENT)
    without |= {"world_model"} if config.is_plain_dapo else set()
    without |= set() if config.shows_replies else {"imagine.form"}
    without |= {"steps"} if config.optimizer.constant else set()
    return fingerprint(config, without - ({"eval.every"} if config.world_model.schedule == "adaptive" else set()))


def _resolve(files: Sequence[Setting], overrides: Sequence[Setting] = ()) -> RunConfig:
    """Apply the settings to the preset and algorithm that they choose, and check the result."""
    given = dict((*files, *overrides))
    arguments = SHIPPED_ENVIRONMENTS.get(str(given.get("env", RunConfig().env)), {})
    if LEVELS not in arguments:  # files of earlier versions have levels for every environment
        files = [setting for setting in files if setting[0] != LEVELS]
    tree = dataclasses.asdict(RunConfig(env_args=dict(arguments)))
    preset, algorithm = (str(given.get(name, KNOBS[name].default)) for name in ("preset", "algo"))
    of_preset, of_algorithm = PRESETS.get(preset, {}), ALGORITHMS.get(algorithm)
    tables = [*of_preset.items(), *(of_algorithm.settings.items() if of_algorithm else ())]
    if of_algorithm and {"engine": "local", **of_preset, **given}["engine"] == "local":
        tables += of_algorithm.local.items()
    for name, value in (*tables, *_spell_out((*files, *overrides))):
        assign(tree, name, value)
    try:
        return from_mapping(OmegaConf.to_container(OmegaConf.create(tree), resolve=True))  # type: ignore[arg-type]
    except OmegaConfBaseException as error:
        raise ConfigError(f"a setting cannot be resolved: {str(error).splitlines()[0]}") from error


def _spell_out(settings: Iterable[Setting]) -> Iterator[Setting]:
    """Replace `levels` by `env_args.levels`, and `env_args` by one setting for each argument."""
    for name, value in settings:
        if name == LEVELS:
            yield f"env_args.{LEVELS}", value if isinstance(value, list) else [value]
        elif name == "env_args" and isinstance(value, Mapping):
            yield from ((f"env_args.{key}", argument) for key, argument in value.items())
        else:
            yield name, value


def _read(path: Path, *, known_only: bool = False, saved: bool = False) -> list[Setting]:
    """Return the settings of a file by their present names."""
    tree = read_yaml(path, saved=saved)
    settings, removed = modernise(by_name(tree), complete=True)
    for name, value in removed.items():
        if name not in RETIRED:
            logger.warning("%s: %s=%s is no longer a setting; new runs ignore it", path, name, value)
        settings.append((f"{OLDER}.{name}", value))
    if known_only:
        settings = [each for each in settings if each[0] in KNOBS or each[0] == LEVELS or _is_older(each[0])]
    else:  # split verl's settings, so that a file adds to those of its preset
        settings = [
            each for name, value in settings for each in (dotted({name: value}) if name == "verl" else [(name, value)])
        ]
    for name, _ in settings:
        try:
            _type_of(name)
        except ConfigError as error:
            raise ConfigError(f"{error} (in {path})") from error
    # `levels` comes first, so that `env_args.levels` overrides it.
    return [*newer_than(tree, {name for name, _ in settings}), *sorted(settings, key=lambda each: each[0] != LEVELS)]


def _refuse_code(path: Path, saved: Sequence[Setting], typed: Collection[str]) -> None:
    """Raise a `ConfigError` for settings by which the config of a run could have its own code run.

    verl has dozens of them: classes, files, addresses, commands. The usual settings are numbers and single words.
    """
    if "env" not in typed:
        named = dict(saved)
        refuse_code_elsewhere(str(named.get("env", "")), named.get("env_args") or {}, ", or type env=... again")
    for name, value in saved:
        values = value if isinstance(value, list) else [value]
        plain = all(isinstance(each, int | float | None) or re.fullmatch(r"[\w-]*", str(each)) for each in values)
        acts = value and {"trust_remote_code", "finish_hook_cmd", "runtime_env"} & set(name.split("."))
        if name.startswith("verl.") and name not in typed and (acts or not plain):
            raise ConfigError(
                f"{name}={value} in {path} may name code, a command or a machine; if you trust it, type it again"
            )


def _is_older(name: str) -> bool:
    """Whether this is the value of a removed setting in a saved run."""
    return name.partition(".")[0] == OLDER


def familiar(name: str) -> str | None:
    """Return the setting that a name stands for, here or in other libraries: `lr` is `policy.learning_rate`."""
    is_ours = name in KNOBS or name in (LEVELS, "preset", "config") or name.startswith(("env_args.", "verl."))
    return name if is_ours else _FAMILIAR.get(name)


def _meant(word: str, rest: Sequence[str]) -> str:
    """Return the setting that a word without `=` may stand for, or ""."""
    if (name := familiar(word)) and rest:
        return f"{name}={rest[0]}"
    if word.endswith((".yaml", ".yml")):
        return f"config={word}"
    choices = (("preset", PRESETS), ("algo", ALGORITHMS), ("env", SHIPPED_ENVIRONMENTS))
    known = next((f"{name}={word}" for name, words in choices if word in words), "")
    return f"env={word}" if re.fullmatch(r"[^:=\s]+:[^=\s]+", word) else known


def _type_of(name: str, text: str = "") -> Any:
    if name in KNOBS:
        return KNOBS[name].annotation
    if name == LEVELS:
        return tuple[int, ...]
    if name in OLD_NAMES or name.startswith(("env_args.", "verl.")) or _is_older(name):
        return Any
    if name in PARTS:
        inner = ", ".join(leaf for leaf in KNOBS if leaf.startswith(f"{name}."))
        raise ConfigError(f"{name} is a group of settings; set one of {inner}")
    close = _FAMILIAR.get(name) or nearest(name, (*KNOBS, LEVELS))
    raise ConfigError(f"there is no setting {name!r}; the nearest is {close}{text and f': write {close}={text}'}")


def _sentence(error: ValidationError) -> str:
    """Return pydantic's first error as one sentence, such as `steps must be a valid integer, not 'abc'`."""
    first = error.errors(include_url=False)[0]
    name = ".".join(part for part in first["loc"] if isinstance(part, str))
    if first["type"] == "json_invalid":
        return "a setting contains text that is not valid Unicode"
    if first["type"] == "string_pattern_mismatch":  # of the only knob with a pattern
        numbered = "world_model_first:N, explore_first:N or hierarchical:N"
        return f"{name} must be joint, alternating, adaptive, {numbered}, not {first['input']!r}"
    if first["type"] == "too_short":
        return f"{name} must have at least one value"
    choices = re.findall(r"'([^']+)'", first.get("ctx", {}).get("expected", ""))
    words = re.sub(r"^\w+ should", f"{name} must", first["msg"]).replace("an object", "a mapping")
    words = words if words.startswith(name) else f"{name}: {words}"
    return f"{words}, not {first['input']!r}{did_you_mean(str(first['input']), choices)}"
