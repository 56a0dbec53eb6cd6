"""Check the phone-call world: run every scripted player on fresh tasks and check its bounds.

The bounds (`docs/ENVIRONMENT.md` shows measured values):

    informed                                 always succeeds
    law                                      equals the information ceiling of the tasks it played
    reader                                   at least 90 % on level 1, at most 5 % on all others
    constant                                 lower end of its interval at most 10 %
    nothing, random, every_field, copied     lower end of their intervals at most 2 %
    hostile players                          never succeed and never make the environment raise

On level 6 guessing sometimes succeeds on purpose: `constant` may reach 20 % and `random` 12 %, well below the 70 % of
the ceiling at which runs are compared.

The check also tests that the splits are disjoint, and that every task in the files can be solved but not by doing
nothing.

    lfo bench bounds --data data
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.players import HOSTILE_PLAYERS, PLAYERS
from lfo.env.worlds.phone import reps
from lfo.env.worlds.phone.ceiling import ceiling, industry_of, mean_ceiling
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.generator import Dataset, Options
from lfo.env.worlds.phone.players import Player
from lfo.env.worlds.phone.tasks import LEVEL, SPLITS, Task
from lfo.statistics import wilson

FRESH_STREAM = 1  # the files are the beginning of stream 0
WIDE = 3.3  # standard deviations: one false alarm in a thousand, because there are many bounds
MIN_TRAIN_PHRASINGS = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """A success rate with its Wilson interval (95 %)."""

    success: float
    low: float
    high: float
    n: int


def check(
    dataset: Dataset, *, tasks_per_level: int = 1_000, on_played: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Play and check everything; `on_played` is called after each player's tasks of one level (see `plays`)."""
    options = dataset.options
    problems = [*disjointness_problems(dataset), *_solvability_problems(dataset)]
    players: dict[str, dict[str, Any]] = {name: {} for name in PLAYERS}
    hostile: dict[str, dict[str, Any]] = {name: {} for name in HOSTILE_PLAYERS}
    fresh_ceiling: dict[str, float] = {}
    for level in options.levels:
        tasks = options.stream("val", levels=(level,), stream_seed=FRESH_STREAM).take(tasks_per_level)
        fresh_ceiling[str(level)] = mean_ceiling(tasks)
        for name, player in PLAYERS.items():
            rewards = play(player, options, tasks)
            score = score_of(rewards)
            players[name][str(level)] = asdict(score)
            problems += bound_problems(name, level, score)
            if name == "law":
                problems += law_problems(level, tasks, rewards)
            on_played()
        for name, player in HOSTILE_PLAYERS.items():
            some = tasks[: max(1, tasks_per_level // 10)]
            try:
                score = score_of(play(player, options, some))
            except Exception as error:  # the environment must never raise, so any exception is a finding
                problems.append(f"{name} on level {level}: the environment raised {type(error).__name__}: {error}")
            else:
                hostile[name][str(level)] = asdict(score)
                problems += [f"{name} on level {level} succeeds in {score.success:.1%}"] * (score.success > 0)
            on_played()
    return {
        "ok": not problems,
        "problems": problems,
        "players": players,
        "hostile": hostile,
        "ceiling": dataset.ceilings,
        "fresh_ceiling": fresh_ceiling,
    }


def plays(options: Options) -> int:
    """Return how often `check` calls `on_played`."""
    return (len(PLAYERS) + len(HOSTILE_PLAYERS)) * len(options.levels)


def play(player: Player, options: Options, tasks: Iterable[Task]) -> list[float]:
    rewards = []
    for task in tasks:
        environment = PhoneCalls(
            seed=options.seed,
            law=options.law,
            companies=options.num_companies,
            unseen_companies=options.num_unseen_companies,
            levels=(task.level,),
        )
        environment.reset(task)
        rewards.append(player(environment, task))
    return rewards


def score_of(rewards: Sequence[float]) -> Score:
    success = sum(rewards) / len(rewards)
    low, high = wilson(success, len(rewards))
    return Score(success=success, low=low, high=high, n=len(rewards))


def bound_problems(player: str, level: int, score: Score) -> list[str]:
    """Return the broken bounds of one player on one level, as sentences."""
    constant, chance = (0.20, 0.12) if LEVEL[level].lenient else (0.10, 0.02)
    broken = {
        "informed": score.success < 1,
        "reader": score.success < 0.9 if level == 1 else score.success > 0.05,
        "constant": score.low > constant,
        "random": score.low > chance,
    }.get(player, player in ("nothing", "every_field", "copied") and score.low > 0.02)
    return [f"{player} on level {level} succeeds in {score.success:.1%}, which breaks its bound"] if broken else []


def law_problems(level: int, tasks: Sequence[Task], rewards: Sequence[float]) -> list[str]:
    """Check that the ceiling is within a wide interval around the success of the player `law`.

    A company deviates in all of its tasks or in none, so its tasks are not independent trials. The interval therefore
    uses the smaller number of independent trials that has the same variance.
    """
    expected = mean_ceiling(tasks)
    excess: dict[int, float] = defaultdict(float)
    for task, reward in zip(tasks, rewards, strict=True):
        excess[task.company] += reward - ceiling(task)
    scatter = sum(value * value for value in excess.values())
    independent = len(tasks) * expected * (1 - expected)  # the variance if all tasks were independent
    trials = len(tasks) * min(1.0, independent / scatter if scatter else 1.0)
    success = sum(rewards) / len(rewards)
    if trials == 0:  # the ceiling is 1, but a task failed
        return [f"law on level {level} reaches {success:.1%}, although the ceiling is 100%"]
    low, high = wilson(success, trials, WIDE)
    if low <= expected <= high:
        return []
    return [f"law on level {level} reaches {success:.1%} ({low:.1%} to {high:.1%}), the ceiling is {expected:.1%}"]


def disjointness_problems(dataset: Dataset) -> list[str]:
    """Return what two splits share although they must not."""
    problems = []
    seen_ids: dict[str, str] = {}
    for split in SPLITS:
        for task in dataset.tasks[split]:
            if task.id in seen_ids:
                problems.append(f"task {task.id} is in {seen_ids[task.id]} and in {split}")
            seen_ids[task.id] = split
    names = {each.name for each in dataset.companies} & {each.name for each in dataset.unseen_companies}
    problems += [f"company {name} is seen and unseen" for name in sorted(names)]
    trained_companies = {task.company for task in dataset.tasks["train"]}
    trained_rules = {rule for task in dataset.tasks["train"] for rule in _rules(task)}
    for task in dataset.tasks["test_unseen_companies"]:
        if task.company in trained_companies:
            problems.append(f"task {task.id} is about a company of train")
    for task in dataset.tasks["test_unseen_rules"]:
        if _rules(task) <= trained_rules:
            problems.append(f"task {task.id} needs no rule combination that train lacks")
    for category in reps.PHRASINGS:
        trained, held_out = (set(reps.phrasings(category, held_out=which)) for which in (False, True))
        if trained & held_out or len(trained) < MIN_TRAIN_PHRASINGS or not held_out:
            problems.append(f"the phrasings of {category} are not split as they must be")
    return problems


def _rules(task: Task) -> set[tuple[str, str]]:
    return {(industry_of(task), errand.kind) for errand in task.errands}


def _solvability_problems(dataset: Dataset) -> list[str]:
    """Check that every task of the files can be solved, and not by doing nothing."""
    problems = []
    for split, tasks in dataset.tasks.items():
        for player, right in (("informed", 1.0), ("nothing", 0.0)):
            rewards = play(PLAYERS[player], dataset.options, tasks)
            wrong = [task.id for task, reward in zip(tasks, rewards, strict=True) if reward != right]
            problems += (
                [f"{player} gets {1 - right:g} in {len(wrong)} tasks of {split}, first {wrong[0]}"] if wrong else []
            )
    return problems
