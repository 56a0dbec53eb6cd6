"""`lfo bench`: the commands of `benchmarks/`, which the repository has and the installed package has not."""

from __future__ import annotations

import sys
from pathlib import Path

import typer

from lfo.errors import ConfigError

REPOSITORY = Path(__file__).parents[3]


def bench(context: typer.Context) -> None:
    """Measure speed and memory on this machine, in a checkout of the repository: lfo bench step; lfo bench --help"""
    if not (REPOSITORY / "benchmarks" / "__main__.py").is_file():
        raise ConfigError("lfo bench needs a checkout of the repository; install from there: pip install --editable .")
    sys.path.insert(0, str(REPOSITORY))
    from benchmarks.__main__ import app

    app(context.args, prog_name="lfo bench")
