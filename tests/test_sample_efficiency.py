"""Comparing runs: values computed by hand, a known ratio recovered, coverage of intervals, and clear errors."""

import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lfo.cli import main
from lfo.config import load_config, to_yaml
from lfo.errors import DataError, UsageError
from lfo.runs.alone import without_lookahead
from lfo.runs.comparison_text import (
    as_json,
    conclusions,
    cost_table,
    level_table,
    needed_table,
    split_table,
    table,
)
from lfo.runs.correlation import correlation, pearson
from lfo.runs.costs import spent
from lfo.runs.grouping import group_names
from lfo.runs.intervals import median_bound, t_interval
from lfo.runs.reading import RunRecord, find_runs, read_run
from lfo.runs.sample_efficiency import (
    VAL,
    Ratio,
    Reached,
    compare,
    curve,
    needed,
    ratio_to_baseline,
    tasks_to,
)

UNSEEN = "eval/test_unseen_companies/success"
ACCURACY = "eval/val/lookahead_accuracy"
DATA = {
    "environment": "phone-calls",
    "levels": [2],
    "splits": {
        "val": {"tasks": 100, "fingerprint": "a" * 16, "ceiling": 0.9},
        "test_unseen_companies": {"tasks": 100, "fingerprint": "b" * 16, "ceiling": 0.8},
    },
}
SPLITS = "eval.splits=val,test_unseen_companies"


def rows_of(points: dict[int, float], **columns: list[float]) -> tuple[dict[str, Any], ...]:
    """Evaluations every 10 steps."""
    rows = [
        {"step": 10 * place, "tasks_seen": tasks, VAL: value} for place, (tasks, value) in enumerate(points.items())
    ]
    for key, values in columns.items():
        for row, value in zip(rows, values, strict=True):
            row[{"unseen": UNSEEN, "accuracy": ACCURACY}[key]] = value
    return tuple(rows)


def run_of(points: dict[int, float], *overrides: str, data: Any = DATA, **columns: list[float]) -> RunRecord:
    config = load_config(["preset=tiny", SPLITS, *overrides])
    return RunRecord(
        path=Path(f"{config.algo}-{config.seed}"),
        config=config,
        rows=rows_of(points, **columns),
        data=data,
        finished=True,
    )


def reaching(tasks: int, *overrides: str, last: int = 2000) -> RunRecord:
    """A run that reaches the target (63 %) at `tasks`, and never after `last`."""
    success = 0.7 if tasks <= last else 0.1
    return run_of({0: 0.0, tasks: success, tasks + 1: success}, *overrides)


def test_a_run_that_learns_from_logs_has_seconds_but_no_tasks():
    rows = [{"step": step, "tasks_seen": 0, VAL: 0.1, "seconds/update": 1.0 * step} for step in range(3)]
    (group,) = compare([dataclasses.replace(run_of({0: 0.0}), rows=tuple(rows))]).groups
    assert (group.ratio.value, group.ratio.note) == (None, "not every run has seen a task")


# Tasks to a target


def test_a_target_is_reached_at_the_first_of_two_evaluations_in_a_row_at_or_above_it():
    points = {0: 0.0, 80: 0.6, 160: 0.3, 240: 0.5, 320: 0.9, 400: 0.7}
    assert tasks_to(points, 0.5) == Reached(tasks=240), "at 80 tasks it was lost again"
    assert tasks_to(points, 0.51) == Reached(tasks=320)
    assert tasks_to(points, 0.0) == Reached(tasks=0)
    assert tasks_to(points, 0.8) == Reached(tasks=400, censored=True), "once is not enough"
    assert tasks_to(dict(reversed(points.items())), 0.5) == Reached(tasks=240)


def test_a_target_met_at_the_last_evaluation_only_is_not_confirmed_and_it_is_said():
    late = run_of({0: 0.0, 80: 0.1, 160: 0.7})
    assert tasks_to(curve(late.rows), 0.63) == Reached(tasks=160, censored=True)
    comparison = compare([late, reaching(80, "algo=dapo")])
    assert comparison.groups[0].ratio.bound == "at most"
    (note,) = (note for note in comparison.notes if "only at its last evaluation" in note)
    assert note.startswith("dual-lora-0 reached 63% only at its last evaluation, which a second one must confirm")
    assert not any("only at its last evaluation" in note for note in compare([reaching(80)]).notes)


def test_a_curve_is_made_of_the_rows_that_have_the_metric():
    rows = [
        {"step": 0, "tasks_seen": 0, VAL: 0.1},
        {"step": 1, "tasks_seen": 8},
        {"step": 2, "tasks_seen": 16, VAL: None},
    ]
    assert curve(rows) == {0: 0.1}


