"""Read settings from command lines and files. This module knows no setting by name; `config` does.

parse("1e-4", float)                                -> 0.0001
dict(dotted({"rollout": {"prompts": 8}}))           -> {"rollout.prompts": 8}
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from difflib import SequenceMatcher, get_close_matches
from itertools import chain
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from lfo.errors import ConfigError

Setting = tuple[str, Any]  # dotted name, value
MOST_CHARACTERS = 100_000  # of a config; that of a run has two thousand


def did_you_mean(value: str, choices: Sequence[str]) -> str:
    close = get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; did you mean {close[0]}?" if close else ""


def nearest(name: str, names: Iterable[str]) -> str:
    """Return the most similar dotted name; the part after the last dot counts twice."""

    def likeness(other: str) -> float:
        whole = SequenceMatcher(None, name, other).ratio()
        return whole + SequenceMatcher(None, name.rpartition(".")[2], other.rpartition(".")[2]).ratio()

    return max(names, key=likeness)


def dotted(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[Setting]:
    """Return the values of a nested mapping by their dotted names.

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
            raise ConfigError(f"{name} cannot be set: {key} is not a group of settings")
    tree[last] = value


def read_yaml(path: Path, *, saved: bool = False) -> dict[Any, Any]:
    """Return the mapping of a file, with interpolations unresolved.

    `saved`: the file is the config of a run, which may be a stranger's. It has values only: an interpolation could put
    an environment variable of this machine, such as a password, into the address of a server.
    """
    try:
        text = _bounded_text(path)
        tree = OmegaConf.to_container(OmegaConf.create(text))
    except OSError as error:
        raise ConfigError(f"cannot read the config {path}: {error.strerror}") from error
    except RecursionError as error:
        raise ConfigError(f"the config {path} is nested too deeply") from error
    except (YAMLError, ValueError, OmegaConfBaseException) as error:  # ValueError: no UTF-8, or a date that is none
        mark = getattr(error, "problem_mark", None)
        line = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"the config {path}{line} is not valid YAML") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"the config {path} must be a mapping of settings")
    if saved and "${" in str(tree):
        raise ConfigError(f"the config {path} contains ${{...}}, which no saved run has; write the value in its place")
    return tree


def _bounded_text(path: Path) -> str:
    """Return the text of a config, whose aliases do not repeat more than a config can hold."""
    with open(path, "rb") as file:
        content = file.read(MOST_CHARACTERS + 1)
    if len(content) > MOST_CHARACTERS:
        raise ConfigError(f"the config {path} is too long: it must have at most {MOST_CHARACTERS:,} bytes")
    text = content.decode("utf-8")
    if "*" in text and _written_out(yaml.compose(text, Loader=yaml.SafeLoader), {}) > MOST_CHARACTERS:
        raise ConfigError(f"the config {path} repeats too much by aliases, such as *name; write it without them")
    return text


def _written_out(node: yaml.Node | None, known: dict[int, int]) -> int:
    """Return about how many characters a part of a config has if each alias is replaced by what it stands for."""
    if node is None or isinstance(node, yaml.ScalarNode):
        return 1 + len(node.value) if node else 0
    if id(node) not in known:
        known[id(node)] = MOST_CHARACTERS  # until it is known: a part that holds itself has no end
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        known[id(node)] = 1 + sum(_written_out(part, known) for part in parts)
    return known[id(node)]


def parse(text: str, annotation: Any) -> Any:
    """Return the value of command-line text. Text for a `str` stays as it is: a folder may be named 1e5."""
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
        return text  # pydantic then reports the type
