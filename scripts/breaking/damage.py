"""Damage each file of a checkpoint and of a finished run in many ways; resume or load, and see what is said and kept.

One run of four steps has every file that a checkpoint can have, and checkpoints of steps 2 and 4. With both, a resumed
run must continue from the whole one, name the damaged file, keep it, and end with the metrics and adapters of the
undisturbed run. With one checkpoint only, it must refuse with exit code 1, name the file and change nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import random
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from compare_metrics import rows_of

from breaking import Outcome

SETTINGS = (
    "preset=tiny",
    "algo=internalise",
    "lookahead_source=memory_first",
    "world_model.predict=all",
    "levels=1",
    "rollout.prompts=2",
    "rollout.group_size=4",
    "rollout.max_context=1024",
    "eval.every=2",
    "eval.tasks=2",
    "checkpoint_every=2",
    "steps=4",
)

Damage = Callable[[Path], None]


def cut(share: float) -> Damage:
    def damage(file: Path) -> None:
        data = file.read_bytes()
        file.write_bytes(data[: min(int(len(data) * share), len(data) - 1)])

    return damage


def flip(share: float) -> Damage:
    """Flip one bit; the size stays."""

    def damage(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[min(int(len(data) * share), len(data) - 1)] ^= 1
        file.write_bytes(bytes(data))

    return damage


DAMAGES: Mapping[str, Damage] = {
    "cut to nothing": cut(0),
    "cut to a third": cut(1 / 3),
    "cut to two thirds": cut(2 / 3),
    "without its last byte": cut(1),
    "with a flipped bit at its start": flip(0.02),
    "with a flipped bit in its middle": flip(0.5),
    "missing": Path.unlink,
}


def trials(folder: Path, *, short: bool) -> Iterator[Outcome]:
    folder.mkdir()
    whole = folder / "whole"
    code, said = lfo("train", *SETTINGS, f"output_dir={whole}")
    if code:
        raise RuntimeError(f"the run to damage could not be made: {said}")
    last = whole / "checkpoints" / "step-000004"
    files = sorted(str(file.relative_to(last)) for file in last.rglob("*") if file.is_file())
    chance = random.Random(0)
    for file in files:
        names = [chance.choice(list(DAMAGES))] if short else list(DAMAGES)
        for name in names:
            yield one_checkpoint(whole, folder / "trial", file, name)
        for name in [] if short and file != files[-1] else chance.sample(list(DAMAGES), 1 if short else 2):
            yield two_checkpoints(whole, folder / "trial", file, name, newest=True)
            yield two_checkpoints(whole, folder / "trial", file, name, newest=False)
    for name in ["cut to a third"] if short else list(DAMAGES):
        yield damaged_metrics(whole, folder / "trial", name)
    for file in ("policy/adapter_model.safetensors", "policy/adapter_config.json", "memory.json"):
        for name in ["with a flipped bit in its middle"] if short else list(DAMAGES):
            yield finished_adapters(whole, folder / "trial", file, name)


def one_checkpoint(whole: Path, run: Path, file: str, name: str) -> Outcome:
    _copy(whole, run)
    shutil.rmtree(run / "checkpoints" / "step-000002")
    shutil.rmtree(run / "adapters")
    (run / "checkpoints" / "best").unlink(missing_ok=True)
    return _refused(run, run / "checkpoints" / "step-000004" / file, name, "the only checkpoint")


def damaged_metrics(whole: Path, run: Path, name: str) -> Outcome:
    _copy(whole, run)
    return _refused(run, run / "metrics.jsonl", name, "two checkpoints")


def _refused(run: Path, path: Path, name: str, where: str) -> Outcome:
    """Damage a file, resume, and expect a refusal that names the file and changes nothing."""
    DAMAGES[name](path)
    before = digests(run)
    code, said = lfo("train", "--resume", str(run))
    held = code == 1 and str(path) in said and "unexpected" not in said and digests(run) == before
    return Outcome(trial=f"{path.name} {name}, {where}", held=held, said=said)


def two_checkpoints(whole: Path, run: Path, file: str, name: str, *, newest: bool) -> Outcome:
    _copy(whole, run)
    folder = run / "checkpoints" / ("step-000004" if newest else "step-000002")
    DAMAGES[name](folder / file)
    before = set(digests(folder).values())
    begin = time.monotonic()
    code, said = lfo("train", "--resume", str(run))
    kept = before <= set(digests(run / "checkpoints").values())
    same = rows_of(run) == rows_of(whole) and adapters_of(run) == adapters_of(whole)
    held = code == 0 and str(folder / file) in said and kept and same
    which = "the newer" if newest else "the older"
    seconds = time.monotonic() - begin
    return Outcome(
        trial=f"{Path(file).name} {name}, {which} of two checkpoints",
        held=held,
        said=said,
        figures={"seconds": seconds},
    )


def finished_adapters(whole: Path, run: Path, file: str, name: str) -> Outcome:
    """Damage the adapters of a finished run without checkpoints and load them, as `lfo eval` does."""
    from lfo.agent import load_agent
    from lfo.errors import LfoError

    _copy(whole, run)
    shutil.rmtree(run / "checkpoints")
    path = run / "adapters" / file
    DAMAGES[name](path)
    said = "it was loaded"
    with contextlib.suppress(LfoError):
        try:
            load_agent(run, device="cpu")
        except LfoError as error:
            said = str(error)
            raise
    return Outcome(trial=f"{path.name} {name}, adapters of a finished run", held=str(path) in said, said=said)


def lfo(*arguments: str) -> tuple[int, str]:
    """Run a command in this process; return its exit code and what it wrote on stderr."""
    from lfo.cli import main

    streams, before = (sys.argv, sys.stdout, sys.stderr), io.StringIO()
    sys.argv, sys.stdout, sys.stderr = ["lfo", *arguments], io.StringIO(), before
    code = 0
    try:
        main()
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        sys.argv, sys.stdout, sys.stderr = streams
    return code, " / ".join(line for line in before.getvalue().splitlines() if not line.startswith("step "))


def digests(folder: Path) -> dict[str, str]:
    """Return the digest of each file; the lock holds the number of the last process."""
    files = (
        file for file in sorted(folder.rglob("*")) if file.is_file() and file.name not in (".lock", "last", "best")
    )
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def adapters_of(run: Path) -> dict[str, str]:
    return {name: digest for name, digest in digests(run / "adapters").items() if name.endswith(".safetensors")}


def _copy(whole: Path, run: Path) -> None:
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(whole, run)
