"""Train real runs in misbehaving environments: each is a small working one with one bad answer of one method.

Where one rollout can fail, the run must go on: the rollout counts in `stops`, and its sentence names environment and
method. Where nothing can be rolled out, the run must end in one such sentence, with what was learned saved. Nothing may
hang, and replies of 10 MB must cost less than twice a normal step.
"""

from __future__ import annotations

import copy
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

import torch
from compare_metrics import rows_of

from breaking import Outcome
from breaking._bad_answers import Act, Variation, raising, result, table
from lfo.config import load_config
from lfo.engines import create_trainer
from lfo.env.patience import words_of
from lfo.env.worlds.oracle import OracleCodes
from lfo.errors import LfoError
from lfo.loading import load_base, load_tokenizer
from lfo.measure.success import BROKEN_ROLLOUTS
from lfo.runs.folder import read_metrics
from lfo.train.loop import Trainer
from lfo.types import RolloutGroup, StepPlan

SETTINGS = (
    "preset=tiny",
    "world_model.predict=all",
    "world_model.examples_per_mini_batch=4",
    "policy.max_resamples=0",
    "rollout.prompts=4",
    "rollout.group_size=2",
    "exploration.blind_share=0",
    "rollout.mini_batch_prompts=2",
    "rollout.max_turns=3",
    "rollout.max_turn_tokens=48",
    "rollout.max_context=1024",
    "eval.every=0",
    "eval.tasks=3",
    "checkpoint_every=100",
    "steps=2",
)
TIMEOUT = 2.0  # seconds of `rollout.environment_timeout` where something hangs
LIMIT = 300  # seconds for one trial; it hangs if it takes longer
SHORT = frozenset({"step returns done=None", "step raises an exception whose text raises", "step closes file 1"})
FAILURES = ("environment_error", "environment_timeout")
BIG = "Ordinary words in a long reply. " * (10_000_000 // 32)


class Working(OracleCodes):
    """A small world whose tools the embedded base calls; an arbitrary half of all ways to end earns a reward."""

    def reward(self) -> float:
        return float(zlib.crc32(" ".join(sorted(self.spoken or ())).encode()) % 2)

    def check(self) -> None:
        pass


class _Task:
    """A task whose id is foreign code."""

    def __init__(self, task: Any, read: Callable[[], Any]) -> None:
        self._task, self._read = task, read

    def __getattr__(self, name: str) -> Any:
        return getattr(self._task, name)

    @property
    def id(self) -> Any:
        return self._read()


class Misbehaving(Working):
    """One method answers badly: for a third of the tasks or texts, or always if there is no answer for a single one."""

    method: ClassVar[str] = ""
    act: ClassVar[Act] = staticmethod(lambda answer: answer())
    made: ClassVar[int] = 0
    happened: ClassVar[int] = 0  # bad answers so far
    always: ClassVar[bool] = False
    working_for: ClassVar[int] = 0  # bad answers are ordinary ones so many times first

    def __init__(self) -> None:
        super().__init__()
        self.key = ""
        cls = type(self)
        cls.made += 1
        # The first ones serve the run itself, which asks several times; a constructor that never works ends it.
        if cls.method == "constructor" and cls.made > 12 and cls.made % 4 == 0:
            self._bad(lambda: None)

    def tasks(self, split: str) -> Any:
        tasks = self._answer("tasks", partial(super().tasks, split), key="")
        if self.method != "task":
            return tasks
        return [_Task(task, partial(self._answer, "task", lambda task=task: task.id, key=task.id)) for task in tasks]

    def tools(self) -> Any:
        return self._answer("tools", super().tools, key="")

    def reset(self, task: Any) -> Any:
        self.key = getattr(task, "_task", task).id
        return self._answer("reset", partial(super().reset, getattr(task, "_task", task)), key=self.key)

    def step(self, message: str) -> Any:
        return self._answer("step", partial(super().step, message), key=self.key)

    def describe_reply(self, observation: str) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self._answer("describe_reply", partial(super().describe_reply, observation), key=observation)

    def lookahead_query(self, transcript: Any) -> Any:
        return self._answer("lookahead_query", partial(super().lookahead_query, transcript), key=self.key)

    def _answer(self, method: str, answer: Callable[[], Any], *, key: str) -> Any:
        if method != self.method or not (self.always or not key or zlib.crc32(key.encode()) % 3 == 0):
            return answer()
        return self._bad(answer)

    def _bad(self, answer: Callable[[], Any]) -> Any:
        cls = type(self)
        cls.happened += 1
        return answer() if cls.happened <= cls.working_for else cls.act(answer)


def misbehaving(method: str, act: Act, **fields: Any) -> type[Misbehaving]:
    return type("Misbehaving", (Misbehaving,), {"method": method, "act": staticmethod(act), **fields})


def trials(folder: Path, *, short: bool) -> Iterator[Outcome]:
    folder.mkdir()
    for number, variation in enumerate(table()):
        name = f"{variation.method} {variation.words}"
        if not short or name in SHORT:
            yield _timed(name, partial(play, variation, folder / f"{number}"))
    yield _timed("step returns 10 MB in every rollout", partial(big_replies, folder / "big", steps=1 if short else 3))
    yield _timed("step raises in all rollouts of the second step", partial(dead, folder / "dead"))
    if not short:
        yield _timed("step raises in all rollouts of an evaluation", partial(dead_evaluation, folder / "evaluation"))


def play(variation: Variation, folder: Path) -> Outcome:
    """Train a short run in an environment with this variation."""
    environment = misbehaving(variation.method, variation.act)
    settings = (*variation.settings, *([f"rollout.environment_timeout={TIMEOUT}"] if variation.hangs else []))
    errors: list[str] = []
    try:
        trainer = new_trainer(environment, folder, *settings)
        errors = errors_of(trainer)
        trainer.fit()
        said = ""
    except LfoError as error:
        said = str(error)
    written = read_metrics(folder) if (folder / "metrics.jsonl").exists() else []
    rows = [row for row in written if "stops" in row]  # the first may be an evaluation before training
    stops = [row["stops"] for row in rows]
    failed = sum(count for each in stops for name, count in each.items() if name in FAILURES)
    whole = sum(sum(each.values()) for each in stops) - failed
    cut = sum(row.get("replies_cut", 0) for row in rows)
    sentence = said or (errors or [""])[0]
    in_words = "\n" not in sentence and len(sentence) < 1_000
    held = {
        "goes on": not said and len(rows) == 2 and not failed,
        "fails": not said and len(rows) == 2 and bool(failed) and bool(whole),
        "cuts": not said and len(rows) == 2 and not failed and bool(cut),
        "ends": bool(said),
    }[variation.expected]
    if variation.expected in ("fails", "ends"):
        held = held and in_words and variation.method in sentence and "Misbehaving" in sentence
    if variation.expected == "fails":
        held = held and any(BROKEN_ROLLOUTS in row.get("warnings", ()) for row in rows)
    figures = {"misbehaved": environment.happened, "failed": failed, "others": whole, "cut": cut}
    return Outcome(trial="", held=held and environment.happened > 0, said=sentence, figures=figures)


def big_replies(folder: Path, *, steps: int) -> Outcome:
    """Measure normal steps and steps whose every reply has 10 MB, in turn, in one run."""
    environment = misbehaving("", result(observation=BIG), always=True)
    trainer = new_trainer(environment, folder)
    trainer.step(0)  # compiles and fills caches
    seconds: dict[str, list[float]] = {"": [], "step": []}
    cut = 0
    for number in range(1, 2 * steps + 1):
        environment.method = "step" if number % 2 else ""
        started = time.perf_counter()
        row = trainer.step(number)
        seconds[environment.method].append(time.perf_counter() - started)
        cut += row.get("replies_cut", 0)
    normal, big = median(seconds[""]), median(seconds["step"])
    figures = {"normal step s": normal, "step with 10 MB replies s": big, "cut": cut}
    return Outcome(trial="", held=cut > 0 and big < 2 * normal, figures=figures)


def dead(folder: Path) -> Outcome:
    """Lose the environment after a step; resume when it is back, and compare with a run that never lost it."""
    environment = misbehaving("step", raising(lambda: ConnectionError("the line is dead")), always=True)
    environment.working_for = 10**9
    trainer = new_trainer(environment, folder / "lost")
    step = trainer.step

    def steps(number: int) -> dict[str, Any]:
        environment.working_for = -1 if number == 1 else 10**9
        return step(number)

    trainer.step = steps  # type: ignore[method-assign]
    said = ""
    try:
        trainer.fit()
    except LfoError as error:
        said = str(error)
    environment.working_for = 10**9
    new_trainer(environment, folder / "lost").fit(resume=True)
    new_trainer(environment, folder / "whole").fit()
    same = rows_of(folder / "lost") == rows_of(folder / "whole")
    words = "step of Misbehaving raised ConnectionError: the line is dead" in said and "up to step 1 is saved" in said
    return Outcome(trial="", held=same and words, said=said, figures={"steps": len(rows_of(folder / "lost"))})


def dead_evaluation(folder: Path) -> Outcome:
    """Fail in all rollouts of an evaluation: its step is trained, and the run goes on."""
    environment = misbehaving("step", raising(lambda: ConnectionError("the line is dead")), always=True)
    environment.working_for = 10**9
    trainer = new_trainer(environment, folder, "eval.every=1")
    evaluate = trainer.evaluate

    def evaluates(*arguments: Any) -> dict[str, Any]:
        environment.working_for = -1 if trainer.state.step == 1 else 10**9
        try:
            return evaluate(*arguments)
        finally:
            environment.working_for = 10**9

    trainer.evaluate = evaluates  # type: ignore[method-assign]
    trainer.fit()
    rows = read_metrics(folder)
    said = " ".join(rows[1].get("warnings", ()))
    held = [row["step"] for row in rows if "eval/val/success" in row] == [0, 2] and "no evaluation of this step" in said
    return Outcome(trial="", held=held, said=said, figures={"rows": len(rows)})


def new_trainer(environment: type[Misbehaving], folder: Path, *settings: str) -> Trainer:
    config = load_config([*SETTINGS, *settings, f"output_dir={folder}"])
    return create_trainer(config, environment, load_tokenizer("tiny"), base=copy.deepcopy(_base()))


def errors_of(trainer: Trainer) -> list[str]:
    """Return a list that gets the sentence of each rollout in which the environment fails."""
    draw, errors = trainer.draw, []

    def watched(plan: StepPlan, number: int) -> list[RolloutGroup]:
        groups = draw(plan, number)
        errors.extend(rollout.error for group in groups for rollout in group.rollouts if rollout.error)
        return groups

    trainer.draw = watched  # type: ignore[method-assign]
    return errors


@cache
def _base() -> Any:
    return load_base("tiny", torch.device("cpu"))


class _Hangs(BaseException):
    pass


@contextmanager
def _limited(seconds: int) -> Iterator[None]:
    """Raise `_Hangs` in the main thread after so many seconds."""

    def hangs(*_: object) -> None:
        raise _Hangs

    before = signal.signal(signal.SIGALRM, hangs)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _timed(name: str, trial: Callable[[], Outcome]) -> Outcome:
    """Run a trial with a time limit; whatever gets out of it but our own sentences has ended a run."""
    started = time.perf_counter()
    try:
        with _limited(LIMIT):
            done = trial()
    except _Hangs:
        done = Outcome(trial="", held=False, said=f"it hangs: no end within {LIMIT} seconds")
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        done = Outcome(trial="", held=False, said=f"unexpected {words_of(error)}")
    figures = {**done.figures, "seconds": time.perf_counter() - started}
    return Outcome(trial=name, held=done.held, said=done.said, figures=figures)