def test_a_group_takes_the_geometric_mean_of_its_seeds_which_is_a_bound_when_one_did_not_get_there():
    runs = [run_of({0: 0.0, 100: 0.5, 400: 0.9, 900: 0.9}), run_of({0: 0.0, 400: 0.5, 900: 0.5}, "seed=1")]
    (group,) = compare(runs).groups
    assert group.tasks_to["success"][0.5] == Reached(tasks=200)  # sqrt(100 * 400)
    assert group.tasks_to["success"][0.9] == Reached(tasks=600, censored=True)
    assert group.tasks_to["ceiling"][0.5] == Reached(tasks=200)  # 45 %
    assert group.tasks_to["ceiling"][0.7] == Reached(tasks=600, censored=True)  # 63 %: 400, and more than 900
    assert group.by_seed == {0: Reached(tasks=400), 1: Reached(tasks=900, censored=True)}
    assert (group.success, group.tasks_seen) == (pytest.approx(0.7), 900)


# The ratio


def exact(*tasks: float) -> dict[int, Reached]:
    return {seed: Reached(tasks=each) for seed, each in enumerate(tasks)}


def never(*tasks: float) -> dict[int, Reached]:
    return {seed: Reached(tasks=each, censored=True) for seed, each in enumerate(tasks)}


def test_the_ratio_is_the_geometric_mean_over_seeds_with_its_t_interval():
    ratio = ratio_to_baseline(exact(800, 1600), exact(400, 200))  # 2 and 8, so logs ln 2 and 3 ln 2
    assert ratio.value == pytest.approx(4)
    # mean 2 ln 2, deviation sqrt(2) ln 2, so the half width is t(1, 97.5 %) * ln 2 = 12.7062 ln 2
    assert ratio.interval == (pytest.approx(2 ** (2 - 12.7062), rel=1e-3), pytest.approx(2 ** (2 + 12.7062), rel=1e-3))
    assert (ratio.censored, ratio.bound, ratio.seeds) == (False, None, (0, 1))


def test_seeds_are_paired_and_those_of_one_side_alone_do_not_count():
    ratio = ratio_to_baseline(
        {0: Reached(tasks=600), 5: Reached(tasks=9)}, {0: Reached(tasks=200), 1: Reached(tasks=1)}
    )
    assert (ratio.value, ratio.seeds) == (pytest.approx(3), (0,))
    assert ratio_to_baseline(exact(5), {3: Reached(tasks=5)}).note == "the two have no seed in common"


def test_one_seed_and_seeds_that_agree_exactly_have_no_interval():
    assert ratio_to_baseline(exact(800), exact(200)) == Ratio(value=4.0, seeds=(0,))
    assert ratio_to_baseline(exact(800, 400), exact(200, 100)).interval is None


def test_a_baseline_that_never_got_there_makes_the_ratio_a_lower_bound():
    ratio = ratio_to_baseline(never(1600, 1600, 1600), exact(320, 320, 160))
    assert ratio.value == pytest.approx((5 * 5 * 10) ** (1 / 3))
    assert (ratio.censored, ratio.bound, ratio.interval) == (True, "at least", None)
    five = ratio_to_baseline(never(*[1600] * 5), exact(320, 160, 400, 200, 100))
    assert five.interval == (pytest.approx(4), None)  # the smallest of 5, 10, 4, 8, 16


def test_a_group_that_never_got_there_makes_the_ratio_an_upper_bound():
    ratio = ratio_to_baseline(exact(*[800] * 5), {**exact(*[200] * 4), 4: Reached(tasks=1600, censored=True)})
    assert ratio.value == pytest.approx((4**4 * 0.5) ** 0.2)
    assert (ratio.censored, ratio.bound) == (True, "at most")
    assert ratio.interval == (None, pytest.approx(4))


def test_nothing_is_made_up_where_neither_got_there():
    both = ratio_to_baseline(never(1600), never(480))
    assert (both.value, both.interval, both.censored, both.bound) == (None, None, True, None)
    crossed = ratio_to_baseline(
        {0: Reached(tasks=900, censored=True), 1: Reached(tasks=9)},
        {0: Reached(tasks=9), 1: Reached(tasks=900, censored=True)},
    )
    assert (crossed.value, crossed.interval, crossed.censored) == (None, None, True)


def test_a_target_reached_before_training_has_no_ratio():
    ratio = ratio_to_baseline(exact(800), exact(0))
    assert (ratio.value, ratio.note) == (None, "the target was reached before any training")


# The other costs


def test_the_four_costs_have_a_ratio_each_and_the_same_bounds(folder: Path):
    """dapo: 160 tasks, 8 rollouts each, 2 x 1,000 tokens, 2 x 10 s, and not there; dual-lora: 80, 4, 4,000, 10 s."""
    comparison = compare([read_run(path) for path in find_runs([folder])])
    dapo, dual = comparison.groups
    assert dual.costs["rollouts"].by_seed == {0: 320, 1: 320}, "as the run counts them"
    assert dapo.costs["rollouts"].by_seed == {0: 1280, 1: 1280}, "of a run that does not count them, tasks x group size"
    ratios = {cost: each.ratio for cost, each in dual.costs.items()}
    assert {cost: ratio.value for cost, ratio in ratios.items()} == pytest.approx(
        {"tasks": 2, "rollouts": 4, "sampled_tokens": 0.5, "seconds": 2}
    )
    assert {ratio.bound for ratio in ratios.values()} == {"at least"}
    assert ratios["tasks"] == dual.ratio
    assert cost_table(comparison) == [
        ("group", "tasks", "rollouts", "sampled tokens", "seconds"),
        ("dual-lora", "≥ 2.0", "≥ 4.0", "≥ 0.5", "≥ 2.0"),
    ]
    assert cost_table(compare([reaching(80)])) == [], "without a baseline there is nothing to be less than"


