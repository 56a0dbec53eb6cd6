"""Write the phone-call world to files: companies, tasks of every split, and a manifest with their hashes.

    data/
      manifest.json               version, options, SHA-256 and length of every file, counts and ceilings by level
      companies.jsonl             one company in each line, with its hidden rules
      unseen_companies.jsonl      companies of `test_unseen_companies` only
      train.jsonl, val.jsonl, test_*.jsonl        one task in each line

Every file is a pure function of the options: the same options give the same bytes on every machine, and a changed file
can be compared line by line with the original. `TaskStream` has tasks beyond the files.

    lfo generate --num-companies 100 --num-train-tasks 500 --num-val-tasks 100 --output-dir data --seed 0
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from lfo.atomic import write_folder_atomic
from lfo.env.worlds.phone.ceiling import mean_ceiling
from lfo.env.worlds.phone.tasks import LEVEL, LEVELS, SPLITS, Task, TaskStream, World
from lfo.env.worlds.phone.world import UNSEEN, Company, company
from lfo.errors import DataError, UsageError, WorkError

GENERATOR_VERSION = 2  # raise it if the same options give other bytes
MAX_COMPANIES = 5_000  # names stay unique
MAX_TASKS = 1_000_000
MANIFEST = "manifest.json"
LEFT_OUT_AT_0 = "law"  # not written for law 0, so that its data keeps the bytes from before other laws existed
FILES = ("companies.jsonl", "unseen_companies.jsonl", *(f"{split}.jsonl" for split in SPLITS))


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The options that determine a folder of data."""

    num_companies: int = 100
    num_unseen_companies: int = 50
    num_train_tasks: int = 500
    num_val_tasks: int = 100  # and as many in each test split
    seed: int = 0
    levels: tuple[int, ...] = LEVELS
    law: int = 0  # the seed of what departments want

    def __post_init__(self) -> None:
        for name, low, high in (
            ("num_companies", 2, MAX_COMPANIES),
            ("num_unseen_companies", 1, MAX_COMPANIES),
            ("num_train_tasks", 1, MAX_TASKS),
            ("num_val_tasks", 1, MAX_TASKS),
            ("seed", 0, 2**63 - 1),
            ("law", 0, 2**63 - 1),
        ):
            value = getattr(self, name)
            if not low <= value <= high:
                raise UsageError(f"{name} must be between {low} and {high}, not {value}.")
        if not self.levels or set(self.levels) - set(LEVEL) or list(self.levels) != sorted(set(self.levels)):
            raise UsageError(f"levels must be some of {list(LEVEL)} in order, not {list(self.levels)}.")

    def count(self, split: str) -> int:
        return self.num_train_tasks if split == "train" else self.num_val_tasks

    def stream(self, split: str, *, levels: Sequence[int] = (), stream_seed: int = 0) -> TaskStream:
        """Return an endless stream of tasks; the files are the start of `stream_seed` 0."""
        world = World(self.seed, self.num_companies, self.num_unseen_companies, self.law)
        return world.stream(split, levels=tuple(levels) or self.levels, stream_seed=stream_seed)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A validated folder of data."""

    options: Options
    companies: tuple[Company, ...]
    unseen_companies: tuple[Company, ...]
    tasks: Mapping[str, tuple[Task, ...]]  # by split
    ceilings: Mapping[str, Mapping[str, float]]  # by split and level, as published in the manifest


def parse_levels(text: str) -> tuple[int, ...]:
    """`"1-3,5"` -> `(1, 2, 3, 5)`."""
    levels: set[int] = set()
    try:
        for part in text.split(","):
            low, _, high = part.partition("-")
            levels |= set(range(int(low), int(high or low) + 1) if len(part) < 8 else [0])
    except ValueError:
        raise UsageError(f"levels are written as 1-5 or 2,3, not {text!r}.") from None
    return Options(levels=tuple(sorted(levels))).levels


# --- writing ---------------------------------------------------------------------------------------------------------


def generate(output_dir: str | Path, *, num_companies: int = 100, force: bool = False, **others: Any) -> dict[str, Any]:
    """Write a folder of data and return its manifest; `others` are further `Options`.

    Replace data of other options only with `force`.
    """
    options = Options(num_companies=num_companies, num_unseen_companies=max(1, num_companies // 2), **others)
    output = Path(output_dir).absolute()
    _refuse_to_overwrite(output, options, force=force)
    files = render(options)

    def write(folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)

    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        write_folder_atomic(output, write)
    except OSError as error:
        raise WorkError(f"Could not write {output_dir}: {error.strerror or error}.") from error
    return json.loads(files[MANIFEST])


def render(options: Options) -> dict[str, bytes]:
    """Return the bytes of every file."""
    return _files(options, _tasks(options))


def _tasks(options: Options) -> dict[str, tuple[Task, ...]]:
    return {split: tuple(options.stream(split).take(options.count(split))) for split in SPLITS}


def _files(options: Options, tasks: Mapping[str, Sequence[Task]]) -> dict[str, bytes]:
    files = {
        "companies.jsonl": _lines(map(company_row, _companies(options, unseen=False))),
        "unseen_companies.jsonl": _lines(map(company_row, _companies(options, unseen=True))),
        **{f"{split}.jsonl": _lines(map(_row, tasks[split])) for split in SPLITS},
    }
    return files | {MANIFEST: _manifest(options, files, tasks)}


def _manifest(options: Options, files: Mapping[str, bytes], tasks: Mapping[str, Sequence[Task]]) -> bytes:
    manifest = {
        "generator_version": GENERATOR_VERSION,
        "seed": options.seed,
        "options": _row(options),
        "files": {
            name: {"sha256": hashlib.sha256(content).hexdigest(), "lines": content.count(b"\n")}
            for name, content in files.items()
        },
        "counts": {split: _by_level(tasks[split], len) for split in SPLITS},
        "ceilings": {split: _by_level(tasks[split], mean_ceiling) for split in SPLITS},
    }
    return json.dumps(manifest, indent=2).encode() + b"\n"


def company_row(each: Company) -> dict[str, Any]:
    """Return a company as readable JSON, including its hidden rules."""
    return {
        "index": each.index,
        "name": each.name,
        "industry": each.industry,
        "unseen": each.unseen,
        "departments": [
            {
                "kind": department.kind,
                "name": department.name,
                "number": department.number,
                "requires": {
                    service.name: list(rule.fields)
                    for service, rule in zip(department.services, department.rules, strict=True)
                },
            }
            for department in each.departments
        ],
    }


def _row(value: Task | Options) -> dict[str, Any]:
    row = dataclasses.asdict(value)
    return row if row[LEFT_OUT_AT_0] else {name: each for name, each in row.items() if name != LEFT_OUT_AT_0}


def _companies(options: Options, *, unseen: bool) -> list[Company]:
    first, count = (UNSEEN, options.num_unseen_companies) if unseen else (0, options.num_companies)
    return [company(options.seed, index, options.law) for index in range(first, first + count)]


def _lines(rows: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _by_level(tasks: Sequence[Task], value: Callable[[list[Task]], float]) -> dict[str, float]:
    levels = sorted({task.level for task in tasks})
    return {str(level): value([task for task in tasks if task.level == level]) for level in levels}


def _refuse_to_overwrite(output: Path, options: Options, *, force: bool) -> None:
    """Raise a `UsageError` unless the folder is empty or contains only our own data."""
    if not output.exists():
        return
    if not output.is_dir():
        raise UsageError(f"{output} is not a folder.")
    found = sorted(path.name for path in output.iterdir())
    foreign = [name for name in found if name not in (*FILES, MANIFEST)]
    if foreign:
        raise UsageError(f"{output} contains {foreign[0]}, which lfo generate did not write; choose another folder.")
    if not found or force:
        return
    try:
        before = _read_options(output)
    except DataError as error:
        raise UsageError(f"{error} Use --force to replace the folder.") from None
    if before != options:
        raise UsageError(
            f"{output} contains data of other options (seed {before.seed}, law {before.law}); use --force."
        )


# --- reading ---------------------------------------------------------------------------------------------------------


def load(data_dir: str | Path) -> Dataset:
    """Read a folder of data; raise a `DataError` that names file and line if it is not what its options give."""
    folder = Path(data_dir)
    options = _read_options(folder)
    tasks = _tasks(options)
    files = _files(options, tasks)
    for name, right in files.items():
        _refuse_change(folder / name, _read_bytes(folder / name), right)
    return Dataset(
        options=options,
        companies=tuple(_companies(options, unseen=False)),
        unseen_companies=tuple(_companies(options, unseen=True)),
        tasks=tasks,
        ceilings=json.loads(files[MANIFEST])["ceilings"],
    )


@lru_cache(maxsize=4)
def load_cached(data_dir: str) -> Dataset:
    """`load`, cached for each folder: a run makes thousands of environments."""
    return load(data_dir)


def _refuse_change(path: Path, found: bytes, right: bytes) -> None:
    pairs = itertools.zip_longest(found.splitlines(keepends=True), right.splitlines(keepends=True))
    for number, (line, right_line) in enumerate(pairs, start=1):
        if line != right_line:
            raise DataError(f"{path}, line {number}: was changed; it is not what the options of {MANIFEST} give.")


def _read_options(folder: Path) -> Options:
    """Return the options of a manifest; nothing else in it is trusted."""
    path = folder / MANIFEST
    if not path.is_file():
        raise DataError(f"{folder} contains no data ({path} is missing); write some with: lfo generate")
    where = f"{path}, line 1"
    try:
        manifest = json.loads(_read_bytes(path).decode())
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg}).") from None
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not JSON in UTF-8.") from None
    if not isinstance(manifest, dict):
        raise DataError(f"{where}: must be a JSON object.")
    if manifest.get("generator_version") != GENERATOR_VERSION:
        raise DataError(f"{where}: not written by version {GENERATOR_VERSION} of the generator; generate it again.")
    given, names = manifest.get("options"), [each.name for each in dataclasses.fields(Options)]
    if not isinstance(given, dict) or {LEFT_OUT_AT_0, *given} != set(names):
        raise DataError(f"{where}: options: must be an object with {', '.join(names)}.")
    levels = given.pop("levels")
    if not isinstance(levels, list) or any(type(level) is not int for level in levels):
        raise DataError(f"{where}: options: levels: must be an array of integers.")
    for name, value in given.items():
        if type(value) is not int:
            raise DataError(f"{where}: options: {name}: must be an integer.")
    try:
        return Options(**given, levels=tuple(levels))
    except UsageError as error:
        raise DataError(f"{where}: options: {error}") from None


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise DataError(f"{path} is missing.") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}.") from None
