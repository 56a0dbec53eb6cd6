"""Who acts after training, where the run has decided that itself: a file beside the adapters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from lfo.checkpoints import reading
from lfo.config import RunConfig
from lfo.types import StepPlan

FILE = "agent.json"


def save_agent(folder: Path, plan: StepPlan) -> None:
    """Write who acts after the step of this plan; nothing if the settings say it already."""
    if plan.agent:
        saved = {"looks_ahead": plan.looks_ahead, "words": plan.agent}
        (folder / FILE).write_text(json.dumps(saved), encoding="utf-8")


def acting_config(config: RunConfig, folder: Path | None) -> RunConfig:
    """Return the config of an agent with the adapters of a folder: without look-ahead where the policy alone acts."""
    if not config.is_auto or not config.looks_ahead:
        return config
    looks_ahead = False
    if folder is not None and (folder / FILE).is_file():
        with reading(folder / FILE) as file:
            looks_ahead = json.loads(file.read_text(encoding="utf-8"))["looks_ahead"] is True
    return config if looks_ahead else replace(config, lookahead="off", lookahead_source="world_model")