def test_what_each_group_needed_is_shown_with_its_bounds(folder: Path):
    comparison = compare([read_run(path) for path in find_runs([folder])])
    assert needed_table(comparison) == [
        ("group", "there", "tasks", "rollouts", "tokens", "seconds"),
        ("dapo", "0/2", "> 160", "> 1280", "> 2000", "> 20"),
        ("dual-lora", "2/2", "80", "320", "4000", "10"),
    ]
    costs = as_json(comparison)["groups"][1]["costs"]
    assert costs["tasks"]["needed"] == {"mean": 80.0, "interval": None, "censored": False}


def test_the_mean_of_what_was_needed_is_geometric_and_a_bound_where_a_seed_never_got_there():
    """Logs of 100, 400, 1600: mean log 400, deviation log 4, so t(2) = 4.3027 times log 4 / sqrt(3) either way."""
    exactly = needed({0: 100, 1: 400, 2: 1600}, exact(1, 2, 3))
    factor = 4 ** (4.30265 / 3**0.5)
    assert exactly.mean == pytest.approx(400)
    assert exactly.interval == (pytest.approx(400 / factor, rel=1e-4), pytest.approx(400 * factor, rel=1e-4))
    bounded = needed({0: 100, 1: 400, 2: 1600}, {**exact(1, 2), 2: Reached(tasks=3, censored=True)})
    assert (bounded.mean, bounded.interval, bounded.censored) == (pytest.approx(400), None, True)
    five = needed(dict(enumerate([30, 20, 50, 40, 60])), never(*[1] * 5))
    assert five.interval == (pytest.approx(20), None)
    assert needed({0: 0, 1: 5}, exact(0, 1)).mean == 0


def test_a_cost_that_a_run_does_not_tell_is_left_out_and_its_cell_empty():
    comparison = compare([reaching(800, "algo=dapo"), reaching(200)])
    assert list(comparison.groups[1].costs) == ["tasks", "rollouts"]
    assert cost_table(comparison)[1] == ("dual-lora", "4.0", "4.0", "-", "-")


def test_what_is_spent_is_counted_by_the_run_or_summed_over_its_steps():
    old = [{"tasks_seen": 8 * n, "sampled_tokens": 100, "seconds/update": 1.0, "seconds/eval": 9.0} for n in (1, 2)]
    assert spent(old, group_size=8) == {
        "tasks": {8: 8, 16: 16},
        "rollouts": {8: 64, 16: 128},
        "sampled_tokens": {8: 100, 16: 200},
        "seconds": {8: 1, 16: 2},
    }
    new = {"rollouts_seen": 7, "sampled_tokens_seen": 5000, "seconds/seen": 60.0}
    assert {cost: each[16] for cost, each in spent([old[0], {**old[1], **new}], group_size=8).items()} == {
        "tasks": 16,
        "rollouts": 7,
        "sampled_tokens": 5000,
        "seconds": 60,
    }


# Do the intervals cover?

EXPERIMENTS = 4000


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_the_interval_of_a_known_ratio_covers_it_as_often_as_it_says(seeds: int):
    random = np.random.default_rng(seeds)
    baseline = random.lognormal(math.log(2500), 0.5, size=(EXPERIMENTS, seeds))
    group = random.lognormal(math.log(500), 0.3, size=(EXPERIMENTS, seeds))
    _, low, high = t_interval(np.log(baseline / group))
    covered = np.mean((low <= math.log(5)) & (math.log(5) <= high))
    assert 0.93 <= covered <= 0.97


@pytest.mark.parametrize("seeds", [3, 5, 10])
def test_it_covers_also_when_tasks_are_only_counted_at_evaluations(seeds: int):
    random = np.random.default_rng(seeds)

    def counted(median: float, spread: float) -> Any:
        tasks = random.lognormal(math.log(median), spread, size=(EXPERIMENTS, seeds))
        return 80 * np.ceil(tasks / 80)

    ratios = np.log(counted(4000, 0.5) / counted(1000, 0.3))
    # Rounding up to the next evaluation makes both larger; the ratio that this estimates is that of the counted tasks.
    truth = np.mean(np.log(counted(4000, 0.5))) - np.mean(np.log(counted(1000, 0.3)))
    _, low, high = t_interval(ratios)
    assert 0.93 <= np.mean((low <= truth) & (truth <= high)) <= 0.97


