"""Open hostile run folders with every command that takes one, and see that nothing is called and nothing is touched.

The config of a hostile run names something that is no environment, or code in the run folder itself; each would create
a file, the canary. Commands that only read a run must work all the same; the others must refuse in one line that names
what the config names. The long form runs the real `lfo`, one process for each command. The short form forks its
processes from one that has already imported everything.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from breaking import Outcome

# What is run on each hostile folder, and whether it must work without the environment. None: it makes none, and
# ends because no server answers.
COMMANDS: Mapping[tuple[str, ...], bool | None] = {
    ("inspect", "RUN", "--device", "cpu"): True,
    ("export", "RUN", "--out", "OUT"): True,
    ("report", "RUN", "-o", "OUT"): True,
    ("compare", "RUN"): True,
    ("advise", "RUN"): True,
    ("inspect", "RUN", "--judge", "--device", "cpu"): False,
    ("probe", "RUN", "--cases", "CASES", "--device", "cpu"): False,
    ("eval", "RUN", "--k", "1", "--tasks", "1", "--device", "cpu"): False,
    ("run", "RUN", "--device", "cpu"): False,
    ("rollouts", "RUN", "--num", "1", "--device", "cpu"): False,
    ("serve", "RUN", "--port", "0", "--device", "cpu"): False,
    ("serve", "RUN", "--port", "0", "--upstream", "http://127.0.0.1:9/v1"): None,
    ("train", "--resume", "RUN"): False,
}
FEW = (("eval", "RUN", "--k", "1", "--tasks", "1", "--device", "cpu"), ("train", "--resume", "RUN"))
PATIENCE = 120.0  # seconds for one command; a bomb that is not refused takes hours
SECRET = "s3cret-of-this-machine"
ENVIRONMENT = "from lfo.env.worlds.oracle import OracleCodes\n\nclass World(OracleCodes):\n    pass\n"
CASES = "cases:\n- name: one\n  task: Open the door.\n  call: open_door\n  arguments: {}\n  expect: {reply: open}\n"


@dataclass(frozen=True, kw_only=True)
class Attack:
    """`RUN` and `CANARY` in texts stand for the paths of the run folder and of the file that must not be created."""

    name: str
    env: str
    env_args: Mapping[str, Any] = field(default_factory=dict)
    inside: Mapping[str, str] = field(default_factory=dict)  # files of the run folder
    beside: Mapping[str, str] = field(default_factory=dict)  # files of the project, which is the current folder
    within: bool = False  # whether commands are run in the run folder
    on_path: bool = False  # whether PYTHONPATH names the run folder
    said: str = ""  # what a refusal must name; "": the `env` of the config
    settings: Mapping[str, Any] = field(default_factory=dict)


TOUCH = "import pathlib\npathlib.Path('CANARY').touch()\n"
CLASS = "import pathlib\n\nclass Deploy:\n    def __init__(self, target):\n        pathlib.Path(target).touch()\n\n"
CLASS += "    def __call__(self):\n        return self\n"
ATTACKS = (
    Attack(name="env: os:system with arguments", env="os:system", env_args={"command": "touch CANARY"}),
    Attack(
        name="a module inside the run folder", env="evil:World", inside={"evil.py": TOUCH + ENVIRONMENT}, within=True
    ),
    Attack(
        name="a callable class without the methods",
        env="my_tools:Deploy",
        env_args={"target": "CANARY"},
        beside={"my_tools.py": CLASS},
    ),
)
PACKAGE = {"__init__.py": TOUCH, "evil/__init__.py": TOUCH, "evil/world.py": ENVIRONMENT}
REWARD = TOUCH + "def compute_score(**_):\n    return 0\n"
PROJECT = {"evil.py": "# @function_tool\n" + REWARD, "train.parquet": "", "val.parquet": ""}
MORE_ATTACKS = (
    Attack(name="a module found from above", env="runs.hostile.evil:World", inside={"evil.py": TOUCH + ENVIRONMENT}),
    Attack(name="a package whose parent is the run", env="runs.hostile.evil.world:World", inside=PACKAGE),
    Attack(name="a run folder in PYTHONPATH", env="evil:World", inside={"evil.py": TOUCH + ENVIRONMENT}, on_path=True),
    Attack(name="a function of a package", env="numpy:savetxt", env_args={"fname": "CANARY", "X": [1]}),
    Attack(name="a module that acts when it is imported", env="antigravity:fly"),
    Attack(
        name="a factory for gymnasium.make",
        env="gymnasium:lfo.env.gym:lfo/PhoneCalls-v0",
        env_args={"factory": "os:system", "command": "touch CANARY"},
    ),
    Attack(
        name="a module for gymnasium.make",
        env="gymnasium:runs.hostile.evil:World-v0",
        inside={"evil.py": TOUCH},
    ),
    Attack(name="the run as a verl project", env="verl:RUN", inside=PROJECT),
    Attack(
        name="a verl project around the run",
        env="lfo.env.adapters.verl_project:LibraryEnvironment",
        env_args={"name": "."},
        inside=PROJECT,
        said="env=verl:.",
    ),
    Attack(name="a password in the name", env="openenv:http://127.0.0.1:9/${oc.env:LFO_TEST_SECRET}", said="${...}"),
)


def trials(folder: Path, *, short: bool) -> Iterator[Outcome]:
    folder.mkdir()
    run_command = _fork if short else _spawn
    for attack in ATTACKS if short else (*ATTACKS, *MORE_ATTACKS):
        project = folder / hashlib.sha256(attack.name.encode()).hexdigest()[:8]
        written = write_hostile(project, attack)
        for command, reads in COMMANDS.items():
            if attack in ATTACKS or command in FEW:
                yield _tried(attack, project, written, command, reads=reads, run_command=run_command)
    for name, text in bombs():
        yield _bomb(folder / "bomb", name, text, run_command)
    for name, link in LINKS.items():
        yield _link(folder / "links" / name.replace(" ", "-").replace("/", "-"), name, link)
    yield _foreign_leftovers(folder / "leftovers")
    yield _init_in_a_full_folder(folder / "desk", run_command)


# Hostile environments


def write_hostile(project: Path, attack: Attack) -> Path:
    """Write a project folder and in it `runs/hostile`, a run that looks finished; return the run."""
    run = project / "runs" / "hostile"
    write_run(run, env=attack.env, env_args=attack.env_args, **attack.settings)
    for where, files in ((run, attack.inside), (project, {**attack.beside, "cases.yaml": CASES})):
        for name, text in files.items():
            (where / name).parent.mkdir(parents=True, exist_ok=True)
            (where / name).write_text(text)
    for file in (file for file in project.rglob("*") if file.suffix in (".py", ".yaml")):
        text = file.read_text().replace("CANARY", str(project / "canary"))
        file.write_text(text.replace("RUN", str(run)) if file.name == "config.yaml" else text)
    return run


def write_run(run: Path, **settings: Any) -> None:
    """Write a small run with adapters and one kept rollout, without training it."""
    from lfo.config import load_config, to_yaml
    from lfo.loading import load_base, pick_device
    from lfo.model.adapters import DualAdapterModel

    small = ["preset=tiny", "lora.rank=1", "steps=1", "eval.every=1", "world_model.predict=all", "env_args={}"]
    config = load_config([*small, f"output_dir={run}"])
    DualAdapterModel.of_run(load_base("tiny", pick_device("cpu")), config).save(run / "adapters")
    tree = json.loads(json.dumps(_plain(to_yaml(config)))) | settings
    (run / "config.yaml").write_text(json.dumps(tree))  # JSON is YAML
    rows = [{"step": step, "tasks_seen": 8 * step, "eval/val/success": step / 2} for step in (0, 1)]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    val = {"tasks": 5, "fingerprint": "0" * 16, "ceiling": None}
    data = {"environment": "hostile", "levels": [], "predicted_tools": None, "splits": {"val": val}}
    (run / "data.json").write_text(json.dumps(data))
    (run / "rollouts").mkdir()
    (run / "rollouts" / "step-000001.jsonl").write_text(json.dumps(ROLLOUT) + "\n")


ROLLOUT = {
    "split": "val",
    "task_id": "val-red",
    "reward": 1.0,
    "stop": "done",
    "error": "",
    "blind": False,
    "level": None,
    "opening": [{"role": "user", "content": "Open the red safe."}],
    "turns": [
        {
            "predicted": False,
            "taken_back": False,
            "action": '<tool_call>\n{"name": "type_code", "arguments": {"code": "17"}}\n</tool_call>',
            "observation": "It opens.",
            "tool": "type_code",
            "category": "opening",
            "facts": [],
        }
    ],
}


def _plain(text: str) -> dict[str, Any]:
    import yaml

    return yaml.safe_load(text)


def _tried(
    attack: Attack,
    project: Path,
    run: Path,
    command: Sequence[str],
    *,
    reads: bool | None,
    run_command: Callable[..., tuple[int, str]],
) -> Outcome:
    canary, out = project / "canary", project / f"out-{command[0]}"
    browser = project / "browser"
    browser.write_text(f"#!/bin/sh\ntouch {canary}\n")
    browser.chmod(0o755)
    named = {"RUN": "." if attack.within else "runs/hostile", "OUT": str(out), "CASES": str(project / "cases.yaml")}
    code, said = run_command(
        [named.get(word, word) for word in command],
        folder=run if attack.within else project,
        variables={"BROWSER": str(browser), "LFO_TEST_SECRET": SECRET},
        on_path=run if attack.on_path else None,
    )
    lines = [line for line in said.splitlines() if line.startswith("lfo: ") or "Traceback" in line]
    refused = code == 2 and len(lines) == 1 and (attack.said or attack.env.replace("RUN", str(run))) in lines[0]
    worked = code == 0 and "Traceback" not in said
    unanswered = reads is None and code == 1 and len(lines) == 1
    reads = reads and not attack.said  # a config that is refused itself cannot be read by any command
    ended = worked if reads else refused or unanswered
    held = not canary.exists() and SECRET not in said and ended
    what = "the canary exists; " if canary.exists() else ""
    canary.unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        out.unlink()
    shown = lines[-1] if lines else said.strip()[-300:] if not held else ""
    return Outcome(trial=f"{attack.name}: lfo {' '.join(command[:3])}", held=held, said=what + shown)


def _spawn(
    arguments: Sequence[str], *, folder: Path, variables: Mapping[str, str], on_path: Path | None = None
) -> tuple[int, str]:
    """Run the real `lfo`; return its exit code and what it says on stderr."""
    path = [os.environ.get("PYTHONPATH", ""), *([str(on_path)] if on_path else [])]
    environment = {**os.environ, **variables, "PYTHONPATH": os.pathsep.join(filter(None, path)), "OMP_NUM_THREADS": "1"}
    script = Path(sys.executable).with_name("lfo")
    try:
        done = subprocess.run(
            [script, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=PATIENCE
        )
    except subprocess.TimeoutExpired:
        return -1, f"no answer within {PATIENCE:g} s"
    return done.returncode, done.stderr


def _fork(
    arguments: Sequence[str], *, folder: Path, variables: Mapping[str, str], on_path: Path | None = None
) -> tuple[int, str]:
    """As `_spawn`, in a process that is forked from one with all imports, which takes a tenth of the time."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["lfo.cli", "lfo.agent", "lfo.engines.local", "lfo.tools.export", "lfo.serving.app"])
    errors = folder.parent / f"{folder.name}.stderr"
    child = context.Process(target=_command, args=(list(arguments), folder, dict(variables), on_path, errors))
    child.start()
    child.join(PATIENCE)
    if child.is_alive():
        child.kill()
        return -1, f"no answer within {PATIENCE:g} s"
    return child.exitcode or 0, errors.read_text(errors="replace")


