"""What the schemas of tools say about a call, without an environment."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jsonschema

from lfo.protocol.hermes import Mistake, quote
from lfo.types import ToolCall

_WORD = re.compile(r"[^\W_]+")


def refuse_bad_arguments(call: ToolCall, schema: Mapping[str, Any]) -> None:
    """Raise a `Mistake` for the first invalid argument; the message quotes the schema, not the policy."""
    known = schema.get("properties", {})
    for name in call.arguments:
        if name not in known and not schema.get("additionalProperties"):
            raise Mistake(
                f"{call.name} has no argument {quote(name)}; its arguments are: {', '.join(known) or 'none'}."
            )
    validator = jsonschema.Draft202012Validator(schema).evolve(format_checker=None)
    for found in validator.iter_errors(dict(call.arguments)):
        if found.validator == "required":
            missing = next(name for name in found.validator_value if name not in found.instance)
            raise Mistake(f"{call.name} needs the argument {missing}.")
        where = ".".join(str(part) for part in found.absolute_path)
        raise Mistake(f"Argument {where} of {call.name} {_requirement(str(found.validator), found.validator_value)}.")


def _requirement(rule: str, value: Any) -> str:
    if rule == "enum":
        return "must be one of: " + ", ".join(map(str, value))
    if rule == "type":
        return f"must be of type {value if isinstance(value, str) else ' or '.join(value)}"
    return f"does not fit its schema: {rule} {str(value)[:80]}"


def misfit(call: ToolCall, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return in one sentence why a call does not fit these tools; None if it fits, or if their schemas cannot tell.

    >>> tool = {"function": {"name": "dial", "parameters": {"properties": {"number": {}}, "required": ["number"]}}}
    >>> misfit(ToolCall(name="dial", arguments={}), [tool])
    'dial needs the argument number.'
    """
    schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    if not schemas:
        return None
    if call.name not in schemas:
        return f"There is no tool {quote(call.name)}; the tools are: {', '.join(schemas)}."
    try:
        refuse_bad_arguments(call, schemas[call.name])
    except Mistake as mistake:
        return str(mistake)
    except Exception:  # a foreign schema may be no schema, or nested without an end: the environment decides then
        return None
    return None


def listed_words(text: str, tools: Sequence[Mapping[str, Any]]) -> set[str]:
    """Return the words of each enum, of two values or more, that a text lists completely.

    >>> tools = [{"function": {"name": "paint", "parameters": {"properties": {"colour": {"enum": ["red", "blue"]}}}}}]
    >>> sorted(listed_words("Argument colour must be one of: red, blue.", tools)), listed_words("It is red.", tools)
    (['blue', 'red'], set())
    """
    said = words_of(text)
    enums = (words_of(*map(str, values)) for tool in tools for values in _enums(tool) if len(values) > 1)
    return {word for words in enums if words <= said for word in words}


def words_of(*texts: str) -> set[str]:
    return {word for text in texts for word in _WORD.findall(text.casefold())}


def _enums(schema: Any) -> Iterator[Sequence[Any]]:
    parts = schema.items() if isinstance(schema, Mapping) else enumerate(schema) if isinstance(schema, list) else ()
    for name, part in parts:
        if name == "enum" and isinstance(part, list):
            yield part
        else:
            yield from _enums(part)