@pytest.mark.parametrize("seeds", [5, 8, 10, 20])
@pytest.mark.parametrize("stopped_at", [1500, 2500, 4000])
def test_the_bound_of_censored_ratios_holds_at_least_as_often_as_it_says(seeds: int, stopped_at: float):
    random = np.random.default_rng(seeds)
    baseline = random.lognormal(math.log(2500), 0.8, size=(EXPERIMENTS, seeds))
    group = random.lognormal(math.log(500), 0.3, size=(EXPERIMENTS, seeds))
    bounds = np.log(np.minimum(baseline, stopped_at) / group)
    assert np.mean(median_bound(bounds) <= math.log(5)) >= 0.95 - 0.01


def test_a_t_interval_over_bounds_would_not_hold():
    """Why censored ratios do not get one: the bounds of a stopped baseline hide its spread."""
    random = np.random.default_rng(0)
    baseline = np.where(random.random((EXPERIMENTS, 5)) < 0.3, 100.0, 1e9)  # sometimes lucky, else never
    _, low, _ = t_interval(np.log(np.minimum(baseline, 2000) / 500) + random.normal(0, 0.01, size=baseline.shape))
    restricted_mean = 0.3 * math.log(100 / 500) + 0.7 * math.log(2000 / 500)
    assert np.mean(low <= restricted_mean) < 0.9


def test_t_interval_and_median_bound_by_hand():
    mean, low, high = t_interval([1.0, 2.0, 3.0])  # deviation 1, t(2, 97.5 %) = 4.30265
    half = 4.30265 / math.sqrt(3)
    assert (mean, low, high) == (2, pytest.approx(2 - half, rel=1e-5), pytest.approx(2 + half, rel=1e-5))
    assert all(math.isnan(each) for each in t_interval([1.0])[1:])
    assert median_bound([4.0, 3.0, 2.0, 1.0]) == -math.inf  # 1 / 16 is more than 5 %
    assert median_bound([5.0, 4.0, 3.0, 2.0, 1.0]) == 1.0  # 1 / 32
    assert median_bound([8.0, 7, 6, 5, 4, 3, 2, 1]) == 2.0  # 9 / 256 allows the second smallest, 37 / 256 not the third


# Groups


def test_runs_with_a_known_ratio_give_it_back_within_the_interval():
    random = np.random.default_rng(3)
    runs = []
    for seed in range(5):
        runs.append(reaching(int(random.lognormal(math.log(1200), 0.1)), "algo=dapo", f"seed={seed}", last=10**6))
        runs.append(reaching(int(random.lognormal(math.log(300), 0.1)), f"seed={seed}"))
    comparison = compare(runs)
    assert [(group.name, len(group.runs)) for group in comparison.groups] == [("dapo", 5), ("dual-lora", 5)]
    assert (comparison.baseline, comparison.ceiling, comparison.target) == ("dapo", 0.9, pytest.approx(0.63))
    low, high = comparison.groups[1].ratio.interval  # type: ignore[misc]
    assert low < 4 < high  # type: ignore[operator]
    assert 2 < low < high < 8  # type: ignore[operator]


def test_groups_are_named_by_what_sets_them_apart():
    def named(*settings: str) -> list[str]:
        return group_names([load_config(["preset=tiny", *each.split()]) for each in settings])

    assert named("algo=dapo", "seed=3") == ["dapo", "dual-lora"]
    assert named("algo=dapo steps=7", "steps=9") == ["dapo", "dual-lora"]  # constant within its algorithm
    assert named("coupling=separate", "coupling=shared lookahead=off") == [
        "dual-lora",
        "dual-lora coupling=shared lookahead=off",
    ]
    assert named("", "policy.frozen=true", "world_model.only=true lora.rank=8") == [
        "dual-lora",
        "dual-lora frozen-policy",
        "dual-lora frozen-policy rank=8",
    ]
    assert named("algo=dapo", "policy.frozen=true") == ["dapo", "dual-lora frozen-policy"], "also where it is alone"
    assert named("algo=dapo", "algo=dapo feedback=true internalise.rows=8", "feedback=true internalise.rows=8") == [
        "dapo",
        "imitation+feedback",
        "dual-lora+feedback",
    ]
    verl = "engine=verl verl.actor_rollout_ref.rollout.name"
    assert named("", f"{verl}=vllm verl.trainer.nnodes=2") == ["dual-lora", "dual-lora engine=verl"]
    assert named(f"{verl}=vllm", f"{verl}=lfo") == [
        "dual-lora verl=name=vllm",
        "dual-lora verl=name=lfo",
    ]
    assert named("world_model.weight=0.5", "world_model.weight=1", "world_model.weight=2") == [
        "dual-lora weight=0.5",
        "dual-lora",
        "dual-lora weight=2",
    ]
    assert named("policy.learning_rate=0.1", "eval.splits=val,train") == [
        "dual-lora policy.learning_rate=0.1",
        "dual-lora",  # how it is evaluated does not make the arm
    ]
    assert named("", "eval.tasks=300") == ["dual-lora", "dual-lora tasks=300"], "unless nothing else tells them apart"


