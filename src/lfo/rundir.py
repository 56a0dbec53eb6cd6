"""A run on disk: one readable folder that stays consistent if the process is killed at any time.

    runs/x/
      config.yaml                   the complete config
      data.json                     the tasks of its evaluation
      metrics.jsonl                 one row for each step; archived runs may have it compressed, as metrics.jsonl.gz
      rollouts/step-000010.jsonl    sample rollouts
      predictions/step-000010.jsonl predicted replies beside the true ones
      checkpoints/step-000010/      the state of the engine, and `checkpoint.json`, written last
      checkpoints/last, best        each names a checkpoint; all others are removed
      adapters/policy, world_model  ordinary PEFT folders

Files and folders are complete as soon as they have their names: they are written under a temporary name, synced and
renamed. One process at a time may write; the kernel releases the lock when that process ends. The engine decides what
a checkpoint contains.
"""

from __future__ import annotations

import errno
import fcntl
import gzip
import json
import logging
import math
import os
import re
import shutil
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfo.config import RunConfig, differences, from_yaml, to_yaml
from lfo.errors import ConfigError, DataError, UsageError, WorkError

# A resumed run keeps its config, except for keys that do not change the next step, and `steps`: a longer run is
# allowed, and its learning rate then follows the schedule of the new length.
CHANGEABLE_ON_RESUME = frozenset(
    {"steps", "output_dir", "device", "micro_batch_tokens", "checkpoint_every", "trackers"}
)

