"""The evaluation of an untrained base, made once and kept for other runs that would repeat it exactly.

    kept = kept_evaluation(config, make_environment, base=folder, device="cpu")     # None: it cannot be known to repeat
    row, rollouts, predictions = kept.of(measure)

It is kept beside the runs (`runs/.evaluations/1a2b3c4d....json`). The name is a digest of everything that it depends
on: settings, weights, the code of this package, versions and machine. Only environments that ship with the package are
known by their code; any other may read what no digest covers, so it is always played.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from importlib import metadata, resources
from pathlib import Path
from typing import Any

from lfo.atomic import write_json_atomic
from lfo.config import RunConfig
from lfo.config.knobs import by_name
from lfo.env.interface import EnvironmentFactory
from lfo.env.patience import QuietFactory
from lfo.env.worlds.shipped import SHIPPED

logger = logging.getLogger(__name__)

FOLDER = ".evaluations"  # beside the runs; hidden, because it holds no runs
# Settings that change nothing before the first step: adapters start as zeros, whatever the seed.
_LATER = frozenset(
    ("preset", "seed", "output_dir", "steps", "checkpoint_every", "trackers", "eval.every", "eval.final_splits")
)
_LIBRARIES = ("torch", "transformers", "tokenizers", "numpy", "scipy")

Evaluation = tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]  # metrics, rollouts, predictions


@dataclass(frozen=True, slots=True)
class KeptEvaluation:
    path: Path

    def of(self, measure: Callable[[], Evaluation]) -> Evaluation:
        """Return what was kept; if nothing was, or if it is damaged, measure and keep it."""
        with suppress(OSError, ValueError, TypeError):
            metrics, rollouts, predictions = json.loads(self.path.read_bytes())
            found = dict(metrics), list(rollouts), list(predictions)
            logger.info("the untrained base was evaluated before: %s", self.path)
            return found
        measured = measure()
        with suppress(OSError):  # a run does not need it
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_json_atomic(self.path, measured)
        return measured


def kept_evaluation(
    config: RunConfig, make_environment: EnvironmentFactory, *, base: Path, device: str
) -> KeptEvaluation | None:
    """Return the place of the first evaluation of a run; None if what it depends on is not known."""
    shipped = SHIPPED.get(config.env)
    known = (
        shipped is not None
        and isinstance(make_environment, QuietFactory)
        and make_environment.func is shipped.made_by
        and dict(make_environment.keywords) == config.env_args
    )
    if not known or config.init_from or not base.is_dir():
        return None
    settings = {name: value for name, value in by_name(asdict(config)) if not _is_later(name)}
    depends = {
        "settings": settings,
        "base": _digest_of(base),
        "code": _code(),
        "versions": {name: metadata.version(name) for name in _LIBRARIES},
        "machine": [platform.node(), platform.machine(), platform.python_version(), device],
        "threads": os.environ.get("OMP_NUM_THREADS"),
    }
    text = json.dumps(depends, sort_keys=True, default=str)
    name = f"{hashlib.sha256(text.encode()).hexdigest()}.json"
    return KeptEvaluation(Path(config.output_dir).absolute().parent / FOLDER / name)


def _is_later(name: str) -> bool:
    return name in _LATER or name.startswith("optimizer.") or name.endswith("learning_rate")


@cache  # the code of a process does not change
def _code() -> str:
    return _digest_of(Path(str(resources.files("lfo"))))


def _digest_of(folder: Path) -> str:
    """Return a digest of the names and contents of all files below a folder, except compiled code."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            digest.update(f"{path.relative_to(folder)}\0{path.stat().st_size}\0".encode())
            with path.open("rb") as file:
                digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
