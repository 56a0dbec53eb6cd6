"""Reading practice: rows that teach a base to look up first and to act on a reply that it is shown, but no law.

    P  look-ups..  F  (expected) R  C       the refused call F is not made: its reply R is shown as look-ahead would
    P  look-ups..  F  R  C                  it was made, where the environment goes on after a refusal
    P  look-ups..  F                        nothing says what to do
    state  F  <|predict|>  R                as the world model is asked: it learns how replies are worded

Where something must be looked up, most requests are worded anew: words around the names are left out, made up or moved.
With the few wordings of an environment a base learns where names stand, and finds none in another wording.

Everything that the base says has a loss, and so has what a world model predicts. The law is scrambled anew in each row:
the members of an enum are permuted, and other values that a reply names are replaced by random ones of the same shape,
in everything but the opening. So the task does not predict the call; only the reply does. Names of the opening are
replaced in the whole row, so that they are copied.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from random import Random
from typing import Any

from lfo.env.random_play import random_call
from lfo.env.seeds import stream
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import format_tool_call
from lfo.protocol.shown import ShownForm
from lfo.protocol.world_model import WorldModelCodec, render_state, state_of
from lfo.tools.pretrain.lessons import Experience, Lesson, Step
from lfo.tools.pretrain.values import alike, names, resolved, reworded, swapped, swapper
from lfo.types import ToolCall, Turn

OPEN = 0.4  # share of rows in which nothing says what to do
PREDICTED = 0.25  # share of rows that predict a reply
LOOKED = 0.2  # share of these that predict a look-up's
UNKNOWN = 0.15  # share of shown replies that are empty: nobody can predict yet
REWORDED = 0.6  # share of rows with a look-up whose request is worded anew
REAL = 0.4  # share of refusals that were made, where the environment goes on after them
FROM_STOCK = 0.6  # chance that a word is replaced by another value of the same parameter instead of a made-up one

Row = tuple[list[int], list[bool]]  # tokens, and which of them the base says


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Makes practice rows from what was found out."""

    experience: Experience
    tools: Sequence[Mapping[str, Any]]
    codec: ChatCodec
    world_model: WorldModelCodec
    form: ShownForm
    seed: int
    predicted: float = PREDICTED

    def rows(self, count: int, room: int) -> list[Row]:
        """Return this many rows; those with more tokens than there is room for are left out."""
        made = [self._row(stream(self.seed, "practice", number)) for number in range(count)]
        return [row for row in made if row is not None and len(row[0]) <= room]

    def longest_state(self) -> int:
        """Return the tokens of the longest state in which a decisive call was made."""
        states = [state_of(each.opening, list(map(_turn, each.looked))) for each in self.experience.lessons]
        return max((len(self.codec.encode(render_state(state))) for state in states), default=0)

    def _row(self, random: Random) -> Row | None:
        if self.experience.lessons and random.random() < self.predicted:
            return self._prediction(random)
        explained = self.experience.explained
        is_open = not explained or random.random() < OPEN
        lesson = random.choice(self.experience.lessons if is_open else explained)
        lesson = scrambled(lesson, self.experience.schemas, random, self._stock)
        if lesson.looked and random.random() < REWORDED:
            lesson = self._reworded(lesson, random)
        writer = Writer(self.codec, self.form, lesson, self.experience.names.renaming(self._copied(lesson), random))
        for step in lesson.looked:
            writer.say(step.call)
            writer.hear(step.reply)
        if is_open or lesson.success is None:
            writer.say(self._another(lesson.refused[0].call, lesson, random))
            return writer.row
        for step in lesson.refused:
            made = lesson.goes_on and random.random() < REAL
            if not made and random.random() < UNKNOWN:
                writer.say(self._another(step.call, lesson, random))
                writer.show("")
            writer.say(step.call)
            (writer.hear if made else writer.show)(step.reply)
        writer.say(lesson.success)
        return writer.row

    def _reworded(self, lesson: Lesson, random: Random) -> Lesson:
        """Return the lesson with another wording of the request, so that names to look up are found in any."""
        is_name = self.experience.names.is_name
        opening = tuple(
            replace(each, content=reworded(each.content, is_name, random)) if each.role == "user" else each
            for each in lesson.opening
        )
        return replace(lesson, opening=opening)

    def _prediction(self, random: Random) -> Row:
        """Return a row that predicts the reply to a refused call or to a look-up."""
        lesson = scrambled(random.choice(self.experience.lessons), self.experience.schemas, random, self._stock)
        lesson = _renamed_all(lesson, self.experience.names.renaming(self._copied(lesson), random))
        *before, last = *lesson.looked, lesson.refused[0]
        if before and random.random() < LOOKED:
            last = before.pop()
        example = self.world_model.example(state_of(lesson.opening, list(map(_turn, before))), last.call, last.reply)
        return list(example.tokens), [weight > 0 for weight in example.token_weights]

    def _copied(self, lesson: Lesson) -> list[str]:
        """Return texts whose names should be copied and not known by heart: of the user, and of calls that look up."""
        texts = [message.content for message in lesson.opening if message.role != "system"]
        for step in lesson.looked:
            properties = self.experience.schemas[step.call.name].get("properties", {})
            values = (value for name, value in step.call.arguments.items() if "enum" not in resolved(properties[name]))
            texts += [str(value) for value in values if isinstance(value, str | int) and not isinstance(value, bool)]
        return texts

    def _another(self, call: ToolCall, lesson: Lesson, random: Random) -> ToolCall:
        if call.name in self.experience.fragile:  # random words would be a mistake
            return random.choice(self._calls[call.name])
        tools = [tool for tool in self.tools if tool["function"]["name"] == call.name]
        text = "\n".join([*(each.content for each in lesson.opening), *(step.reply for step in lesson.looked)])
        return random_call(tools, transcript=text, random=random)

    @cached_property
    def _calls(self) -> Mapping[str, Sequence[ToolCall]]:
        """Return the refused calls of each tool, which were drawn at random."""
        calls: dict[str, list[ToolCall]] = defaultdict(list)
        for lesson in self.experience.lessons:
            calls[lesson.refused[0].call.name].append(lesson.refused[0].call)
        return calls

    @cached_property
    def _stock(self) -> Mapping[str, Sequence[str]]:
        """Return the words that each parameter of a successful call had."""
        stock: dict[str, set[str]] = defaultdict(set)
        for lesson in self.experience.explained:
            assert lesson.success is not None
            for name, value in lesson.success.arguments.items():
                if isinstance(value, str) and value.replace(" ", "").isalpha():
                    stock[name].add(value)
        return {name: sorted(values) for name, values in stock.items()}


