"""A run on disk: one readable folder that stays consistent if the process is killed at any time.

    runs/x/
      config.yaml                   the complete config
      data.json                     the tasks of its evaluation
      metrics.jsonl                 one row for each step; archived runs may have it compressed, as metrics.jsonl.gz
      rollouts/step-000010.jsonl    sample rollouts
      predictions/step-000010.jsonl predicted replies beside the true ones
      checkpoints/step-000010/      the state of the engine, and `checkpoint.json`, written last (checkpoints.py)
      checkpoints/last, best        each names a checkpoint; all others are removed
      adapters/policy, world_model  ordinary PEFT folders

Files and folders are complete as soon as they have their names: they are written under a temporary name, synced and
renamed. One process at a time may write; the kernel releases the lock when that process ends. The engine decides what
a checkpoint contains. A resumed run first verifies every checkpoint: it removes nothing that it could not read.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import logging
import math
import os
import re
import shutil
import stat
import zlib
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from lfo.atomic import sync, temporary_path, write_folder_atomic, write_json_atomic, write_text_atomic, writing
from lfo.checkpoints import (
    Checkpoint,
    best_checkpoint,
    complete_checkpoints,
    fingerprint,
    free_path,
    is_checkpoint,
    latest_checkpoint,
    put_aside,
    seal,
    step_name,
    step_of,
    survey,
)
from lfo.config import RunConfig, differences, from_yaml, to_yaml
from lfo.errors import ConfigError, DamageError, DataError, UsageError

# A resumed run keeps its config, except for keys that do not change the next step, and `steps`: a longer run is
# allowed, and its learning rate then follows the schedule of the new length.
CHANGEABLE_ON_RESUME = frozenset(
    {"steps", "output_dir", "device", "micro_batch_tokens", "checkpoint_every", "trackers"}
)

NOTHING = hashlib.sha256().hexdigest()
CONFIG_SEAL = "# SHA-256 of what follows: "  # the first line of config.yaml

logger = logging.getLogger(__name__)


def refuse_used_folder(path: str | Path) -> None:
    """Raise a `UsageError` if a new run cannot start in this folder; it need not exist."""
    path = Path(path)
    if (path / "config.yaml").is_file():
        raise UsageError(
            f"{path} already contains a run; continue it with --resume {path} or choose another output_dir"
        )
    # A run that was killed before its first complete file leaves only the lock and temporary files.
    if path.is_dir() and any(entry.name != ".lock" and not _is_leftover(entry) for entry in path.iterdir()):
        raise UsageError(f"{path} is not empty; choose another output_dir")


class RunDirectory:
    """The only writer of a run folder; use it in a `with` block, which releases the lock."""

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock
        self._resumed_from: Checkpoint | None = None
        self._damaged: frozenset[Path] = frozenset()  # checkpoints that could not be read: never removed

    @classmethod
    def create(cls, path: str | Path, config: RunConfig, resume: bool = False) -> RunDirectory:
        """Start a run in an empty folder, or resume the run in the folder."""
        path = Path(path)
        with writing(f"the run {path}"):
            path.mkdir(parents=True, exist_ok=True)
            if not resume:
                refuse_used_folder(path)
            elif not (path / "config.yaml").is_file():
                raise UsageError(f"{path} contains no run to resume")
            _refuse_links(path)
            run = cls(path, _take_lock(path))
            try:
                if resume:
                    _refuse_damaged_config(path / "config.yaml")
                    _check_resumable(from_yaml(path / "config.yaml"), config)
                    _refuse_fewer_steps(path, config)
                    run._choose_checkpoint()  # before anything changes
                _remove_leftovers(path)
                run._point_at_checkpoints()
                write_text_atomic(path / "config.yaml", _sealed(to_yaml(config)))
            except BaseException:
                run.close()
                raise
        return run

    def close(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def __enter__(self) -> RunDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def adapters(self) -> Path:
        return self.path / "adapters"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    def append_metrics(self, row: Mapping[str, Any]) -> None:
        """Append the row of one step; numbers that are not finite are written as null."""
        if not isinstance(row.get("step"), int):
            raise ValueError("a row of metrics needs an integer `step`")
        line = (json.dumps(_finite(row), allow_nan=False) + "\n").encode()
        with self._writing("the metrics"), open(self.metrics, "ab", buffering=0) as file:
            while line:
                line = line[file.write(line) :]

    def _choose_checkpoint(self) -> None:
        """Choose the newest whole checkpoint; refuse to resume if that would lose something without a word."""
        whole, damaged = survey(self.path)
        if not whole and damaged:
            raise DamageError(
                f"{self.path} cannot be resumed, because none of its checkpoints is whole: "
                f"{'; '.join(damaged.values())}; restore it from a copy, or start a new run in another folder; nothing "
                "was changed"
            )
        if not whole and (self.adapters.exists() or metrics_file(self.path) != self.metrics):
            raise UsageError(f"{self.path} has ended and has no checkpoint left to resume from; start a new run")
        self._resumed_from = checkpoint = whole[-1] if whole else None
        self._refuse_other_metrics(checkpoint)
        if checkpoint is None:
            logger.warning(f"{self.path} has no checkpoint yet, so training starts again at step 1")
        self._damaged = frozenset(damaged)
        for path, flaw in damaged.items():
            newer = checkpoint is not None and step_of(path) > checkpoint.step
            kept = put_aside(path) if newer and path.exists() else path
            resumed = f"; training continues from the checkpoint of step {checkpoint.step}" if checkpoint else ""
            rest = f"; what is left of it stays in {kept}" if kept.exists() else ""
            logger.warning(f"the checkpoint of step {step_of(path)} cannot be used: {flaw}{resumed}{rest}")

    def _refuse_other_metrics(self, checkpoint: Checkpoint | None) -> None:
        """Raise a `DamageError` unless metrics.jsonl still has the rows that it had at the checkpoint."""
        remedy = f"; restore it from a copy, or start a new run with init_from={self.path}; nothing was changed"
        if checkpoint and checkpoint.metrics:
            size = checkpoint.metrics["bytes"]
            if self._metrics_mark(size) != checkpoint.metrics:
                raise DamageError(
                    f"{self.metrics} does not agree with the checkpoint of step {checkpoint.step}: its first {size:,} "
                    f"bytes are not those that were written{remedy}"
                )
            return
        # A checkpoint of an older version, or none.
        try:
            steps = [row["step"] for row in read_metrics(self.metrics)] if self.metrics.exists() else []
        except DataError as error:
            raise DamageError(f"{error}{remedy}") from error
        if checkpoint and [step for step in steps if 1 <= step <= checkpoint.step] != [*range(1, checkpoint.step + 1)]:
            raise DamageError(
                f"{self.metrics} does not have the rows up to the checkpoint of step {checkpoint.step}{remedy}"
            )
        every = from_yaml(self.path / "config.yaml").checkpoint_every
        if checkpoint is None and max(steps, default=0) > every:
            raise DamageError(
                f"{self.path} has no checkpoint, although {self.metrics.name} has {max(steps)} steps and a checkpoint "
                f"was written every {every}; restore its folder `checkpoints`, or start a new run; nothing was changed"
            )

    def _metrics_mark(self, size: int | None = None) -> dict[str, Any]:
        """Return size and digest of the metrics, or of their first `size` bytes."""
        return fingerprint(self.metrics, size) if self.metrics.exists() else {"bytes": 0, "sha256": NOTHING}

    def rewind(self) -> tuple[Checkpoint | None, int]:
        """Drop the rows after the checkpoint to resume from; return the checkpoint and the step of the next row."""
        checkpoint = self._resumed_from
        self.truncate_metrics(checkpoint.step if checkpoint else 0)
        if checkpoint is not None:
            return checkpoint, checkpoint.step + 1
        # Killed before the first checkpoint: start again, but keep the evaluation of the untrained policy.
        return None, 1 if self.metrics.exists() and read_metrics(self.metrics) else 0

    def truncate_metrics(self, step: int) -> None:
        """Drop the rows after `step`; the resumed run computes them again. Unreadable rows are kept in another file."""
        if not self.metrics.exists():
            return
        lines = self.metrics.read_bytes().splitlines(keepends=True)
        read = [_row_of(line) for line in lines]
        count = next((index for index, row in enumerate(read) if row is None or row["step"] > step), len(lines))
        torn = lines[-1:] and not lines[-1].endswith(b"\n")  # by a kill while it was written
        with self._writing("the metrics"):
            if any(row is None for row in read[: -1 if torn else None]):
                copy = free_path(self.metrics.with_suffix(".damaged.jsonl"))
                shutil.copyfile(self.metrics, copy)
                logger.warning(f"{self.metrics} has unreadable rows after step {step}; all of it is kept in {copy}")
            os.truncate(self.metrics, sum(map(len, lines[:count])))
            sync(self.metrics)

    def write_data(self, description: Mapping[str, Any]) -> None:
        """Write which tasks the run is evaluated on, so that runs can be compared from their folders."""
        with self._writing("data.json"):
            write_json_atomic(self.path / "data.json", _finite(description))

    def write_samples(self, what: str, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write sample `rollouts` of one step, or replies that the world model predicted (`predictions`)."""
        path = self.path / what / f"{step_name(step)}.jsonl"
        with self._writing(f"sample {what}"):
            path.parent.mkdir(exist_ok=True)
            write_text_atomic(path, "".join(json.dumps(_finite(row)) + "\n" for row in rows))
        return path

    def write_adapters(self, writer: Callable[[Path], None]) -> None:
        """Replace `adapters`; `writer` receives the new folder and fills it."""

        def write(folder: Path) -> None:
            writer(folder)
            seal(folder, {})

        with self._writing("the adapters"):
            write_folder_atomic(self.adapters, write)

    def write_checkpoint(self, step: int, writer: Callable[[Path], None], best: bool = False) -> Checkpoint:
        """Write a checkpoint; `writer` receives the folder and fills it. Keep this checkpoint and the best."""

        mark = self._metrics_mark()

        def write(folder: Path) -> None:
            writer(folder)
            seal(folder, {"step": step, "best": best, "metrics": mark})

        path = self.checkpoints / step_name(step)
        with self._writing(f"the checkpoint of step {step}"):
            if self.metrics.exists():
                sync(self.metrics)  # a checkpoint must not exist without the rows before it
            self.checkpoints.mkdir(exist_ok=True)
            write_folder_atomic(path, write)
            self._point_at_checkpoints()
        self._remove_old_checkpoints()
        return Checkpoint(step=step, path=path, best=best, metrics=mark)

    def latest_checkpoint(self) -> Checkpoint | None:
        return latest_checkpoint(self.path)

    def best_checkpoint(self) -> Checkpoint | None:
        return best_checkpoint(self.path)

    def _point_at_checkpoints(self) -> None:
        for name, checkpoint in (("last", self.latest_checkpoint()), ("best", self.best_checkpoint())):
            if checkpoint:
                write_text_atomic(self.checkpoints / name, checkpoint.path.name + "\n")

    def _remove_old_checkpoints(self) -> None:
        """Remove complete checkpoints that are neither the last nor the best; keep what is damaged."""
        kept = {checkpoint.path for checkpoint in (self.latest_checkpoint(), self.best_checkpoint()) if checkpoint}
        kept |= self._damaged  # which may be complete by their sizes
        for path in [checkpoint.path for checkpoint in complete_checkpoints(self.path)]:
            if path not in kept:
                with suppress(OSError):
                    # Renamed first, so that no checkpoint is half removed.
                    shutil.rmtree(path.rename(temporary_path(path)))

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return writing(f"{what} of {self.path}", self._what_is_intact)

    def _what_is_intact(self) -> str:
        checkpoint = self.latest_checkpoint()
        return f"; the checkpoint of step {checkpoint.step} is intact" if checkpoint else "; there is no checkpoint yet"


