"""Turn what a lost or failed process raises into one sentence for the user, with what to do next."""

# pyright: reportMissingImports=false

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import RayError, RayTaskError
from safetensors import SafetensorError

from lfo.atomic import errno_of
from lfo.errors import WorkError

# The words of torch, and those of vLLM when it finds less free memory than configured or too little for its cache.
OUT_OF_MEMORY = (
    "CUDA out of memory",
    "torch.OutOfMemoryError",
    "Free memory on device",
    "No available memory for the cache blocks",
)
_ERROR = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception): \S.*)$")  # after the prefix of vLLM
_TOLD_ABOVE = ("See root cause", "See stack trace")  # vLLM's words for an error whose cause is in its log only


class Lost(WorkError):
    """A process is gone; the run can go on from its last checkpoint."""


@contextmanager
def as_if_here() -> Iterator[None]:
    """Raise a write error of another process as if it had happened here, so that `lfo.runs.folder` reports it."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, OSError | SafetensorError):
            raise error.cause from error
        raise


@contextmanager
def in_one_sentence(resume: str, logs: Callable[[], str]) -> Iterator[None]:
    """Raise a `WorkError` of one sentence instead; `resume` is the run folder, `logs` returns Ray's log folder."""
    way_on = f"continue from the last checkpoint with: lfo train --resume {resume}"
    try:
        yield
    except Lost as error:
        raise WorkError(f"{error}; see its log in {logs()}; {way_on}") from error
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, WorkError):
            raise cause from error
        if errno_of(cause) == errno.ENOSPC:  # while the world model is written for vLLM
            raise WorkError(f"the disk is full: {cause}; {way_on}") from error
        lines = str(cause or error).strip().splitlines() or [""]
        # For an actor that failed in its constructor, the cause is in the last line.
        reason = lines[-1] if "creation task" in lines[0] else lines[0]
        told = f"{type(cause or error).__name__}: {reason}"
        if any(words in str(error) for words in _TOLD_ABOVE):
            told = last_error(Path(logs())) or told
        if any(words in f"{told} {error}" for words in OUT_OF_MEMORY):
            raise WorkError(
                f"the GPU is out of memory ({told[:300]}): lower verl.actor_rollout_ref.rollout.gpu_memory_utilization"
                ", kv_cache_memory_bytes if it is set, or micro_batch_tokens (lfo plan counts what fits); "
                f"{way_on} and the lower values"
            ) from error
        raise WorkError(
            f"a process of the run was lost or failed ({told[:300]}); see its log in {logs()}; {way_on}"
        ) from error


def last_error(logs: Path) -> str | None:
    """Return the last error in the logs of Ray's workers, as Python prints it, that does not refer to another one."""
    found = None
    for log in sorted((*logs.glob("worker-*.err"), *logs.glob("worker-*.out")), key=lambda path: path.stat().st_mtime):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            match = _ERROR.search(line)
            if match and not any(words in line for words in _TOLD_ABOVE):
                found = match[1]
    return found
