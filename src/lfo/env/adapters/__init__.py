"""Environments of other libraries by name: `env=textarena:FrozenLake-v0`. The one table of the reserved words.

Each word has a module in this package with a class `Adapter`, which is given what follows the colon and the run's
`env_args`. This module imports none of them: a config is read without the libraries.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from lfo.errors import ConfigError

# The word before the colon -> the module that knows its library; each word is also the name of an extra.
ADAPTERS: Mapping[str, str] = {
    "gymnasium": "gymnasium_env",
    "textarena": "textarena_game",
    "openenv": "openenv_server",
    "verifiers": "verifiers_env",
    "verl": "verl_project",
    "scienceworld": "scienceworld_task",
}


def adapter_word(env: str) -> str | None:
    """The reserved word before the colon, None where there is none.

    >>> adapter_word("textarena:FrozenLake-v0")
    'textarena'
    """
    word, colon, name = env.partition(":")
    return word if colon and name and word in ADAPTERS else None


def adapter_class(env: str) -> Any:
    """The class behind a name such as `textarena:FrozenLake-v0`; its library is imported only here."""
    word = env.partition(":")[0]
    try:
        return importlib.import_module(f"{__name__}.{ADAPTERS[word]}").Adapter
    except ImportError as error:
        missing = (error.name or word).partition(".")[0]
        raise ConfigError(
            f"env={env} needs {missing}, which is not installed: pip install 'learn-from-observation[{word}]'"
        ) from error