def _command(arguments: list[str], folder: Path, variables: dict[str, str], on_path: Path | None, errors: Path) -> None:
    for descriptor, file in ((1, os.devnull), (2, errors)):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), descriptor)
    os.chdir(folder)
    os.environ.update(variables)
    sys.path[:0] = [str(on_path)] if on_path else []
    sys.argv = ["lfo", *arguments]
    from lfo.cli import main

    main()


# Bombs, links and other people's files


def bombs() -> Iterator[tuple[str, str]]:
    """Yield configs that would fill the memory, or the stack, of whoever reads them."""
    levels = [(f"l{number}", f"l{number + 1}") for number in range(9)]
    ten = {before: ", ".join([f"*{before}"] * 10) for before, _ in levels}
    yield "aliases of aliases", _indented("env_args", "l0: &l0 [1]", *(f"{b}: &{b} [{ten[a]}]" for a, b in levels))
    merged = (f"{b}: &{b} {{<<: [{ten[a]}]}}" for a, b in levels)
    yield "merged aliases", _indented("verl", "l0: &l0 {x: 1}", *merged)
    yield "an alias of itself", "env_args: &a\n  again: *a\n"
    yield "ten megabytes", "seed: 0 #" + 10_000_000 * "x"
    yield "a thousand levels", "env_args: " + 1_000 * "{a: " + 1_000 * "}"
    yield "a number without end", f"seed: {9_000 * '9'}"
    chained = (f"{b}: {10 * f'${{env_args.{a}}}'}" for a, b in levels)
    yield "strings of strings", _indented("env_args", "l0: xxxxxxxxxx", *chained)