class Writer:
    """Writes a row in the tokens that the policy would see and say."""

    def __init__(self, codec: ChatCodec, form: ShownForm, lesson: Lesson, named: Callable[[str], str]) -> None:
        self._codec, self._form, self._named = codec, form, named
        opening = [replace(message, content=named(message.content)) for message in lesson.opening]
        ids = list(codec.opening(opening).ids)
        self.row: Row = ids, [False] * len(ids)

    def say(self, call: ToolCall) -> None:
        arguments = {name: swapped(value, self._named) for name, value in call.arguments.items()}
        said = self._codec.encode_message(format_tool_call(replace(call, arguments=arguments)))
        self._add([*said, self._codec.end_of_turn], wanted=True)

    def hear(self, reply: str) -> None:
        self._add(self._codec.after_action(self._named(reply), stopped=True).ids, wanted=False)

    def show(self, reply: str) -> None:
        self._add(self._codec.shown(self._form.text(self._named(reply)), self._form).ids, wanted=False)

    def _add(self, ids: Sequence[int], *, wanted: bool) -> None:
        tokens, mask = self.row
        tokens += ids
        mask += [wanted] * len(ids)


def _turn(step: Step) -> Turn:
    return Turn(
        action=format_tool_call(step.call),
        observation=step.reply,
        call=step.call,
        action_start=0,
        action_end=0,
        observation_start=0,
        observation_end=0,
    )