@pytest.mark.parametrize(
    ("one", "other", "names"),
    [
        ("eval.every=5", "eval.every=10", ["dual-lora every=5", "dual-lora"]),  # how often the weight is set
        (
            "surprise=0.0123",
            "surprise=0.01230001",
            ["dual-lora surprise=0.0123", "dual-lora surprise=0.01230001"],
        ),
        ("env_args.companies=50", "env_args.companies=50.0", ["dual-lora #1", "dual-lora #2"]),  # equal, to Python
    ],
)
def test_no_two_groups_have_one_name_and_no_group_is_left_out(one: str, other: str, names: list[str]):
    runs = [reaching(80, "world_model.schedule=adaptive", each) for each in (one, other)]
    comparison = compare(runs, baseline=names[1])
    assert [group.name for group in comparison.groups] == names
    assert [group.runs[0] for group in comparison.groups] == runs
    assert [group.ratio.value for group in comparison.groups] == [pytest.approx(1), None]


def test_machine_and_place_do_not_make_a_group_but_two_runs_of_one_seed_are_refused():
    one = reaching(80, "seed=1", "output_dir=a")
    other = reaching(80, "seed=2", "output_dir=b", "checkpoint_every=5")
    assert len(compare([one, other]).groups) == 1
    with pytest.raises(UsageError, match="same config and the same seed"):
        compare([one, dataclasses.replace(one, path=Path("copy"))])


def test_the_baseline_is_plain_dapo_unless_another_is_named():
    runs = [reaching(800, "algo=dapo"), reaching(200), reaching(400, "coupling=shared")]
    ratios = [group.ratio.value for group in compare(runs).groups]
    assert ratios == [None, pytest.approx(4), pytest.approx(2)]
    ratios = [group.ratio.value for group in compare(runs, baseline="dual-lora coupling=shared").groups]
    assert ratios == [pytest.approx(0.5), pytest.approx(2), None]
    with pytest.raises(UsageError, match=r"group 'x' does not exist; the groups are 'dapo', 'dual-lora', "):
        compare(runs, baseline="x")
    with pytest.raises(UsageError, match="several groups are plain DAPO"):
        compare([*runs, reaching(800, "algo=dapo", "policy.learning_rate=0.1")])
    without = compare(runs[1:])
    assert without.baseline is None
    assert "--baseline names another" in without.notes[-1]
    assert all(group.ratio.value is None for group in without.groups)


def test_runs_that_were_looked_at_more_or_less_often_are_compared_and_it_is_said():
    runs = [run_of({0: 0.0, 80: 0.1}, f"seed={seed}", f"eval.every={every}") for seed, every in ((0, 5), (1, 20))]
    comparison = compare(runs)
    assert len(comparison.groups) == 1
    assert "evaluated every 5 or 20 steps" in comparison.notes[-1]
    assert not any("evaluated" in note for note in compare(runs[:1]).notes)


def test_policies_that_internalised_are_compared_without_look_ahead_when_asked():
    with_lookahead = reaching(80, "algo=internalise", "seed=0")
    rows = [{**row, f"{VAL}_blind": row[VAL] / 2} for row in with_lookahead.rows]
    trained = dataclasses.replace(with_lookahead, rows=rows)
    plain = reaching(160, "algo=dapo")
    sighted = compare([trained, plain])
    assert sighted.groups[0].by_seed == {0: Reached(tasks=80)}
    assert any("--blind measures their policies" in note for note in sighted.notes)
    blind = compare([without_lookahead(run) for run in (trained, plain)])
    assert [group.by_seed for group in blind.groups] == [{0: Reached(tasks=81, censored=True)}, {0: Reached(tasks=160)}]
    assert not any("--blind" in note for note in blind.notes)


def test_blind_shows_no_success_with_look_ahead():
    run = reaching(80, "algo=dual-lora")
    levels = {f"{VAL}_by_level": {"2": 0.9, "3": 0.8}}
    measured = [{**row, **levels, f"{VAL}_blind": 0.2} for row in run.rows]
    blind = compare([without_lookahead(dataclasses.replace(run, rows=(*measured, {"step": 99, **levels})))])
    assert (blind.groups[0].success, blind.groups[0].by_level, blind.groups[0].blind) == (0.2, {}, {})
    with pytest.raises(DataError, match="was never evaluated without look-ahead"):
        compare([without_lookahead(run)])
    plain = reaching(80, "algo=dapo")
    assert without_lookahead(plain) is plain


def test_a_world_without_a_ceiling_is_compared_by_success_itself():
    data = json.loads(json.dumps(DATA))
    data["splits"]["val"]["ceiling"] = None
    comparison = compare([run_of({0: 0.0, 80: 0.69, 160: 0.7}, data=data)])
    assert (comparison.target, comparison.groups[0].by_seed[0].tasks) == (0.7, 160)
    assert list(comparison.groups[0].tasks_to) == ["success"]


