"""`lfo serve`: serve a trained agent with OpenAI's chat API."""

from __future__ import annotations

import importlib.util
import secrets
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lfo.cli import common
from lfo.cli.serve_in_words import ADAPTERS, models_of, serve_in_words
from lfo.errors import UsageError

if TYPE_CHECKING:
    from lfo.serving.speaker import Speaker


def serve(
    run: common.Run,
    host: Annotated[
        str, common.option("The address to listen on; 0.0.0.0 allows other machines.", "ADDRESS")
    ] = "127.0.0.1",
    port: Annotated[int, common.option("0 takes a free one.", min=0, max=65535)] = 8000,
    token: Annotated[
        str | None, common.option("The API key; the default is a new one.", "TOKEN", envvar="LFO_TOKEN")
    ] = None,
    adapter: common.Adapter = "last",
    no_lookahead: common.NoLookahead = False,
    upstream: Annotated[
        str | None, common.option("Any chat server to stand before, or vLLM with both LoRAs.", "URL")
    ] = None,
    upstream_key: Annotated[str, common.option("That server's API key.", "KEY", envvar="LFO_UPSTREAM_KEY")] = "",
    recorded: Annotated[
        Path | None, typer.Option("--record", metavar="DIR", help="With --upstream: go on recording into this folder.")
    ] = None,
    rows: Annotated[int, common.option("Conversations in parallel.", min=1)] = 64,
    device: common.Device = "auto",
    logs: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="First learn the replies in these rollouts, in the new run --output-dir."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(metavar="DIR", help="With --logs: the folder of the new run.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="With --logs: steps of eight updates.")] = 20,
) -> None:
    """Serve a trained agent with look-ahead to any OpenAI client: lfo serve runs/x

    Tools, tool calls and streaming work as in OpenAI's chat completions. If the
    client names no tools, the agent uses those of its training.

    Where the rules have changed, a log of the agent is enough to learn the new
    ones: lfo serve runs/x --logs calls.jsonl --output-dir runs/y
    """
    for package in ("starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"lfo serve needs {package}: pip install 'learn-from-observation[serve]'")
    if logs is not None:
        if upstream is not None or output_dir is None:
            raise UsageError("--logs needs --output-dir, where the run goes that learns from them, and no --upstream")
        run, adapter = learnt_from(run, logs, output_dir, steps), "last"
    elif upstream is not None and adapter == "none":
        raise UsageError("--adapter none serves the untrained base, and --upstream has adapters; choose best or last")
    if upstream is not None and (own_models := models_of(upstream, upstream_key)).isdisjoint(ADAPTERS):
        shown = sorted(own_models)[:3]
        serve_in_words(
            run, upstream, upstream_key, shown, host, port, token, adapter, not no_lookahead, recorded, device
        )
        return
    if recorded is not None:
        raise UsageError("--record needs --upstream with any chat server; others are recorded by lfo record")
    speaker, weights = _speaker(run, upstream, upstream_key, adapter, device, lookahead=not no_lookahead)
    from lfo.serving.app import listen, make_app, make_server
    from lfo.serving.batcher import Batcher

    model, token = run.resolve().name, token or secrets.token_urlsafe(24)
    with listen(host, port) as socket, Batcher(speaker, lookahead=not no_lookahead, slots=rows) as batcher:
        app = make_app(batcher.submit, model=model, token=token, figures=batcher.listener.figures)
        looks = "with look-ahead" if speaker.lookahead is not None and not no_lookahead else "without look-ahead"
        typer.echo(f"Serving {model}, {weights}, {looks}. Ctrl-C ends it. In the client's shell:")
        typer.echo(
            f"  export OPENAI_BASE_URL=http://{_reached_at(host)}:{socket.getsockname()[1]}/v1 OPENAI_API_KEY={token}"
        )
        make_server(app).run(sockets=[socket])


def _speaker(
    run: Path, upstream: str | None, key: str, adapter: common.Adapter, device: str, *, lookahead: bool
) -> tuple[Speaker, str]:
    """Return what speaks for the run, and whose weights it has."""
    if upstream is None or adapter == "none":
        agent = common.open_agent(run, adapter=adapter, device=device)
        from lfo.serving.speaker import local_speaker

        return local_speaker(agent), common.weights_in_words(agent)
    with common.working(f"Loading {common.visible(str(run))}"):
        from lfo.serving.speaker import upstream_speaker

        speaker = upstream_speaker(run, upstream, adapter=adapter, api_key=key, lookahead=lookahead)
    return speaker, f"weights of {upstream}"


def learnt_from(run: Path, logs: Path, output_dir: Path, steps: int) -> Path:
    """Train the world model of a run on logs, in a run of its own; return that run."""
    from lfo import engines
    from lfo.config import load_config
    from lfo.runs.folder import run_folder

    settings = {
        "init_from": run,  # its settings too
        "policy.frozen": "true",
        "world_model.from_logs": logs,
        "output_dir": output_dir,
        "steps": steps,
        "eval.every": 0,  # no environment is played
        "eval.final_splits": "[]",
    }
    engines.train(load_config([f"{name}={value}" for name, value in settings.items()], run=run_folder(run)))
    return output_dir


def _reached_at(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
