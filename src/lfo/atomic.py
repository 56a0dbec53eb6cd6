"""Write files and folders that are complete as soon as they have their names: temporary name, sync, rename."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

from lfo.checkpoints import files_of
from lfo.errors import UsageError, WorkError


def new_folder(path: Path) -> Path:
    """Return a folder that may be filled: one that is new or empty. `new/..` is the folder that `new` would be in."""
    detour = any(one != ".." and other == ".." for one, other in pairwise(path.parts))
    folder = path.resolve() if detour else path
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"{path} already exists and is not empty; name a new folder")
    return folder


def write_text_atomic(path: str | Path, text: str) -> None:
    path = Path(path)
    temporary = temporary_path(path)
    try:
        temporary.write_text(text, encoding="utf-8")
        sync(temporary)
        os.replace(temporary, path)
        sync(path.parent)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json_atomic(path: str | Path, value: Any) -> None:
    write_text_atomic(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def write_folder_atomic(path: str | Path, writer: Callable[[Path], None]) -> None:
    """Let `writer` fill a temporary folder, then rename it to `path`, replacing a folder of that name."""
    path = Path(path)
    temporary, replaced = temporary_path(path), temporary_path(path.with_name(f"{path.name}.replaced"))
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        writer(temporary)
        readers = temporary.stat().st_mode & 0o666
        for file in files_of(temporary):
            file.chmod(readers)  # safetensors makes its files readable by their owner only
            sync(file)
        for folder, _, _ in os.walk(temporary):
            sync(Path(folder))
        if path.exists():  # os.rename cannot replace a folder that is not empty
            os.rename(path, replaced)
        os.rename(temporary, path)
        sync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    shutil.rmtree(replaced, ignore_errors=True)


@contextmanager
def writing(what: str, what_is_intact: Callable[[], str] = str) -> Iterator[None]:
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


def temporary_path(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
