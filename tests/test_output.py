"""The output of environments, also of calls that return late."""

from __future__ import annotations

import io
import sys

from lfo.env.output import redirected_stdout


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
