"""Write the adapters of a run for PEFT or vLLM, with a model card: `lfo export`.

    form       policy                                              world model
    alone      policy/        one plain LoRA, which needs nothing  none
               beside it
    adapters   policy/        the LoRA as it was trained           world_model/   a LoRA on the base
    merged     the folder itself: a whole model, base + policy     world_model/   a LoRA on the *unmerged* base;
                                                                   where one adapter is both, the merged model itself

The embedded base, which is on no hub, is included as `base/`; any other folder is named by its absolute path. The card
(`README.md`) shows how to serve the files and how to do look-ahead, which is up to the caller.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig

from lfo.agent import Agent
from lfo.atomic import new_folder, write_folder_atomic, write_text_atomic
from lfo.config.couplings import POLICY, WORLD_MODEL
from lfo.errors import WorkError
from lfo.loading import PACKAGED, model_source
from lfo.runs.alone import Alone, policy_alone
from lfo.runs.folder import run_folder
from lfo.runs.reading import read_run
from lfo.tools.model_card import BASE, base_of, model_card

Form = Literal["alone", "adapters", "merged"]


def alone(agent: Agent, run: str | Path) -> Alone | None:
    """Return the success of these adapters without and with look-ahead; None if it was not measured."""
    step = re.fullmatch(r"step-(\d+)", agent.adapters_folder.name if agent.adapters_folder else "")
    rows, tasks = read_run(run_folder(Path(run))).rows, agent.config.eval.tasks
    found = policy_alone(rows, at_most=tasks, step=int(step[1]) if step else None)
    # A run that went on from another did not begin with what chance gives.
    return replace(found, start=None) if found is not None and agent.config.init_from else found


def export(agent: Agent, out: str | Path, *, run: str | Path, form: Form = "adapters") -> list[str]:
    """Write the new folder `out` and return its files. `merged` makes the agent unusable."""
    out = new_folder(Path(out))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_folder_atomic(out, _writer(agent, Path(run), form))
    except OSError as error:
        raise WorkError(f"cannot write {out}: {error.strerror or error}") from error
    return sorted(str(file.relative_to(out)) for file in out.rglob("*") if file.is_file())


def has_own_world_model(agent: Agent, form: Form) -> bool:
    """Whether the world model has its own folder; a merged model of coupling=shared is both."""
    both = form == "merged" and agent.model.coupling.is_shared
    return bool(agent.model.world_model_adapters) and form != "alone" and not both


def _writer(agent: Agent, run: Path, form: Form) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        if has_own_world_model(agent, form):
            (adapter,) = agent.model.world_model_adapters
            _write_adapter(agent, folder / WORLD_MODEL, adapter)
        if form != "merged":
            _write_adapter(agent, folder / POLICY, POLICY)
        if agent.config.model in PACKAGED and any(folder.iterdir()):
            shutil.copytree(model_source(agent.config.model), folder / BASE)
        write_text_atomic(folder / "README.md", model_card(agent, run, form, has_own_world_model(agent, form)))
        if form == "merged":
            _write_merged(agent, folder)

    return write


def _write_adapter(agent: Agent, folder: Path, adapter: str) -> None:
    agent.model.export(folder, adapter)
    path = folder / "adapter_config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    settings["base_model_name_or_path"] = base_of(agent)
    write_text_atomic(path, json.dumps(settings, indent=2, sort_keys=True) + "\n")


def _write_merged(agent: Agent, folder: Path) -> None:
    """Merge the policy into a full model in the precision of the loaded base, and save it in that of its files."""
    merged: Any = cast(Any, agent.model.peft_model).merge_and_unload(adapter_names=[POLICY])
    # A base of this package is stored in fp16 but always computed in fp32, so the merged model is saved in fp32.
    stored = AutoConfig.from_pretrained(model_source(agent.config.model), trust_remote_code=False).dtype
    merged.to((stored if agent.config.model not in PACKAGED else None) or torch.float32).save_pretrained(folder)
    agent.tokenizer.save_pretrained(folder)
