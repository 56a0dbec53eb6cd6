"""Environments of other libraries by name, such as `env=textarena:FrozenLake-v0`: the table of reserved words.

Each word has a module in this package with a class `LibraryEnvironment`, whose arguments are the text after the colon
and the run's `env_args`. This module imports none of them, so that a config can be read without the libraries.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lfo.errors import ConfigError

# The word before the colon -> its module; each word is also the name of a pip extra.
ADAPTERS: Mapping[str, str] = {
    "gymnasium": "gymnasium_env",
    "textarena": "textarena_game",
    "openenv": "openenv_server",
    "verifiers": "verifiers_env",
    "verl": "verl_project",
    "scienceworld": "scienceworld_task",
    "logs": "logged",  # of no library: what `lfo record` has written
}

# Where a library has changed so much that another version of it needs another module.
OTHER_VERSIONS: Mapping[str, str] = {"verifiers": "verifiers_v1"}


def adapter_word(env: str) -> str | None:
    """Return the reserved word before the colon, or None if there is none.

    >>> adapter_word("textarena:FrozenLake-v0")
    'textarena'
    """
    word, colon, name = env.partition(":")
    return word if colon and name and word in ADAPTERS else None


def adapter_class(env: str) -> Any:
    """Return the class of a name such as `textarena:FrozenLake-v0`; its library is imported only here."""
    word = env.partition(":")[0]
    try:
        return _class_in(ADAPTERS[word])
    except ImportError as error:
        missing, reason = (error.name or word).partition(".")[0], error
    if not _is_installed(missing):
        raise ConfigError(
            f"env={env} needs {missing}, which is not installed: pip install 'learn-from-observation[{word}]'"
        ) from reason
    try:
        return _class_in(OTHER_VERSIONS.get(word, ADAPTERS[word]))
    except ImportError as error:
        raise ConfigError(
            f"env={env}: the installed version of {missing} cannot be used ({error}); one that can: pip install "
            f"'learn-from-observation[{word}]'"
        ) from error


def _class_in(module: str) -> Any:
    return importlib.import_module(f"{__name__}.{module}").LibraryEnvironment


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # None stands for it in sys.modules
        return False


def refuse_code_elsewhere(env: str, env_args: Mapping[str, Any], remedy: str = "") -> None:
    """Raise a `ConfigError` if an `env` of a run's config names a verl project that is not in the current folder.

    Such a project is code that is found by its path. The config may be a stranger's, who has put both on this machine.
    """
    for path in _code_of_project(env, env_args):
        here, there = Path.cwd().resolve(), path.resolve()
        if here != there and here not in there.parents:
            raise ConfigError(
                f"env={env} of a run names {path}, which is code outside of the current folder; if you trust it, run "
                f"this command in a folder that holds it{remedy}"
            )


def _code_of_project(env: str, env_args: Mapping[str, Any]) -> Iterator[Path]:
    """Yield the folder of a verl project and the files in it that are named; nothing for other environments."""
    named = env.partition(":")[2] if adapter_word(env) == "verl" else env_args.get("name")
    if adapter_word(env) == "verl" or env.startswith(f"{__name__}.{ADAPTERS['verl']}:"):
        folder = Path(str(named)).expanduser()
        yield folder
        for part in ("tool_config", "function_tools", "reward"):
            yield folder / str(env_args.get(part) or "")
