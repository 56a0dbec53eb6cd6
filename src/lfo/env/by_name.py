"""Find the class that `env=package.module:Class` names, and keep the code of run folders out of this process.

A run folder is data, and may be a stranger's: its config names an environment and the arguments of its class. So

- the module is an installed one or one of the current folder: `hold_as_data(run)` lets nobody in this process import a
  module below the run;
- the name must be that of an environment class, or of a factory marked with `makes_environments`. This is known before
  anything is called: `env: os:system` calls nothing.

The module itself is imported, which runs its top level. Python's own modules are refused before that, because some act
when they are imported (`antigravity` opens a browser) and none has an environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Iterator
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from typing import Any

from lfo.env.interface import MARK, METHODS, Environment
from lfo.errors import ConfigError, first_line

_held: dict[Path, Path] = {}  # each form of a run folder's path -> the path as it was given
_INSTALLED = frozenset({"site-packages", "dist-packages"})


def hold_as_data(run: Path) -> None:
    """Refuse, from now on and for the whole process, to import any module below this folder."""
    _held.update(dict.fromkeys(_forms(run), run))
    if _Finder not in sys.meta_path:
        ours = (index for index, finder in enumerate(sys.meta_path) if finder is PathFinder)
        sys.meta_path.insert(next(ours, len(sys.meta_path)), _Finder)


def run_around(path: str | Path) -> Path | None:
    """Return the run folder that a path lies in, if it is held as data; links do not hide it."""
    above = (parent for form in _forms(Path(path)) for parent in (form, *form.parents))
    return next((_held[each] for each in above if each in _held), None)


def refuse_code_of_a_run(file: str | Path) -> None:
    """Raise an `ImportError` for a file of a run folder, which is data."""
    run = run_around(file)
    if run is not None:
        raise ImportError(
            f"{file} lies in the run folder {run}, and a run folder is data, not code; if you trust this file, copy it "
            "to the current folder"
        )


def _forms(path: Path) -> Iterator[Path]:
    yield Path(os.path.abspath(path))
    yield Path(os.path.realpath(path))


class _Finder(PathFinder):
    """Python's own finder of modules in `sys.path`, without those of run folders; it stands in front of it."""

    @classmethod
    def find_spec(cls, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = super().find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None:  # None: a folder without __init__.py, which has no code
            refuse_code_of_a_run(spec.origin)
        return spec


def find_modules_here() -> None:
    """Allow imports from the current folder: for the script `lfo`, sys.path starts with its own folder.

    Not from within a run folder, where a file could also stand in for an installed module of its name.
    """
    here = str(Path.cwd())
    if here not in sys.path and run_around(here) is None:
        sys.path.insert(0, here)


def refuse_pythons_own(module: str) -> None:
    """Raise an `ImportError` for a module of Python's standard library, before it is imported."""
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None or spec.origin is None:
        return
    home = Path(os.__file__).parent
    inside = home in Path(spec.origin).parents and _INSTALLED.isdisjoint(Path(spec.origin).parts)
    if inside or spec.origin in ("built-in", "frozen"):
        raise ImportError(f"{module} is a module of Python itself, which has no environments")


def environment_named(name: str, *, setting: str = "env", hint: str = "") -> Any:
    """Return the environment class, or marked factory, at `package.module:Class`; call nothing."""
    module, _, attribute = name.partition(":")
    find_modules_here()
    try:
        refuse_pythons_own(module)
        imported = importlib.import_module(module)
        found = getattr(imported, attribute, None)
    except ImportError as error:
        run = run_around(Path.cwd())
        hint = hint if run is None else f"; the current folder lies in the run folder {run}, which is data, not code"
        hint = hint + _other_package(module) if isinstance(error, ModuleNotFoundError) else ""
        raise ConfigError(f"{setting}={name} cannot be imported: {error}{hint}") from error
    except (Exception, SystemExit) as error:  # a script may end itself when it is imported
        reason = f"{type(error).__name__}: {first_line(error)}"
        raise ConfigError(f"{setting}={name} cannot be imported: {reason}") from error
    if found is None:
        raise ConfigError(f"{setting}={name}: the module {module} has no {attribute}{_environments_of(imported)}")
    refuse_no_environment(found, f"{setting}={name}")
    return found


def _environments_of(module: Any) -> str:
    """Say which environment classes a module has."""
    classes = [name for name, each in vars(module).items() if inspect.isclass(each) and each is not Environment]
    found = [name for name in classes if all(callable(getattr(vars(module)[name], each, None)) for each in METHODS)]
    return f"; it has {', '.join(found)}" if found else ""


def _other_package(module: str) -> str:
    """Say where Python found the package of a missing module: an installed one wins over a bare folder."""
    package = module.partition(".")[0]
    places = list(getattr(sys.modules.get(package), "__path__", ()))
    return f"; Python found the package {package} in {places[0]}" if places and package != module else ""


def refuse_no_environment(found: Any, name: str) -> None:
    """Raise a `ConfigError` unless this is an environment class, with or without arguments, or a marked factory."""
    while isinstance(found, partial) and not _is_marked(found):
        found = found.func
    if _is_marked(found) and callable(found):
        return
    needed = f"{name} is not an environment: it needs the methods {', '.join(METHODS[:-1])} and {METHODS[-1]}"
    if not inspect.isclass(found):
        kind = "a function" if inspect.isroutine(found) else f"an object of type {type(found).__name__}"
        raise ConfigError(
            f"{needed}, and this is {kind}; name a class, or mark a function of your own that makes one with "
            "@makes_environments"
        )
    if missing := [method for method in METHODS if not callable(getattr(found, method, None))]:
        raise ConfigError(f"{needed}, and this class has no {' and no '.join(missing)}")


def _is_marked(found: Any) -> bool:
    return inspect.getattr_static(found, MARK, None) is True  # objects that answer to every name are not marked
