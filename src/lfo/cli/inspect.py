"""`lfo inspect`: show predicted replies beside the true ones, token by token."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from lfo.cli import common
from lfo.errors import UsageError

if TYPE_CHECKING:
    from lfo.tools.surprise import InspectedReply

# Least surprise in nats for each colour: almost certain, likely, a guess, unexpected.
COLOURS = ((0.0, "green"), (0.22, "yellow"), (1.6, "red"), (3.0, "bold white on red"))
NAMED = 1.6  # above this, tokens are also listed with the predicted token
MOST_NAMED = 3


def inspect(
    run: common.Run,
    rollout: Annotated[
        Path | None, common.option("Rollouts to read; the default is the newest file of the run.", "FILE")
    ] = None,
    num: Annotated[int, common.option("How many replies to show at most.", min=1)] = 20,
    adapter: common.Adapter = "last",
    judged: Annotated[
        bool, common.flag("--judge", "Make the environment of the run, to tell whether replies mean the same.")
    ] = False,
    device: common.Device = "auto",
    as_json: common.Json = False,
) -> None:
    """Show predicted and actual replies, and surprising tokens: lfo inspect runs/x

    For every real reply of a rollout: the state and the call, the reply that the
    world model predicts, and the actual one, each token coloured by its surprise
    (-log p, in nats, under the world model).

    The environment is not made, except with --judge: rollouts are read from their
    file, and only the shipped environments tell what a reply means without it.
    """
    agent = (common.open_agent if judged else common.open_models)(run, adapter=adapter, device=device)
    agent.require_world_model()
    file = rollout or _newest_rollouts(run)
    from lfo.env.worlds.shipped import SHIPPED
    from lfo.play.records import read_rollouts
    from lfo.protocol.world_model import observed_calls
    from lfo.runs.data import predicted_by
    from lfo.runs.folder import run_folder
    from lfo.runs.reading import read_data
    from lfo.tools.surprise import inspect_calls

    shipped = SHIPPED.get(agent.config.env)
    judge = agent.make_environment() if judged else shipped and shipped.made_by
    tools = predicted_by(agent.config, read_data(run_folder(run))) or None  # all, if the run predicts none
    found = [(read.task_id, call) for read in read_rollouts(file, None) for call in observed_calls(read, predict=tools)]
    if not found:
        raise UsageError(f"{file} contains no reply of a tool that this run predicts")
    tasks = [task for task, _ in found[:num]]
    with common.bars(hidden=as_json, transient=True) as shown:
        inspected = inspect_calls(agent, (call for _, call in found[:num]), judge=judge)
        replies = list(shown.track(inspected, total=len(tasks), description="replies"))
    if as_json:
        each = zip(tasks, replies, strict=True)
        listed = [{"task_id": task, "surprise": reply.surprise, **asdict(reply)} for task, reply in each]
        typer.echo(json.dumps({"run": str(run), "rollouts": str(file), **_summary(replies), "replies": listed}))
        return
    _show(tasks, replies, f"{run}, {common.weights_in_words(agent)}: {len(replies)} of {len(found)} replies in {file}")


def _newest_rollouts(run: Path) -> Path:
    from lfo.runs.folder import run_folder

    files = sorted((run_folder(run) / "rollouts").glob("step-*.jsonl"))
    if not files:
        raise UsageError(
            f"{run} contains no rollouts; make some with: lfo rollouts {run} --output FILE, and pass --rollout FILE"
        )
    return files[-1]


def _summary(replies: list[InspectedReply]) -> dict[str, Any]:
    known = [reply.same_meaning for reply in replies if reply.same_meaning is not None]
    surprises = [token.surprise for reply in replies for token in reply.tokens]
    return {"mean_surprise": fmean(surprises) if surprises else None, "same_meaning": fmean(known) if known else None}


def _show(tasks: list[str], replies: list[InspectedReply], title: str) -> None:
    console = common.titled(title)
    for task, reply in zip(tasks, replies, strict=True):
        common.print_rule(console, task)
        _show_reply(console, reply)
    summary = _summary(replies)
    words = f"\nMean surprise {summary['mean_surprise']:.2f} nats a token"
    if summary["same_meaning"] is not None:
        words += f"; {summary['same_meaning']:.0%} of the predictions mean the same as the reply"
    console.print(f"{words}.", highlight=False)
    legend = Text("Surprise: ")
    for bound, style in COLOURS:
        legend.append(f"from {bound:g}" if bound else "as expected", style=style).append("  ")
    console.print(legend)


def _show_reply(console: Console, reply: InspectedReply) -> None:
    verdict = {True: "  (means the same)", False: "  (means something else)", None: ""}[reply.same_meaning]
    common.print_lines(
        console,
        ("state", reply.state.removeprefix("<|state|>\n").removesuffix("\n<|/state|>"), "dim"),
        ("call", common.call_in_words(reply.call), "cyan"),
        ("expected", reply.predicted + verdict, "italic magenta"),
        ("actual", _coloured(reply), ""),
        ("surprise", _in_words(reply), "dim"),
    )


def _coloured(reply: InspectedReply) -> Text:
    text = Text()
    for token in reply.tokens:
        style = next(style for bound, style in reversed(COLOURS) if token.surprise >= bound or bound == 0)
        text.append(common.visible(token.text), style=style)
    return text


def _in_words(reply: InspectedReply) -> str:
    named = sorted((token for token in reply.tokens if token.surprise >= NAMED), key=lambda token: -token.surprise)
    words = [f"{token.text.strip()!r} {token.surprise:.1f}, not {token.likeliest.strip()!r}" for token in named]
    more = f"; {len(named) - MOST_NAMED} more" if len(named) > MOST_NAMED else ""
    return f"{reply.surprise:.2f} a token" + (f": {'; '.join(words[:MOST_NAMED])}{more}" if words else "")
