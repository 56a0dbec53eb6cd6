"""Type 40 wrong commands and show how each ends: exit code, CPU seconds and the sentence.

    python scripts/wrong_commands.py               # all of them; exit code 1 if one ends otherwise than the table says
    python scripts/wrong_commands.py train eval    # those whose text contains one of these words

Each must end with one sentence on stderr that contains the given words, with its exit code, in at most 3 s of CPU.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

MOST_SECONDS = 3.0
DEAD_HUB = "http://127.0.0.1:9"  # nothing listens there

# What is typed behind `lfo`, its exit code, and words of the sentence.
WRONG: tuple[tuple[str, int, tuple[str, ...]], ...] = (
    # Settings that are typed in another form.
    ("train --steps 10", 2, ("lfo train steps=10",)),
    ("train --lr=1e-4", 2, ("lfo train policy.learning_rate=1e-4",)),
    ("train --env my_world:Safes", 2, ("lfo train env=my_world:Safes",)),
    ("train steps 10", 2, ("name=value", "steps=10")),
    ("train steps = 10", 2, ("name=value", "steps=10")),
    ("train lr=1e-4", 2, ("policy.learning_rate=1e-4",)),
    ("train epochs=3", 2, ("steps=3",)),
    ("train my_world:Safes", 2, ("env=my_world:Safes",)),
    ("train config.yaml", 2, ("config=config.yaml",)),
    ("train step=10", 2, ("steps",)),
    ("train steps=ten", 2, ("steps must be", "'ten'")),
    ("train algo=dpao", 2, ("dapo",)),
    ("train preset=tinny", 2, ("tiny",)),
    ("train config=nothing.yaml", 2, ("nothing.yaml", "cannot read")),
    # Names that do not exist.
    ("train env=phone-call", 2, ("phone-calls",)),
    ("train env=my_world.py:Safes", 2, ("env=my_world:Safes",)),
    ("train env=./my_world.py", 2, ("env=my_world:", "Class")),
    ("train env=my_wrld:Safes", 2, ("my_wrld", "my_world")),
    ("train env=my_world:Safe", 2, ("no Safe", "Safes")),
    ("train env=my_world:helper", 2, ("is not an environment",)),
    ("train env=my_world:Safes env_args.size=3", 2, ("size",)),
    ("train env=my_world:Safes eval.splits=test", 2, ("'test'", "train", "val")),
    ("train env=my_world:Safes model=./nothing", 2, ("model=./nothing", "does not exist")),
    ("train env=my_world:Safes model=nobody/nothing", 2, ("model=nobody/nothing", "hub")),
    ("train --resume nothing", 2, ("nothing", "no run")),
    ("train --from nothing", 2, ("nothing", "no run")),
    ("train output_dir=full", 2, ("full", "not empty")),
    # Other commands.
    ("trian steps=10", 2, ("trian", "train")),
    ("check-env --env my_world:Safes", 2, ("lfo check-env env=my_world:Safes",)),
    ("check-env my_world:Safes", 2, ("env=my_world:Safes",)),
    ("check-env env=my_world:Safe", 2, ("no Safe",)),
    ("pretrain env=my_world:Safe --output-dir base", 2, ("no Safe",)),
    ("pretrain --env my_world:Safe --output-dir base", 2, ("no Safe",)),
    ("eval nothing", 2, ("nothing", "config.yaml")),
    ("eval run --split test", 2, ("'test'", "val")),
    ("eval run --split=val --tasks many", 2, ("--tasks", "integer")),
    ("run full", 2, ("full", "config.yaml")),
    ("compare", 2, ("RUNS",)),
    ("report unusable", 1, ("unusable",)),
    ("models fetch qwen", 2, ("qwen", "smollm2-135m")),
)

WORLD = """
class Safes:
    def tasks(self, split):
        return {"train": [1, 2], "val": [3]}[split]

    def tools(self):
        return []

    def reset(self, task, seed=0):
        return []

    def step(self, call):
        raise NotImplementedError


def helper():
    return None
"""


def prepare(folder: Path) -> None:
    """Write what the commands name: an environment, a run, a run that cannot be read and a folder that is no run."""
    for name in ("full", "run", "unusable"):
        (folder / name).mkdir()
    (folder / "my_world.py").write_text(WORLD)
    (folder / "config.yaml").write_text("steps: 3\n")
    (folder / "full" / "notes.txt").write_text("kept\n")
    (folder / "run" / "config.yaml").write_text("preset: tiny\nenv: my_world:Safes\n")
    (folder / "run" / "metrics.jsonl").write_text(json.dumps({"step": 0, "tasks_seen": 0}) + "\n")
    (folder / "unusable" / "config.yaml").write_text("[[[\n")


def seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def end_of(command: str, folder: Path) -> tuple[int, str, float]:
    """Return the exit code of a command, what it wrote on stderr, and its CPU seconds."""
    environment = {**os.environ, "HF_ENDPOINT": DEAD_HUB, "COLUMNS": "80", "OMP_NUM_THREADS": "1"}
    environment["HF_HOME"] = environment["LFO_HOME"] = str(folder / "cache")
    before = seconds_of_children()
    ended = subprocess.run(
        [sys.executable, "-c", "from lfo.cli import main; main()", *command.split()],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    return ended.returncode, ended.stderr, seconds_of_children() - before


def flaws(code: int, said: str, seconds: float, wanted: int, words: tuple[str, ...]) -> list[str]:
    """Return what is wrong with the end of a command."""
    lines = [line for line in said.splitlines() if line.strip()]
    found = []
    if code != wanted:
        found.append(f"exit code {code}, not {wanted}")
    if len(lines) != 1 or not said.startswith("lfo: "):
        found.append(f"{len(lines)} lines, not one sentence")
    if missing := [word for word in words if word not in said]:
        found.append(f"without {', '.join(missing)}")
    if seconds > MOST_SECONDS:
        found.append("too slow")
    return found


def main() -> int:
    chosen = [each for each in WRONG if not sys.argv[1:] or any(word in each[0] for word in sys.argv[1:])]
    bad = 0
    with tempfile.TemporaryDirectory() as place:
        prepare(Path(place))
        for command, wanted, words in chosen:
            code, said, seconds = end_of(command, Path(place))
            wrong = flaws(code, said, seconds, wanted, words)
            bad += bool(wrong)
            print(
                f"{'; '.join(wrong) or 'good'} | lfo {command} | {code} | {seconds:.1f} s | {said.strip()}", flush=True
            )
    print(f"{len(chosen) - bad} of {len(chosen)} end as they should")
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
