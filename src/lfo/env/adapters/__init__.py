"""Environments of other libraries by name, such as `env=textarena:FrozenLake-v0`: the table of reserved words.

Each word has a module in this package with a class `LibraryEnvironment`, whose arguments are the text after the colon
and the run's `env_args`. This module imports none of them, so that a config can be read without the libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
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
}


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
        return importlib.import_module(f"{__name__}.{ADAPTERS[word]}").LibraryEnvironment
    except ImportError as error:
        missing = (error.name or word).partition(".")[0]
        raise ConfigError(
            f"env={env} needs {missing}, which is not installed: pip install 'learn-from-observation[{word}]'"
        ) from error
