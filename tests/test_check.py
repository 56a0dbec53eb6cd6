"""The check of the phone-call world: it passes on a good world and finds the defects of bad ones."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from benchmarks import bounds as check_module
from benchmarks.bounds import Score, bound_problems, check, disjointness_problems, law_problems, plays, score_of
from benchmarks.players import HOSTILE_PLAYERS, PLAYERS
from lfo.env.worlds.phone.generator import Dataset, Options, generate, load
from lfo.env.worlds.phone.tasks import Task
from lfo.statistics import wilson


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    folder = tmp_path_factory.mktemp("check") / "data"
    generate(folder, num_train_tasks=60, num_val_tasks=20)
    return load(folder)


def test_a_good_world_keeps_its_promises(dataset: Dataset) -> None:
    played = []
    result = check(dataset, tasks_per_level=60, on_played=lambda: played.append(1))
    assert result["problems"] == []
    assert result["ok"] is True
    assert len(played) == plays(dataset.options)
    assert list(result["players"]) == list(PLAYERS) == [
        *("informed", "law", "reader", "constant", "nothing", "random", "every_field", "copied"),
    ]  # fmt: skip
    for scores in result["players"].values():
        assert list(scores) == ["1", "2", "3", "4", "5"]
        for score in scores.values():
            assert list(score) == ["success", "low", "high", "n"]
            assert 0 <= score["low"] <= score["success"] <= score["high"] <= 1
            assert score["n"] == 60
    assert {split: list(levels) for split, levels in result["ceiling"].items()} == {
        split: ["1", "2", "3", "4", "5"] for split in dataset.tasks
    }
    assert set(result["hostile"]) == set(HOSTILE_PLAYERS)


def test_a_player_that_wins_by_doing_nothing_and_one_that_raises_are_found(
    dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lucky(environment: object, task: Task) -> float:
        return 1.0

    def crash(environment: object, task: Task) -> float:
        raise RecursionError("deep")

    few = dataclasses.replace(dataset, options=dataclasses.replace(dataset.options, levels=(2,)))
    monkeypatch.setattr(check_module, "PLAYERS", {"informed": PLAYERS["informed"], "nothing": lucky})
    monkeypatch.setattr(check_module, "HOSTILE_PLAYERS", {"megabyte": crash, "forged_values": lucky})
    result = check(few, tasks_per_level=20)
    assert result["ok"] is False
    words = "\n".join(result["problems"])
    assert "nothing on level 2 succeeds in 100.0%" in words
    assert "nothing gets 1 in 60 tasks of train" in words
    assert "megabyte on level 2: the environment raised RecursionError: deep" in words
    assert "forged_values on level 2 succeeds" in words


@pytest.mark.parametrize(
    ("player", "level", "success", "broken"),
    [
        ("informed", 3, 0.999, True),
        ("informed", 3, 1.0, False),
        ("reader", 1, 0.5, True),
        ("reader", 1, 1.0, False),
        ("reader", 2, 0.06, True),
        ("reader", 2, 0.05, False),
        ("constant", 2, 0.11, False),  # its lower bound is 9.2 %
        ("constant", 2, 0.13, True),
        ("random", 2, 0.02, False),
        ("random", 2, 0.05, True),
        ("copied", 5, 0.05, True),
        ("constant", 6, 0.22, False),
        ("constant", 6, 0.25, True),
        ("random", 6, 0.12, False),
        ("random", 6, 0.15, True),
        ("copied", 6, 0.05, True),
        ("reader", 6, 0.06, True),
    ],
)
def test_bounds(player: str, level: int, success: float, broken: bool) -> None:
    low, high = wilson(success, 1000)
    score = Score(success=success, low=low, high=high, n=1000)
    assert bool(bound_problems(player, level, score)) is broken


@pytest.mark.parametrize("seed", [0, 1, 6, 7])  # in 1, 6 and 7 the companies happen to deviate more or less often
def test_the_law_knower_meets_the_ceiling_in_every_world(seed: int) -> None:
    options = Options(seed=seed)
    for level in (2, 3, 5):
        tasks = options.stream("val", levels=(level,), stream_seed=1).take(400)
        rewards = check_module.play(PLAYERS["law"], options, tasks)
        assert law_problems(level, tasks, rewards) == []


def test_a_law_knower_off_the_ceiling_is_found() -> None:
    options = Options()
    tasks = options.stream("val", levels=(2,), stream_seed=1).take(1000)
    for share in (0.7, 1.0):
        rewards = [float(number < share * 1000) for number in range(1000)]
        assert score_of(rewards).success == share
        assert len(law_problems(2, tasks, rewards)) == 1
    certain = options.stream("val", levels=(1,), stream_seed=1).take(50)
    assert law_problems(1, certain, [1.0] * 50) == []
    assert len(law_problems(1, certain, [1.0] * 49 + [0.0])) == 1


def test_splits_that_overlap_are_found(dataset: Dataset) -> None:
    assert disjointness_problems(dataset) == []
    train = dataset.tasks["train"]

    def problems(split: str, *tasks: Task) -> str:
        return "\n".join(disjointness_problems(dataclasses.replace(dataset, tasks={**dataset.tasks, split: tasks})))

    assert f"task {train[0].id} is in train and in val" in problems("val", train[0])
    stranger = dataclasses.replace(train[0], id="x")
    assert "task x is about a company of train" in problems("test_unseen_companies", stranger)
    assert "task x needs no rule combination that train lacks" in problems("test_unseen_rules", stranger)
    twins = dataclasses.replace(dataset, unseen_companies=dataset.companies[:1])
    assert f"company {dataset.companies[0].name} is seen and unseen" in disjointness_problems(twins)


def test_an_unsolvable_task_in_the_files_is_found(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    task = dataset.tasks["val"][1]
    broken = dataclasses.replace(task, profile={})
    damaged = dataclasses.replace(dataset, tasks={**dataset.tasks, "val": (broken,)})
    monkeypatch.setattr(check_module, "HOSTILE_PLAYERS", {})
    result = check(damaged, tasks_per_level=5)
    assert any(f"informed gets 0 in 1 tasks of val, first {task.id}" in problem for problem in result["problems"])


def test_folders_can_be_checked_twice(tmp_path: Path) -> None:
    generate(tmp_path / "a", num_companies=12, num_train_tasks=5, num_val_tasks=5, levels=(1,))
    once, twice = (check(load(tmp_path / "a"), tasks_per_level=10) for _ in range(2))
    assert once == twice
