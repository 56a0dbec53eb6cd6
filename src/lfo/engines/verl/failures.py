"""One sentence for the user when a process of a run is lost or fails, with what to do."""

# pyright: reportMissingImports=false

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ray.exceptions import RayError, RayTaskError
from safetensors import SafetensorError

from lfo.errors import WorkError

# As torch says it, and vLLM where it finds less free than it was promised or too little for its cache.
OUT_OF_MEMORY = (
    "CUDA out of memory",
    "torch.OutOfMemoryError",
    "Free memory on device",
    "No available memory for the cache blocks",
)
_ERROR = re.compile(r"(?:^|[\s\]])((?:\w+\.)*\w*(?:Error|Exception): \S.*)$")  # behind what vLLM puts before each line
_TOLD_ABOVE = ("See root cause", "See stack trace")  # vLLM's words for a failure whose cause only its log tells


class Lost(WorkError):
    """A process is gone; the run can go on from its last checkpoint."""


@contextmanager
def as_if_here() -> Iterator[None]:
    """Let a disk that failed in another process fail here, where it becomes a sentence: `lfo.rundir`."""
    try:
        yield
    except RayTaskError as error:
        if isinstance(error.cause, OSError | SafetensorError):
            raise error.cause from error
        raise


@contextmanager
def in_one_sentence(resume: str, logs: Callable[[], str]) -> Iterator[None]:
    """Turn what a lost or failed process raises into one sentence with the way on; `logs` is Ray's folder of them."""
    way_on = f"continue from the last checkpoint with: lfo train --resume {resume}"
    try:
        yield
    except Lost as error:
        raise WorkError(f"{error}; {way_on}") from error
    except RayError as error:
        cause = getattr(error, "cause", None)
        if isinstance(cause, WorkError):
            raise cause from error
        if isinstance(cause, OSError) and cause.errno == errno.ENOSPC:  # while the world model goes to the servers
            raise WorkError(f"the disk is full: {cause}; {way_on}") from error
        lines = str(cause or error).strip().splitlines() or [""]
        # An actor that failed while it was made says why in its last line.
        reason = lines[-1] if "creation task" in lines[0] else lines[0]
        told = f"{type(cause or error).__name__}: {reason}"
        if any(words in str(error) for words in _TOLD_ABOVE):
            told = last_error(Path(logs())) or told
        if any(words in f"{told} {error}" for words in OUT_OF_MEMORY):
            raise WorkError(
                f"the GPU is out of memory ({told[:300]}): lower verl.actor_rollout_ref.rollout.gpu_memory_utilization "
                f"or micro_batch_tokens (lfo plan counts what fits); {way_on} and the lower values"
            ) from error
        raise WorkError(
            f"a process of the run was lost or failed ({told[:300]}); its log lies in {logs()}; {way_on}"
        ) from error


def last_error(logs: Path) -> str | None:
    """The last error in the logs of Ray's workers that is not itself about another one, as Python writes it."""
    found = None
    for log in sorted((*logs.glob("worker-*.err"), *logs.glob("worker-*.out")), key=lambda path: path.stat().st_mtime):
        for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
            match = _ERROR.search(line)
            if match and not any(words in line for words in _TOLD_ABOVE):
                found = match[1]
    return found
