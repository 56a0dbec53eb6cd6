"""Which look-ups matter: those whose replies go along with the arguments that succeed, more than by chance.

    relevant(lessons) -> {"look_up"}        of look_up, ring, ask_weather

For each look-up, the words of its replies and the values of successful calls are compared over tasks: the information
that the words have on the values, against the same with the tasks shuffled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from lfo.tools.pretrain.lessons import Lesson
from lfo.tools.pretrain.values import words_in

CHANCE = 0.1
SHUFFLES = 199
FEWEST = 3  # tasks that have a word or a value


def relevant(lessons: Sequence[Lesson]) -> set[str]:
    """Return the look-ups that matter; none if that cannot be told."""
    solved = list({lesson.opening: lesson for lesson in lessons if lesson.success is not None}.values())
    tools = {step.call.name for lesson in solved for step in lesson.looked}
    return {tool for tool in tools if _p(solved, tool) < CHANCE}


def _p(lessons: Sequence[Lesson], tool: str) -> float:
    """Return the chance of as much information by shuffled tasks."""
    replies = [
        {word for step in each.looked if step.call.name == tool for word in words_in(step.reply)} for each in lessons
    ]
    values = [{f"{name}={value}" for name, value in each.success.arguments.items()} for each in lessons if each.success]
    words, wanted = _table(replies), _table(values)
    if not words.size or not wanted.size:
        return 1.0
    real = _information(words, wanted)
    generator = np.random.default_rng(0)
    shuffled = [_information(words[generator.permutation(len(words))], wanted) for _ in range(SHUFFLES)]
    return (1 + sum(each >= real - 1e-9 for each in shuffled)) / (1 + SHUFFLES)


def _table(bags: Sequence[set[str]]) -> np.ndarray:
    """Return an array `[task, word]` of the words that some tasks have, but not all."""
    counts = Counter(word for bag in bags for word in bag)
    kept = sorted(word for word, count in counts.items() if FEWEST <= count <= len(bags) - FEWEST)
    return np.array([[word in bag for word in kept] for bag in bags], dtype=float).reshape(len(bags), len(kept))


def _information(words: np.ndarray, values: np.ndarray) -> float:
    """Return the mutual information of each word with each value, in sum."""
    tasks, total = len(words), 0.0
    for one, share in ((words, words.mean(0)), (1 - words, 1 - words.mean(0))):
        for other, part in ((values, values.mean(0)), (1 - values, 1 - values.mean(0))):
            both = one.T @ other / tasks
            by_chance = share[:, None] * part[None, :]
            total += float(np.sum(both * np.log(np.where(both > 0, both, 1) / np.where(both > 0, by_chance, 1))))
    return total
