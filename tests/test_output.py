"""The output of environments, also of calls that return late."""

from __future__ import annotations

import io
import sys

import pytest

from lfo.env.patience import MOST_PRINTED, redirected_stdout


def test_what_is_printed_goes_elsewhere():
    target, before = io.StringIO(), sys.stdout
    with redirected_stdout(target):
        print("hidden")
    assert target.getvalue() == "hidden\n"
    assert sys.stdout is before


def test_a_call_that_ends_late_leaves_the_stdout_of_others_alone(monkeypatch):
    ours, others = io.StringIO(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", ours)
    with redirected_stdout(io.StringIO()):
        sys.stdout = others  # somebody has given up waiting, and put it back
    assert sys.stdout is others


def test_megabytes_are_shown_up_to_a_page():
    target = io.StringIO()
    with redirected_stdout(target):
        for _ in range(3):
            print("x" * 1_000_000)
    assert target.getvalue() == "x" * MOST_PRINTED + "\n(an environment printed more; it is not shown)\n"


def test_a_stdout_that_is_closed_inside_costs_nothing(monkeypatch):
    stderr = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stderr)
    with redirected_stdout():
        sys.stdout.close()
        with pytest.raises(ValueError, match="cannot be detached"):
            sys.stdout.detach()  # type: ignore[attr-defined]
        print("still here")
    assert stderr.getvalue() == "still here\n"


@pytest.mark.parametrize("stderr", [None, "closed"])
def test_nobody_needs_to_read_what_is_printed(monkeypatch, stderr: str | None):
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stderr", None if stderr is None else closed)
    with redirected_stdout():
        print("unheard", flush=True)
