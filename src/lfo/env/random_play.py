"""Random play in any environment: calls drawn from the tool schemas or from the moves that an environment names.

    random_call(environment.tools(), transcript="Open the red safe.", random=stream(0, "play"))

Such a player only knows the syntax of calls. `lfo check-env` uses it as the baseline that a policy must beat, and
`lfo pretrain env=...` as training data for syntax.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any

from lfo.env.answers import checked_step, legal_moves, opening_of, tools_of
from lfo.env.interface import Environment, NamesMoves
from lfo.env.seeds import stream
from lfo.protocol.hermes import format_tool_call
from lfo.types import ToolCall

MOST_ITEMS = 3  # of a list or an object without a size limit
_MARKED = re.compile(r"\[([^\[\]\n]{1,40})\]|\"([^\"\n]{1,40})\"|'([^'\n]{1,40})'")
_WORD = re.compile(r"\w[\w.-]*\w|\w")


def random_message(tools: Sequence[Mapping[str, Any]], seed: int, transcript: str, environment: Any) -> str:
    """Return a random call, a pure function of the seed, the transcript and the moves of the environment."""
    return format_tool_call(_random_move(tools, seed, transcript, environment))


def play_randomly(
    environment: Environment, task: Any, *, seed: int, max_turns: int, most_chars: int
) -> tuple[list[str], bool]:
    """Play one task; return the names of the tools that were called, and whether the last call ended the task.

    Like a rollout, it ends when its texts have more than `most_chars` characters: no context has room for them.
    """
    tools, names = tools_of(environment), []
    texts = [message.content for message in opening_of(environment, task)]
    while len(names) < max_turns and sum(map(len, texts)) <= most_chars:
        call = _random_move(tools, seed, "\n".join(texts), environment)
        names.append(call.name)
        result = checked_step(environment, format_tool_call(call))
        if result.done:
            return names, True
        texts.append(result.observation)
    return names, False


def _random_move(tools: Sequence[Mapping[str, Any]], seed: int, transcript: str, environment: Any) -> ToolCall:
    moves = legal_moves(environment) if isinstance(environment, NamesMoves) else ()
    random = stream(seed, len(transcript), transcript[-200:])
    return random_call(tools, transcript=transcript, random=random, moves=moves)


def random_call(
    tools: Sequence[Mapping[str, Any]], *, transcript: str, random: Random, moves: Sequence[ToolCall] = ()
) -> ToolCall:
    """Return one of the moves if there are any, else a call of any tool with valid arguments from words of the text."""
    if moves:
        return random.choice(moves)
    function = random.choice(tools)["function"]
    schema = function.get("parameters") or {}
    return ToolCall(name=function["name"], arguments=_object(schema, schema.get("$defs", {}), transcript, random))


def _object(
    schema: Mapping[str, Any], definitions: Mapping[str, Any], transcript: str, random: Random
) -> dict[str, Any]:
    required = schema.get("required", ())
    value = {
        name: _value(part, definitions, transcript, random)
        for name, part in schema.get("properties", {}).items()
        if name in required or random.random() < 0.5
    }
    others = schema.get("additionalProperties")
    if isinstance(others, Mapping) and not value:
        for _ in range(random.randint(0, MOST_ITEMS)):
            value[some_words(transcript, random)] = _value(others, definitions, transcript, random)
    return value


def _value(schema: Mapping[str, Any], definitions: Mapping[str, Any], transcript: str, random: Random) -> Any:
    if "$ref" in schema:
        schema = definitions.get(str(schema["$ref"]).rpartition("/")[2], {})
    if alternatives := schema.get("anyOf") or schema.get("oneOf"):
        return _value(random.choice(alternatives), definitions, transcript, random)
    if "enum" in schema:
        return random.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    kind = schema.get("type", "string")
    if not isinstance(kind, str):
        kind = random.choice([each for each in kind if each != "null"] or ["null"])
    high = schema.get("maximum", 9)
    low = schema.get("minimum", min(0, high))
    if kind == "object":
        return _object(schema, definitions, transcript, random)
    if kind == "array":
        first = [_value(part, definitions, transcript, random) for part in schema.get("prefixItems", ())]
        fewest = max(schema.get("minItems", 0) - len(first), 0)
        most = max(fewest, min(schema.get("maxItems", len(first) + MOST_ITEMS) - len(first), MOST_ITEMS))
        rest = range(random.randint(fewest, most)) if "items" in schema else range(0)
        return first + [_value(schema["items"], definitions, transcript, random) for _ in rest]
    if kind == "integer":
        return random.randint(int(low), int(max(low, high)))
    if kind == "number":
        return round(random.uniform(low, max(low, high)), 2)
    if kind == "boolean":
        return random.random() < 0.5
    if kind == "null":
        return None
    return some_words(transcript, random)[: schema.get("maxLength", 1_000)]


def some_words(transcript: str, random: Random) -> str:
    """Return a part of the text in brackets or quotes, or one to three consecutive words of it."""
    marked = ["".join(found) for found in _MARKED.findall(transcript)]
    if marked and random.random() < 0.7:
        return random.choice(marked)
    words = _WORD.findall(transcript) or ["nothing"]
    start = random.randrange(len(words))
    return " ".join(words[start : start + random.randint(1, 3)])
