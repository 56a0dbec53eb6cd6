"""Collect the data of the report page from run folders, as one JSON value.

    payload = build(find_runs_and_studies([Path("runs/level2")]))

A run that cannot be used is listed with the reason and does not affect others. Runs with the same config except for the
seed are one group (`sample_efficiency`); runs that were evaluated on different tasks are never in the same chart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from lfo import __version__
from lfo.config import RunConfig, experiment
from lfo.env.worlds.shipped import SHIPPED
from lfo.errors import LfoError, UsageError
from lfo.report.curves import POINTS, SMALL_CHART_POINTS, Member, curve, mark
from lfo.report.samples import BUDGET, ROLLOUTS_PER_RUN, Texts, read_predictions, read_rollouts
from lfo.report.studies import ABLATION_FILE, StudyResult, described
from lfo.report.text import shown
from lfo.report.words import headline, page_names, renamed
from lfo.runs.comparison_text import sentences
from lfo.runs.comparison_text import tables as tables_of
from lfo.runs.costs import number, training_seconds
from lfo.runs.grouping import config_of, group_names
from lfo.runs.reading import RunRecord, find_runs, folders, holds_run, read_run
from lfo.runs.sample_efficiency import Comparison, compare
from lfo.runs.sample_efficiency import curve as curve_of

COLOURS = 8  # distinguishable colours of the page

# Metric -> title and form, in the order of the page; metrics without values are left out.
WORLD_MODEL = {
    "world_model_eval/semantic_accuracy": ("meaning right, held-out calls", "share"),
    "world_model_eval/token_accuracy": ("tokens right, held-out calls", "share"),
    "world_model_eval/exact": ("text exactly right, held-out calls", "share"),
    "world_model_eval/bleu": ("BLEU, held-out calls", "number"),
    "world_model_eval/perplexity": ("perplexity, held-out calls", "number"),
    "eval/val/lookahead_accuracy": ("look-ahead right, on val", "share"),
    "world_model_accuracy": ("trained tokens right, by weight", "share"),
}
CATEGORIES = {
    "semantic_accuracy": ("meaning right", "share"),
    "token_accuracy": ("tokens right", "share"),
    "bleu": ("BLEU", "number"),
    "perplexity": ("perplexity", "number"),
}
TRAINING = {
    "success": ("success of training rollouts", "share"),
    "entropy": ("entropy of the policy", "number"),
    "policy_loss": ("policy loss", "number"),
    "world_model_loss": ("world-model loss", "number"),
    "imitation_loss": ("imitation loss", "number"),
    "imitation_accuracy": ("imitated tokens right", "share"),
    "success_tasks": ("tasks with a success to imitate", "number"),
    "gradient_norm/policy": ("gradient norm, policy", "number"),
    "gradient_norm/world_model": ("gradient norm, world model", "number"),
    "gradient_ratio": ("gradient ratio, policy over world model", "number"),
    "clip_fraction": ("clipped tokens", "fraction"),
    "groups_kept": ("groups that taught the policy", "number"),
    "turns": ("turns per rollout", "number"),
    "drafts": ("imagined calls per rollout", "number"),
    "drafts_kept": ("imagined calls that were kept", "share"),
    "fresh_right": ("predictions right beside what was heard", "share"),
    "eval/val/drafts_informative": ("rollouts with informative calls, val", "share"),
    "tokens_per_second": ("sampled tokens per second", "number"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What was found in the given folders."""

    runs: tuple[Path, ...]
    studies: tuple[StudyResult, ...]
    problems: tuple[str, ...]


