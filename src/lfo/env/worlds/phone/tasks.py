"""Tasks: what a user wants from which company, and the limits. A task is a pure function of its seed.

The visible part (goal, company, limits) depends on the law only; deviations change only the hidden part. So the best
success probability of an agent that knows the law but no deviations is exact: `ceiling.py`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lfo.env.seeds import stream
from lfo.env.worlds.phone.fields import ALTERNATIVE, FIELDS, REFERENCE
from lfo.env.worlds.phone.rules import Requirement, law, stand_ins
from lfo.env.worlds.phone.world import HELD_OUT_RULES, UNSEEN, Company, Department, Service, company
from lfo.errors import UsageError

SPLITS = ("train", "val", "test_unseen_companies", "test_unseen_rules", "test_unseen_phrasing")
LEVELS = (1, 2, 3, 4, 5)  # the default
_ROUND = 100  # companies tried before all may draw again


@dataclass(frozen=True, kw_only=True, slots=True)
class Level:
    """The limits of a level; `vague` is the probability that a rep does not say what is missing."""

    departments: tuple[int, int]
    max_fields: int
    failures_to_lock: int
    calls: int
    chained: bool = False  # each department asks for the reference that the one before it gave
    sensitive: bool = True  # sensitive services occur (three fields instead of two)
    look_alikes: bool = False
    alternatives: bool = False  # a required field is unavailable, and reps name what they take instead
    moved: bool = False  # the first department's listed number is an old one
    vague: float = 0.0
    lenient: bool = False  # a department checks only the first detail of a call: `Errand.accepted`


LEVEL: dict[int, Level] = {
    1: Level(departments=(1, 1), max_fields=3, failures_to_lock=2, calls=4, sensitive=False),
    2: Level(departments=(1, 1), max_fields=4, failures_to_lock=1, calls=3, look_alikes=True),
    3: Level(departments=(2, 2), max_fields=6, failures_to_lock=1, calls=4, chained=True),
    4: Level(departments=(1, 2), max_fields=6, failures_to_lock=1, calls=4, alternatives=True),
    5: Level(departments=(3, 3), max_fields=8, failures_to_lock=1, calls=6, chained=True, moved=True, vague=0.5),
    6: Level(departments=(1, 1), max_fields=4, failures_to_lock=1, calls=3, sensitive=False, lenient=True),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Errand:
    """One service that must be done: `Errand(kind="billing", service="invoice copy", requires=("account_number",))`.

    `requires` is hidden. It includes the reference of the previous errand, if the level chains errands.
    """

    kind: str
    service: str
    requires: tuple[str, ...]

    def accepted(self, industry: str, law: int) -> frozenset[str]:
        """Return the fields any one of which is enough for a lenient department: its identifier or a substitute."""
        return stand_ins(law)[industry] | {self.requires[0]}


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    id: str
    split: str
    level: int
    company: int  # index in the world
    company_name: str
    goal: str
    errands: tuple[Errand, ...]  # hidden, in the order in which they must be done
    profile: Mapping[str, str]  # hidden: the user's value for every available field
    moved_kind: str = ""  # the department whose listed number is old: that of the first errand
    moved_number: str = ""  # that old number
    talk_seed: int = 0  # the seed of the reps' phrasings
    law: int = 0  # hidden: the seed of the law that the company follows

    @property
    def limits(self) -> Level:
        return LEVEL[self.level]


_ASKS = (
    "I need {wishes} from {company}.",
    "Please call {company}: I need {wishes}.",
    "Can you reach {company} for me? I want {wishes}.",
    "At {company} I would like {wishes}.",
    "It is about {company}. Please get me {wishes}.",
)


def _goal(rng: random.Random, name: str, services: Sequence[str], level: Level) -> str:
    """Return the text of the goal. Services have their directory names; several are joined by "then", in order."""
    wishes = " and then ".join(f"the {service}" for service in services)
    text = rng.choice(_ASKS).format(wishes=wishes, company=name)
    if level.alternatives:
        text += " I may not have every paper here."
    checks = "check" if level.failures_to_lock == 1 else "checks"
    return f"{text} Limits: {level.max_fields} details, {level.calls} calls, {level.failures_to_lock} failed {checks}."


def _looks_alike(service: Service, home: Department, where: Company) -> bool:
    """Whether another department of this company has a service with the same last word."""
    head = service.name.split()[-1]
    others = (each for department in where.departments if department is not home for each in department.services)
    return any(other.name.split()[-1] == head for other in others)


def form_with_alternatives(requirements: Sequence[Requirement], *, alternatives: bool) -> tuple[str, ...]:
    """Return the distinct fields of the requirements; with `alternatives`, also their alternatives."""
    names = dict.fromkeys(name for requirement in requirements for name in requirement.fields)
    if alternatives:
        names |= dict.fromkeys(ALTERNATIVE[name] for name in tuple(names) if name in ALTERNATIVE)
    return tuple(names)


def _pick_errands(
    rng: random.Random, where: Company, level: Level, split: str
) -> list[tuple[Department, Service]] | None:
    """Choose departments and services by visible facts and the law; None if this company cannot serve the level."""
    low, high = level.departments
    count = rng.randint(low, high)
    wants_held_out = split == "test_unseen_rules"

    def held_out(department: Department) -> bool:
        return (where.industry, department.kind) in HELD_OUT_RULES

    usable = [each for each in where.departments if not held_out(each)]
    chosen: list[Department] = []
    if wants_held_out:
        chosen = [each for each in where.departments if held_out(each)]
    if len(usable) < count - len(chosen):
        return None
    chosen += rng.sample(usable, count - len(chosen))
    rng.shuffle(chosen)
    errands = [(department, department.services[rng.randrange(2) if level.sensitive else 0]) for department in chosen]
    requirements = [
        law(where.industry, department.kind, sensitive=service.sensitive, seed=where.law)
        for department, service in errands
    ]
    form = form_with_alternatives(requirements, alternatives=level.alternatives)
    if level.look_alikes and not all(_looks_alike(service, department, where) for department, service in errands):
        return None
    if level.alternatives and not any(name in ALTERNATIVE for name in form):
        return None
    # If two departments share a field and one deviates from it, the form gets one field longer.
    return errands if len(form) + count - 1 <= level.max_fields else None


def _profile(
    rng: random.Random, errands: Sequence[Errand], lawful: Sequence[Requirement], level: Level
) -> dict[str, str]:
    """Return values for most fields. Every required field is available, itself or as an alternative.

    Where one detail decides, the user has all of them: otherwise a form could win by what the user lacks.
    """
    values = {name: field.value(rng) for name, field in FIELDS.items()}
    if level.lenient:
        return values
    needed = {name for errand in errands for name in errand.requires}
    missing: set[str] = set()
    if level.alternatives:
        with_alternative = [name for name in form_with_alternatives(lawful, alternatives=False) if name in ALTERNATIVE]
        missing.add(rng.choice(with_alternative))
        needed |= {ALTERNATIVE[name] for name in missing}
    spare = [name for name in FIELDS if name not in needed]
    missing |= set(rng.sample(spare, 5))
    return {name: value for name, value in values.items() if name not in missing}


def _unused_number(rng: random.Random, where: Company) -> str:
    taken = {department.number for department in where.departments}
    return next(number for number in iter(lambda: f"555-{rng.randrange(1000, 10_000)}", "") if number not in taken)


def draw_task(
    *, world: int, where: Company, level: int, split: str, number: int, stream_seed: int, attempt: int = 0
) -> Task | None:
    """Return task `number` of a split's stream at one company, or None if this attempt finds none."""
    again = (attempt,) if attempt else ()
    rng = stream(world, "task", stream_seed, split, level, where.index, number, *again)
    limits = LEVEL[level]
    picked = _pick_errands(rng, where, limits, split)
    if picked is None:
        return None
    services = [service for _, service in picked]
    goal = _goal(rng, where.name, [service.name for service in services], limits)
    moved_number = _unused_number(rng, where) if limits.moved else ""
    lawful = [law(where.industry, each.kind, sensitive=service.sensitive, seed=where.law) for each, service in picked]
    errands = tuple(
        Errand(
            kind=department.kind,
            service=service.name,
            requires=(
                *department.requirement(service.name).fields,
                *((REFERENCE,) if limits.chained and index else ()),
            ),
        )
        for index, (department, service) in enumerate(picked)
    )
    return Task(
        id=f"{split}-L{level}-{stream_seed}-{number:06d}" + (f"-law{where.law}" if where.law else ""),
        split=split,
        level=level,
        company=where.index,
        company_name=where.name,
        goal=goal,
        errands=errands,
        profile=_profile(rng, errands, lawful, limits),
        moved_kind=picked[0][0].kind if limits.moved else "",
        moved_number=moved_number,
        talk_seed=rng.randrange(2**32),
        law=where.law,
    )


