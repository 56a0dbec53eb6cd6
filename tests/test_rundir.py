"""The run folder: what is kept, what is rejected, and that a killed writer leaves no half-written file."""

import errno
import gzip
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from lfo.atomic import write_folder_atomic, write_json_atomic, write_text_atomic
from lfo.checkpoints import best_checkpoint, latest_checkpoint
from lfo.config import RunConfig, from_yaml, load_config
from lfo.errors import ConfigError, DataError, UsageError, WorkError
from lfo.runs.folder import RunDirectory, read_json_lines, read_metrics

CONFIG = RunConfig()
needs_dev_full = pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full here")


def writer(step: int):
    def write(folder: Path) -> None:
        (folder / "adapters").mkdir()
        (folder / "adapters" / "weights.bin").write_bytes(b"%06d" % step * 1000)
        (folder / "state.json").write_text(json.dumps({"step": step}))

    return write


def fill_a_disk(folder: Path) -> None:
    (folder / "half.bin").write_bytes(b"x" * 100)
    with open("/dev/full", "r+b", buffering=0) as file:  # a real ENOSPC from the kernel
        file.write(b"x")


@pytest.fixture
def run(tmp_path: Path):
    with RunDirectory.create(tmp_path / "run", CONFIG) as run:
        yield run


def names(folder: Path) -> set[str]:
    return {entry.name for entry in folder.iterdir()}


# Starting and resuming


def test_a_new_run_holds_its_resolved_config(run):
    assert from_yaml(run.path / "config.yaml") == CONFIG
    assert names(run.path) == {"config.yaml", ".lock"}


def test_a_run_is_never_overwritten_and_the_message_names_the_option(run):
    run.close()
    with pytest.raises(UsageError, match="continue it with --resume"):
        RunDirectory.create(run.path, CONFIG)


def test_a_run_killed_before_its_first_file_was_named_can_start_again(tmp_path: Path):
    (tmp_path / ".lock").write_text("1\n")
    (tmp_path / ".config.yaml.1.tmp").write_text("seed:")
    with RunDirectory.create(tmp_path, CONFIG):
        assert names(tmp_path) == {".lock", "config.yaml"}


def test_a_folder_with_other_things_in_it_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(UsageError, match="is not empty; choose another output_dir"):
        RunDirectory.create(tmp_path, CONFIG)
    assert names(tmp_path) == {"thesis.tex"}


def test_only_a_run_can_be_resumed(tmp_path: Path):
    with pytest.raises(UsageError, match="contains no run to resume"):
        RunDirectory.create(tmp_path, CONFIG, resume=True)


def test_a_resumed_run_keeps_its_settings_but_may_go_on_for_longer(run):
    run.close()
    with pytest.raises(ConfigError, match=r"lora\.rank was 16 and is now 8"):
        RunDirectory.create(run.path, load_config(["lora.rank=8"]), resume=True)
    longer = load_config(["steps=500"])
    with RunDirectory.create(run.path, longer, resume=True):
        assert from_yaml(run.path / "config.yaml") == longer


