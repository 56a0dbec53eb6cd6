"""`lfo advise`: find known problems in the metrics of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from lfo.cli.common import Json, visible
from lfo.errors import DataError


def advise(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder, finished or not.")],
    as_json: Json = False,
) -> None:
    """Show which known problems a run has, and which option to change: lfo advise runs/x"""
    from dataclasses import asdict

    from lfo.measure.gate import read_gate
    from lfo.runs.advice import MIN_STEPS
    from lfo.runs.advice import advise as look
    from lfo.runs.passed_warnings import passed_warnings
    from lfo.runs.reading import read_run

    record = read_run(run)
    if record.problem or record.config is None:
        raise DataError(record.problem)
    steps = record.rows[-1]["step"]
    troubles = look(record.rows, record.config, read_gate(run))
    passed = passed_warnings(record.rows, troubles)
    if as_json:
        enough = steps >= MIN_STEPS
        answer = {
            "run": str(run),
            "steps": steps,
            "enough": enough,
            "troubles": [asdict(each) for each in troubles],
            "passed": passed,
        }
        typer.echo(json.dumps(answer | ({"agent": record.agent} if record.agent else {}), indent=2))
        return
    if record.note:
        typer.echo(f"{record.note}.")
    if record.agent:
        typer.echo(f"{visible(record.agent)}.")
    for trouble in troubles:
        typer.echo(f"{trouble.name}: {trouble.figure}.\n  -> {trouble.knob}.")
    for sentence in passed:
        typer.echo(f"{visible(sentence)}.")
    if not troubles and steps < MIN_STEPS:
        typer.echo(f"Too early to tell: {steps} steps, and at least {MIN_STEPS} are needed.")
    elif not troubles:
        typer.echo(f"No known problem in {steps} steps.")
