"""`lfo probe`: test the world model with hand-written cases."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from lfo.cli import common
from lfo.errors import UsageError

if TYPE_CHECKING:
    from lfo.measure.probe import ProbeCase

SHIPPED_FOR = "phone-calls"


def probe(
    run: common.Run,
    cases: Annotated[
        Path | None, common.option("Cases in YAML; the default are those that ship with lfo.", "FILE")
    ] = None,
    strict: Annotated[bool, common.flag("--strict", "Exit with 1 if a case fails.")] = False,
    adapter: common.Adapter = "last",
    device: common.Device = "auto",
    as_json: common.Json = False,
) -> None:
    """Test the world model in cases with known replies: lfo probe runs/x

    A failed case is a finding, not an error, so the exit code is 0 unless
    --strict is set. The default cases ship with lfo and are about the
    phone-call world.
    """
    from lfo.measure.probe import read_cases

    read = read_cases(cases or _shipped())
    agent = common.open_agent(run, adapter=adapter, device=device)
    agent.require_world_model()
    if cases is None and agent.config.env != SHIPPED_FOR:
        raise UsageError(f"the shipped cases are about {SHIPPED_FOR}, and {run} about {agent.config.env}; use --cases")
    environment = agent.make_environment()
    replies = agent.predict([(case.state(environment), case.call) for case in read])
    problems = [case.problems(reply, environment) for case, reply in zip(read, replies, strict=True)]
    passed = sum(not found for found in problems)
    if as_json:
        shown = [_as_json(*each) for each in zip(read, replies, problems, strict=True)]
        typer.echo(json.dumps({"run": str(run), "passed": passed, "failed": len(read) - passed, "cases": shown}))
    else:
        title = f"{run}, {common.weights_in_words(agent)}: {passed} of {len(read)} cases passed"
        _show(read, replies, problems, title)
    if strict and passed < len(read):
        raise typer.Exit(1)


def _shipped() -> Path:
    from importlib import resources

    return Path(str(resources.files("lfo") / "assets" / "probe_cases.yaml"))


def _as_json(case: ProbeCase, reply: str, problems: list[str]) -> dict[str, Any]:
    return {
        "name": case.name,
        "passed": not problems,
        "problems": problems,
        "predicted": reply,
        "call": {"name": case.call.name, "arguments": case.call.arguments},
        "assumes": case.assumes,
    }


def _show(cases: Sequence[ProbeCase], replies: Sequence[str], problems: Sequence[list[str]], title: str) -> None:
    console = common.titled(title)
    for case, reply, found in zip(cases, replies, problems, strict=True):
        console.print()
        mark = Text("failed ", style="bold red") if found else Text("passed ", style="bold green")
        console.print(mark.append(common.visible(case.name), style="default"), soft_wrap=True)
        lines = [("call", common.call_in_words(case.call), "cyan"), ("expects", reply, "italic magenta")]
        lines += [("but", problem, "red") for problem in found]
        if case.assumes:
            lines.append(("assumes", case.assumes, "dim"))
        common.print_lines(console, *lines)
