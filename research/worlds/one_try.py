"""What the five worlds share: tasks drawn from seeds, one try, and a reply that names what was needed.

A case (two words, such as contents and destination) decides the answer by a hidden rule. A law is the number from which
the rule is drawn; `env_args.law=3` plays under another one.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from random import Random
from typing import Any, ClassVar

from lfo.env.tool_environment import ToolEnvironment
from lfo.errors import UsageError
from lfo.types import Message, ToolCall

SIZES = {"train": 400, "val": 100, "test_unseen": 100}

Case = tuple[str, str]
Answer = tuple[str | int, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """What each case needs. No task of train or val needs an answer in `unseen`, all of test_unseen do."""

    answers: Mapping[Case, Answer]
    unseen: frozenset[Answer]


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """One request. Its name (a person, or a number) belongs to no other task."""

    id: str
    name: str
    case: Case
    answer: Answer  # hidden
    request: str
    talk: int  # chooses the wording of replies


def matched(words: Sequence[str], choices: Sequence[Any], dice: Random) -> dict[str, Any]:
    """Draw another choice for each word."""
    return dict(zip(words, dice.sample(choices, len(words)), strict=True))


def crossed(first: Mapping[str, str | int], second: Mapping[str, str | int], dice: Random) -> Rule:
    """Return the rule by which each word of a case decides one part of the answer."""
    answers: dict[Case, Answer] = {(a, b): (first[a], second[b]) for a, b in product(first, second)}
    return Rule(answers=answers, unseen=frozenset(answers[case] for case in held_out(list(first), list(second), dice)))


def held_out(rows: Sequence[str], columns: Sequence[str], dice: Random) -> list[tuple[str, str]]:
    """Return one cell of each row, spread evenly over the columns, so that every row and column keeps others."""
    shuffled = dice.sample(columns, len(columns))
    return [(row, shuffled[index % len(shuffled)]) for index, row in enumerate(rows)]


def draw_people(dice: Random, count: int) -> list[str]:
    return dice.sample([f"{first} {last}" for first, last in product(_FIRST_NAMES, _LAST_NAMES)], count)


def draw_numbers(dice: Random, count: int) -> list[str]:
    return [str(number) for number in dice.sample(range(1000, 10_000), count)]


class OneTry(ToolEnvironment):
    """A world whose last tool is called once. A subclass names its words, its rule and its tools."""

    system: ClassVar[str]
    case_words: ClassVar[tuple[str, str]]  # the placeholders of the case in the texts below; {name} is the task's
    answer_words: ClassVar[tuple[str, ...]]  # those of the answer
    draw_names: ClassVar[staticmethod[[Random, int], list[str]]]
    requests: ClassVar[Sequence[str]]  # of train and test_unseen
    val_requests: ClassVar[Sequence[str]]
    accepted: ClassVar[Sequence[str]]
    refused: ClassVar[Sequence[str]]

    task: Task

    def __init__(self, law: int = 0) -> None:
        self.law = law
        self.over = False
        self.right = False

    @abstractmethod
    def draw_rule(self, dice: Random) -> Rule:
        """Return the hidden rule."""

    @abstractmethod
    def solution(self, task: Task) -> list[ToolCall]:
        """Return calls that solve a task; for tests."""

    def tasks(self, split: str) -> list[Task]:
        if split not in SIZES:
            raise UsageError(f"There is no split {split!r}; the splits are {', '.join(SIZES)}.")
        rule = self.draw_rule(self._dice("rule"))
        cases = [case for case, answer in rule.answers.items() if (answer in rule.unseen) == (split == "test_unseen")]
        names = self.draw_names(self._dice("names"), sum(SIZES.values()))
        first = sum(SIZES[earlier] for earlier in list(SIZES)[: list(SIZES).index(split)])
        dice = self._dice(split)
        drawn = []
        for number in range(SIZES[split]):
            if number % len(cases) == 0:
                dice.shuffle(cases)  # each case is as frequent as any other
            case, name = cases[number % len(cases)], names[first + number]
            wording = dice.choice(self.val_requests if split == "val" else self.requests)
            request = wording.format(name=name, **dict(zip(self.case_words, case, strict=True)))
            talk = dice.randrange(1_000_000)
            drawn.append(
                Task(
                    id=f"{split}-{number}",
                    name=name,
                    case=case,
                    answer=rule.answers[case],
                    request=request,
                    talk=talk,
                )
            )
        return drawn

    def start(self, task: Task) -> list[Message]:
        self.task = task
        return [Message(role="system", content=self.system), Message(role="user", content=task.request)]

    def finished(self) -> bool:
        return self.over

    def reward(self) -> float:
        return float(self.right)

    def attempt(self, *given: str | int) -> str:
        """Make the one try and return the reply."""
        self.over, self.right = True, given == self.task.answer
        return self.say(self.accepted if self.right else self.refused)

    def say(self, wordings: Sequence[str], **more: str) -> str:
        task = self.task
        words = dict(zip(self.case_words + self.answer_words, task.case + task.answer, strict=True))
        return wordings[task.talk % len(wordings)].format(name=task.name, **words, **more)

    def _dice(self, purpose: str) -> Random:
        return Random(f"{type(self).__name__}/{self.law}/{purpose}")


_FIRST_NAMES = (
    *("Ada", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mary", "Nora"),
    *("Oscar", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Adam", "Bella", "Carl", "Diana", "Eric", "Fiona"),
    *("George", "Helen", "Ivan"),
)
_LAST_NAMES = (
    *("Adams", "Baker", "Carter", "Dixon", "Ellis", "Fisher", "Green", "Harris", "Irwin", "Jones", "King", "Lewis"),
    *("Mason", "Nolan", "Owen", "Parker", "Quinn", "Reed", "Scott", "Turner", "Vance", "Walker", "Young", "Abbott"),
    *("Brooks", "Cole", "Dale", "Evans", "Ford", "Grant"),
)