# Reading; safe while a run writes


def read_metrics(path: str | Path) -> list[dict[str, Any]]:
    """Return the rows of a run folder or of a `metrics.jsonl`, also while a run writes it."""
    path = Path(path)
    path = metrics_file(path) if path.is_dir() else path
    rows = read_json_lines(path)
    for number, row in enumerate(rows, start=1):
        if not isinstance(row.get("step"), int):
            raise DataError(f"{path}, line {number}: this row of metrics has no step")
    return rows


def metrics_file(run: Path) -> Path:
    """Return the file of a run's metrics, which may be compressed."""
    plain, compressed = run / "metrics.jsonl", run / "metrics.jsonl.gz"
    return compressed if compressed.is_file() and not plain.is_file() else plain


def read_json_lines(path: str | Path) -> list[dict[str, Any]]:
    """Return one object for each line; ignore a last line that is incomplete."""
    path = Path(path)
    try:
        text = path.read_bytes()
        lines = (gzip.decompress(text) if path.suffix == ".gz" else text).split(b"\n")
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise DataError(f"{path} is damaged: it cannot be decompressed") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    rows = []
    for number, line in enumerate(lines, start=1):
        row = _object_of(line)
        if row is not None:
            rows.append(row)
        elif number < len(lines):
            raise DataError(f"{path}, line {number}: not a JSON object")
    return rows