def _indented(name: str, *lines: str) -> str:
    return "".join([f"{name}:\n", *(f"  {line}\n" for line in lines)])


def _bomb(folder: Path, name: str, text: str, run_command: Callable[..., tuple[int, str]]) -> Outcome:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(text)
    (folder / "metrics.jsonl").write_text('{"step": 1}\n')
    begin = time.monotonic()
    code, said = run_command(["train", "--resume", str(folder)], folder=folder.parent, variables={})
    seconds = time.monotonic() - begin
    held = code == 2 and said.count("\n") == 1 and str(folder / "config.yaml") in said
    return Outcome(trial=f"a config with {name}", held=held, said=said.strip()[-300:], figures={"seconds": seconds})


LINKS: Mapping[str, str] = {
    ".lock": "victim",
    "metrics.jsonl": "victim",
    "data.json": "new",
    "checkpoints": "folder",
    "rollouts": "folder",
    "checkpoints/step-000001": "folder",
}


def _link(folder: Path, name: str, target: str) -> Outcome:
    """Resume a run in which one name is a link to a file or folder elsewhere."""
    from lfo.errors import UsageError
    from lfo.runs.folder import RunDirectory

    elsewhere, run = folder / "elsewhere", folder / "run"
    (elsewhere / "folder" / "step-000009").mkdir(parents=True)
    (elsewhere / "victim").write_text("precious\n")
    (elsewhere / "folder" / "step-000009" / "precious").write_text("precious\n")
    config = _empty_run(run)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(elsewhere / target)
    before = digests(elsewhere)
    said, refused = "it was resumed", False
    try:
        RunDirectory.create(run, config, resume=True).close()
    except UsageError as error:
        said, refused = str(error), str(run / name) in str(error)
    return Outcome(trial=f"{name} is a link", held=refused and digests(elsewhere) == before, said=said)


