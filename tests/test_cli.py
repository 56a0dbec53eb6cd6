"""The command line: one sentence and an exit code for every failure, and fast help."""

import ast
import importlib.util
import json
import resource
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lfo import __version__, cli, engines
from lfo.cli import main
from lfo.config import RunConfig, from_yaml, load_config, to_yaml
from lfo.errors import DataError, WorkError


@pytest.fixture
def lfo(monkeypatch, capsys):
    """Run `lfo ARGUMENTS` in this process: exit code, stdout, stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["lfo", *arguments])
        with pytest.raises(SystemExit) as exit_:
            main()
        captured = capsys.readouterr()
        return int(exit_.value.code or 0), captured.out, captured.err

    return run


@pytest.fixture
def engine(monkeypatch):
    """An engine in place of the real one: it keeps what it was given and does what `act` says."""
    module = SimpleNamespace(given=[], act=lambda: {"success": 0.5})

    def train(config, resume):
        module.given.append((config, resume))
        return module.act()

    monkeypatch.setattr(engines, "train", train)
    return module


def raising(error: BaseException):
    def act():
        raise error

    return act


def test_version(lfo):
    assert lfo("--version") == (0, f"lfo {__version__}\n", "")


def test_config_shows_what_a_run_would_have(lfo, tmp_path: Path):
    code, out, _ = lfo("config", "preset=tiny", "algo=dapo")
    assert code == 0
    (tmp_path / "shown.yaml").write_text(out)
    assert from_yaml(tmp_path / "shown.yaml") == load_config(["preset=tiny", "algo=dapo"])
    code, out, _ = lfo("config", "preset=tiny", "--json")
    assert code == 0
    assert json.loads(out) == json.loads(json.dumps(asdict(load_config(["preset=tiny"]))))


@pytest.mark.parametrize("command", ["config", "train"])
@pytest.mark.parametrize("setting", ["lora.rnak=3", "steps=x", "lora.rank=0", "rollout.mini_batch_prompts=3", "steps"])
def test_a_bad_setting_is_exit_2_and_one_sentence(lfo, engine, command, setting):
    code, out, err = lfo(command, setting)
    assert (code, out) == (2, "")
    assert err.startswith("lfo: ")
    assert err.count("\n") == 1
    assert engine.given == []


def test_train_gives_the_config_to_the_engine_and_prints_its_summary(lfo, engine):
    code, out, err = lfo("train", "preset=tiny", "steps=3", "--json")
    assert (code, json.loads(out), err) == (0, {"success": 0.5}, "")
    assert engine.given == [(load_config(["preset=tiny", "steps=3"]), False)]


def test_resume_takes_the_saved_settings_and_the_folder_where_they_lie_now(lfo, engine, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(RunConfig(output_dir="runs/moved", seed=4)))
    assert lfo("train", "--resume", str(tmp_path), "steps=500")[0] == 0
    assert engine.given == [(RunConfig(output_dir=str(tmp_path), seed=4, steps=500), True)]


def test_another_run_starts_from_the_settings_and_adapters_of_one(lfo, engine, tmp_path: Path):
    (tmp_path / "config.yaml").write_text(to_yaml(RunConfig(output_dir="runs/moved", seed=4)))
    checkpoint, new = tmp_path / "checkpoints" / "step-000003", f"output_dir={tmp_path / 'new'}"
    for start in (tmp_path, checkpoint):
        assert lfo("train", "--from", str(start), "env_args.law=1", "policy.frozen=true", new)[0] == 0
        wanted = load_config(["seed=4", "env_args.law=1", "policy.frozen=true", f"init_from={start}", new])
        assert engine.given.pop() == (wanted, False)
    assert lfo("train", "--from", str(tmp_path / "new"))[2].endswith("contains no run to start from\n")
    code, _, err = lfo("train", "--from", str(tmp_path), "--resume", str(tmp_path))
    assert (code, "choose one" in err) == (2, True)


def test_resuming_what_is_no_run_is_exit_2(lfo, engine, tmp_path: Path):
    assert lfo("train", "--resume", str(tmp_path)) == (2, "", f"lfo: {tmp_path} contains no run to resume\n")


@pytest.mark.parametrize(
    ("error", "code", "sentence"),
    [
        (WorkError("the loss is NaN at step 3"), 1, "lfo: the loss is NaN at step 3\n"),
        (DataError("x.jsonl, line 3: damaged"), 2, "lfo: x.jsonl, line 3: damaged\n"),
        (
            KeyError("x\ny"),
            1,
            "lfo: unexpected KeyError: 'x\\ny'; run again with --debug for the traceback\n",
        ),
        (RuntimeError("a\nb"), 1, "lfo: unexpected RuntimeError: a; run again with --debug for the traceback\n"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 282.00 MiB."),
            1,
            "lfo: the GPU is out of memory; wait until it is free, or run `lfo plan` to see what fits\n",
        ),
        (
            KeyboardInterrupt(),
            130,
            "lfo: interrupted; continue with: lfo train --resume runs/latest\n",
        ),
    ],
)
def test_a_failed_run_is_one_sentence_and_its_exit_code(lfo, engine, error, code, sentence):
    engine.act = raising(error)
    assert lfo("train") == (code, "", sentence)


@pytest.mark.parametrize(
    ("interrupted", "code", "words"), [(True, 130, "lfo: interrupted"), (False, 1, "unexpected ImportError")]
)
def test_a_package_that_swallows_ctrl_c_while_it_is_imported_does_not_hide_it(lfo, engine, interrupted, code, words):
    def act(*_: object) -> None:
        if interrupted:
            with suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGINT)
        raise ImportError("cannot load module more than once per process")

    engine.act = act
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # also where it is ignored
    try:
        found, _, err = lfo("train")
    finally:
        signal.signal(signal.SIGINT, before)
    assert found == code
    assert words in err


@pytest.mark.parametrize("position", [0, 1])
def test_debug_shows_the_traceback_wherever_it_is_written(lfo, engine, position):
    engine.act = raising(WorkError("broken"))
    arguments = ["train"]
    arguments.insert(position, "--debug")
    code, _, err = lfo(*arguments)
    assert code == 1
    assert err.startswith("Traceback ")
    assert err.endswith("lfo: broken\n")


def test_an_engine_whose_packages_are_missing_is_exit_2(lfo, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    code, _, err = lfo("train", "engine=verl")
    assert (code, err) == (2, "lfo: engine=verl needs verl: pip install 'learn-from-observation[verl]'\n")


@pytest.mark.parametrize("arguments", [["frob"], ["train", "--frob"], []])
def test_a_mistyped_command_is_exit_2(lfo, arguments):
    assert lfo(*arguments)[0] == 2


HELP_OF_EVERYTHING = """
import contextlib, io, sys, typer
from lfo.cli import app