@dataclass(frozen=True, slots=True)
class TaskStream:
    """An endless seeded stream of tasks of one split, so that training is not limited to the tasks in the files.

    Levels alternate. Streams of different splits share no task, but `train`, `val` and `test_unseen_phrasing` share
    companies, and so combinations of company and service, which require the same. The data files are the start of
    `stream_seed` 0.
    """

    world: int = 0
    split: str = "train"
    levels: tuple[int, ...] = LEVELS
    companies: int = 100
    unseen_companies: int = 50
    stream_seed: int = 0
    law: int = 0

    def _company(self, rng: random.Random) -> Company:
        if self.split == "test_unseen_companies":
            return company(self.world, UNSEEN + rng.randrange(self.unseen_companies), self.law)
        return company(self.world, rng.randrange(self.companies), self.law)

    def task(self, number: int) -> Task:
        """Return the task of that number, without drawing the tasks before it."""
        level = self.levels[number % len(self.levels)]
        rng = stream(self.world, "companies", self.stream_seed, self.split, level, number)
        # Skip a company that cannot serve the level (no look-alike, too few departments). In a small world all may
        # fail at first; after a round, every company draws again.
        for visit in range(20 * _ROUND):
            task = draw_task(
                world=self.world,
                where=self._company(rng),
                level=level,
                split=self.split,
                number=number,
                stream_seed=self.stream_seed,
                attempt=visit // _ROUND,
            )
            if task is not None:
                return task
        raise UsageError(
            f"No company can serve level {level} of {self.split}: {self.companies} companies and "
            f"{self.unseen_companies} unseen ones are too few."
        )

    def take(self, count: int) -> list[Task]:
        return [self.task(number) for number in range(count)]

    def __iter__(self) -> Iterator[Task]:
        return map(self.task, itertools.count())


@dataclass(frozen=True, slots=True)
class World:
    """What determines companies and tasks."""

    seed: int = 0
    companies: int = 100
    unseen_companies: int = 50
    law: int = 0

    def stream(self, split: str, *, levels: Iterable[int] = LEVELS, stream_seed: int = 0) -> TaskStream:
        return TaskStream(
            world=self.seed,
            split=split,
            levels=tuple(levels),
            companies=self.companies,
            unseen_companies=self.unseen_companies,
            stream_seed=stream_seed,
            law=self.law,
        )
