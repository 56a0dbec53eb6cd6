"""`lfo record`: record the conversations of an agent that is running, or import those of a file."""

from __future__ import annotations

import importlib.util
import re
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lfo.cli.common import counted, visible
from lfo.errors import UsageError

if TYPE_CHECKING:
    from lfo.serving.recording import Recorder

MEGABYTE = 1_000_000
Idle = Annotated[float, typer.Option(min=0.1, metavar="SECONDS", help="A conversation silent for so long has ended.")]
FileSize = Annotated[int, typer.Option(min=1, metavar="MB", help="Size at which a new file is begun.")]
Hidden = Annotated[
    list[str] | None,
    typer.Option("--hide", metavar="REGEX", help="What must not be written, such as a card number; may be repeated."),
]
OutcomeFunction = Annotated[
    str | None,
    typer.Option("--outcome", metavar="MODULE:FUNCTION", help="Your function: messages -> 1 for success, 0, or None."),
]


def record(
    upstream: Annotated[
        str | None, typer.Option(metavar="URL", help="The model server of your agent, as https://api.example.com/v1.")
    ] = None,
    output: Annotated[Path, typer.Option(metavar="DIR", help="The folder of the logs.")] = Path("logs"),
    chats: Annotated[
        Path | None,
        typer.Option("--import", metavar="FILE", help="Import conversations instead: OpenAI chat format, JSON lines."),
    ] = None,
    host: Annotated[str, typer.Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8010,
    idle: Idle = 600.0,
    file_size: FileSize = 64,
    hide: Hidden = None,
    outcome: OutcomeFunction = None,
) -> None:
    """Record a running agent: lfo record --upstream https://api.example.com/v1

    A proxy in front of any server with OpenAI's chat endpoint. Answers pass
    through byte for byte. Tool calls and their replies are written to the folder,
    which check-env --logs, inspect and world_model.from_logs read (docs/LOGS.md).
    """
    if (upstream is None) == (chats is None):
        raise UsageError("name either the server to stand before, --upstream URL, or a file, --import FILE")
    if chats is not None:
        _import(chats, output, hide, file_size, outcome)
        return
    assert upstream is not None
    require_packages("lfo record")
    from lfo.serving.app import listen, make_server
    from lfo.serving.proxy import Proxy, base_of

    with listen(host, port) as socket, new_recorder(output, idle, file_size, hide, outcome) as recorder:
        proxy = Proxy(base_of(upstream), recorder)
        typer.echo(f"Recording to {output} what {proxy.base} answers. Ctrl-C ends it. In the agent's shell:")
        typer.echo(f"  export OPENAI_BASE_URL=http://{reached_at(host)}:{socket.getsockname()[1]}/v1")
        with suppress(KeyboardInterrupt):  # this is how it ends
            make_server(proxy, passes_through=True).run(sockets=[socket])
    _say_what_was_written(recorder.status, output)


def new_recorder(output: Path, idle: float, file_size: int, hide: list[str] | None, outcome: str | None) -> Recorder:
    from lfo.serving.recording import Recorder

    options = {"hide": _patterns(hide), "outcome": _function(outcome)}
    return Recorder(_folder(output), idle=idle, most_bytes=file_size * MEGABYTE, **options)


def require_packages(command: str) -> None:
    for package in ("httpx", "starlette", "uvicorn"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"{command} needs {package}: pip install 'learn-from-observation[serve]'")


def reached_at(host: str) -> str:
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)


def _folder(output: Path) -> Path:
    """Return the folder of the logs, which exists and is readable by its owner only if it is new."""
    try:
        output.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise UsageError(f"cannot write into {output}: {error.strerror}; name another --output") from error
    return output


def _patterns(given: list[str] | None) -> list[re.Pattern[str]]:
    try:
        return [re.compile(each) for each in given or ()]
    except re.error as error:
        raise UsageError(f"--hide {error.pattern!r} is no regular expression: {error}") from error


def _function(name: str | None) -> Any:
    if name is None:
        return None
    from lfo.env.by_name import find_modules_here

    module, _, function = name.partition(":")
    find_modules_here()
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise UsageError(
            f"--outcome {name}: {error}; name a function of an installed module, or of one here"
        ) from error
    if not callable(found):
        raise UsageError(f"--outcome {name} is no function")
    return found


def _import(chats: Path, output: Path, hide: list[str] | None, file_size: int, outcome: str | None) -> None:
    from lfo.serving.importing import import_chats

    with new_recorder(output, 0.1, file_size, hide, outcome) as recorder:
        import_chats(chats, recorder)
    _say_what_was_written(recorder.status, output)


def _say_what_was_written(status: dict[str, int], output: Path) -> None:
    lost = "".join(f", {status[key]} {words}" for key, words in _LOSSES.items() if status[key])
    typer.echo(f"{counted(status['written'], 'conversation')} in {visible(str(output))}{lost}.")


_LOSSES = {
    "unread": "answers that were none of chat-completions",
    "overlooked": "not recorded because too many waited",
    "lost": "lost because the disk was full",
}
