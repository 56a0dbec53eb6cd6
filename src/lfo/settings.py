"""Settings as a tree of dataclasses: their dotted names, values as typed or in a file, and checks of both.

    leaves(RunConfig)["rollout.prompts"]      -> int
    parse("1e-4", float)                      -> 0.0001
    typed("8", int, "rollout.prompts")        ConfigError: rollout.prompts must be a whole number (int), not '8'

Knows no setting by name: which there are is said in `config`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lfo.errors import ConfigError

hints_of = cache(get_type_hints)  # resolving them is most of the time of a check


def leaves(part: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> annotation, for every setting."""
    found: dict[str, Any] = {}
    for name, annotation in hints_of(part).items():
        if dataclasses.is_dataclass(annotation):
            found.update(leaves(cast(type, annotation), f"{prefix}{name}."))
        else:
            found[prefix + name] = annotation
    return found


def did_you_mean(value: str, choices: Sequence[str]) -> str:
    close = get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """The dotted name that is most like this one, as a whole and in its last word."""

    def likeness(other: str) -> float:
        whole = SequenceMatcher(None, name, other).ratio()
        return whole + SequenceMatcher(None, name.rpartition(".")[2], other.rpartition(".")[2]).ratio()

    return max(names, key=likeness)


def dotted(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of a nested mapping by their dotted names.

    >>> list(dotted({"trainer": {"nnodes": 2, "logger": []}, "seed": 0}))
    [('trainer.nnodes', 2), ('trainer.logger', []), ('seed', 0)]
    """
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from dotted(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def assign(tree: dict[str, Any], name: str, value: Any) -> None:
    """Set a value of a nested mapping by its dotted name."""
    *path, last = name.split(".")
    for key in path:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{name} cannot be set: {key} holds a value already")
    tree[last] = value


def read_yaml(path: Path) -> dict[Any, Any]:
    """The mapping in a file, interpolations as they are written."""
    try:
        tree = OmegaConf.to_container(OmegaConf.create(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except (YAMLError, UnicodeDecodeError, OmegaConfBaseException) as error:
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"the config {path}{line} is not valid YAML") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"the config {path} must be a mapping of settings")
    return tree


def parse(text: str, annotation: Any) -> Any:
    """A value as typed on a command line. Text stays as it is, so that a folder named 1e5 keeps its name."""
    origin = get_origin(annotation)
    if annotation is str or origin is Literal:
        return text
    if origin in (Union, UnionType) and str in get_args(annotation):
        return None if text.lower() in ("", "none", "null") else text
    if origin is tuple and not text.startswith(("[", "$")):
        text = f"[{text}]"
    try:
        return OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))["value"]  # type: ignore[index]
    except (YAMLError, OmegaConfBaseException):
        return text  # the check of its type says what was expected


def typed(value: Any, annotation: Any, name: str) -> Any:
    """The value as its annotation wants it, or a ConfigError that says what was expected."""
    origin, arguments = get_origin(annotation), get_args(annotation)
    if dataclasses.is_dataclass(annotation):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} is a group of settings, not {value!r}")
        hints = hints_of(annotation)
        prefix = f"{name}." if name else ""
        return cast(type, annotation)(**{key: typed(inner, hints[key], prefix + key) for key, inner in value.items()})
    if origin is Literal:
        if value not in arguments:
            hint = did_you_mean(str(value), arguments)
            raise ConfigError(f"{name} must be one of {', '.join(arguments)}, not {value!r}{hint}")
        return value
    if origin in (Union, UnionType):
        inner = next(argument for argument in arguments if argument is not NoneType)
        return None if value is None else typed(value, inner, name)
    if origin is tuple:
        variadic = arguments[-1] is Ellipsis
        if not isinstance(value, list | tuple) or not (variadic or len(value) == len(arguments)):
            length = "" if variadic else f"{len(arguments)} "
            raise ConfigError(f"{name} must be a list of {length}values in brackets, not {value!r}")
        inner = arguments[:1] * len(value) if variadic else arguments
        return tuple(
            typed(item, item_type, f"each value of {name}") for item, item_type in zip(value, inner, strict=True)
        )
    if origin is Mapping:
        if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
            raise ConfigError(f"{name} must be a mapping from names to values, not {value!r}")
        return dict(value)
    if annotation is float and type(value) is int:
        value = float(value)
    if type(value) is not annotation or (annotation is float and not math.isfinite(value)):
        raise ConfigError(f"{name} must be {_IN_WORDS[annotation]}, not {value!r}")
    if annotation is str and not value.isprintable():  # YAML would not give every kind of line break back
        raise ConfigError(f"{name} must be printable text, not {value!r}")
    return value


_IN_WORDS = {
    bool: "true or false (bool)",
    int: "a whole number (int)",
    float: "a finite number (float)",
    str: "text (str)",
}
