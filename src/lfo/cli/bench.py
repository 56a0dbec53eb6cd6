"""`lfo bench`: how fast the parts are, measured on this machine, each by one command."""

from __future__ import annotations

import json
from typing import Annotated

import typer

Json = Annotated[bool, typer.Option("--json", help="Answer in JSON.")]

app = typer.Typer(help="Measure how fast a part is on this machine.", no_args_is_help=True)


@app.command("env")
def bench_environment(as_json: Json = False) -> None:
    """The phone-call world: tool calls a second on one core, and seconds to generate the default data."""
    from lfo.env.bench import generate_seconds, tool_calls_per_second

    result = {"tool_calls_per_second": tool_calls_per_second(), "generate_seconds": generate_seconds()}
    if as_json:
        typer.echo(json.dumps(result))
    else:
        typer.echo(f"{result['tool_calls_per_second']:,.0f} tool calls a second on one core")
        typer.echo(f"{result['generate_seconds']:.2f} s to generate the default data")
