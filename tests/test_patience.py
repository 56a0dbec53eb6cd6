"""Parallel calls of foreign code: none can block, break or be confused with another."""

from __future__ import annotations

import os
import threading
import time

import pytest

from lfo.env.patience import EnvironmentTimedOut, ask, call_all, naming
from lfo.errors import EnvironmentFailed, UsageError


def run(calls, *, timeout: float = 20.0, retries: int = 0, workers: int = 4):
    return call_all(calls, timeout=timeout, retries=retries, workers=workers)


def test_results_come_in_order_whatever_the_number_of_workers():
    calls = [lambda number=number: time.sleep((number % 3) / 200) or number for number in range(20)]
    for workers in (1, 3, 50):
        assert run(calls, workers=workers) == list(range(20))
    assert run([]) == []


def test_a_call_may_answer_none():
    assert run([lambda: None, lambda: 1]) == [None, 1]


def test_calls_run_at_the_same_time_and_no_more_than_there_are_workers():
    together = threading.Barrier(3, timeout=10)
    assert run([together.wait] * 3, workers=3) != [None] * 3  # would time out one after the other
    running, most = [0], [0]
    lock = threading.Lock()

    def call() -> None:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.005)
        with lock:
            running[0] -= 1

    run([call] * 12, workers=3)
    assert most[0] <= 3


class Flaky:
    def __init__(self, failures: int, error: BaseException | None = None) -> None:
        self.failures, self.calls = failures, 0
        self.error = error or OSError("the line is busy")

    def __call__(self) -> str:
        self.calls += 1
        if self.calls <= self.failures:
            raise self.error
        return "ok"


@pytest.mark.parametrize("retries", [0, 1, 2])
def test_a_call_that_raises_is_tried_again_so_often_and_no_more(retries: int):
    just, never = Flaky(retries), Flaky(retries + 1)
    good, bad = run([just, never], retries=retries)
    assert good == "ok"
    assert isinstance(bad, EnvironmentFailed)
    assert not isinstance(bad, EnvironmentTimedOut)
    assert str(bad) == "the environment raised OSError: the line is busy"
    assert (just.calls, never.calls) == (retries + 1, retries + 1)


def test_the_first_error_is_the_one_that_is_told():
    errors = iter([AttributeError("no such field"), OSError("already done")])

    def call() -> str:
        raise next(errors)

    assert [str(each) for each in run([call], retries=1)] == ["the environment raised AttributeError: no such field"]


def test_an_answer_that_is_of_no_use_is_not_asked_for_again():
    useless = Flaky(99, EnvironmentFailed("step answered the reward nan"))
    (outcome,) = run([useless], retries=2)
    assert (str(outcome), useless.calls) == ("step answered the reward nan", 1)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), RecursionError("deep")])
def test_nothing_that_a_call_raises_gets_out(error: BaseException):
    (outcome,) = run([Flaky(99, error)])
    assert isinstance(outcome, EnvironmentFailed)
    assert type(error).__name__ in str(outcome)


class Unreadable(EnvironmentFailed):
    def __str__(self) -> str:
        raise OSError("no words")


class UnreadableError(Exception):
    def __str__(self) -> str:
        raise OSError("no words")


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(), "step of X raised OSError without a message"),
        (OSError("two\n  lines"), "step of X raised OSError: two lines"),
        (OSError("half: \ud800"), "step of X raised OSError: half: ?"),
        (UnreadableError(), "step of X raised UnreadableError: a message that cannot be read (OSError)"),
        (Unreadable(), "step of X failed without a message"),
        (EnvironmentFailed("x" * 1_000_000), "x" * 500),
        (UsageError("no such split"), "step of X raised UsageError: no such split"),
    ],
)
def test_a_failure_has_words_whatever_the_exception_says(error: BaseException, words: str):
    (outcome,) = call_all([Flaky(99, error)], timeout=20, retries=0, workers=1, what="step of X")
    assert str(outcome) == words


def test_what_a_call_says_itself_comes_first():
    def call() -> str:
        with naming("step of X"):
            raise OSError("no line")

    flaky = Flaky(1, OSError("no line"))

    def again() -> str:
        with naming("step of X"):
            return flaky()

    assert [str(each) for each in run([call, again], retries=1)] == ["step of X raised OSError: no line", "ok"]


def test_a_call_outside_of_rollouts_is_answered_or_raises_its_failure():
    assert ask(Flaky(2), timeout=20) == "ok", "it is tried again"
    with pytest.raises(EnvironmentFailed, match="the tasks raised SystemExit: 3"):
        ask(Flaky(99, SystemExit(3)), timeout=20, what="the tasks")
    with pytest.raises(UsageError, match=r"^no such split$"):
        ask(Flaky(99, UsageError("no such split")), timeout=20)
    release = threading.Event()
    with pytest.raises(EnvironmentTimedOut, match=r"the tasks did not answer within 0\.1 seconds"):
        ask(lambda: release.wait(30), timeout=0.01, what="the tasks")
    release.set()


def test_a_call_inside_of_another_one_needs_no_thread_of_its_own():
    inside = run([lambda: ask(threading.current_thread, timeout=20) is threading.current_thread()])
    assert inside == [True]


def test_the_users_own_interruption_is_no_failure_of_an_environment():
    with pytest.raises(KeyboardInterrupt), naming("step of X"):
        raise KeyboardInterrupt


def test_a_message_of_a_megabyte_is_cut():
    (outcome,) = run([Flaky(99, ValueError("x" * 1_000_000))])
    assert len(str(outcome)) == 500


def test_a_call_that_hangs_blocks_nobody_and_is_not_tried_again():
    release, tries = threading.Event(), []

    def hang() -> str:
        tries.append(1)
        release.wait(30)
        return "too late"

    started = time.monotonic()
    # More hung calls than workers: without replacements the others would never run.
    outcomes = run([hang, hang, hang, *[lambda: "ok"] * 5], timeout=0.2, retries=3, workers=2)
    assert time.monotonic() - started < 10
    assert [type(outcome) for outcome in outcomes[:3]] == [EnvironmentTimedOut] * 3
    assert outcomes[3:] == ["ok"] * 5
    assert str(outcomes[0]) == "the environment did not answer within 0.2 seconds"
    release.set()
    time.sleep(0.05)
    assert [type(outcome) for outcome in outcomes[:3]] == [EnvironmentTimedOut] * 3, "a late answer must not count"
    assert len(tries) == 3


def test_a_call_may_remove_the_folder_that_it_works_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = os.getcwd()

    def call() -> str:
        work = tmp_path / "work"
        work.mkdir()
        os.chdir(work)
        work.rmdir()
        return "done"

    assert run([call]) == ["done"]
    assert os.getcwd() == folder