def _row_of(line: bytes) -> dict[str, Any] | None:
    """Return the row of metrics in a complete line, or None."""
    row = _object_of(line) if line.endswith(b"\n") else None
    return row if row is not None and isinstance(row.get("step"), int) else None


def _object_of(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line, parse_constant=_refuse_constant)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def run_folder(path: Path) -> Path:
    """Return the run folder of a run or of one of its checkpoints."""
    return path.parent.parent if is_checkpoint(path) else path


# Helpers


def _refuse_links(path: Path) -> None:
    """Raise a `UsageError` if writing into this run, which may be a stranger's, could write anywhere else."""
    for folder, folders, files in os.walk(path):
        for entry in (Path(folder, name) for name in (*folders, *files)):
            if entry.is_symlink():
                raise UsageError(
                    f"{entry} is a symbolic link, and a run writes into its own folder only; put what it points to in "
                    "its place"
                )


def _is_leftover(path: Path) -> bool:
    """Whether this is a temporary file or folder that a killed run left; a `*.tmp` of anybody else is not ours."""
    ours = r"config\.yaml|data\.json|adapters(\.replaced)?|step-\d{6,}(\.replaced|\.jsonl)?|last|best"
    return re.fullmatch(rf"\.({ours})\.\d+\.tmp", path.name) is not None


