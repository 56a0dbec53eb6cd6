"""Ablations: the runs that vary one idea, with several seeds each. `cli/ablate.py` runs them.

    lfo ablate weight --values 0,0.5 --seeds 3 --jobs 2

A study varies one idea, which may need more than one config key:

    weight     world_model.weight, with look-ahead on. 0 is the control with an untrained world model, not plain DAPO,
               which has no look-ahead
    predict    which replies the world model learns (tools joined by +); `none` is an untrained world model again
    rank       lora.rank; alpha is 2 * rank, so the scale of an update stays the same
    schedule   when the world model learns: world_model_first and explore_first for a fifth of the steps, hierarchical
               every second step
    coupling   each coupling without and with look-ahead; `separate` without look-ahead is the negative control

Every value has the seeds 0, 1, ..., so values are compared on the same tasks in the same order. The folder of a study
contains a run for each cell, and `ablation.json`, a summary of them:

    runs/ablations/weight/0.5-s0/       an ordinary run
    runs/ablations/weight/ablation.json {"study": "weight", "setting": "world_model.weight", "cells": [...]}
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from lfo.atomic import write_json_atomic
from lfo.config import load_config
from lfo.config.couplings import COUPLINGS
from lfo.errors import ConfigError, UsageError
from lfo.runs.comparison_text import group_as_json, reached_cells, success_cells
from lfo.runs.reading import read_run
from lfo.runs.sample_efficiency import SHARES, Group, compare, curve

Status = Literal["done", "failed", "missing"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """A study: the config key that it varies, its values, and the overrides of each value."""

    setting: str
    values: tuple[str, ...]  # the default grid
    overrides: Callable[[str, int], Sequence[str]]  # (value, steps) -> overrides


def _rank(value: str, steps: int) -> Sequence[str]:
    if not value.isdecimal():
        raise ConfigError(f"a rank must be a whole number, not {value!r}")
    return (f"lora.rank={value}",)


def _schedule(value: str, steps: int) -> Sequence[str]:
    first = f":{max(1, steps // 5)}"
    numbers = {"world_model_first": first, "explore_first": first, "hierarchical": ":2"}
    return (f"world_model.schedule={value}{numbers.get(value, '')}",)


def _coupling(value: str, steps: int) -> Sequence[str]:
    coupling, plus, lookahead = value.partition("+")
    if plus and lookahead != "lookahead":
        raise ConfigError(f"a coupling must be written as shared or shared+lookahead, not {value!r}")
    return f"coupling={coupling}", f"lookahead={'true' if plus else 'false'}"


STUDIES: Mapping[str, Study] = {
    "weight": Study(
        setting="world_model.weight",
        values=("0", "0.1", "0.3", "0.5", "1", "2"),
        overrides=lambda value, steps: (f"world_model.weight={value}",),
    ),
    "predict": Study(
        setting="world_model.predict",
        values=("none", "default", "make_phone_call+auth_info_form", "all"),
        overrides=lambda value, steps: (f"world_model.predict={value.replace('+', ',')}",),
    ),
    "rank": Study(setting="lora.rank", values=("8", "16", "32", "64"), overrides=_rank),
    "schedule": Study(
        setting="world_model.schedule",
        values=("joint", "alternating", "world_model_first", "hierarchical"),
        overrides=_schedule,
    ),
    "coupling": Study(
        setting="coupling and lookahead",
        values=(*COUPLINGS, *(f"{coupling}+lookahead" for coupling in COUPLINGS)),
        overrides=_coupling,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One run of a study: `Cell(value="0.5", seed=0, run="0.5-s0", status="done")`."""

    value: str
    seed: int
    run: str  # its folder in the folder of the study
    status: Status = "missing"  # also while it runs, and after it was stopped
    error: str = ""  # the error message, if it failed


def grid(study: str, values: Sequence[str] | None, seeds: int) -> list[Cell]:
    """Return the cells, seed by seed, so that a study that is stopped early has all values."""
    values = STUDIES[study].values if values is None else values
    if not values or seeds < 1:
        raise UsageError("an ablation needs at least one value and one seed")
    if len(set(values)) < len(values):
        raise UsageError(f"--values names something twice: {', '.join(values)}")
    for value in values:
        if not re.fullmatch(r"[\w.+]+", value):
            raise UsageError(f"{value!r} is not a value of a study")
    return [Cell(value=value, seed=seed, run=f"{value}-s{seed}") for seed in range(seeds) for value in values]


def overrides_of(study: str, cell: Cell, overrides: Sequence[str]) -> tuple[str, ...]:
    """Return the overrides of a cell, except its folder; those of the study come last and win."""
    steps = load_config(overrides).steps
    return *overrides, *STUDIES[study].overrides(cell.value, steps), f"seed={cell.seed}"


def done_before(folder: Path, cells: Iterable[Cell]) -> list[Cell]:
    """Return finished cells of earlier commands with other values or seeds."""
    asked = {cell.run for cell in cells}
    found = []
    for adapters in sorted(folder.glob("*/adapters")):
        name = re.fullmatch(r"([\w.+]+)-s(\d+)", adapters.parent.name)
        if name and adapters.parent.name not in asked:
            found.append(Cell(value=name[1], seed=int(name[2]), run=adapters.parent.name, status="done"))
    return found


def write_ablation(folder: Path, study: str, cells: Sequence[Cell]) -> None:
    """Write `ablation.json`, for the report and for people."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomic(folder / "ablation.json", as_json(study, cells))


# Results


def results(folder: Path, cells: Sequence[Cell]) -> dict[str, Group]:
    """Return the result of each value with finished runs, in order."""
    found = {}
    for value in dict.fromkeys(cell.value for cell in cells):
        runs = [read_run(folder / cell.run) for cell in cells if cell.value == value and cell.status == "done"]
        usable = [run for run in runs if not run.problem and curve(run.rows)]
        if usable:
            (found[value],) = compare(usable).groups
    return found


def table(study: str, cells: Sequence[Cell], found: Mapping[str, Group]) -> list[tuple[str, ...]]:
    """Return the rows of the table; the first has the headings."""
    of = "ceiling" if all("ceiling" in group.tasks_to for group in found.values()) else "success"
    rows: list[tuple[str, ...]] = [
        (STUDIES[study].setting, "seeds", *(f"{share:.0%}" for share in SHARES), "val", "unseen")
    ]
    for value in dict.fromkeys(cell.value for cell in cells):
        own = [cell for cell in cells if cell.value == value]
        done = sum(cell.status == "done" for cell in own)
        seeds = str(done) if done == len(own) else f"{done} of {len(own)}"
        group = found.get(value)
        if group is None:
            rows.append((value, seeds, *["-"] * (len(rows[0]) - 2)))
            continue
        rows.append((value, seeds, *reached_cells(group, of), *success_cells(group)))
    return rows


def as_json(study: str, cells: Sequence[Cell], found: Mapping[str, Group] | None = None) -> dict[str, Any]:
    """Return the content of `ablation.json`, with the result of each value if they were `found`."""
    content = {"study": study, "setting": STUDIES[study].setting, "cells": [asdict(cell) for cell in cells]}
    if found is None:
        return content
    return content | {"values": [{"value": value, **group_as_json(group)} for value, group in found.items()]}
