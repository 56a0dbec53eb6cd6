"""The forms in which models write tool calls: parse them, write them, and detect the form of a chat template.

    hermes          <tool_call>\n{"name": "look", "arguments": {"at": "red"}}\n</tool_call>         Qwen, Hermes, ours
    qwen-xml        <tool_call>\n<function=look>\n<parameter=at>\nred\n</parameter>\n...            Qwen3-Coder
    llama           {"name": "look", "parameters": {"at": "red"}}                                   Llama 3.1 to 4
    mistral-args    [TOOL_CALLS]look[ARGS]{"at": "red"}                                             later Mistral models
    mistral         [TOOL_CALLS][{"name": "look", "arguments": {"at": "red"}}]                      Mistral to Small 3.1

A form has two pure functions: `parse` returns all calls of a message or raises a `Mistake`, as strictly as `hermes`;
`pieces` writes calls. Only messages that the policy has sampled are parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfo.protocol.hermes import (
    FENCE,
    Mistake,
    Tools,
    as_mapping,
    call_of,
    format_tool_call,
    parse_with_or_without_tags,
    read_json,
    refuse_overlong,
)
from lfo.types import ToolCall


class Control(str):
    """A part of a written call that is one token, if the vocabulary has it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CallForm:
    name: str
    parse: Callable[[str, Tools], list[ToolCall]]
    pieces: Callable[[Sequence[ToolCall]], Iterable[str]]
    ends: tuple[str, ...] = ()  # tokens that end a message with a call, besides the template's end of turn
    opening: str = ""  # how the first call starts, if text may be before it

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "".join(self.pieces(calls))

    def before(self, message: str) -> str:
        """Return the text before the calls of a message; "" if Hermes would parse it as a call."""
        text = message.partition(self.opening)[0].strip() if self.opening else ""
        return "" if "<tool_call>" in text else text


def form_of(written: str, call: ToolCall) -> CallForm | None:
    """Return the form in which a template has written this call, with a string argument; None if it is unknown."""
    for form in FORMS:
        try:
            if form.parse(written, ()) == [call]:
                return form
        except Mistake:
            continue
    return None


# --- Llama 3 -------------------------------------------------------------------------------------------------------

_PYTHON_TAG = Control("<|python_tag|>")


def _parse_llama(message: str, tools: Tools) -> list[ToolCall]:
    """Parse a message that is one call, or several separated by `;`; text that merely contains JSON is text."""
    index = len(message) - len(message.lstrip())
    if message.startswith(_PYTHON_TAG, index):
        index = _skip_space(message, index + len(_PYTHON_TAG))
    elif not message.startswith("{", index):
        _refuse_other_forms(message)
        return []
    calls: list[ToolCall] = []
    while True:
        refuse_overlong(message, calls)
        value, index = read_json(message, index)
        calls.append(call_of(value, message, key="parameters", ignored=("type",)))
        index = _skip_space(message, index)
        if index == len(message):
            return calls
        if message[index] != ";":
            raise Mistake("A message with a tool call must hold nothing else.")
        index = _skip_space(message, index + 1)


def _write_llama(calls: Sequence[ToolCall]) -> Iterator[str]:
    yield "; ".join(_json({"name": call.name, "parameters": dict(call.arguments)}) for call in calls)


# --- Mistral -------------------------------------------------------------------------------------------------------

_TOOL_CALLS, _ARGS = Control("[TOOL_CALLS]"), Control("[ARGS]")
_NAMED = re.compile(r"\s*([^\[\]{}\s]+)(?:\[CALL_ID\][0-9A-Za-z]+)?\[ARGS\]\s*")


def _parse_mistral(message: str, tools: Tools) -> list[ToolCall]:
    text, found, _ = message.partition(_TOOL_CALLS)
    if not found:
        _refuse_other_forms(message)
        return []
    refuse_overlong(message, [])
    values, end = read_json(message, _skip_space(message, len(text) + len(found)))
    if type(values) is not list or not values:
        raise Mistake("The tool calls must be a JSON array of objects.")
    if message[end:].strip():
        raise Mistake("Nothing may follow the tool calls.")
    calls: list[ToolCall] = []
    for value in values:
        refuse_overlong(message, calls)
        calls.append(call_of(value, message, ignored=("id",)))
    return calls


def _write_mistral(calls: Sequence[ToolCall]) -> Iterator[str]:
    yield _TOOL_CALLS
    yield _json([{"name": call.name, "arguments": dict(call.arguments)} for call in calls])


def _parse_mistral_args(message: str, tools: Tools) -> list[ToolCall]:
    index = message.find(_TOOL_CALLS)
    if index < 0:
        _refuse_other_forms(message)
    calls: list[ToolCall] = []
    while 0 <= index < len(message):
        refuse_overlong(message, calls)
        named = _NAMED.match(message, index + len(_TOOL_CALLS)) if message.startswith(_TOOL_CALLS, index) else None
        if named is None:
            raise Mistake(f"A tool call must be written {_TOOL_CALLS}name{_ARGS}{{...}}, and nothing may follow it.")
        arguments, end = read_json(message, named.end())
        calls.append(call_of({"name": named[1], "arguments": arguments}, message))
        index = _skip_space(message, end)
    return calls


