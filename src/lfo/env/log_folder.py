"""The folder that `lfo record` writes: rollouts in files that rotate, and outcomes that came later.

    logs/rollouts-20260131-120000-4711-0001.jsonl     one conversation in each line
    logs/outcomes-20260131-120000-4711.jsonl          {"conversation": "5f...", "reward": 1.0} in each line

A conversation that goes on after it was written is written again, whole, and names the earlier one (`continues`), which
then does not count. The last line of a file that is being written, or whose writer was killed, may be unfinished.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from lfo.errors import DataError

ROLLOUTS, OUTCOMES = "rollouts-", "outcomes-"


class NumberedRecord(NamedTuple):
    file: Path
    line: int
    record: Any


def numbered_records(path: Path) -> list[NumberedRecord]:
    """Return the records of a file, or of all files of a folder in the order of their names."""
    if not path.is_dir():
        return list(_lines(path, growing=False))
    files = sorted(path.glob("*.jsonl"))
    records = [each for file in files if not file.name.startswith(OUTCOMES) for each in _lines(file, growing=True)]
    outcomes = [each for file in files if file.name.startswith(OUTCOMES) for each in _lines(file, growing=True)]
    if not records:
        raise DataError(f"{path} contains no recorded conversation yet (files *.jsonl)")
    rewards = {each.record.get("conversation"): each.record.get("reward") for each in outcomes if _is_object(each)}
    continued = {each.record.get("continues") for each in records if _is_object(each)} - {None}
    counted = []
    for each in records:
        name = each.record.get("conversation") if _is_object(each) else None
        if name is None or name not in continued:
            later = {"reward": rewards[name]} if name in rewards else {}
            counted.append(each._replace(record={**each.record, **later}) if later else each)
    return counted


def _is_object(each: NumberedRecord) -> bool:
    return isinstance(each.record, dict)


def _lines(path: Path, *, growing: bool) -> Iterator[NumberedRecord]:
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    for number, line in enumerate(lines[:-1] if growing else lines, start=1):
        if line.strip():
            try:
                yield NumberedRecord(path, number, json.loads(line))
            except (ValueError, RecursionError):
                raise DataError(f"{path}, line {number}: not valid JSON") from None