def find_runs_and_studies(paths: Sequence[Path]) -> Found:
    """Return the runs and studies in these folders and below."""
    for path in paths:
        if not path.is_dir():
            raise UsageError(f"the folder {path} does not exist")
    found = find_runs(paths)
    runs = [path for path in found if holds_run(path)]
    studies, problems = [], []
    for folder in dict.fromkeys(folder for path in paths for folder in folders(path)):
        if (folder / ABLATION_FILE).is_file():
            try:
                studies.append(StudyResult.read(folder))
            except (OSError, ValueError, KeyError, TypeError) as error:
                problems.append(f"{folder / ABLATION_FILE} cannot be read: {error}")
    for path in found:
        if path not in runs and not any(study.path.is_relative_to(path) for study in studies):
            problems.append(f"{path} is not a run folder")
    if not runs and not studies:
        raise UsageError(f"there is no run in {', '.join(map(str, paths))}: no folder in it contains a config.yaml")
    return Found(runs=tuple(runs), studies=tuple(studies), problems=tuple(problems))


def build(found: Found, records: Iterable[RunRecord] | None = None) -> dict[str, Any]:
    """Return the payload of the page; `records` are the runs, if they have been read already."""
    page = _Page(list(found.problems))
    for record in map(read_run, found.runs) if records is None else records:
        page.add(record)
    page.group({study.path for study in found.studies})
    texts, items, examples, about = page.samples()
    first, second, tables = page.comparison()
    return {
        "title": "lfo report",
        "headline": first,
        "lede": second,
        "problems": [shown(words) for words in page.problems],
        "notes": [shown(words) for words in page.notes],
        "groups": [
            {"name": shown(name, 200), "colour": index % COLOURS, "dash": index // COLOURS}
            for name, index in page.groups
        ],
        "runs": [page.describe(index) for index in range(len(page.records))],
        "success": page.success(),
        "comparison": tables,
        "levels": page.levels(),
        "world_model": page.curves(WORLD_MODEL, POINTS),
        "categories": page.categories(),
        "examples": examples,
        "training": page.curves(TRAINING, SMALL_CHART_POINTS),
        "ablations": [study.chart(page.records) for study in found.studies],
        "rollouts": {"texts": texts, "items": items, "about": about},
        "foot": f"Written by lfo {__version__} on {datetime.now(UTC):%Y-%m-%d %H:%M} UTC. This page is one file, "
        "loads nothing and sends nothing.",
    }


class _Page:
    """Collects runs and assigns them to groups."""

    def __init__(self, problems: list[str]) -> None:
        self.records: list[RunRecord] = []
        self.problems = problems
        self.notes: list[str] = []  # for the reader
        self.groups: list[tuple[str, int]] = []  # name and index of its colour; colours repeat with other dashes
        self.members: list[Member] = []

    def add(self, record: RunRecord) -> None:
        self.records.append(record)
        if record.problem:
            named = str(record.path) in record.problem
            self.problems.append(record.problem if named else f"{record.path}: {record.problem}")

    def group(self, studies: set[Path]) -> None:
        """Group usable runs; runs of an ablation have their own chart and are grouped only if there are no others."""
        usable = [
            index for index, record in enumerate(self.records) if record.rows and record.config and not record.problem
        ]
        main = [index for index in usable if self.records[index].path.parent not in studies] or usable
        groups: dict[str, list[int]] = {}
        for index in main:
            groups.setdefault(_group_key(self.records[index]), []).append(index)
        kept = [self._without_twins(indices) for indices in groups.values()]
        kept.sort(key=lambda indices: _order(self._config(indices[0]), len(indices)))
        configs = [self._config(indices[0]) for indices in kept]
        names = page_names(group_names(configs))
        for group, (name, indices) in enumerate(zip(names, kept, strict=True)):
            self.groups.append((name, _colour_index(group, configs)))
            counted = [index for index in indices if self.records[index].finished] or indices
            for index in indices:
                rows, note = self.records[index].rows, self.records[index].note
                seconds = training_seconds(rows)
                self.members.append(Member(run=index, group=group, rows=rows, seconds=seconds, counts=index in counted))
                if note:
                    left_out = "; until then it is drawn dashed and left out of means"
                    self.notes.append(note if index in counted else note + left_out)

    def _without_twins(self, indices: Sequence[int]) -> list[int]:
        by_seed: dict[int, int] = {}
        for index in indices:
            twin = by_seed.setdefault(self._config(index).seed, index)
            if twin != index:
                paths = self.records[index].path, self.records[twin].path
                self.notes.append(f"{paths[0]} has the same config and seed as {paths[1]} and is left out")
        return list(by_seed.values())

    def _config(self, index: int) -> RunConfig:
        return config_of(self.records[index])

    # The parts of the page

    def describe(self, index: int) -> dict[str, Any]:
        """Return a row of the table of runs."""
        record = self.records[index]
        success = list(curve_of(record.rows).values())
        group = next((member.group for member in self.members if member.run == index), None)
        last = record.rows[-1] if record.rows else {}
        words = record.problem
        if not words and record.config is not None and not record.finished:
            words = f"step {last.get('step')} of {record.config.steps}"
        words = ". ".join(filter(None, (" ".join(filter(None, (words, _phases(record.rows)))), record.agent)))
        found = [row["warnings"] for row in record.rows if isinstance(row.get("warnings"), list)]
        warnings = [str(warning) for each in found for warning in each]
        if warnings:
            words = f"{words} {len(warnings)} warnings, the last: {warnings[-1]}".strip()
        return {
            "name": shown(_short_name(record.path, self.records), 120),
            "path": shown(str(record.path), 300),
            "group": group,
            "seed": record.config.seed if record.config else None,
            "state": "unusable" if record.problem else "finished" if record.finished else "not ended",
            "words": shown(words, 400),
            "tasks": number(last.get("tasks_seen")),
            "seconds": training_seconds(record.rows)[-1] if record.rows else None,
            "success": success[-1] if success else None,
        }

    def success(self) -> list[dict[str, Any]]:
        """Return a learning curve for each set of evaluated tasks, except splits that are evaluated only at the end."""
        settings = [self._config(member.run).eval for member in self.members]
        at_the_end = {split for each in settings for split in each.final_splits}
        at_the_end -= {split for each in settings for split in each.splits}
        charts = []
        for split, title, ceiling, members in self._evaluations():
            if split not in at_the_end:
                blind = curve(title, f"eval/{split}/success_blind", members, "share")
                chart = curve(title, f"eval/{split}/success", members, "share", ceiling=ceiling)
                charts.append({**chart, "blind": blind["lines"]})
        return [chart for chart in charts if chart["lines"]]

    def curves(self, metrics: Mapping[str, tuple[str, str]], limit: int) -> list[dict[str, Any]]:
        charts = (curve(title, key, self.members, form, limit=limit) for key, (title, form) in metrics.items())
        return [chart for chart in charts if chart["lines"]]

    def levels(self) -> list[dict[str, Any]]:
        """Return the success at the last evaluation of each split, and by level if there are several."""
        rows = []
        for split, title, ceiling, members in self._evaluations():
            key, by_level = f"eval/{split}/success", f"eval/{split}/success_by_level"
            label, _, about = title.partition(": ")
            levels = sorted({level for member in members for level in _last(member, by_level) or ()})
            one = f"level {levels[0]}" if len(levels) == 1 else "all levels" if levels else ""
            note = ", ".join(filter(None, (about, one)))
            rows.append({"label": label, "note": note, "ceiling": ceiling, "marks": self._marks(members, key)})
            blind = self._marks(members, f"{key}_blind")
            rows.append({"label": "blind", "note": f"{label}, without look-ahead", "ceiling": None, "marks": blind})
            for level in levels if len(levels) > 1 else ():
                marks = self._marks(members, by_level, level)
                rows.append({"label": "", "note": shown(f"level {level}", 60), "ceiling": None, "marks": marks})
        return [row for row in rows if row["marks"]]

    def categories(self) -> list[dict[str, Any]]:
        """Return each world-model metric by kind of reply, at the last evaluation."""
        key = "world_model_eval/by_category"
        counts: dict[str, int] = {}
        for member in self.members:
            for name, found in (_last(member, key) or {}).items():
                if isinstance(found, dict):
                    counts[name] = int(number(found.get("count")) or counts.get(name, 0))
        charts = []
        for measure, (title, form) in CATEGORIES.items():
            rows = []
            for name in sorted(counts, key=lambda name: -counts[name]):
                label, note = shown(name.replace("_", " "), 60), f"{counts[name]:,} replies"
                if marks := self._marks(self.members, key, name, measure, form=form):
                    rows.append({"label": label, "note": note, "ceiling": None, "marks": marks})
            if rows:
                charts.append({"title": title, "format": form, "rows": rows})
        return charts

    def comparison(self) -> tuple[str, str, list[dict[str, Any]]]:
        """Return the headline, its evidence, and a table for each set of tasks, or why runs cannot be compared."""
        if not self.members:
            return "None of these runs can be used; the reasons are below.", "", []
        found, tables = [], []
        for data, members in self._by_tasks("val"):
            evaluated = [self.records[each.run] for each in members if each.counts and len(curve_of(each.rows)) > 1]
            title = self._split_title("val", data)
            if not evaluated:
                continue
            try:
                comparison = compare(evaluated)
            except (LfoError, KeyError, TypeError) as error:  # the last two: a damaged data.json
                tables.append({"title": title, "tables": [], "words": [shown(f"Not compared: {error}.")]})
                continue
            indices = [self._group_of(group.runs[0]) for group in comparison.groups]
            comparison = renamed(comparison, [self.groups[index][0] for index in indices])
            found.append((len(evaluated), *headline(comparison)))
            tables.append({"title": title, **self._compared(comparison)})
        if not tables:
            return "Nothing has been evaluated after training yet.", "", []
        if not found:
            return f"Runs evaluated so far: {len(self.members)}.", tables[0]["words"][0], tables
        _, first, second = max(found, key=lambda each: each[0])
        if len(tables) > 1:
            second += " This is about the largest of several sets of runs that were evaluated on different tasks."
        return shown(first), shown(second.strip()), tables

    def _compared(self, comparison: Comparison) -> dict[str, Any]:
        """Return what `lfo compare` prints; a row names its group by its index on the page."""
        indices = {group.name: self._group_of(group.runs[0]) for group in comparison.groups}
        tables = []
        for title, (columns, *groups) in tables_of(comparison).items():
            rows = [{"group": indices[name], "cells": cells} for name, *cells in groups]
            rows.sort(key=lambda row: row["group"])
            tables.append({"title": title, "columns": list(columns), "rows": rows})
        return {"tables": tables, "words": list(map(shown, sentences(comparison)))}

    def samples(self) -> tuple[list[str], list[dict[str, Any]], list[dict[str, Any]], str]:
        texts, items, examples, cut = Texts(), [], [], 0
        indices = {member.run: member.group for member in self.members}
        for index in sorted(range(len(self.records)), key=lambda index: indices.get(index, len(self.groups))):
            path = self.records[index].path
            kept, left_out = read_rollouts(path, index, texts, BUDGET // len(self.records), self.problems)
            items += kept
            examples += read_predictions(path, index, self.problems)
            cut += left_out
        about = "Sample rollouts, the latest step of each run first. "
        about += (
            "An imagined exchange is a call that was not made, with the reply that the world model predicts. It is "
        )
        about += "kept if the policy then makes a different call, and taken back otherwise."
        if cut:
            about += (
                f" To keep the page small, at most {ROLLOUTS_PER_RUN} rollouts of a run are here, from steps spread "
                f"over the whole run; {cut} {'run has' if cut == 1 else 'runs have'} more on disk."
            )
        return texts.all, items, examples, about

    # Helpers

    def _by_tasks(self, split: str) -> list[tuple[Mapping[str, Any], list[Member]]]:
        """Return the members that were evaluated on the same tasks of a split, with the description of the tasks."""
        sets: dict[str, tuple[Mapping[str, Any], list[Member]]] = {}
        for member in self.members:
            data = self.records[member.run].data or {"environment": self._config(member.run).env}
            tasks = described(data, split).get("fingerprint")
            sets.setdefault(json.dumps([data.get("environment"), tasks]), (data, []))[1].append(member)
        return list(sets.values())

    def _evaluations(self) -> Iterator[tuple[str, str, float | None, list[Member]]]:
        """Yield split, title, ceiling and members for each set of evaluated tasks."""
        for split in _splits(self.members):
            for data, members in self._by_tasks(split):
                yield split, self._split_title(split, data), number(described(data, split).get("ceiling")), members

    def _split_title(self, split: str, data: Mapping[str, Any]) -> str:
        shipped = SHIPPED.get(str(data.get("environment")))
        meaning = shipped.splits.get(split) if shipped else None
        words = f"{split}: {meaning}" if meaning else split
        if len(self._by_tasks(split)) > 1:
            levels = ",".join(map(str, data.get("levels") or ()))
            tasks = described(data, split).get("tasks")
            own = (data.get("environment"), levels and f"level {levels}", tasks and f"{tasks} tasks")
            words += f" ({', '.join(str(each) for each in own if each)})"
        return shown(words, 120)

    def _marks(self, members: Sequence[Member], *keys: str, form: str = "share") -> list[dict[str, Any]]:
        """Return the last value of each counted run under these nested keys of a row."""
        by_group: dict[int, list[float]] = {}
        for member in members:
            found = [each for row in member.rows if (each := number(_within(row, *keys))) is not None]
            if member.counts and found:
                by_group.setdefault(member.group, []).append(found[-1])
        return [mark(group, values, form) for group, values in sorted(by_group.items())]

    def _group_of(self, record: RunRecord) -> int:
        return next(member.group for member in self.members if self.records[member.run] is record)


def _group_key(record: RunRecord) -> str:
    """Return a key of config and tasks: with the same config, the environment may have changed."""
    splits = (record.data or {}).get("splits", {})
    tasks = {split: described(record.data, split).get("fingerprint") for split in splits}
    return experiment(config_of(record)) + json.dumps(tasks)


def _order(config: RunConfig, seeds: int) -> tuple[bool, bool, int]:
    """Sort key: trained groups first, then controls, the baseline last; groups with more seeds first."""
    shown = config.source.is_learned and config.feedback != "other_task"
    return config.is_plain_dapo, not shown or config.policy.frozen, -seeds


def _colour_index(group: int, configs: Sequence[RunConfig]) -> int:
    """Return the index of a colour; a single baseline always has the second, so that pages look alike."""
    baselines = [index for index, config in enumerate(configs) if config.is_plain_dapo]
    if len(baselines) != 1:
        return group
    among_others = group - (group > baselines[0])
    return 1 if group == baselines[0] else among_others + (among_others >= 1)


def _splits(members: Sequence[Member]) -> list[str]:
    """Return the evaluated splits, val first."""
    found = {
        key.split("/")[1]
        for member in members
        for row in member.rows
        for key in row
        if key.startswith("eval/") and key.endswith("/success")
    }
    return sorted(found, key=lambda split: (split != "val", split))


def _within(row: Mapping[str, Any], *keys: str) -> Any:
    """Return the value under these nested keys, or None."""
    found: Any = row
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _last(member: Member, key: str) -> Any:
    return next((row[key] for row in reversed(member.rows) if isinstance(row.get(key), dict)), None)


def _short_name(path: Path, records: Sequence[RunRecord]) -> str:
    """Return the name of the folder, with its parent's if another run has the same name."""
    path = path.resolve()  # `.` has no name
    twins = sum(record.path.resolve().name == path.name for record in records)
    return path.name if twins == 1 else str(Path(path.parent.name, path.name))


def _phases(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the phases of a run, each with its last step; "" if it has none.

    >>> _phases([{"step": 1, "phase": "ask"}, {"step": 2, "phase": "ask"}, {"step": 3, "phase": "reinforce"}])
    'ask to step 2, reinforce to step 3'
    """
    last = {str(row["phase"]): row["step"] for row in rows if "phase" in row}
    return ", ".join(f"{phase} to step {step}" for phase, step in last.items())
