"""A reader who goes away costs the display and nothing else."""

import io
import logging
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from lfo.config import load_config
from lfo.errors import WorkError
from lfo.runs.folder import read_metrics
from lfo.streams import flush_stdout, lossy
from lfo.train import tracking
from lfo.train.tracking import Progress, open_trackers
from small_runs import small_trainer

needs_dev_full = pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")


@pytest.fixture
def closed_pipe():
    """A stream whose reader has gone."""
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb", buffering=0) as raw:
        yield io.TextIOWrapper(raw, write_through=True)


def test_what_cannot_be_written_is_dropped(closed_pipe):
    stream = lossy(closed_pipe)
    assert stream is not None
    assert stream.write("gone") == 4
    stream.flush()
    stream.close()
    assert not stream.closed, "nobody else may close it"
    text = io.StringIO()
    lossless = lossy(text)
    assert lossless is lossy(lossless)
    print("kept", file=lossless)
    assert text.getvalue() == "kept\n"
    text.close()
    print("dropped", file=lossless)
    assert not lossless.isatty()


def test_a_run_whose_reader_has_gone_trains_to_its_end(tmp_path: Path, monkeypatch, closed_pipe):
    monkeypatch.setattr(sys, "stderr", closed_pipe)
    summary = small_trainer("steps=2", "eval.every=1", "eval.tasks=1", f"output_dir={tmp_path}").fit()
    assert summary["steps"] == 2
    assert [row["step"] for row in read_metrics(tmp_path)] == [0, 1, 2]


def test_a_checkpoint_is_written_before_anything_is_shown(tmp_path: Path, monkeypatch):
    def show(self, row) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(Progress, "show", show)
    with pytest.raises(ZeroDivisionError):
        small_trainer("steps=2", "checkpoint_every=1", f"output_dir={tmp_path}").fit()
    assert (tmp_path / "checkpoints" / "step-000001" / "checkpoint.json").is_file()


def test_a_tracker_that_fails_gets_no_more_rows(tmp_path: Path, monkeypatch, caplog):
    seen = []

    @contextmanager
    def broken(config, folder, first_step):
        def log(row) -> None:
            seen.append(row["step"])
            raise ConnectionError("no network")

        yield log

    monkeypatch.setitem(tracking.TRACKERS, "wandb", broken)
    with (
        caplog.at_level(logging.WARNING),
        open_trackers(load_config(["trackers=wandb"]), tmp_path, first_step=0) as track,
    ):
        track({"step": 1})
        track({"step": 2})
    assert seen == [1]
    assert "trackers=wandb failed" in caplog.text
    assert "no network" in caplog.text


@needs_dev_full
def test_a_result_that_cannot_be_written_is_one_sentence_and_exit_code_1():
    script = "import sys; from lfo.cli import main; sys.argv = ['lfo', '--version']; main()"
    start = ["bash", "-c", f'"{sys.executable}" -c "$0" > /dev/full', script]
    done = subprocess.run(start, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr == "lfo: cannot write the output: No space left on device\n"


def test_the_output_is_flushed_once(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO()))
    flush_stdout()
    sys.stdout.close()
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # not the one of pytest
    with pytest.raises(WorkError, match="cannot write the output"):
        flush_stdout()


@pytest.mark.parametrize("redirection", [">&- 2>&-", ">&- 2>&- <&-"])
def test_closed_descriptors_do_not_receive_files(redirection: str, tmp_path: Path):
    """Descriptor 2 would otherwise be the next file that is opened, and receive what is written to stderr."""
    script = (
        "import os, sys; from lfo.streams import protect_standard_streams; protect_standard_streams();"
        f"file = open({str(tmp_path / 'data')!r}, 'w'); print('to stderr', file=sys.stderr); os.write(2, b'raw');"
        "print('to stdout'); sys.stdout.flush(); file.write(str(file.fileno()))"
    )
    done = subprocess.run(["bash", "-c", f'"{sys.executable}" -c "$0" {redirection}', script])
    assert done.returncode == 0
    assert int((tmp_path / "data").read_text()) > 2
