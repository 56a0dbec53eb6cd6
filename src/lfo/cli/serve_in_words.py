"""`lfo serve RUN --upstream URL` in front of any chat server: the world model here, the agent there."""

from __future__ import annotations

import secrets
import urllib.error
from contextlib import ExitStack
from pathlib import Path

import typer

from lfo.cli import common
from lfo.cli.record import new_recorder, reached_at, require_packages
from lfo.errors import WorkError

ADAPTERS = frozenset({"policy", "world_model"})  # of vLLM in the folder of `lfo export`
IDLE, FILE_SIZE = 600.0, 64  # as `lfo record`


def models_of(url: str, key: str) -> frozenset[str]:
    """Return the names of a server's models; none if it does not tell them."""
    from lfo.serving.upstream import Upstream

    try:
        return frozenset(Upstream(url, ends=(), api_key=key).models())
    except WorkError as error:
        if isinstance(error.__cause__, urllib.error.HTTPError):
            return frozenset()
        raise


def serve_in_words(
    run: Path,
    url: str,
    key: str,
    models: list[str],
    host: str,
    port: int,
    token: str | None,
    adapter: str,
    lookahead: bool,
    recorded: Path | None,
    device: str,
) -> None:
    require_packages("lfo serve")
    with common.working(f"Loading {common.visible(str(run))}"):
        from lfo.runs.data import predicted_by
        from lfo.runs.folder import run_folder
        from lfo.runs.reading import read_data
        from lfo.serving.app import Guarded, listen, make_server
        from lfo.serving.following import FollowingWorldModel
        from lfo.serving.in_words import InWords
        from lfo.serving.proxy import Proxy

        answerer = None
        if lookahead:
            world_model = FollowingWorldModel(run, adapter=adapter, device=device)
            config = world_model.agent.config
            tools = predicted_by(config, read_data(run_folder(run))) or None
            answerer = InWords(world_model, tools=tools, first_form=config.imagine.form)
    token = token or secrets.token_urlsafe(24)
    with ExitStack() as stack:
        socket = stack.enter_context(listen(host, port))
        recorder = recorded and stack.enter_context(new_recorder(recorded, IDLE, FILE_SIZE, None, None))
        proxy = Proxy(url, recorder or None, key=key, answerer=answerer)
        what = f"predictions of {run.resolve().name} in words" if lookahead else "no look-ahead"
        records = f", recording to {recorded}" if recorded else ""
        named = common.visible(", ".join(models)) or "its models"
        typer.echo(f"Serving {named} of {proxy.base} with {what}{records}. Ctrl-C ends it. In the client's shell:")
        address = f"http://{reached_at(host)}:{socket.getsockname()[1]}/v1"
        typer.echo(f"  export OPENAI_BASE_URL={address} OPENAI_API_KEY={token}")
        make_server(Guarded(proxy, token), passes_through=True).run(sockets=[socket])
