"""`lfo export`: a run's weights as PEFT or vLLM serve them, with a model card."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lfo.cli import common
from lfo.errors import UsageError


def export(
    run: common.Run,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder to write; must not hold anything yet.")],
    merged: Annotated[bool, typer.Option("--merged", help="The policy as a whole model, adapters merged in.")] = False,
    stacked: Annotated[
        bool, typer.Option("--stacked", help="For coupling=stacked: both adapters as one LoRA.")
    ] = False,
    adapter: common.Adapter = "last",
    as_json: common.Json = False,
) -> None:
    """Write adapters, or a merged model, to be served: lfo export runs/x --out served/x

    Without an option: the policy and the world model as two PEFT folders. The
    README.md beside them says how to serve them with vLLM or PEFT, and how
    look-ahead is done.
    """
    if merged and stacked:
        raise UsageError("--merged and --stacked are two different forms; choose one")
    if adapter == "none":
        raise UsageError("--adapter none has nothing to export; choose best or last")
    agent = common.open_agent(run, adapter=adapter, device="cpu")
    from lfo.tools import export as exporting

    form = "merged" if merged else "stacked" if stacked else "adapters"
    with common.progress_bar(f"Writing {out}", None, hidden=as_json):
        files = exporting.export(agent, out, run=run, form=form)
    words = f"Wrote {out} ({form}): {len(files)} files. How to serve them stands in {out / 'README.md'}."
    result = {"run": str(run), "out": str(out), "form": form, "files": files}
    common.answer(result, lambda: typer.echo(words), as_json=as_json)
