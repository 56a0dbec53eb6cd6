"""What environments change in their process is put back after each call."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from lfo.env.patience import call_all, kept_process_state


def call(effect: Callable[[], object]) -> None:
    """Let an environment do this."""
    (outcome,) = call_all([effect], timeout=20, retries=0, workers=1)
    assert not isinstance(outcome, Exception), outcome


def test_the_default_dtype_of_torch():
    call(lambda: torch.set_default_dtype(torch.float64))
    assert torch.get_default_dtype() == torch.float32


def test_the_errors_of_numpy():
    before = np.geterr()
    with kept_process_state():  # as in an import, which happens in the main thread
        np.seterr(all="raise")
    assert np.geterr() == before


def test_the_folder_even_if_there_is_none(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    call(lambda: os.chdir("/"))
    assert Path.cwd() == tmp_path
    lost = tmp_path / "lost"
    lost.mkdir()
    os.chdir(lost)
    lost.rmdir()
    call(lambda: os.chdir("/"))
    assert Path.cwd() == Path("/")


@pytest.mark.parametrize("number", [1, 2])
def test_a_closed_file_is_opened_again_before_another_takes_its_number(number: int, tmp_path: Path):
    before = os.fstat(number)

    def close() -> None:
        os.close(number)
        assert os.open(tmp_path / "metrics", os.O_CREAT | os.O_WRONLY) == number, "the lowest free number"

    call(close)
    os.write(number, b"for people\n")
    after = os.fstat(number)
    assert (after.st_dev, after.st_ino) == (before.st_dev, before.st_ino)
    assert (tmp_path / "metrics").read_bytes() == b""


def test_streams_that_are_removed_or_closed():
    before = sys.stdout, sys.stderr

    def remove() -> None:
        sys.stdout = sys.stderr = None  # type: ignore[assignment]

    call(remove)
    assert (sys.stdout, sys.stderr) == before


@pytest.mark.parametrize("end", ["close", "detach"])
def test_a_stream_that_is_of_no_use_is_made_anew(end: str, monkeypatch, capfd):
    monkeypatch.setattr(sys, "stderr", os.fdopen(2, "w", encoding="utf-8", closefd=False))
    call(getattr(sys.stderr, end))
    print("still here", file=sys.stderr)
    assert capfd.readouterr().err == "still here\n"


def test_who_overlaps_restores_what_the_first_one_found(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with kept_process_state():
        os.chdir("/")
        with kept_process_state():
            os.chdir("/tmp")
        assert Path.cwd() == Path("/tmp")
    assert Path.cwd() == tmp_path