def _write_mistral_args(calls: Sequence[ToolCall]) -> Iterator[str]:
    for call in calls:
        yield from (_TOOL_CALLS, call.name, _ARGS, _json(dict(call.arguments)))


# --- Qwen3-Coder ---------------------------------------------------------------------------------------------------

_XML_START = re.compile(r"<tool_call>\s*")
_XML_FUNCTION = re.compile(r"<function=([^<>\s]+)>\s*")
_XML_PARAMETER = re.compile(r"<parameter=([^<>\s]+)>")
_XML_VALUE_END = "</parameter>"
_XML_END = re.compile(r"</function>\s*</tool_call>")
_XML_SPELLING = {"True": "true", "False": "false", "None": "null"}  # templates write Python's spelling


def _parse_qwen_xml(message: str, tools: Tools) -> list[ToolCall]:
    """Parse values between tags by the schema of the tool; without a type in the schema, they are text."""
    calls: list[ToolCall] = []
    index = 0
    while start := _XML_START.search(message, index):
        refuse_overlong(message, calls)
        function = _XML_FUNCTION.match(message, start.end())
        if function is None:
            raise Mistake("A tool call must begin with <function=name>.")
        properties = _properties(tools, function[1])
        arguments: dict[str, Any] = {}
        index = function.end()
        while parameter := _XML_PARAMETER.match(message, index):
            end = message.find(_XML_VALUE_END, parameter.end())
            if end < 0:
                raise Mistake(f"A parameter must end with {_XML_VALUE_END}.")
            if parameter[1] in arguments:
                raise Mistake("The tool call has a parameter twice.")
            value = message[parameter.end() : end].removeprefix("\n").removesuffix("\n")
            arguments[parameter[1]] = _typed(value, properties.get(parameter[1]))
            index = _skip_space(message, end + len(_XML_VALUE_END))
        closing = _XML_END.match(message, index)
        if closing is None:
            raise Mistake("A tool call must end with </function> and </tool_call> right after its parameters.")
        index = closing.end()
        calls.append(call_of({"name": function[1], "arguments": arguments}, message))
    return calls


def _typed(text: str, schema: Any) -> Any:
    """Convert a value to the type of its schema; text if that is a string, unknown, or does not fit."""
    if not isinstance(schema, Mapping):
        return text
    options = [schema, *(each for each in _listed(schema.get("anyOf", ())) if isinstance(each, Mapping))]
    types = {str(kind) for each in options for kind in _listed(each.get("type", ()))}
    allows_text = not types or "string" in types
    if allows_text and not ("null" in types and text in ("null", "None")):
        return text
    spelled = _XML_SPELLING.get(text, text)
    try:
        value, end = read_json(spelled, len(spelled) - len(spelled.lstrip()))
    except Mistake:
        return text  # the validation of arguments reports the error
    return value if not spelled[end:].strip() else text


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, list | tuple) else (value,)


def _properties(tools: Tools, name: str) -> Mapping[str, Any]:
    for tool in tools:
        function = as_mapping(tool.get("function"))
        if function.get("name") == name:
            return as_mapping(as_mapping(function.get("parameters")).get("properties"))
    return {}


def _write_qwen_xml(calls: Sequence[ToolCall]) -> Iterator[str]:
    for index, call in enumerate(calls):
        yield "\n" * (index > 0) + f"<tool_call>\n<function={call.name}>\n"
        for name, value in call.arguments.items():
            yield f"<parameter={name}>\n{value if isinstance(value, str) else _json(value)}\n{_XML_VALUE_END}\n"
        yield "</function>\n</tool_call>"


# --- all of them ---------------------------------------------------------------------------------------------------


def _skip_space(message: str, index: int) -> int:
    while index < len(message) and message[index].isspace():
        index += 1
    return index


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def _refuse_other_forms(message: str) -> None:
    """Raise a `Mistake` for Hermes calls of a model with another form, because environments would execute them."""
    if "<tool_call>" in message:
        raise Mistake("The tool call is not in the form that the chat template of this model has.")


HERMES = CallForm(
    name="hermes",
    parse=parse_with_or_without_tags,
    pieces=lambda calls: ("\n".join(map(format_tool_call, calls)),),
    opening=FENCE,  # of a call without tags; one with tags is not written again
)
QWEN_XML = CallForm(name="qwen-xml", parse=_parse_qwen_xml, pieces=_write_qwen_xml, opening="<tool_call>")
LLAMA = CallForm(name="llama", parse=_parse_llama, pieces=_write_llama, ends=("<|eom_id|>",))
MISTRAL_ARGS = CallForm(name="mistral-args", parse=_parse_mistral_args, pieces=_write_mistral_args, opening=_TOOL_CALLS)
MISTRAL = CallForm(name="mistral", parse=_parse_mistral, pieces=_write_mistral, opening=_TOOL_CALLS)
FORMS = (HERMES, QWEN_XML, LLAMA, MISTRAL_ARGS, MISTRAL)
