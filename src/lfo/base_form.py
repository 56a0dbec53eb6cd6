"""Which form of told replies a base acts on (`lfo.protocol.shown`): stored with the base, found once by a probe.

The probe draws a few cases of invented tools. In each, the base has drafted a call, is told that it would be refused,
and which value it needed. The form after which the base most often calls with that value is its form.

    lfo_model.json in the folder of the base:  {"form": "user", "form_probe": {"user": 0.92, "tool": 0.75, "mark": 0.0}}
"""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any, get_args

from transformers import PreTrainedTokenizerBase

from lfo.atomic import write_json_atomic
from lfo.config import RunConfig
from lfo.errors import ConfigError
from lfo.loading import model_source
from lfo.model.adapters import DualAdapterModel
from lfo.model.catalog import PROVENANCE, models_root
from lfo.model.sampler import Sampler
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.shown import SHOWN_FORMS, FormName, ShownForm
from lfo.types import Message, ToolCall

CASES = 6
SPOKEN = 64  # tokens of an answer at most; a call of an invented tool has about 30
ACTS = 0.5  # least share of cases in which a base should do as it is told

logger = logging.getLogger(__name__)


def with_stored_form(config: RunConfig, codec: ChatCodec) -> RunConfig:
    """Return the config with the form of its base, if anything is shown: the stored one, or that of most instruct
    models."""

    def usual() -> FormName:
        form = forms_of(codec)[0]
        logger.warning(
            "model=%s: nobody has probed how this base acts on predicted replies; imagine.form=%s is taken, which most "
            "instruct models act on (a run with engine=local probes a base)",
            config.model,
            form,
        )
        return form

    return _with_form(config, codec, usual)


def with_probed_form(
    config: RunConfig, codec: ChatCodec, tokenizer: PreTrainedTokenizerBase, model: DualAdapterModel
) -> RunConfig:
    """Return the config with the form of its base, if anything is shown; if it has none, probe it, and store the
    result with the base."""

    def probed() -> FormName:
        shares = probe(model, tokenizer, thinking=config.rollout.thinking)
        form = max(shares, key=lambda each: shares[each])  # the first of the best
        store_form(config.model, form, shares)
        _say(config.model, form, shares[form])
        return form

    return _with_form(config, codec, probed)


def _with_form(config: RunConfig, codec: ChatCodec, otherwise: Callable[[], FormName]) -> RunConfig:
    if not config.shows_replies:
        return config
    form, allowed = config.imagine.form, forms_of(codec)
    if form == "auto":
        form = stored_form(config.model) or otherwise()
        form = form if form in allowed else allowed[0]  # it may have been found without thoughts
    if form not in allowed:
        raise ConfigError(
            f"imagine.form={form}: the chat template of model={config.model} does not allow a user message after a "
            "call without a reply; set imagine.form=tool"
        )
    return replace(config, imagine=replace(config.imagine, form=form))


def form_of(config: RunConfig) -> ShownForm:
    """Return the form of a run, or what its base would be shown if the run shows nothing."""
    name = config.imagine.form
    return SHOWN_FORMS[(stored_form(config.model) or "tool") if name == "auto" else name]


def forms_of(codec: ChatCodec) -> list[FormName]:
    """Return the forms that a chat template allows; the earlier is preferred among equals."""
    return ["user", "tool", "mark"] if codec.lets_user_follow_draft else ["tool", "mark"]


# --- stored with the base ----------------------------------------------------------------------------------------


def stored_form(model: str) -> FormName | None:
    """Return the form that is stored with a base, if any."""
    notes: Any = {}
    with suppress(OSError, ValueError, ConfigError):
        notes = json.loads(_notes_of(model).read_bytes())
    if not isinstance(notes, dict):
        raise ConfigError(f"{_notes_of(model)}: must be a JSON object")
    # Bases that were warmed up before forms had names practised on dialogues with marks.
    form = notes.get("form", "mark" if "practice" in notes else None)
    if form not in (None, *get_args(FormName)):
        raise ConfigError(f"{_notes_of(model)}: form must be one of {', '.join(get_args(FormName))}, not {form!r}")
    return form


