"""Sample rollouts and predictions for the page, within a size budget.

A damaged file or record is skipped and reported.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lfo.errors import DataError
from lfo.report.text import as_script_json, shown
from lfo.runs.folder import read_json_lines

ROLLOUTS_PER_RUN = 200
BUDGET = 18_000_000  # characters of all rollouts of the page


class Texts:
    """Stores every text once; rollouts share prompts and replies and refer to them by index."""

    def __init__(self) -> None:
        self.all: list[str] = []
        self.size = 0  # characters on the page, with the structure of rollouts
        self._numbers: dict[str, int] = {}

    def number(self, text: Any) -> int:
        words = shown(text)
        if words not in self._numbers:
            self._numbers[words] = len(self.all)
            self.all.append(words)
            self.size += len(as_script_json(words))
        return self._numbers[words]


def read_rollouts(
    run: Path, number: int, texts: Texts, budget: int, problems: list[str]
) -> tuple[list[dict[str, Any]], bool]:
    """Return sample rollouts of a run, from files spread evenly over its steps, and whether there are more."""
    kept, start, left_out = [], texts.size, False

    def full() -> bool:
        return len(kept) >= ROLLOUTS_PER_RUN or texts.size - start >= budget

    for path in spread(sorted((run / "rollouts").glob("step-*.jsonl"))):
        if left_out := full():
            break
        unusable = 0
        for record in _records(path, problems):
            if left_out := full():
                break
            try:
                kept.append(_rollout(record, number, _step(path), texts))
                texts.size += 200 + 100 * len(record["turns"])  # the structure around the texts
            except (KeyError, TypeError, ValueError, AttributeError):
                unusable += 1
        if unusable:
            problems.append(f"{path}: {unusable} of its records are not rollouts and are left out")
    kept.sort(key=lambda item: -item["step"])  # stable: latest step first, in the order of the file
    return kept, left_out


def read_predictions(run: Path, number: int, problems: list[str]) -> list[dict[str, Any]]:
    """Return the predictions of the last evaluation that has some."""
    for path in sorted((run / "predictions").glob("step-*.jsonl"), reverse=True):
        examples = []
        for record in _records(path, problems)[:5]:
            try:
                examples.append(
                    {
                        **{key: shown(record[key]) for key in ("state", "action", "predicted", "actual")},
                        "run": number,
                        "step": _step(path),
                        "category": shown(record.get("category") or ""),
                        "same_meaning": record.get("same_meaning") is True,
                    }
                )
            except KeyError as error:
                problems.append(f"{path}: a prediction example without {error}")
        if examples:
            return examples
    return []


def spread(files: Sequence[Path]) -> Iterator[Path]:
    """Yield the last file, the first, the middle one, and so on into the gaps.

    >>> [path.name for path in spread([Path(name) for name in "abcde"])]
    ['e', 'a', 'c', 'b', 'd']
    """
    if files:
        yield files[-1]
    if len(files) > 1:
        yield files[0]
    gaps = deque([(0, len(files) - 1)])
    while gaps:
        low, high = gaps.popleft()
        middle = (low + high) // 2
        if low < middle:
            yield files[middle]
            gaps += [(low, middle), (middle, high)]


def _rollout(record: Mapping[str, Any], run: int, step: int, texts: Texts) -> dict[str, Any]:
    level, reward = record.get("level"), record.get("reward")
    return {
        "run": run,
        "step": step,
        "split": shown(record.get("split") or "", 80),
        "task": shown(record["task_id"], 120),
        "reward": float(reward) if isinstance(reward, int | float) else 0.0,
        "stop": shown(record.get("stop") or "unknown", 40),
        "error": shown(record.get("error") or "", 500),
        "blind": record.get("blind") is True,
        "level": None if level is None else shown(level, 40),
        "opening": [[shown(each["role"], 40), texts.number(each["content"])] for each in record["opening"]],
        "turns": [
            {
                "predicted": turn.get("predicted") is True,
                "taken_back": turn.get("taken_back") is True,
                "checked": turn.get("checked") is True,
                "tool": None if turn.get("tool") is None else shown(turn["tool"], 80),
                "action": texts.number(turn["action"]),
                "observation": texts.number(turn["observation"]),
                "category": None if turn.get("category") is None else shown(turn["category"], 80),
                "facts": [shown(fact, 80) for fact in turn.get("facts") or ()],
            }
            for turn in record["turns"]
        ],
    }


def _records(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        return read_json_lines(path)
    except DataError as error:
        problems.append(str(error))
        return []


def _step(path: Path) -> int:
    found = re.search(r"step-(\d+)", path.name)
    return int(found[1]) if found else 0
