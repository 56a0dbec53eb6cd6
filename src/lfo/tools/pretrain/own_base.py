"""The general base in somebody's own environment: it practises tools that are not known, once for all runs.

    config = with_practised_base(config, make_environment)

The base is kept beside the runs (`runs/.bases/Safes-1a2b3c4d`). Its name has a digest of everything that practice
depends on: the environment's name, arguments, tools, openings and source, and the room of a rollout. So other runs and
commands find it; in a changed environment a new one practises.
"""

from __future__ import annotations

import fcntl
import hashlib
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from lfo.atomic import writing
from lfo.config import RunConfig
from lfo.config.presets import PRESETS
from lfo.env.adapters import adapter_word
from lfo.env.answers import opening_of, tools_of
from lfo.env.interface import EnvironmentFactory, tasks_of
from lfo.env.patience import ask
from lfo.env.worlds.shipped import SHIPPED
from lfo.loading import EMBEDDED, GENERAL, pick_device
from lfo.model.catalog import PROVENANCE, practice_of
from lfo.tools.pretrain.recipe import Progress
from lfo.tools.pretrain.syntax import SYNTAX, teach_syntax

VERSION = 4  # of practice: another one makes other bases
FOLDER = ".bases"  # beside the runs; hidden, because it holds no runs
OPENINGS = 8
ROOM = 2  # times the longest state of practice: requests may be longer, and rollouts have more calls


def with_practised_base(
    config: RunConfig,
    make_environment: EnvironmentFactory,
    *,
    progress: Progress = lambda phase, done, of, words: None,
    say: Callable[[str], None] = lambda words: None,
) -> RunConfig:
    """Return the config with a base that knows the tools of the environment; let the general one practise if need be.

    `say` is told in one sentence which base that is and what it took.
    """
    timeout = config.rollout.environment_timeout
    if config.model != EMBEDDED or config.practice == "off" or config.init_from or adapter_word(config.env) == "logs":
        return config  # nobody can practise in logs
    tools = ask(lambda: tools_of(make_environment()), timeout=timeout, what=f"tools of {config.env}")
    if knows(tools):
        return config
    about = ask(lambda: _about(config, make_environment, tools), timeout=timeout, what=f"the environment {config.env}")
    folder = Path(config.output_dir).parent / FOLDER / _name(config.env, about)
    with _locked(folder):
        if not (folder / PROVENANCE).is_file():
            say(
                f"the embedded bases do not know the tools of {config.env}: one practises them first, which takes a "
                "few minutes (practice=off: not; or name a model that calls tools)"
            )
            teach_syntax(
                GENERAL,
                make_environment,
                replace(SYNTAX, row=config.rollout.max_context),
                folder,
                device=pick_device(config.device).type,
                progress=progress,
                timeout=timeout,
                about=about,
            )
    used = practice_of(str(folder))
    say(f"model={folder}: the general base after {used.get('rollouts', 0):,} rollouts in {used.get('tasks', 0)} tasks")
    return fitted(config, str(folder))


def fitted(config: RunConfig, folder: str) -> RunConfig:
    """Return the config with a practised base, and room in a state of its world model for what is looked up.

    The room of the preset is for phone calls. One that was set otherwise stays.
    """
    world = config.world_model
    if world.state_tokens != PRESETS["tiny"]["world_model.state_tokens"]:
        return replace(config, model=folder)
    wanted = min(ROOM * practice_of(folder).get("longest_state", 0), config.rollout.max_context // 2)
    return replace(config, model=folder, world_model=replace(world, state_tokens=max(world.state_tokens, wanted)))


def knows(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the embedded base was built with these tools: those of the environments that ship with it."""
    shipped = {_signature(tool) for each in SHIPPED.values() for tool in each.made_by().tools()}
    return all(_signature(tool) in shipped for tool in tools)


def _signature(tool: Mapping[str, Any]) -> tuple[str, ...]:
    function = tool["function"]
    return function["name"], *sorted((function.get("parameters") or {}).get("properties", {}))


def _about(config: RunConfig, make_environment: EnvironmentFactory, tools: Sequence[Any]) -> dict[str, Any]:
    """Return what practice in an environment depends on."""
    environment = make_environment()
    tasks = tasks_of(environment, "train")
    openings = [[each.content for each in opening_of(make_environment(), task)] for task in tasks[:OPENINGS]]
    source = ""
    with suppress(OSError, TypeError):
        source = inspect.getsource(sys.modules[type(environment).__module__])
    seen = json.dumps([tools, len(tasks), openings, source], sort_keys=True, default=str)
    return {
        "version": VERSION,
        "env": config.env,
        "env_args": json.loads(json.dumps(config.env_args, sort_keys=True, default=str)),
        "room": config.rollout.max_context,
        "seen": hashlib.sha256(seen.encode()).hexdigest(),
    }


def _name(env: str, about: Mapping[str, Any]) -> str:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:8]
    word = re.sub(r"[^\w-]+", "-", env.rpartition(":")[2]).strip("-")[:40] or "environment"
    return f"{word}-{digest}"


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process practise at a time; others wait, and find the base."""
    with writing(f"the base {folder}"):
        folder.parent.mkdir(parents=True, exist_ok=True)
        lock = (folder.parent / f".{folder.name}.lock").open("w")
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