# --- scrambling ----------------------------------------------------------------------------------------------------


def scrambled(lesson: Lesson, schemas: Mapping[str, Any], random: Random, stock: Mapping[str, Sequence[str]]) -> Lesson:
    """Return the lesson under another law: its values renamed by a random bijection, except in the opening."""
    swaps = _permuted_members(schemas[lesson.refused[0].call.name], random)
    members = set(swaps)
    opening = "\n".join(message.content for message in lesson.opening)
    properties = schemas[lesson.refused[0].call.name].get("properties", {})
    for call, told in zip([step.call for step in lesson.refused[1:]] + [lesson.success], lesson.refused, strict=True):
        for name, value in call.arguments.items() if call else ():
            for each in value if isinstance(value, list) else [value]:
                text = str(each)
                free = isinstance(each, str | int | float) and not isinstance(each, bool) and text not in members
                if free and text not in swaps and names(told.reply, each) and not names(opening, each):
                    swaps[text] = _replacement(text, name, properties, swaps, opening, stock, random)
    return _renamed(lesson, swaps)


def _permuted_members(schema: Mapping[str, Any], random: Random) -> dict[str, str]:
    """Return a permutation of all enum members; those of the same parameters change places with each other."""
    homes: dict[str, set[str]] = defaultdict(set)
    for name, part in schema.get("properties", {}).items():
        part = resolved(part)
        for member in (resolved(part.get("items", {})) if part.get("type") == "array" else part).get("enum", ()):
            homes[str(member)].add(name)
    classes: dict[frozenset[str], list[str]] = defaultdict(list)
    for member, parameters in homes.items():
        classes[frozenset(parameters)].append(member)
    swaps: dict[str, str] = {}
    for members in classes.values():
        swaps |= zip(members, random.sample(members, len(members)), strict=True)
    return swaps


def _replacement(
    text: str,
    name: str,
    properties: Mapping[str, Any],
    swaps: Mapping[str, str],
    opening: str,
    stock: Mapping[str, Sequence[str]],
    random: Random,
) -> str:
    taken = set(swaps.values())
    others = [each for each in stock.get(name, ()) if each not in taken and not names(opening, each)]
    if text in stock.get(name, ()) and others and random.random() < FROM_STOCK:
        return random.choice(others)
    schema = resolved(properties.get(name, {}))
    found = alike(text, schema, random)
    for _ in range(8):
        if found not in taken:
            break
        found = alike(text, schema, random)
    return found


def _renamed(lesson: Lesson, swaps: Mapping[str, str]) -> Lesson:
    """Return the lesson with these values swapped where the environment decides them."""
    return _swapped(lesson, swapper(swaps), only_replies=True)


def _renamed_all(lesson: Lesson, text_of: Callable[[str], str]) -> Lesson:
    opening = tuple(replace(message, content=text_of(message.content)) for message in lesson.opening)
    return replace(_swapped(lesson, text_of, only_replies=False), opening=opening)


def _swapped(lesson: Lesson, text_of: Callable[[str], str], *, only_replies: bool) -> Lesson:
    """Return the lesson with swapped values; `only_replies`: the calls that look up keep theirs."""

    def call_of(call: ToolCall) -> ToolCall:
        return replace(call, arguments={name: swapped(value, text_of) for name, value in call.arguments.items()})

    def steps_of(steps: Sequence[Step]) -> tuple[Step, ...]:
        return tuple(Step(call=call_of(step.call), reply=text_of(step.reply)) for step in steps)

    return replace(
        lesson,
        looked=tuple(
            Step(call=step.call if only_replies else call_of(step.call), reply=text_of(step.reply))
            for step in lesson.looked
        ),
        refused=steps_of(lesson.refused),
        success=None if lesson.success is None else call_of(lesson.success),
    )
