"""`lfo train` trains a run; `lfo config` shows its config."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lfo.cli.common import Json, flag, option
from lfo.cli.practice import practised
from lfo.errors import UsageError

if TYPE_CHECKING:
    from lfo.config import RunConfig

Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="NAME=VALUE", help="Config overrides, such as preset=tiny coupling=shared steps=200."),
]


def train(
    overrides: Overrides = None,
    resume: Annotated[Path | None, option("Continue the run in this folder.", "DIR")] = None,
    start_from: Annotated[
        Path | None,
        typer.Option("--from", metavar="DIR", help="Start another run with the settings and adapters of this one."),
    ] = None,
    print_config: Annotated[
        bool, flag("--print-config", "Validate and show the complete config of the engine, without training.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Train a policy and a world model: lfo train preset=tiny steps=100 output_dir=runs/x"""
    from lfo import engines
    from lfo.runs.folder import refuse_used_folder

    if resume is not None and start_from is not None:
        raise UsageError("--resume continues a run in its folder, and --from starts another one; choose one of them")
    config = _load(overrides or [], resume, start_from)
    if print_config:
        typer.echo(engines.config_text(config), nl=False)
        return
    if resume is None:
        refuse_used_folder(config.output_dir)  # before minutes of practice
        _refuse_unknown_splits(config)
        config = practised(config)
    try:
        summary = engines.train(config, resume=resume is not None)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; continue with: lfo train --resume {config.output_dir}") from None
    if as_json:
        typer.echo(json.dumps(summary, indent=2))
    else:
        typer.echo(_reached(summary, config), err=True)


def _refuse_unknown_splits(config: RunConfig) -> None:
    from lfo.loading import environment_factory
    from lfo.train.preflight import refuse_unknown_splits

    refuse_unknown_splits(config, environment_factory(config)())


def _reached(summary: Mapping[str, Any], config: RunConfig) -> str:
    """Say in one line each what a run has reached and what to type next."""
    folder = config.output_dir
    run, best = shlex.quote(folder), summary.get("best_success")
    reached = "" if best is None else f"; best success on val {best:.0%}, at step {summary['best_step']}"
    done = f"Finished: {summary.get('steps', config.steps)} steps, {summary.get('tasks_seen', 0):,} tasks{reached}."
    chosen = "" if best is None else " --adapter best"
    return f"{done} The run is in {folder}.\nNext: lfo eval {run}{chosen}; lfo report {run}; lfo advise {run}"


def config(overrides: Overrides = None, as_json: Json = False) -> None:
    """Show the complete config of a run: lfo config preset=tiny algo=dapo"""
    from dataclasses import asdict

    from lfo.config import load_config, to_yaml

    resolved = load_config(overrides or [])
    typer.echo(json.dumps(asdict(resolved), indent=2) if as_json else to_yaml(resolved), nl=as_json)


def _load(overrides: list[str], resume: Path | None, start_from: Path | None = None) -> RunConfig:
    """Return the config of a new run, or the saved config of a resumed run, with its current folder.

    With `start_from` a new run has the settings of that run or checkpoint, but for those that are typed.
    """
    from lfo.config import load_config
    from lfo.runs.folder import run_folder

    if start_from is not None:
        run = run_folder(start_from)
        if not (run / "config.yaml").is_file():
            raise UsageError(f"{start_from} contains no run to start from")
        return load_config([f"init_from={start_from}", *overrides], run=run)
    if resume is None:
        return load_config(overrides)
    if not (resume / "config.yaml").is_file():
        raise UsageError(f"{resume} contains no run to resume")
    return load_config([*overrides, f"output_dir={resume}"], run=resume)