def test_unseen_companies_are_compared_at_equal_tasks():
    long = {0: 0.0, 100: 0.0, 200: 0.0, 300: 0.0}
    base = [
        run_of(long, "algo=dapo", unseen=[0.0, 0.1, 0.2, 0.9]),
        run_of({0: 0.0, 100: 0.0, 250: 0.0}, "algo=dapo", "seed=1", unseen=[0.0, 0.1, 0.5]),
    ]
    own = [run_of({0: 0.0, 90: 0.5, 220: 0.8}, unseen=[0.0, 0.3, 0.6])]
    baseline, group = compare([*base, *own]).groups
    shot = group.zero_shot
    assert shot is not None
    assert (shot.tasks, shot.success, shot.baseline) == (220, 0.6, pytest.approx(0.15))  # at 200 and at 100 tasks
    assert shot.ratio == pytest.approx(4)
    assert baseline.zero_shot is not None
    assert (baseline.zero_shot.tasks, baseline.zero_shot.success) == (250, pytest.approx(0.35))


def test_a_zero_shot_ratio_needs_a_baseline_that_is_not_zero_and_a_split_that_was_evaluated():
    base = run_of({0: 0.0, 80: 0.0}, "algo=dapo", unseen=[0.0, 0.0])
    group = compare([base, run_of({0: 0.0, 80: 0.0}, unseen=[0.0, 0.5])]).groups[1]
    assert group.zero_shot is not None
    assert group.zero_shot.ratio is None
    group = compare([base, run_of({0: 0.0, 80: 0.0}, "eval.splits=val")]).groups[1]
    assert group.zero_shot is None


# Every split, and how far seeds agree


def test_success_at_the_end_is_told_for_every_split_and_level_with_its_interval():
    def run(seed: int, success: float) -> RunRecord:
        made = run_of({0: 0.0, 80: success}, f"seed={seed}", "eval.final_splits=test_unseen_rules", unseen=[0.0, 0.5])
        last = {"eval/test_unseen_rules/success": 0.25, "eval/val/success_by_level": {"2": success, "3": 0.0}}
        last["eval/val/success_blind"] = success / 10
        return dataclasses.replace(made, rows=(made.rows[0], {**made.rows[1], **last}))

    comparison = compare([run(seed, success) for seed, success in enumerate((0.5, 0.6, 0.7))])
    (group,) = comparison.groups
    val = group.at_the_end["val"]
    assert (val.by_seed, val.mean) == ({0: 0.5, 1: 0.6, 2: 0.7}, pytest.approx(0.6))
    assert val.interval == pytest.approx((0.6 - 0.2484, 0.6 + 0.2484), abs=1e-4)  # 4.3027 * 0.1 / sqrt(3)
    assert (group.at_the_end["test_unseen_companies"].mean, group.at_the_end["test_unseen_rules"].mean) == (0.5, 0.25)
    assert group.at_the_end["test_unseen_rules"].interval is None, "three seeds that agree tell no deviation"
    assert split_table(comparison) == [
        ("group", "val", "companies", "rules", "val blind"),
        ("dual-lora", "60% ±25", "50%", "25%", "6% ±2"),
    ]
    assert level_table(comparison) == [("group", "2", "3"), ("dual-lora", "60% ±25", "0%")]
    assert level_table(compare([run_of({0: 0.5})])) == []
    apart = compare([run(seed, success) for seed, success in enumerate((0.8, 0.1, 0.9))])
    assert split_table(apart)[1][1] == "60% (seeds 10-90)", "an interval of 108 points either way would say nothing"
    two = compare([run(seed, success) for seed, success in enumerate((0.5, 0.52))])
    assert split_table(two)[1][1] == "51% (seeds 50-52)", "and that of two seeds is 13 times their standard error"


def test_a_difference_has_no_interval_beyond_what_is_possible():
    runs = [run_of({0: 0.0, 80: 0.0}, "algo=dapo", f"seed={seed}") for seed in range(3)]
    runs += [run_of({0: 0.0, 80: success}, f"seed={seed}") for seed, success in enumerate((0.8, 0.1, 0.9))]
    (line,) = (line for line in conclusions(compare(runs)) if "cannot be distinguished" in line)
    assert line.endswith("+60.0 points (95%: -48.3 to +100.0).")


@pytest.mark.parametrize(("own", "told"), [((0.02, 0.01, 0.00), False), ((0.42, 0.39, 0.45), True)])
def test_a_group_that_does_what_the_baseline_does_cannot_be_told_from_it(own: tuple[float, ...], told: bool):
    base = [run_of({0: 0.0, 80: 0.01, 160: 0.9}, "algo=dapo", f"seed={seed}") for seed in range(3)]
    runs = [run_of({0: 0.0, 80: success}, "lookahead=false", f"seed={seed}") for seed, success in enumerate(own)]
    comparison = compare([*base, *runs])
    difference = comparison.groups[1].difference
    assert difference is not None
    assert difference.tasks == 80, "where both have been"
    assert difference.points.mean == pytest.approx(sum(own) / 3 - 0.01)
    assert (
        any("cannot be distinguished from dapo on val after 80 tasks" in line for line in conclusions(comparison))
        != told
    )
    assert comparison.groups[0].difference is None
    elsewhere = [run_of({0: 0.0, 90: 0.5, 160: 0.01}, "lookahead=false", f"seed={seed}") for seed in range(3)]
    gap = compare([*base, *elsewhere]).groups[1].difference
    assert gap is not None
    assert (gap.tasks, gap.points.mean) == (160, pytest.approx(-0.89)), "never at different numbers of tasks"
    two = compare([*base[:2], *runs[:2]])
    assert not any("cannot be distinguished" in line for line in conclusions(two)), (
        "two seeds hardly ever tell anything"
    )