def visit(command, path):
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()) as shown:
        app([*path, "--help"])
    assert "Usage" in shown.getvalue(), path
    for name, inner in getattr(command, "commands", {}).items():
        visit(inner, [*path, name])

visit(typer.main.get_command(app), [])
print(*sys.modules)
"""
HEAVY = {"torch", "transformers", "peft", "tokenizers", "gymnasium", "numpy", "scipy", "sacrebleu", "ray", "verl"}


def modules_after(script: str) -> set[str]:
    return set(
        subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout.split()
    )


def test_help_of_every_command_imports_nothing_heavy():
    modules = modules_after(HELP_OF_EVERYTHING)
    assert "lfo.cli" in modules
    assert not HEAVY & modules
    assert HEAVY & modules_after(f"import numpy\n{HELP_OF_EVERYTHING}") == {"numpy"}


def test_no_module_of_commands_is_imported_inside_a_function():
    """A late import is for what takes long, never to break a cycle."""
    found = []
    for path in sorted(Path(cli.__file__).parent.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        inside = (inner for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for inner in ast.walk(node))
        late = (node.module or "" for node in inside if isinstance(node, ast.ImportFrom))
        found += [f"{path.name}: {module}" for module in late if module.startswith("lfo.cli")]
    assert found == []


def test_help_answers_at_once():
    """In processor time, because the wall clock of a busy machine says little."""
    seconds = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(
            [sys.executable, "-c", "from lfo.cli import main; main()", "--help"], capture_output=True, check=True
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(seconds) < 0.5
