"""`lfo export`: write the adapters of a run for PEFT or vLLM, with a model card."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from lfo.cli import common
from lfo.errors import UsageError


def export(
    run: common.Run,
    out: Annotated[Path, common.option("Folder to write; must be empty or new.", "DIR")],
    merged: Annotated[bool, common.flag("--merged", "Write the policy as a full model with merged adapters.")] = False,
    both: Annotated[bool, common.flag("--both", "Write policy and world model, even if the policy is enough.")] = False,
    adapter: common.Adapter = "last",
    as_json: common.Json = False,
) -> None:
    """Write adapters or a merged model for serving: lfo export runs/x --out served/x

    By default, write only the policy as one plain LoRA if its success without
    look-ahead is within 5 points of that with it and more than chance; else
    write policy and world model as two PEFT folders. The README.md in the folder shows how to serve
    them with vLLM or PEFT, and how look-ahead works.
    """
    if merged and both:
        raise UsageError("--merged and --both exclude each other; choose one")
    if adapter == "none":
        raise UsageError("--adapter none has no adapters to export; choose best or last")
    agent = common.open_models(run, adapter=adapter, device="cpu")
    from lfo.tools import export as exporting

    alone = exporting.alone(agent, run)
    form = "merged" if merged else "adapters"
    if form == "adapters" and not both and alone is not None and alone.suffices:
        form = "alone"
    with common.progress_bar(f"Writing {out}", None, hidden=as_json):
        files = exporting.export(agent, out, run=run, form=form)
    verdict = f"{alone.words} " if alone is not None else ""
    words = f"{verdict}Wrote {out} ({form}): {len(files)} files. {out / 'README.md'} shows how to serve them."
    result = {
        "run": str(run),
        "out": str(out),
        "form": form,
        "files": files,
        "alone": None if alone is None else {**asdict(alone), "suffices": alone.suffices},
    }
    common.answer(result, lambda: typer.echo(words), as_json=as_json)
