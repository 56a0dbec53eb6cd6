"""Laws by seed: law 0 is unchanged, the others shuffle the same fields, and all keep the bounds of the world."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bounds import bound_problems, check, law_problems, play, score_of
from benchmarks.players import PLAYERS
from lfo.config import load_config
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.fields import ALTERNATIVE
from lfo.env.worlds.phone.generator import Options, generate, load, render
from lfo.env.worlds.phone.rules import IDENTIFIERS, PROOFS, law, law_of
from lfo.env.worlds.phone.tasks import Task, TaskStream
from lfo.env.worlds.phone.world import KINDS, company
from lfo.errors import UsageError
from lfo.loading import environment_factory
from lfo.runs.data import describe_data

LAWS = range(1, 6)


def visible(task: Task) -> tuple[Any, ...]:
    return task.company_name, task.goal, task.level, task.moved_kind, task.moved_number


def test_law_0_writes_the_tasks_that_it_wrote_before_there_were_others() -> None:
    files = {name: hashlib.sha256(data).hexdigest()[:16] for name, data in render(Options()).items()}
    files.pop("manifest.json")  # it names the generator's version, which other levels raise
    assert files == {
        "companies.jsonl": "631640efcd5d245c",
        "unseen_companies.jsonl": "e162afeadd79bc9f",
        "train.jsonl": "5c412a9a2596bcb6",
        "val.jsonl": "8c7e95a8e4bdb3aa",
        "test_unseen_companies.jsonl": "c179eff1460dac1c",
        "test_unseen_rules.jsonl": "5a6a0ac0421e4eb7",
        "test_unseen_phrasing.jsonl": "d59f37aceea90a18",
    }


@pytest.mark.parametrize("seed", LAWS)
def test_a_drawn_law_deals_every_field_once_and_keeps_the_parts(seed: int) -> None:
    drawn, by_hand = law_of(seed), law_of(0)
    identifiers = [name for pair in drawn.identifiers.values() for name in pair]
    dealt = [*identifiers, *drawn.extras.values(), *drawn.proofs.values()]
    assert len(dealt) == len(set(dealt)) == 28
    assert not ALTERNATIVE.keys() & set(identifiers)
    for mine, theirs in ((drawn.extras, by_hand.extras), (drawn.proofs, by_hand.proofs)):
        assert mine.keys() == theirs.keys()
        assert len(ALTERNATIVE.keys() & set(mine.values())) == len(ALTERNATIVE.keys() & set(theirs.values()))
    assert len(drawn.first_group) == 5


def test_laws_differ_from_each_other_and_from_common_sense() -> None:
    rules = [(industry, kind) for industry, kinds in KINDS.items() for kind in kinds]

    def shared(seed: int) -> float:
        pairs = [(law(*rule, sensitive=True).fields, law(*rule, sensitive=True, seed=seed).fields) for rule in rules]
        return sum(len({*mine} & {*theirs}) for mine, theirs in pairs) / (3 * len(rules))

    assert sum(map(shared, range(1, 51))) / 50 < 0.12  # three fields of about 22 each, by chance
    assert shared(0) == 1.0
    assert len({tuple(law_of(seed).proofs.items()) for seed in range(50)}) == 50
    assert law_of(3) == law_of(3)
    assert list(law_of(3).proofs) == list(PROOFS)
    assert list(law_of(3).identifiers) == list(IDENTIFIERS)


def test_the_law_changes_only_what_is_hidden() -> None:
    for index in (0, 17, 1_000_003):
        one, other = company(0, index), company(0, index, 2)
        assert one.directory() == other.directory()
        assert one != other
    one, other = (TaskStream(levels=(2, 6), law=seed).take(60) for seed in (0, 2))
    assert [visible(task) for task in one] == [visible(task) for task in other]
    assert not any(mine.errands == theirs.errands for mine, theirs in zip(one, other, strict=True))
    assert {task.id for task in one}.isdisjoint(task.id for task in other)


@pytest.mark.parametrize("seed", LAWS)
def test_the_constant_form_fails_and_the_law_knower_meets_the_ceiling(seed: int) -> None:
    """On level 4, whose tasks need a field with an alternative; `lfo bench bounds` plays all levels."""
    options = Options(law=seed)
    tasks = options.stream("val", levels=(4,), stream_seed=1).take(100)
    assert bound_problems("constant", 4, score_of(play(PLAYERS["constant"], options, tasks))) == []
    assert law_problems(4, tasks, play(PLAYERS["law"], options, tasks)) == []


def test_the_law_knower_of_another_law_knows_nothing() -> None:
    options = Options(law=2)
    tasks = options.stream("val", levels=(2,)).take(200)
    mistaken = [dataclasses.replace(task, law=0) for task in tasks]  # the player reads the law of its task
    assert sum(play(PLAYERS["law"], options, mistaken)) < 0.05 * 200
    assert sum(play(PLAYERS["law"], options, tasks)) > 0.8 * 200


def test_a_folder_of_a_law_is_written_read_and_checked(tmp_path: Path) -> None:
    small: dict[str, Any] = {"num_companies": 12, "num_train_tasks": 10, "num_val_tasks": 10, "levels": (2,)}
    manifest = generate(tmp_path / "data", law=3, **small)
    assert manifest["options"]["law"] == 3
    dataset = load(tmp_path / "data")
    assert {task.law for task in dataset.tasks["val"]} == {3}
    assert PhoneCalls(data=tmp_path / "data").world.law == 3
    drawn = PhoneCalls(law=3, companies=12, unseen_companies=6, levels=(2,), counts={"val": 10}).tasks("val")
    assert dataset.tasks["val"] == tuple(drawn)
    assert check(dataset, tasks_per_level=10)["ok"]
    with pytest.raises(UsageError, match="other options"):
        generate(tmp_path / "data", law=2, **small)
    assert "law" not in generate(tmp_path / "other", **small)["options"]


def test_a_run_names_its_law_and_its_data_differ() -> None:
    def fingerprint(*settings: str) -> str:
        config = load_config(["eval.tasks=3", *settings])
        return describe_data(config, environment_factory(config))["splits"]["val"]["fingerprint"]

    assert fingerprint() == fingerprint("env_args.law=0")
    assert fingerprint() != fingerprint("env_args.law=1") != fingerprint("env_args.law=2")


def test_a_law_is_a_seed() -> None:
    with pytest.raises(UsageError, match="law must be"):
        PhoneCalls(law=-1)
    with pytest.raises(UsageError, match="law must be"):
        Options(law=-1)