def test_a_group_that_does_exactly_what_the_baseline_does_is_said_to():
    base = [run_of({0: 0.0, 80: 0.0}, "algo=dapo", f"seed={seed}") for seed in range(3)]
    runs = [run_of({0: 0.0, 80: 0.0}, "lookahead=false", f"seed={seed}") for seed in range(3)]
    said = "equals dapo exactly on val after 80 tasks, for every seed."
    assert any(said in line for line in conclusions(compare([*base, *runs])))


# World model and policy


def test_accuracy_is_set_against_the_gain_and_the_success_half_a_run_later():
    # Steps 0, 10, 20, 30, 40: gains over 20 steps start at 0, 10 and 20.
    rows = rows_of({0: 0.0, 1: 0.1, 2: 0.4, 3: 0.7, 4: 0.8}, accuracy=[0.1, 0.3, 0.2, 0.9, 0.9])
    found = correlation([rows])
    assert found is not None
    assert (found.accuracy, found.steps, found.n) == (ACCURACY, 20, 3)
    assert found.with_gain == pytest.approx(np.corrcoef([0.1, 0.3, 0.2], [0.4, 0.6, 0.4])[0, 1])
    assert found.with_success == pytest.approx(np.corrcoef([0.1, 0.3, 0.2], [0.4, 0.7, 0.8])[0, 1])


def test_the_gain_is_looked_at_fifty_steps_later_where_the_runs_are_long_enough():
    points = {tasks: tasks / 20 for tasks in range(12)}  # 110 steps
    found = correlation([rows_of(points, accuracy=[0.5] * 12)] * 2)
    assert found is not None
    assert (found.steps, found.n, found.with_gain) == (50, 14, None)  # the accuracy never varies


def test_the_held_out_accuracy_is_the_better_witness_if_all_runs_have_it():
    held_out = "world_model_eval/semantic_accuracy"
    rows = rows_of({0: 0.0, 1: 0.1, 2: 0.2}, accuracy=[0.1, 0.2, 0.3])
    better = tuple({**row, held_out: 0.5} for row in rows)
    for runs, key in (([better], held_out), ([rows, better], ACCURACY)):
        found = correlation(runs)
        assert found is not None
        assert found.accuracy == key
    assert correlation([rows_of({0: 0.0, 1: 0.1})]) is None


def test_a_correlation_of_nothing_is_none():
    assert pearson([1, 2], [1, 2]) is None
    assert pearson([1, 1, 1], [1, 2, 3]) is None
    assert pearson([1, 2, 3], [2, 4, 6]) == pytest.approx(1)


# Refusals


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (
            lambda data: data.update(environment="oracle-codes"),
            "their environment differ, phone-calls and oracle-codes",
        ),
        (lambda data: data.update(levels=[3]), r"their levels differ, \[2\] and \[3\]"),
        (
            lambda data: data["splits"]["val"].update(tasks=50, fingerprint="c" * 16),
            "evaluated on different tasks of val .100 with fingerprint a{16}, 50 with c{16}",
        ),
        (
            lambda data: data["splits"]["test_unseen_companies"].update(fingerprint="c" * 16),
            "different tasks of test_unseen_companies",
        ),
    ],
)
def test_runs_of_different_data_are_not_compared(change, reason):
    other = json.loads(json.dumps(DATA))
    change(other)
    with pytest.raises(UsageError, match=reason):
        compare([reaching(80, "algo=dapo"), run_of({0: 0.0, 80: 0.5}, data=other)])


def test_runs_that_cannot_be_used_are_named():
    good = reaching(80)
    for bad, words in (
        (dataclasses.replace(good, problem="x is damaged"), "x is damaged"),
        (dataclasses.replace(good, rows=({"step": 1, "tasks_seen": 8},)), "contains no evaluation on val yet"),
        (dataclasses.replace(good, data=None), "the tasks of the evaluation of dual-lora-0 are unknown"),
    ):
        with pytest.raises(DataError, match=words):
            compare([good, bad])
    with pytest.raises(UsageError, match="no runs"):
        compare([])
    unbegun = dataclasses.replace(good, problem="x has no metrics yet", rows=())
    comparison = compare([good, unbegun])
    assert [len(group.runs) for group in comparison.groups] == [1]
    assert "x has no metrics yet and is left out" in comparison.notes
    with pytest.raises(DataError, match="x has no metrics yet"):
        compare([unbegun])