def test_a_path_that_is_a_file_is_one_sentence(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(WorkError, match=r"cannot write the run .*: File exists"):
        RunDirectory.create(tmp_path / "file", CONFIG)


def test_one_run_has_one_writer(run):
    with pytest.raises(UsageError, match=f"is being written by process {os.getpid()}"):
        RunDirectory.create(run.path, CONFIG, resume=True)
    run.close()
    RunDirectory.create(run.path, CONFIG, resume=True).close()


# Metrics


def test_metrics_come_back_as_they_were_written(run):
    rows = [{"step": step, "loss": step / 3, "by_level": {"2": 0.5}} for step in range(1, 4)]
    for row in rows:
        run.append_metrics(row)
    assert read_metrics(run.path) == read_metrics(run.path / "metrics.jsonl") == rows


def test_a_number_that_is_not_finite_is_null(run):
    run.append_metrics({"step": 1, "perplexity": float("inf"), "parts": [float("nan"), 1.0]})
    assert read_metrics(run.path) == [{"step": 1, "perplexity": None, "parts": [None, 1.0]}]


def test_a_row_without_its_step_is_refused(run):
    with pytest.raises(ValueError, match="needs an integer"):
        run.append_metrics({"loss": 1.0})


def test_rows_after_the_checkpoint_are_forgotten_with_a_torn_last_line(run):
    for step in range(1, 6):
        run.append_metrics({"step": step})
    with open(run.metrics, "ab") as file:
        file.write(b'{"step": 6, "lo')
    assert [row["step"] for row in read_metrics(run.path)] == [1, 2, 3, 4, 5]
    run.truncate_metrics(3)
    run.append_metrics({"step": 4})
    assert [row["step"] for row in read_metrics(run.path)] == [1, 2, 3, 4]


def test_truncating_metrics_that_were_never_written_is_nothing(run):
    run.truncate_metrics(0)
    assert not run.metrics.exists()


@pytest.mark.parametrize(
    "line", ['{"step": 2', "[2]", "", '{"step": NaN}', "\x00\x00", '{"loss": 2}', '{"step": 2}{"step": 2}', "[" * 9999]
)
def test_a_damaged_middle_line_is_named_with_file_and_number(tmp_path: Path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2: "):
        read_metrics(path)


def test_archived_metrics_may_be_compressed(run):
    rows = [{"step": 1, "success": 0.5}, {"step": 2, "success": 0.75}]
    for row in rows:
        run.append_metrics(row)
    plain = run.path / "metrics.jsonl"
    compressed = plain.with_name("metrics.jsonl.gz")
    compressed.write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert read_metrics(run.path) == rows
    for damaged in (b"no gzip", compressed.read_bytes()[:-9]):
        compressed.write_bytes(damaged)
        with pytest.raises(DataError, match=r"metrics\.jsonl\.gz is damaged"):
            read_metrics(run.path)


def test_missing_metrics_are_one_sentence(tmp_path: Path):
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        read_metrics(tmp_path)


@needs_dev_full
def test_a_full_disk_while_writing_metrics_is_one_sentence(run):
    run.write_checkpoint(1, writer(1))
    run.metrics.symlink_to("/dev/full")
    with pytest.raises(WorkError, match=r"the disk is full: .* the checkpoint of step 1 is intact"):
        run.append_metrics({"step": 2})


def test_sample_rollouts_and_adapters_lie_where_people_look_for_them(run):
    path = run.write_samples("rollouts", 10, [{"reward": 1.0}, {"reward": float("nan")}])
    assert path == run.path / "rollouts" / "step-000010.jsonl"
    assert read_json_lines(path) == [{"reward": 1.0}, {"reward": None}]
    for content in ("first", "second"):
        run.write_adapters(lambda folder, text=content: write_text_atomic(folder / "policy.txt", text))
        assert (run.adapters / "policy.txt").read_text() == content
    assert names(run.path) == {"config.yaml", ".lock", "rollouts", "adapters"}


# Checkpoints


def test_the_last_and_the_best_checkpoint_are_kept(run):
    assert run.latest_checkpoint() is None
    for step, best in ((10, False), (20, True), (30, False), (40, False)):
        written = run.write_checkpoint(step, writer(step), best=best)
        assert run.latest_checkpoint() == written
    assert names(run.checkpoints) == {"step-000020", "step-000040", "last", "best"}
    assert (run.checkpoints / "last").read_text() == "step-000040\n"
    assert (run.checkpoints / "best").read_text() == "step-000020\n"
    best = best_checkpoint(run.path)
    assert best is not None
    assert best.step == 20
    assert json.loads((best.path / "state.json").read_text()) == {"step": 20}


def test_a_checkpoint_of_the_same_step_is_replaced(run):
    run.write_checkpoint(1, writer(1))
    run.write_checkpoint(1, lambda folder: write_json_atomic(folder / "new.json", 1))
    assert names(run.latest_checkpoint().path) == {"new.json", "checkpoint.json"}
    assert names(run.checkpoints) == {"step-000001", "last"}


@pytest.mark.parametrize("damage", ["no manifest", "a short file", "a missing file", "a torn manifest", "another name"])
def test_an_incomplete_checkpoint_is_skipped(run, damage):
    first = run.write_checkpoint(1, writer(1), best=True)
    second = run.write_checkpoint(2, writer(2))
    assert run.latest_checkpoint() == second
    weights, manifest = second.path / "adapters" / "weights.bin", second.path / "checkpoint.json"
    match damage:
        case "no manifest":
            manifest.unlink()
        case "a short file":
            weights.write_bytes(weights.read_bytes()[:-1])
        case "a missing file":
            weights.unlink()
        case "a torn manifest":
            manifest.write_text(manifest.read_text()[:20])
        case "another name":
            second.path.rename(second.path.with_name("step-000003"))
    assert run.latest_checkpoint() == first
    run.close()
    with RunDirectory.create(run.path, CONFIG, resume=True):
        assert (run.checkpoints / "last").read_text() == "step-000001\n"


@pytest.mark.parametrize(
    "failure",
    [
        pytest.param(fill_a_disk, marks=needs_dev_full),
        lambda _: (_ for _ in ()).throw(OSError(errno.EDQUOT, "quota")),
        lambda _: (_ for _ in ()).throw(Exception("I/O error: No space left on device (os error 28)")),  # safetensors
    ],
)
def test_a_full_disk_leaves_the_last_good_checkpoint_intact(run, failure):
    good = run.write_checkpoint(1, writer(1))
    with pytest.raises(WorkError, match=r"the disk is full: .*step 2 .*; the checkpoint of step 1 is intact"):
        run.write_checkpoint(2, failure)
    assert run.latest_checkpoint() == good
    assert names(run.checkpoints) == {"step-000001", "last"}


@pytest.mark.parametrize("moment", range(1, 11))
def test_a_disk_that_fills_at_any_sync_leaves_a_whole_checkpoint(run, monkeypatch, moment):
    run.write_checkpoint(1, writer(1), best=True)
    real, calls = os.fsync, iter(range(1, 1000))

    def fsync(descriptor: int) -> None:
        if next(calls) >= moment:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(WorkError, match="the disk is full"):
        run.write_checkpoint(2, writer(2))
    latest = latest_checkpoint(run.path)
    assert latest is not None
    assert (latest.path / "adapters" / "weights.bin").read_bytes() == b"%06d" % latest.step * 1000
    assert not [name for name in names(run.checkpoints) if name.endswith(".tmp")]


def test_another_failure_of_the_writer_stays_what_it_is(run):
    with pytest.raises(ZeroDivisionError):
        run.write_checkpoint(1, lambda _: 1 / 0)  # type: ignore[arg-type]
    assert names(run.checkpoints) == set()


# Death of the writer

STUCK_IN_A_CHECKPOINT = """
    import sys, time
    from pathlib import Path
    from lfo.config import RunConfig
    from lfo.runs.folder import RunDirectory

    def stuck(folder):
        (folder / "weights.bin").write_bytes(b"half")
        print("half written", flush=True)
        time.sleep(60)

    run = RunDirectory.create(sys.argv[1], RunConfig())
    for step in (1, 2, 3):
        run.append_metrics({"step": step})
        run.write_checkpoint(step, stuck if step == 3 else lambda folder: (folder / "x").write_bytes(b"whole"))
"""

CHECKPOINTS_WITHOUT_END = """
    import sys
    from lfo.config import RunConfig
    from lfo.checkpoints import latest_checkpoint
    from lfo.runs.folder import RunDirectory

    run = RunDirectory.create(sys.argv[1], RunConfig(), resume=sys.argv[2] == "resume")
    found = run.latest_checkpoint()
    first = found.step if found else 0
    run.truncate_metrics(first)
    for step in range(first + 1, 10**6):
        def write(folder):
            for name in "abc":
                (folder / name).write_text(str(step))
        run.append_metrics({"step": step})
        run.write_checkpoint(step, write, best=step % 3 == 0)
        if step == first + 2:
            print("running", flush=True)
"""


def start(script: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", textwrap.dedent(script), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_kill_in_the_middle_of_a_checkpoint_leaves_the_one_before_and_no_lock(tmp_path: Path):
    path = tmp_path / "run"
    process = start(STUCK_IN_A_CHECKPOINT, str(path))
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "half written\n"
        with pytest.raises(UsageError, match=f"is being written by process {process.pid}"):
            RunDirectory.create(path, CONFIG, resume=True)
    finally:
        kill(process)
    assert any(name.endswith(".tmp") for name in names(path / "checkpoints"))
    with RunDirectory.create(path, CONFIG, resume=True) as run:
        checkpoint = run.latest_checkpoint()
        assert checkpoint is not None
        assert checkpoint.step == 2
        assert (checkpoint.path / "x").read_bytes() == b"whole"
        assert names(run.checkpoints) == {"step-000002", "last"}
        run.truncate_metrics(checkpoint.step)
        assert [row["step"] for row in read_metrics(path)] == [1, 2]


def test_kill_at_any_moment_leaves_a_run_that_goes_on(tmp_path: Path):
    path, reached, chance = tmp_path / "run", 0, random.Random(0)
    for attempt in range(4):
        process = start(CHECKPOINTS_WITHOUT_END, str(path), "resume" if attempt else "new")
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "running\n"
            time.sleep(chance.uniform(0.0, 0.05))
        finally:
            kill(process)
        checkpoint = latest_checkpoint(path)
        assert checkpoint is not None
        assert checkpoint.step >= reached + 2
        reached = checkpoint.step
        assert {(checkpoint.path / name).read_text() for name in "abc"} == {str(reached)}
        steps = [row["step"] for row in read_metrics(path)]
        assert steps == list(range(1, len(steps) + 1))
        assert len(steps) >= reached


# The atomic helpers


def test_an_interrupted_write_leaves_the_old_text_and_nothing_else(tmp_path: Path, monkeypatch):
    path = tmp_path / "text"
    write_text_atomic(path, "old")

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write_text_atomic(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == {"text"}


@pytest.mark.parametrize(("umask", "readers"), [(0o022, 0o444), (0o027, 0o440), (0o077, 0o400)])
def test_whoever_may_read_the_folder_may_read_its_files(tmp_path: Path, umask: int, readers: int):
    def private(folder: Path) -> None:
        (folder / "weights").write_text("x")
        (folder / "weights").chmod(0o600)

    before = os.umask(umask)
    try:
        write_folder_atomic(tmp_path / "folder", private)
    finally:
        os.umask(before)
    for path in (tmp_path / "folder", tmp_path / "folder" / "weights"):
        assert path.stat().st_mode & 0o444 == readers, path


def test_an_interrupted_folder_leaves_the_old_one(tmp_path: Path):
    write_folder_atomic(tmp_path / "folder", lambda folder: write_text_atomic(folder / "x", "old"))

    def interrupted(folder: Path) -> None:
        (folder / "x").write_text("new")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder_atomic(tmp_path / "folder", interrupted)
    assert (tmp_path / "folder" / "x").read_text() == "old"
    assert names(tmp_path) == {"folder"}
