"""Which look-ups matter: those whose replies go along with the arguments that succeed, more than by chance.

    relevant(lessons) -> {"look_up"}        of look_up and ask_weather

For each look-up, the words of its replies and the values of successful calls are compared over tasks: the information
that the words have on the values, against the same with the tasks shuffled.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from lfo.tools.pretrain.lessons import Lesson, Step
from lfo.tools.pretrain.values import words_in

SURE = 0.01  # of a chance: a look-up with less surely matters
CHANCE = 0.25  # one with more does not
JUDGED = 0.6  # least share of tasks in which a look-up must have told something to be judged
SHUFFLES = 199
FEWEST = 3  # tasks that have a word or a value


def relevant(lessons: Sequence[Lesson]) -> set[str]:
    """Return the look-ups that may matter, if one of them surely does; else all."""
    solved = list({lesson.opening: lesson for lesson in lessons if lesson.success is not None}.values())
    told = Counter(name for lesson in solved for name in {step.call.name for step in lesson.looked})
    chances = {name: _p(solved, name) for name, count in told.items() if count >= JUDGED * len(solved)}
    if min(chances.values(), default=1.0) > SURE:
        return set(told)
    kept = {name for name in told if chances.get(name, 0.0) < CHANCE}
    while more := {name for lesson in solved for name in _sources(lesson, kept)} - kept:
        kept |= more
    return kept


def _sources(lesson: Lesson, kept: set[str]) -> set[str]:
    """Return the look-ups whose replies have words of the arguments of the kept ones."""
    said = {word for message in lesson.opening for word in words_in(message.content)}
    needed = {word for step in lesson.looked if step.call.name in kept for word in _argument_words(step)} - said
    return {step.call.name for step in lesson.looked if needed & set(words_in(step.reply)) - set(_argument_words(step))}


def in_order(steps: Sequence[Step], opening: str, tools: Sequence[str]) -> list[Step]:
    """Return look-ups in the order of the tools, but each after those whose replies have the words of its arguments."""
    left, chosen, known = sorted(steps, key=lambda step: tools.index(step.call.name)), [], set(words_in(opening))
    replies = {word for step in steps for word in words_in(step.reply)}
    while left:
        ready = [step for step in left if (set(_argument_words(step)) & replies) <= known]
        step = (ready or left)[0]
        left.remove(step)
        chosen.append(step)
        known |= set(words_in(step.reply))
    return chosen


def _argument_words(step: Step) -> list[str]:
    return [word for value in step.call.arguments.values() for word in words_in(str(value))]


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
    """Return the mutual information of a word with all values, in sum, for the word that has most."""
    tasks, total = len(words), np.zeros(words.shape[1])
    for one, share in ((words, words.mean(0)), (1 - words, 1 - words.mean(0))):
        for other, part in ((values, values.mean(0)), (1 - values, 1 - values.mean(0))):
            both = one.T @ other / tasks
            by_chance = share[:, None] * part[None, :]
            total += np.sum(both * np.log(np.where(both > 0, both, 1) / np.where(both > 0, by_chance, 1)), axis=1)
    return float(total.max())