# For people and programs


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Real folders: two seeds each, plain DAPO never gets there, dual-LoRA does."""
    for algo, points in (("dapo", {0: 0.0, 80: 0.1, 160: 0.1}), ("dual-lora", {0: 0.0, 80: 0.9, 88: 0.9})):
        for seed in (0, 1):
            run = tmp_path / f"{algo}-{seed}"
            run.mkdir()
            config = load_config(["preset=tiny", SPLITS, f"algo={algo}", f"seed={seed}", "steps=20"])
            (run / "config.yaml").write_text(to_yaml(config))
            (run / "data.json").write_text(json.dumps(DATA))
            rows = rows_of(points, unseen=list(points.values()))
            for row in rows[1:]:
                row |= {
                    "sampled_tokens": 1000 if algo == "dapo" else 4000,
                    "seconds/rollout": 10.0,
                    "seconds/eval": 99.0,
                }
                if algo == "dual-lora":
                    row |= {"rollouts_seen": 4 * row["tasks_seen"], "eval/val/success_blind": 0.25}
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.fixture
def lfo(monkeypatch, capsys):
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


def test_the_command_shows_bounds_as_bounds(lfo, folder: Path):
    code, out, err = lfo("compare", str(folder))
    assert (code, err) == (0, "")
    assert "> 160" in out
    assert "≥ 2.0" in out
    assert "dapo needed at least 2.0 times as many tasks as dual-lora to reach 63% on val, over 2 paired seeds" in out
    assert "On test_unseen_companies after 88 tasks: dual-lora 90%, dapo 10%." in out
    assert "dapo-0 has not ended" not in out
    assert "Times less than dapo to 63% on val" in out
    assert "val blind" in out
    assert "Blind, without look-ahead, is what the policy's weights know." in out


def test_the_command_answers_programs(lfo, folder: Path):
    code, out, _ = lfo("compare", *map(str, find_runs([folder])), "--json")
    result = json.loads(out)
    assert (code, result["baseline"], result["target"]) == (0, "dapo", pytest.approx(0.63))
    group = result["groups"][1]
    assert group["name"] == "dual-lora"
    assert group["runs"] == [str(folder / "dual-lora-0"), str(folder / "dual-lora-1")]
    assert group["tasks_to"]["ceiling"]["70"] == {"tasks": 80.0, "censored": False}
    assert result["groups"][0]["tasks_to"]["success"]["90"] == {"tasks": 160.0, "censored": True}
    assert (group["ratio_to_baseline"], group["interval"]) == (pytest.approx(2), None)
    assert (group["censored"], group["bound"], group["paired_seeds"]) == (True, "at least", [0, 1])
    assert (group["zero_shot"], group["zero_shot_ratio"]) == (0.9, pytest.approx(9))
    assert group["blind"]["val"]["by_seed"] == {"0": 0.25, "1": 0.25}
    assert result["groups"][0]["blind"] == {}
    assert group["costs"]["seconds"]["by_seed"] == {"0": 10.0, "1": 10.0}, "at 80 tasks, evaluation not counted"
    assert result["groups"][0]["costs"]["tasks"]["value"] is None


def test_runs_are_found_in_all_folders_below_and_not_inside_runs(lfo, folder: Path):
    inner = folder / "deeper" / "still" / "dual-lora-2"
    inner.mkdir(parents=True)
    for file in (folder / "dual-lora-1").iterdir():
        (inner / file.name).write_text(file.read_text().replace("seed: 1", "seed: 2"))
    (inner / "checkpoints").mkdir()
    (inner / "checkpoints" / "config.yaml").touch()
    runs = [folder / name for name in ("dapo-0", "dapo-1", "deeper/still/dual-lora-2", "dual-lora-0", "dual-lora-1")]
    assert find_runs([folder, inner]) == runs
    assert find_runs([inner / "checkpoints", folder / "none"]) == [inner / "checkpoints", folder / "none"]
    _, out, _ = lfo("compare", str(folder), "--json")
    assert [len(group["runs"]) for group in json.loads(out)["groups"]] == [2, 3]


def test_the_command_refuses_with_the_reason(lfo, folder: Path):
    (folder / "dapo-1" / "metrics.jsonl").write_text("{}\n" * 2)
    code, out, err = lfo("compare", str(folder))
    assert (code, out) == (2, "")
    assert err == f"lfo: {folder}/dapo-1/metrics.jsonl, line 1: this row of metrics has no step\n"
    assert lfo("compare", "nowhere")[0::2] == (2, "lfo: nowhere is not a run folder: it has no config.yaml\n")


def test_a_comparison_is_valid_json_and_has_a_row_for_every_group():
    comparison = compare([reaching(800, "algo=dapo"), reaching(200), run_of({0: 0.9, 8: 0.9}, "coupling=shared")])
    json.dumps(as_json(comparison), allow_nan=False)
    headings, *rows = table(comparison)
    assert all(len(row) == len(headings) for row in rows)
    assert [row[0] for row in rows] == ["dapo", "dual-lora", "dual-lora coupling=shared"]
    words = " ".join(conclusions(comparison))
    assert "one seed has no interval" in words
    assert "dual-lora coupling=shared against dapo: the target was reached before any training." in words
