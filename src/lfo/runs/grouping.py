"""Group runs, name the groups, find the baseline, and check which runs can be compared.

Runs with the same config except for the seed are one group.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from lfo.config import BESIDE_THE_EXPERIMENT, KNOBS, RunConfig, differences, experiment, load_config
from lfo.errors import UsageError
from lfo.runs.reading import RunRecord

IMITATION, WITH_FEEDBACK = "imitation", "+feedback"
FROZEN, FROZEN_POLICY = "policy.frozen", "frozen-policy"  # the config key, and its name in group names


def config_of(run: RunRecord) -> RunConfig:
    assert run.config is not None, "unusable runs are rejected before"
    return run.config


def grouped(runs: Sequence[RunRecord]) -> list[list[RunRecord]]:
    groups: dict[str, list[RunRecord]] = defaultdict(list)
    for run in runs:
        group = groups[experiment(config_of(run))]
        twin = next((other for other in group if config_of(other).seed == config_of(run).seed), None)
        if twin is not None:
            raise UsageError(f"{twin.path} and {run.path} have the same config and the same seed; leave one out")
        group.append(run)
    return [sorted(group, key=lambda run: config_of(run).seed) for group in groups.values()]


def group_names(configs: Sequence[RunConfig]) -> list[str]:
    """Return a short name for each group: its algorithm, and the config values that distinguish it.

    "dapo", "dual-lora", "dual-lora frozen-policy", "dual-lora coupling=shared lookahead=off"

    `algo=dapo` that imitates makes few or no updates of DAPO: it is called "imitation". A frozen
    policy, which is a control, and feedback are always named. Names are unique: groups that no config value
    distinguishes get numbers.
    """
    names: list[str] = []
    for config in configs:
        usual = load_config([f"preset={configs[0].preset}", f"algo={config.algo}"])
        algo = _algorithm(config)
        alike = [other for other in configs if _algorithm(other) == algo]
        varying = {name for other in alike for name in _distinguishing(config, other)}
        always_named = {FROZEN} if config.feedback == "other_task" else {FROZEN, "feedback"}
        # The engine's name says enough, unless groups on verl differ in their servers or machines.
        implied = (
            set() if any(other.verl != config.verl for other in alike if other.engine == config.engine) else {"verl"}
        )
        named = varying - always_named - implied
        own = {name: value for name, (value, _) in differences(config, usual).items() if name in named}
        control = [FROZEN_POLICY] if config.policy.frozen else []
        settings = [f"{_short(name)}={_in_words(value)}" for name, value in own.items()]
        names.append(
            " ".join(
                [f"{algo}{WITH_FEEDBACK}" if config.has_feedback and not config.is_auto else algo, *control, *settings]
            )
        )
    return [
        name if names.count(name) == 1 else f"{name} #{names[: index + 1].count(name)}"
        for index, name in enumerate(names)
    ]


def _algorithm(config: RunConfig) -> str:
    return IMITATION if config.algo == "dapo" and config.imitates else config.algo


def _distinguishing(one: RunConfig, other: RunConfig) -> set[str]:
    """Return the config values that distinguish two groups; those of evaluation only if there are no others."""
    found = differences(one, other).keys() - {"seed", "output_dir"}
    evaluated = {name for name in found if name.startswith("eval.")}
    return found - set(BESIDE_THE_EXPERIMENT) - evaluated or found


def _short(name: str) -> str:
    """Return the last part of a config key, if it is unique; `weight` means that of the world model."""
    last = name.rpartition(".")[2]
    if name == "world_model.weight":
        return last
    return last if sum(leaf.rpartition(".")[2] == last for leaf in KNOBS) == 1 else name


def _in_words(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value).removesuffix(".0")  # all digits, because groups may differ in the last
    if isinstance(value, Mapping):  # only the names of the innermost settings
        inner = ((name, each, _in_words(each)) for name, each in value.items())
        return ",".join(words if isinstance(each, Mapping) else f"{name}={words}" for name, each, words in inner)
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def baseline_name(names: Sequence[str], groups: Sequence[Sequence[RunRecord]], asked: str | None) -> str | None:
    if asked is not None:
        if asked not in names:
            raise UsageError(f"group {asked!r} does not exist; the groups are {', '.join(map(repr, names))}")
        return asked
    plain = [name for name, group in zip(names, groups, strict=True) if config_of(group[0]).is_plain_dapo]
    if len(plain) > 1:
        raise UsageError(f"several groups are plain DAPO ({', '.join(plain)}); choose one with --baseline NAME")
    return plain[0] if plain else None


def refuse_different_data(runs: Sequence[RunRecord]) -> None:
    """Raise a `UsageError` if runs were evaluated on different tasks."""
    first, *others = runs
    assert first.data is not None
    for run in others:
        assert run.data is not None
        refusal = f"{first.path} and {run.path} cannot be compared"
        for what in ("environment", "levels"):
            one, other = first.data.get(what), run.data.get(what)
            if one != other:
                raise UsageError(f"{refusal}: their {what} differ, {one} and {other}")
        for split, tasks in first.data["splits"].items():
            other = run.data["splits"].get(split, tasks)
            if tasks["fingerprint"] != other["fingerprint"]:
                raise UsageError(
                    f"{refusal}: they were evaluated on different tasks of {split} ({tasks['tasks']} with fingerprint "
                    f"{tasks['fingerprint']}, {other['tasks']} with {other['fingerprint']})"
                )


def notes_of(runs: Sequence[RunRecord]) -> list[str]:
    """Return what a reader must know to compare these runs."""
    return [*_on_practice(runs), *_on_precision(runs)]


def _on_practice(runs: Sequence[RunRecord]) -> list[str]:
    """Return how many tasks of practice come on top of the tasks of these runs, one note for each number."""
    took: dict[tuple[int, int], list[str]] = {}
    for run in runs:
        practice = (run.data or {}).get("practice")
        tasks, rollouts = map(practice.get, ("tasks", "rollouts")) if isinstance(practice, Mapping) else (None, None)
        if isinstance(tasks, int) and isinstance(rollouts, int):
            took.setdefault((tasks, rollouts), []).append(run.name)
    return [
        f"+ {tasks:,} tasks of practice ({rollouts:,} rollouts), before the first step, on top of the tasks of "
        + ("every run" if len(names) == len(runs) else ", ".join(names))
        for (tasks, rollouts), names in took.items()
    ]


def _on_precision(runs: Sequence[RunRecord]) -> list[str]:
    """Return a note if runs were evaluated at different intervals."""
    *others, last = sorted({config_of(run).eval.every for run in runs})
    if not others:
        return []
    return [
        f"runs were evaluated every {', '.join(map(str, others))} or {last} steps, which limits the precision of the "
        "tasks that they needed"
    ]