def store_form(model: str, form: FormName, shares: Mapping[FormName, float]) -> None:
    """Store the form with its base; a folder that cannot be written is probed again in the next run."""
    path = _notes_of(model)
    with suppress(OSError, ValueError):
        notes = json.loads(path.read_bytes()) if path.is_file() else {}
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json_atomic(path, {**notes, "form": form, "form_probe": dict(shares)})


def _notes_of(model: str) -> Path:
    """Return the file of notes on a base: in its folder, or among the fetched models for one of the hub's cache."""
    folder = Path(model_source(model))
    return folder / PROVENANCE if folder.is_dir() else models_root() / "hub" / model.replace("/", "--") / PROVENANCE


# --- the probe ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A refused call and the call that its reply asks for."""

    request: str
    drafted: ToolCall
    reply: str
    right: ToolCall


COLOURS = ("red", "green", "blue", "white", "black", "yellow")


def drawn_cases() -> list[Case]:
    """Return cases with a text, a number or a word of a list, in turn."""
    draw = random.Random(0)

    def case(name: str, argument: str, values: Sequence[Any], request: str, reply: str) -> Case:
        wrong, right = draw.sample(list(values), 2)
        calls = (ToolCall(name=name, arguments={argument: value}) for value in (wrong, right))
        drafted, wanted = calls
        return Case(request=request, drafted=drafted, reply=reply.format(right), right=wanted)

    codes = [f"{number:03d}" for number in range(100, 1_000)]
    kinds = (
        ("enter_code", "code", codes, "Open the safe.", "It stays shut. The code of this safe is {}."),
        ("set_dial", "position", range(10, 100), "Set the dial of the pump.", "Refused: the dial must be at {}."),
        ("paint_door", "colour", COLOURS, "Paint the door.", "Refused: this door has to be {}."),
    )
    return [case(*kinds[index % len(kinds)]) for index in range(CASES)]


def _tool(name: str, what: str, argument: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {argument: dict(schema)}, "required": [argument]}
    return {"type": "function", "function": {"name": name, "description": what, "parameters": parameters}}


TOOLS = (
    _tool("enter_code", "Enter the code of a safe.", "code", {"type": "string", "description": "three digits"}),
    _tool("set_dial", "Turn a dial.", "position", {"type": "integer", "description": "from 0 to 99"}),
    _tool("paint_door", "Paint a door.", "colour", {"type": "string", "enum": list(COLOURS)}),
)


def probe(
    model: DualAdapterModel, tokenizer: PreTrainedTokenizerBase, *, thinking: bool = False
) -> dict[FormName, float]:
    """Return for each form the share of the cases in which the base calls with the value that it is told."""
    codec, cases = ChatCodec(tokenizer, TOOLS, thinking=thinking), drawn_cases()
    forms = forms_of(codec)
    prompts = [_prompt(codec, case, form) for form in forms for case in cases]
    # Its own sampler, because nothing else needs the weights of the base alone.
    sampler = Sampler(model, max_context=max(map(len, prompts)) + SPOKEN, eos_ids=codec.ends)
    answers = sampler.generate(prompts, adapters=(), max_new_tokens=SPOKEN)
    right = [
        codec.read(answer.tokens).calls[:1] == (case.right,)
        for answer, case in zip(answers, cases * len(forms), strict=True)
    ]
    return {form: fmean(right[index * CASES : (index + 1) * CASES]) for index, form in enumerate(forms)}


def _prompt(codec: ChatCodec, case: Case, name: FormName) -> list[int]:
    form = SHOWN_FORMS[name]
    opening = codec.opening([Message(role="user", content=case.request)])
    return [*opening.ids, *codec.imagined(format_tool_call(case.drafted), form.text(case.reply), form).ids]


def _say(model: str, form: FormName, share: float) -> None:
    acts = f"it acts on them in {share * CASES:.0f} of {CASES} drawn cases"
    words = f"model={model} is told of predicted replies in the form imagine.form={form}; {acts}"
    if share < ACTS:
        logger.warning("%s only, so look-ahead may not help it: lfo check-env measures that", words)
    else:
        logger.info("%s", words)