def _empty_run(run: Path) -> Any:
    from lfo.config import load_config
    from lfo.runs.folder import RunDirectory

    config = load_config(["preset=tiny", f"output_dir={run}"])
    RunDirectory.create(run, config).close()
    return config


def _foreign_leftovers(run: Path) -> Outcome:
    """Temporary files of the run itself are removed when it is resumed, and nobody else's."""
    from lfo.runs.folder import RunDirectory

    config = _empty_run(run)
    theirs = [run / name for name in (".cache.tmp/thesis.tex", ".notes.123.tmp", "checkpoints/.mine.tmp/weights")]
    ours = [run / ".config.yaml.123.tmp", run / "checkpoints" / ".step-000001.123.tmp" / "half"]
    for file in (*theirs, *ours):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("precious")
    RunDirectory.create(run, config, resume=True).close()
    lost = [str(file.relative_to(run)) for file in theirs if not file.exists()]
    held = not lost and not any(file.exists() for file in ours)
    return Outcome(trial="foreign temporary files", held=held, said=f"removed {', '.join(lost)}" if lost else "")


def _init_in_a_full_folder(desk: Path, run_command: Callable[..., tuple[int, str]]) -> Outcome:
    desk.mkdir()
    (desk / "world.py").write_text("precious\n")
    before = digests(desk)
    code, said = run_command(["init", "new/.."], folder=desk, variables={})
    held = code == 2 and digests(desk) == before and not (desk / "new").exists() and "new/.." in said
    return Outcome(trial="lfo init new/.. in a full folder", held=held, said=said.strip()[-300:])


def digests(folder: Path) -> dict[str, str]:
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}