MANIFEST = "checkpoint.json"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint: `Checkpoint(step=10, path=Path("runs/x/checkpoints/step-000010"), best=True)`."""

    step: int
    path: Path
    best: bool  # whether it was the best by evaluation when it was written


class RunDirectory:
    """The only writer of a run folder; use it in a `with` block, which releases the lock."""

    def __init__(self, path: Path, lock: int | None) -> None:
        self.path = path
        self._lock = lock

    @classmethod
    def create(cls, path: str | Path, config: RunConfig, resume: bool = False) -> RunDirectory:
        """Start a run in an empty folder, or resume the run in the folder."""
        path = Path(path)
        with _writing(f"the run {path}"):
            path.mkdir(parents=True, exist_ok=True)
            has_run = (path / "config.yaml").is_file()
            if resume and not has_run:
                raise UsageError(f"{path} contains no run to resume")
            if not resume and has_run:
                raise UsageError(
                    f"{path} already contains a run; continue it with --resume {path} or choose another output_dir"
                )
            # A run that was killed before its first complete file leaves only the lock and temporary files.
            if not resume and any(not re.fullmatch(r"\.lock|\..*\.tmp", entry.name) for entry in path.iterdir()):
                raise UsageError(f"{path} is not empty; choose another output_dir")
            run = cls(path, _take_lock(path))
            try:
                if resume:
                    _check_resumable(from_yaml(path / "config.yaml"), config)
                    _refuse_fewer_steps(path, config)
                _remove_leftovers(path)
                run._point_at_checkpoints()
                write_text_atomic(path / "config.yaml", to_yaml(config))
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

    def rewind(self) -> tuple[Checkpoint | None, int]:
        """Drop the rows after the last checkpoint; return the checkpoint and the step of the next row."""
        checkpoint = self.latest_checkpoint()
        if checkpoint is None and (self.adapters.exists() or metrics_file(self.path) != self.metrics):
            raise UsageError(f"{self.path} has ended and has no checkpoint left to resume from; start a new run")
        self.truncate_metrics(checkpoint.step if checkpoint else 0)
        if checkpoint is not None:
            return checkpoint, checkpoint.step + 1
        # Killed before the first checkpoint: start again, but keep the evaluation of the untrained policy.
        return None, 1 if self.metrics.exists() and read_metrics(self.metrics) else 0

    def truncate_metrics(self, step: int) -> None:
        """Drop the rows after `step`; the resumed run computes them again."""
        if not self.metrics.exists():
            return
        kept = [row for row in read_metrics(self.metrics) if row["step"] <= step]
        with self._writing("the metrics"):
            write_text_atomic(self.metrics, "".join(json.dumps(row) + "\n" for row in kept))

    def write_data(self, description: Mapping[str, Any]) -> None:
        """Write which tasks the run is evaluated on, so that runs can be compared from their folders."""
        with self._writing("data.json"):
            write_json_atomic(self.path / "data.json", _finite(description))

    def write_rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write sample rollouts of one step."""
        return self._write_rows("rollouts", step, rows)

    def write_predictions(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write replies that the world model predicted at one step."""
        return self._write_rows("predictions", step, rows)

    def _write_rows(self, what: str, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        path = self.path / what / f"{_step_name(step)}.jsonl"
        with self._writing(f"sample {what}"):
            path.parent.mkdir(exist_ok=True)
            write_text_atomic(path, "".join(json.dumps(_finite(row)) + "\n" for row in rows))
        return path

    def write_adapters(self, writer: Callable[[Path], None]) -> None:
        """Replace `adapters`; `writer` receives the new folder and fills it."""
        with self._writing("the adapters"):
            write_folder_atomic(self.adapters, writer)

    def write_checkpoint(self, step: int, writer: Callable[[Path], None], best: bool = False) -> Checkpoint:
        """Write a checkpoint; `writer` receives the folder and fills it. Keep this checkpoint and the best."""

        def write(folder: Path) -> None:
            writer(folder)
            sizes = {str(file.relative_to(folder)): file.stat().st_size for file in _files(folder)}
            write_json_atomic(folder / MANIFEST, {"step": step, "best": best, "files": sizes})

        path = self.checkpoints / _step_name(step)
        with self._writing(f"the checkpoint of step {step}"):
            if self.metrics.exists():
                _sync(self.metrics)  # a checkpoint must not exist without the rows before it
            self.checkpoints.mkdir(exist_ok=True)
            write_folder_atomic(path, write)
            self._point_at_checkpoints()
        self._remove_old_checkpoints()
        return Checkpoint(step=step, path=path, best=best)

    def latest_checkpoint(self) -> Checkpoint | None:
        return latest_checkpoint(self.path)

    def best_checkpoint(self) -> Checkpoint | None:
        return best_checkpoint(self.path)

    def _point_at_checkpoints(self) -> None:
        for name, checkpoint in (("last", self.latest_checkpoint()), ("best", self.best_checkpoint())):
            if checkpoint:
                write_text_atomic(self.checkpoints / name, checkpoint.path.name + "\n")

    def _remove_old_checkpoints(self) -> None:
        kept = {checkpoint.path for checkpoint in (self.latest_checkpoint(), self.best_checkpoint()) if checkpoint}
        for path in self.checkpoints.glob("step-*"):
            if path not in kept:
                shutil.rmtree(path, ignore_errors=True)

    def _writing(self, what: str) -> AbstractContextManager[None]:
        return _writing(f"{what} of {self.path}", self._what_is_intact)

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
        try:
            row = json.loads(line, parse_constant=_refuse_constant)
            if not isinstance(row, dict):
                raise ValueError
            rows.append(row)
        except (ValueError, RecursionError):
            if number < len(lines):
                raise DataError(f"{path}, line {number}: not a JSON object") from None
    return rows


def run_folder(path: Path) -> Path:
    """Return the run folder of a run or of one of its checkpoints."""
    return path.parent.parent if path.parent.name == "checkpoints" else path


def latest_checkpoint(run: str | Path) -> Checkpoint | None:
    """Return the newest complete checkpoint of a run folder."""
    return max(_complete_checkpoints(Path(run)), key=lambda checkpoint: checkpoint.step, default=None)


def best_checkpoint(run: str | Path) -> Checkpoint | None:
    """Return the newest complete checkpoint that was the best when it was written."""
    best = (checkpoint for checkpoint in _complete_checkpoints(Path(run)) if checkpoint.best)
    return max(best, key=lambda checkpoint: checkpoint.step, default=None)


def _complete_checkpoints(run: Path) -> Iterator[Checkpoint]:
    """Yield the complete checkpoints by their manifests; the files `last` and `best` are for people and scripts."""
    for path in (run / "checkpoints").glob("step-*"):
        try:
            manifest = json.loads((path / MANIFEST).read_bytes())
            whole = all((path / name).stat().st_size == size for name, size in manifest["files"].items())
            if whole and path.name == _step_name(manifest["step"]):
                yield Checkpoint(step=manifest["step"], path=path, best=manifest["best"])
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue  # an incomplete copy, or a folder that is not ours


# Atomic writing


def write_text_atomic(path: str | Path, text: str) -> None:
    path = Path(path)
    temporary = _temporary(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        _sync(temporary)
        os.replace(temporary, path)
        _sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json_atomic(path: str | Path, value: Any) -> None:
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_folder_atomic(path: str | Path, writer: Callable[[Path], None]) -> None:
    """Let `writer` fill a temporary folder, then rename it to `path`, replacing a folder of that name."""
    path = Path(path)
    temporary, replaced = _temporary(path), _temporary(path.with_name(f"{path.name}.replaced"))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        writer(temporary)
        readers = temporary.stat().st_mode & 0o666
        for file in _files(temporary):
            file.chmod(readers)  # safetensors makes its files readable by their owner only
            _sync(file)
        for folder, _, _ in os.walk(temporary):
            _sync(Path(folder))
        if path.exists():  # os.rename cannot replace a folder that is not empty
            os.rename(path, replaced)
        os.rename(temporary, path)
        _sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def _writing(what: str, what_is_intact: Callable[[], str] = str) -> Iterator[None]:
    """Turn a disk error into a `WorkError` with one sentence."""
    try:
        yield
    except Exception as error:
        number = errno_of(error)
        if number is None:
            raise
        if number in (errno.ENOSPC, errno.EDQUOT):
            raise WorkError(f"the disk is full: cannot write {what}{what_is_intact()}") from error
        raise WorkError(f"cannot write {what}: {os.strerror(number)}{what_is_intact()}") from error


def errno_of(error: object) -> int | None:
    """Return the error number of the operating system, if it is a system error."""
    if isinstance(error, OSError):
        return error.errno
    # safetensors is written in Rust: its exception carries the number only in its text.
    found = re.search(r"\(os error (\d+)\)", str(error))
    return int(found[1]) if found else None


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def _remove_leftovers(path: Path) -> None:
    for folder in (path, path / "checkpoints", path / "rollouts", path / "predictions"):
        for leftover in folder.glob(".*.tmp"):
            if leftover.is_dir():
                shutil.rmtree(leftover)
            else:
                leftover.unlink()


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file())


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _take_lock(path: Path) -> int:
    """Lock `.lock` and write the process id into it. The kernel releases the lock of a dead process."""
    descriptor = os.open(path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.read(descriptor, 20).decode(errors="replace").strip() or "?"
        os.close(descriptor)
        raise UsageError(f"{path} is being written by process {holder}; choose another output_dir") from None
    except OSError as error:
        logger.warning("%s cannot be locked on this file system (%s)", path, error.strerror)
    os.ftruncate(descriptor, 0)
    os.write(descriptor, f"{os.getpid()}\n".encode())
    return descriptor


def _check_resumable(saved: RunConfig, config: RunConfig) -> None:
    for name, (before, now) in differences(saved, config).items():
        if name not in CHANGEABLE_ON_RESUME:
            raise ConfigError(f"a resumed run must keep its config, but {name} was {before} and is now {now}")


def _refuse_fewer_steps(run: Path, config: RunConfig) -> None:
    checkpoint = latest_checkpoint(run)
    if checkpoint is not None and checkpoint.step > config.steps:
        raise ConfigError(f"{run} has already made {checkpoint.step} steps; steps={config.steps} must not be below")


def _step_name(step: int) -> str:
    return f"step-{step:06d}"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not valid JSON")
