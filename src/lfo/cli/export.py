"""`lfo export`: a run's weights as PEFT or vLLM serve them, with a model card."""

from __future__ import annotations

from dataclasses import asdict
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
    both: Annotated[
        bool, typer.Option("--both", help="Policy and world model, even where the policy suffices.")
    ] = False,
    adapter: common.Adapter = "last",
    as_json: common.Json = False,
) -> None:
    """Write adapters, or a merged model, to be served: lfo export runs/x --out served/x

    Without an option: the policy as one plain LoRA where it suffices alone,
    which is where its success without look-ahead comes within 5 points of that
    with it; else the policy and the world model as two PEFT folders. The
    README.md beside them says how to serve them with vLLM or PEFT, and how
    look-ahead is done.
    """
    if sum((merged, stacked, both)) > 1:
        raise UsageError("--merged, --stacked and --both are different forms; choose one")
    if adapter == "none":
        raise UsageError("--adapter none has nothing to export; choose best or last")
    agent = common.open_agent(run, adapter=adapter, device="cpu")
    from lfo.tools import export as exporting

    alone = exporting.alone(agent, run)
    form = "merged" if merged else "stacked" if stacked else "adapters"
    if form == "adapters" and not both and alone is not None and alone.suffices:
        form = "alone"
    with common.progress_bar(f"Writing {out}", None, hidden=as_json):
        files = exporting.export(agent, out, run=run, form=form)
    verdict = f"{alone.words} " if alone is not None else ""
    words = f"{verdict}Wrote {out} ({form}): {len(files)} files. How to serve them stands in {out / 'README.md'}."
    result = {
        "run": str(run),
        "out": str(out),
        "form": form,
        "files": files,
        "alone": None if alone is None else {**asdict(alone), "suffices": alone.suffices},
    }
    common.answer(result, lambda: typer.echo(words), as_json=as_json)