def _remove_leftovers(path: Path) -> None:
    for folder in (path, path / "checkpoints", path / "rollouts", path / "predictions"):
        for leftover in filter(_is_leftover, folder.glob(".*.tmp")):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def _take_lock(path: Path) -> int:
    """Lock `.lock` and write the process id into it. The kernel releases the lock of a dead process."""
    try:
        descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
    except IsADirectoryError as error:
        raise UsageError(f"{path / '.lock'} is not a lock of ours but a folder; move it away") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 20).decode(errors="replace").strip() or "?"
        os.close(descriptor)
        raise UsageError(f"{path} is being written by process {holder}; choose another output_dir") from None
    except OSError as error:
        logger.warning("%s cannot be locked on this file system (%s)", path, error.strerror)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode) or not re.fullmatch(rb"\d{0,20}\n?", os.pread(descriptor, 30, 0)):
        os.close(descriptor)
        raise UsageError(f"{path / '.lock'} is not a lock of ours: it holds something else; move it away")
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _sealed(config: str) -> str:
    return f"{CONFIG_SEAL}{hashlib.sha256(config.encode()).hexdigest()}\n{config}"


def _refuse_damaged_config(file: Path) -> None:
    """Raise a `DamageError` unless the config is as it was written: a torn one may be valid YAML, and defaults would
    replace what it has lost. Configs of older runs have no seal."""
    seal, _, config = file.read_bytes().partition(b"\n")
    digest = hashlib.sha256(config).hexdigest()
    if seal.startswith(CONFIG_SEAL.encode()) and not seal.endswith(digest.encode()):
        raise DamageError(
            f"{file} is damaged: its content is not what was written (SHA-256 differs); restore it from a copy, or "
            f"start a new run with init_from={file.parent}; nothing was changed"
        )


def _check_resumable(saved: RunConfig, config: RunConfig) -> None:
    for name, (before, now) in differences(saved, config).items():
        if name not in CHANGEABLE_ON_RESUME:
            raise ConfigError(f"a resumed run must keep its config, but {name} was {before} and is now {now}")


def _refuse_fewer_steps(run: Path, config: RunConfig) -> None:
    checkpoint = latest_checkpoint(run)
    if checkpoint is not None and checkpoint.step > config.steps:
        raise ConfigError(f"{run} has already made {checkpoint.step} steps; steps={config.steps} must not be below")


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
