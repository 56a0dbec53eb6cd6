"""Which players must succeed and which must fail, on few tasks; `lfo bench bounds` plays a thousand on each level."""

from __future__ import annotations

from collections import Counter

import pytest

from benchmarks.bounds import bound_problems, play, score_of
from benchmarks.players import HOSTILE_PLAYERS, PLAYERS, best_constant_form
from lfo.env.worlds.phone.ceiling import industry_of
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.fields import FIELDS, REFERENCE
from lfo.env.worlds.phone.generator import Options
from lfo.env.worlds.phone.players import informed_form
from lfo.env.worlds.phone.tasks import LEVEL, SPLITS, TaskStream

OPTIONS = Options()


@pytest.mark.parametrize("level", LEVEL)
@pytest.mark.parametrize("name", PLAYERS)
def test_a_player_keeps_its_bound(name: str, level: int) -> None:
    tasks = OPTIONS.stream("val", levels=(level,), stream_seed=11).take(100)
    assert bound_problems(name, level, score_of(play(PLAYERS[name], OPTIONS, tasks))) == []


@pytest.mark.parametrize("split", SPLITS)
def test_the_informed_player_solves_every_split_and_doing_nothing_solves_none(split: str) -> None:
    tasks = OPTIONS.stream(split, stream_seed=12).take(100)
    assert play(PLAYERS["informed"], OPTIONS, tasks) == [1.0] * 100
    assert play(PLAYERS["nothing"], OPTIONS, tasks) == [0.0] * 100


@pytest.mark.parametrize("name", HOSTILE_PLAYERS)
def test_hostile_players_never_succeed(name: str) -> None:
    tasks = OPTIONS.stream("val", stream_seed=13).take(25)
    assert play(HOSTILE_PLAYERS[name], OPTIONS, tasks) == [0.0] * 25


@pytest.mark.parametrize("level", LEVEL)
def test_the_law_knower_succeeds_exactly_when_its_form_holds_what_is_required(level: int) -> None:
    tasks = OPTIONS.stream("val", levels=(level,), stream_seed=14).take(60)
    rewards = play(PLAYERS["law"], OPTIONS, tasks)
    if level in (1, 6):
        assert rewards == [1.0] * 60
    else:
        assert 0 < sum(rewards) < 60  # some companies deviate


def test_the_constant_form_is_as_good_as_any_of_its_neighbours() -> None:
    form = set(best_constant_form(PhoneCalls().world, 2))
    tasks = TaskStream(levels=(2,)).take(500)
    needs = [set(informed_form(task)) - {REFERENCE} for task in tasks]

    def covered(names: set[str]) -> int:
        return sum(need <= names for need in needs)

    assert len(form) == 4
    assert covered(form) > 0
    swaps = [form - {out} | {into} for out in form for into in FIELDS]
    assert covered(form) == max(map(covered, swaps))


def test_on_level_6_no_constant_form_is_better_than_a_guess() -> None:
    tasks = TaskStream(levels=(6,)).take(500)
    enough = Counter(name for task in tasks for name in task.errands[0].accepted(industry_of(task), 0))
    assert set(enough) == set(FIELDS)
    assert 0.12 < min(enough.values()) / 500 <= max(enough.values()) / 500 < 0.21  # a sixth
    assert sum(play(PLAYERS["constant"], OPTIONS, tasks)) == max(enough.values())
