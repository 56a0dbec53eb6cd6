"""The README.md of an export: its contents, its results, and how to run it with look-ahead."""

from __future__ import annotations

import json
import shlex
from importlib.resources import files
from pathlib import Path
from textwrap import indent
from typing import Any

import jinja2

from lfo import __version__
from lfo.agent import Agent
from lfo.base_form import form_of
from lfo.loading import PACKAGED, model_source
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.world_model import WorldModelState, render_prompt, render_target
from lfo.runs.folder import run_folder
from lfo.runs.reading import RunRecord, read_run
from lfo.statistics import wilson
from lfo.types import MOST_IMAGINED, ToolCall

BASE = "base"
VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # supported by vLLM

# An exchange with an invented tool, as an example.
STATE = WorldModelState(
    task="I want my money back for order 17.",
    step=2,
    actions=(('find_order("17")', "Order 17: one lamp, delivered on May 3"),),
    collected={},
)
CALL, REPLY = ToolCall(name="refund_order", arguments={"order": "17"}), "A refund needs a photo of the lamp."


def model_card(agent: Agent, run: Path, form: str, own_world_model: bool) -> str:
    config, record, base = agent.config, read_run(run_folder(run)), base_of(agent)
    weights = "" if agent.adapters_folder is None else agent.adapters_folder.name
    acts_alone = form == "alone" or config.looks_ahead_untrained
    shown = form_of(config)
    exchange = [
        {"role": "assistant", "content": format_tool_call(CALL)},
        {"role": "user" if shown.by_user else "tool", "content": shown.text(REPLY)},
    ]
    return _template().render(
        base=base,
        acts_alone=acts_alone,
        config=config,
        end_of_reply=render_target("").removeprefix("<|csr|>"),
        exchange=json.dumps(exchange, indent=2),
        figures=_figures(record, weights, acts_alone=acts_alone),
        form=form,
        most_imagined=MOST_IMAGINED,
        name=record.name,
        own_world_model=own_world_model,
        predicts=bool(agent.model.world_model_adapters),
        prompt=render_prompt(STATE, CALL),
        run=record.path,
        shared=agent.model.coupling.is_shared,
        shown=shown,
        version=__version__,
        vllm_rank=next((each for each in VLLM_RANKS if each >= config.lora.rank), config.lora.rank),
        weights=weights,
    )


def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    environment.filters |= {"json": json.dumps, "quoted": shlex.quote, "short": "{:g}".format, "code": _code}
    return environment.from_string(files("lfo").joinpath("assets/model_card.md.jinja").read_text(encoding="utf-8"))


def _code(text: str) -> str:
    """Return text as an indented block of Markdown."""
    return indent(text.rstrip("\n"), "    ")


def base_of(agent: Agent) -> str:
    """Return where the exported files find the base: in the export, in a folder of this machine or on the hub."""
    if agent.config.model in PACKAGED:
        return BASE
    source = Path(model_source(agent.config.model))
    return str(source.resolve()) if source.is_dir() else agent.config.model


def _figures(record: RunRecord, weights: str, *, acts_alone: bool) -> dict[str, Any] | None:
    """Return the results at the step of these adapters, or the last ones; `acts_alone`: without look-ahead."""
    rows = [row for row in record.rows if any(name.startswith("eval/") for name in row)]
    rows = [row for row in rows if weights == f"step-{row['step']:06d}"] or rows
    if not rows:
        return None
    splits, last = (record.data or {}).get("splits", {}), rows[-1]
    metric = "success_blind" if acts_alone else "success"
    values = {
        parts[1]: last[name] for name in last if (parts := name.split("/"))[0] == "eval" and parts[2:] == [metric]
    }
    # Success is the mean reward: a share of the tasks only if the environment keeps its rewards within 0..1.
    are_shares = all(0 <= value <= 1 for value in values.values())
    shown = ".1%" if are_shares else ".4g"
    lines = []
    for split, value in values.items():
        tasks = splits.get(split, {}).get("tasks", record.config.eval.tasks if record.config else 0)
        interval = " - ".join(f"{bound:.1%}" for bound in wilson(value, tasks)) if are_shares else "-"
        ceiling = splits.get(split, {}).get("ceiling")
        lines.append((split, tasks, f"{value:{shown}}", interval, "-" if ceiling is None else f"{ceiling:{shown}}"))
    return {"step": last["step"], "tasks_seen": last["tasks_seen"], "are_shares": are_shares, "rows": lines}
