"""Generated worlds of tools: a practice conversation with its own tools, words, wordings and law.

    converse(number)        the same conversation for the same number

Tools that look up come first in most worlds; their replies are records. The values of the decisive call come from the
request, from a record, or from a law that is drawn anew each time: where nothing says what to do, the call is drawn
uniformly; a refusal names what was needed. Refusals are told before a call is made, as look-ahead does, or are real.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from random import Random
from typing import Any

from lfo.env.seeds import stream
from lfo.tools.pretrain import wordings as say
from lfo.tools.pretrain.values import alike
from lfo.tools.pretrain.wordings import FILLER, of, wordings
from lfo.types import Message, ToolCall

SEED = 91_000
MADE_UP = 0.3  # share of words that no list has
LOOKS = {0: 0.3, 1: 0.55, 2: 0.15}  # chances of no, one, two look-ups
OPEN = 0.3  # share of conversations in which nothing says what to do
REAL = 0.3  # of refusals that were made; the others are told
UNKNOWN = 0.1  # of told replies that are empty
ACCEPTED = 0.1  # share of told replies that accept the call, which is then made
BARE = 0.6  # share of names and codes in a request without a word for what they are
LOOSE = 0.35  # share of mentions without a sentence
_LOOKING = of("get find look search fetch read show list check query view ask inspect lookup see describe browse")
_DECIDING = of(
    "open close set send make file book order enter submit call give pay ship route assign move start stop add pick "
    "choose grant approve deliver report post use mark issue register confirm press type try plan answer solve"
)
_CODES = of("A99 A9 A999 A-99 AA-999 9999 99999 A9999 99-9999 AAA9 9A AA9 A/99 999")
_SAID = of("note comment reason message remark")
_WHO = of("name customer client patient member owner guest student driver user person contact tenant sender pupil")
_WHICH = of("id code order invoice reference number case file room account booking key serial batch tag item")
_COUNTS = of("amount count size minutes days hours level price copies weight floor quantity score degrees fee")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of a conversation: a call that is made, or a reply that is real or only told."""

    kind: str  # "call", "reply", "told"
    call: ToolCall | None = None
    text: str = ""
    sure: bool = False  # all arguments of the call follow from what was said


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    opening: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    lines: tuple[Line, ...]


@dataclass(kw_only=True)
class Param:
    name: str
    schema: dict[str, Any]
    value: Any
    source: str  # "task", "record", "law", "note"
    bare: bool = False  # the value shows what it is, without a label
    given: Any = None  # the guess


# Kinds of values and how often they are drawn: said somewhere, or decided by the law.
_SAID_KINDS = {"person": 30, "code": 22, "title": 12, "noun": 10, "enum": 14, "number": 8, "moment": 4}
_LAW_KINDS = {"enum": 60, "integer": 13, "code": 9, "noun": 5, "moment": 3, "list": 8, "boolean": 2}
_SIZES = {2: 12, 3: 20, 4: 22, 5: 16, 6: 12, 8: 12, 12: 6}  # of an enum


def drawn(rng: Random, chances: Mapping[Any, float]) -> Any:
    return rng.choices(list(chances), list(chances.values()))[0]


@lru_cache(maxsize=2)
def _list(name: str) -> list[str]:
    return (resources.files("lfo") / "assets" / "words" / f"{name}.txt").read_text().split()


def text_of(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(text_of, value))
    return json.dumps(value) if isinstance(value, bool) else str(value)


class Words:
    """Draws words and values, none twice."""

    def __init__(self, rng: Random) -> None:
        self._rng, self._used = rng, set[str]()

    def new(self, draw: Any) -> str:
        while True:
            drawn = draw()
            if drawn not in self._used:
                self._used.add(drawn)
                return drawn

    def noun(self) -> str:
        return self.new(
            lambda: self._made("lower") if self._rng.random() < MADE_UP else self._rng.choice(_list("words"))
        )

    def any(self) -> str:
        """Return a word that may come again."""
        return self._rng.choice(FILLER if self._rng.random() < 0.5 else _list("words"))

    def name(self) -> str:
        return self.new(lambda: self._made("Title") if self._rng.random() < 0.5 else self._rng.choice(_list("names")))

    def person(self) -> str:
        rng, first = self._rng, self.name()
        if rng.random() < 0.08:
            first += f"-{self.name()}"
        return " ".join([first, *(self.name() for _ in range(drawn(rng, {0: 12, 1: 75, 2: 13})))])

    def title(self) -> str:
        return " ".join(self.noun().capitalize() for _ in range(self._rng.choice((2, 2, 3))))

    def code(self) -> str:
        return self.new(lambda: alike(self._rng.choice(_CODES), {}, self._rng))

    def moment(self) -> str:
        rng = self._rng
        date = f"20{rng.randint(10, 49)}-{rng.randint(1, 12):02}-{rng.randint(1, 28):02}"
        return self.new(lambda: date if rng.random() < 0.5 else f"{rng.randint(0, 23):02}:{rng.randint(0, 59):02}")

    def _made(self, case: str) -> str:
        made = alike("a" * self._rng.randint(3, 9), {}, self._rng)
        return made.capitalize() if case == "Title" else made

    def member(self, style: float) -> str:
        if style < 0.55:
            return self.noun()
        if style < 0.7:
            return self.name()
        return self.code() if style < 0.88 else f"{self.noun()}_{self.noun()}"


@dataclass
class World:
    """One task with its tools and its law."""

    rng: Random
    held_out: bool
    tools: list[dict[str, Any]] = field(default_factory=list)
    keys: list[Param] = field(default_factory=list)  # what is looked up, one for each look-up
    looks: list[str] = field(default_factory=list)  # the names of these tools
    records: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        rng = self.rng
        self.words = Words(rng)
        facts: list[Param] = []
        for _ in range(drawn(rng, LOOKS)):
            chained = bool(facts) and rng.random() < 0.6
            key = self._linked(rng.choice(facts), "record") if chained else self._free("task")
            self.keys.append(key)
            facts = [self._free("record") for _ in range(rng.randint(1, 3))]
            self.looks.append(self._tool([key], _LOOKING))
            self.records.append(self._record(key, facts))
        self.facts = facts
        self.params = self._decisive(facts)
        self.name = self._tool(self.params, _DECIDING)
        for _ in range(drawn(rng, {0: 65, 1: 27, 2: 8})):
            self._tool([self._free("task") for _ in range(rng.randint(1, 2))], _LOOKING + _DECIDING)
        rng.shuffle(self.tools)
        self.said = [each for each in [*self.keys, *self.params] if each.source == "task"]
        self.opening = self._opening()

    # --- tools ---

    def _tool(self, params: Sequence[Param], verbs: Sequence[str]) -> str:
        rng, words = self.rng, self.words
        parts = [rng.choice(verbs) if rng.random() < 0.75 else words.noun()]
        parts += [words.noun() for _ in range(drawn(rng, {0: 12, 1: 70, 2: 18}))]
        name = words.new(lambda: "_".join(parts) if parts[1:] else rng.choice(verbs))
        parameters = {
            "type": "object",
            "properties": {each.name: each.schema for each in params},
            "required": [each.name for each in params],
        }
        described = self.fill(self.pick(say.DESCRIPTIONS))
        function = {"name": name, "description": described, "parameters": parameters}
        self.tools.append({"type": "function", "function": function})
        return name

    def _decisive(self, facts: Sequence[Param]) -> list[Param]:
        rng = self.rng
        sources = ["law"] * drawn(rng, {0: 12, 1: 63, 2: 25})
        sources += ["task"] * drawn(rng, {0: 45, 1: 40, 2: 15} if self.keys else {0: 15, 1: 55, 2: 30})
        params = [self._law() if each == "law" else self._free("task") for each in sources]
        if (facts and rng.random() < 0.3) or not params:
            params.append(self._linked(rng.choice(facts), "record") if facts else self._free("task"))
        if rng.random() < 0.12:
            text = " ".join(self.words.any() for _ in range(rng.randint(1, 3)))
            schema, name = self._schema("string"), self._named(_SAID)
            params.append(Param(name=name, schema=schema, value=text, source="note"))
        rng.shuffle(params)
        return params

    def _named(self, usual: Sequence[str]) -> str:
        rng, words = self.rng, self.words

        def draw() -> str:
            if rng.random() < 0.5:
                return rng.choice(usual)
            return f"{words.noun()}_{rng.choice(usual)}" if rng.random() < 0.3 else words.noun()

        return words.new(draw)

    def _schema(self, kind: str, name: str = "", **more: Any) -> dict[str, Any]:
        described = self.fill(self.pick(say.ARGUMENTS), a=name)
        return {"type": kind, **more, **({"description": described} if described else {})}

    def _free(self, source: str) -> Param:
        """Return a parameter whose value is said somewhere."""
        rng, words = self.rng, self.words
        kind = drawn(rng, _SAID_KINDS)
        name = self._named({"person": _WHO, "number": _COUNTS}.get(kind, _WHICH))
        value: Any
        if kind == "enum":
            members = self._members()
            schema, value = self._schema("string", name, enum=members), rng.choice(members)
        elif kind == "number":
            schema, value = self._schema("integer", name), rng.randint(1, 10 ** rng.randint(1, 4))
        else:
            value = getattr(words, kind)()
            schema = self._schema("string", name)
        bare = kind in ("person", "code", "enum")
        return Param(name=name, schema=schema, value=value, source=source, bare=bare)

    def _linked(self, fact: Param, source: str) -> Param:
        """Return a parameter that takes the value of a fact."""
        name = fact.name if self.rng.random() < 0.7 else self._named(_WHICH)
        return Param(name=name, schema=fact.schema, value=fact.value, source=source)

    def _members(self) -> list[str]:
        style = self.rng.random()
        return [self.words.member(style) for _ in range(drawn(self.rng, _SIZES))]

    def _law(self) -> Param:
        """Return a parameter that nobody can know; its guess is uniform."""
        rng, words = self.rng, self.words
        kind = drawn(rng, _LAW_KINDS)
        name = self._named(_COUNTS if kind == "integer" else _WHICH)
        if kind in ("enum", "list"):
            members = self._members()
            if kind == "enum":
                schema, draw = self._schema("string", name, enum=members), lambda: rng.choice(members)
            else:
                schema = self._schema("array", name, items={"type": "string", "enum": members})
                draw = lambda: rng.sample(members, rng.randint(1, min(3, len(members))))  # noqa: E731
        elif kind == "integer":
            most = 10 ** rng.randint(1, 3)
            schema, draw = self._schema("integer", name, minimum=0, maximum=most), lambda: rng.randint(0, most)
        elif kind == "boolean":
            schema, draw = self._schema("boolean", name), lambda: rng.random() < 0.5
        else:
            schema, draw = self._schema("string", name), getattr(words, kind)
        return Param(name=name, schema=schema, value=draw(), given=draw(), source="law")

    # --- words ---

    def pick(self, every: Sequence[str]) -> str:
        return self.rng.choice(wordings(every, self.held_out))

    def fill(self, text: str, **named: str) -> str:
        """Fill in a wording: {A} and {R} are {a} and {r} with a capital, {n} and {f} are random words."""
        rng, words = self.rng, self.words
        parts = text.replace("{{", "\0").replace("}}", "\1").split("{")
        out = [parts[0]]
        for part in parts[1:]:
            slot, _, rest = part.partition("}")
            if slot == "f":
                said = " ".join(words.any() for _ in range(rng.randint(1, 7)))
            elif slot in "nN":
                said = rng.choice(_list("words"))
            else:
                said = named[slot.lower() if slot in "AR" else slot]
            out += [said[:1].upper() + said[1:] if slot in "ANR" else said, rest]
        return "".join(out).replace("\0", "{").replace("\1", "}")

    def _mention(self, param: Param) -> str:
        bare = param.bare and self.rng.random() < BARE
        label = param.name.replace("_", " ") if self.rng.random() < 0.8 else param.name
        if self.rng.random() < LOOSE:
            core = "{v}" if bare else self.pick(say.CORES)
            wording = self.pick(say.BEFORE) + core + self.pick(say.AFTER)
        else:
            wording = self.pick(say.BARE if bare else say.LABELLED)
        return self.fill(wording, a=label, v=text_of(param.value))

    def _opening(self) -> tuple[Message, ...]:
        rng = self.rng
        said = [self._mention(each) for each in rng.sample(self.said, len(self.said))] or [self.fill("{f}.")]
        said = [each[:1].upper() + each[1:] if rng.random() < 0.8 else each for each in said]
        for every, chance in ((say.GREETINGS, 0.15), (say.TALK, 0.25), (say.TITLES, 0.15)):
            if rng.random() < chance:
                said.insert(0, self.fill(self.pick(every)))
        said += [self.fill(self.pick(say.TALK)) for _ in range(drawn(rng, {0: 50, 1: 35, 2: 15}))]
        user = Message(role="user", content=rng.choice((" ", " ", " ", "\n")).join(said))
        if rng.random() < 0.3:
            return (user,)
        return Message(role="system", content=self.fill(self.pick(say.SYSTEMS))), user

    def _listed(self, params: Sequence[Param]) -> str:
        form, joint = self.pick(say.FACTS), self.pick(say.JOINTS)
        return joint.join(self.fill(form, a=each.name.replace("_", " "), v=text_of(each.value)) for each in params)

    def _record(self, key: Param, facts: Sequence[Param]) -> str:
        if self.rng.random() < 0.12:
            return json.dumps({each.name: each.value for each in ([key, *facts] if self.rng.random() < 0.5 else facts)})
        return self.fill(self.pick(say.RECORDS), key=text_of(key.value), r=self._listed(facts))

    def refusal(self, wrong: Sequence[Param]) -> str:
        rng = self.rng
        about = [*self.facts, *self.said]
        subject = self.fill(rng.choice(("it", "this", "a {n}", "the {n}", "this {n}")))
        if about and rng.random() < 0.7:
            chosen = rng.sample(about, min(len(about), rng.randint(1, 2)))
            subject = " and ".join(text_of(each.value) for each in chosen)
            subject = self.fill(rng.choice(("", "a ", "the ", "the {n} of "))) + subject
        if rng.random() < 0.08:
            return json.dumps({rng.choice(("error", "problem", "needed")): {each.name: each.value for each in wrong}})
        if len(wrong) > 1 and rng.random() < 0.6:
            core = self.fill(self.pick(say.BOTH), s=subject, r=self._listed(wrong))
        else:
            core = rng.choice((", ", " and ", ". ", "; ")).join(self._needed(each, subject) for each in wrong)
        failed = self.fill(self.pick(say.FAILED), a=wrong[0].name)
        if rng.random() < 0.5 and not core.startswith(text_of(wrong[0].value)):
            core = core[:1].upper() + core[1:]
        return f"{failed}{rng.choice((': ', '. ', ', ', '; '))}{core}." if rng.random() < 0.75 else f"{core}."

    def _needed(self, param: Param, subject: str) -> str:
        named = {"a": param.name.replace("_", " "), "v": text_of(param.value), "g": text_of(param.given)}
        return self.fill(self.pick(say.NEEDED), s=subject, **named)

    def call(self, given: Sequence[Param] = ()) -> ToolCall:
        """Return the decisive call with the guesses of these parameters."""
        arguments = {each.name: each.given if each in given else each.value for each in self.params}
        return ToolCall(name=self.name, arguments=arguments)


def converse(number: int, *, held_out: bool = False) -> Conversation:
    """Return the practice conversation of that number; `held_out`: in wordings that practice never uses."""
    world = World(stream(SEED, "held out" if held_out else "practice", number), held_out)
    rng, lines = world.rng, list[Line]()
    for tool, key, record in zip(world.looks, world.keys, world.records, strict=True):
        lines.append(Line(kind="call", call=ToolCall(name=tool, arguments={key.name: key.value}), sure=True))
        lines.append(Line(kind="reply", text=record))
    wrong = [each for each in world.params if each.source == "law" and each.given != each.value]
    told = not any(each.source in ("law", "note") for each in world.params)
    if rng.random() < OPEN or not wrong:
        lines.append(Line(kind="call", call=world.call(wrong), sure=told))
        return Conversation(opening=world.opening, tools=tuple(world.tools), lines=tuple(lines))
    if rng.random() < ACCEPTED:
        call = world.call(wrong)
        lines += [Line(kind="call", call=call), Line(kind="told", text=world.fill(world.pick(say.DONE)))]
        lines.append(Line(kind="call", call=call, sure=True))
        return Conversation(opening=world.opening, tools=tuple(world.tools), lines=tuple(lines))
    one_by_one, real = len(wrong) > 1 and rng.random() < 0.35, rng.random() < REAL
    lines.append(Line(kind="call", call=world.call(wrong)))
    while wrong:
        if not real and rng.random() < UNKNOWN:
            lines += [Line(kind="told"), Line(kind="call", call=world.call(wrong))]
        named = wrong[:1] if one_by_one else wrong
        lines.append(Line(kind="reply" if real else "told", text=world.refusal(named)))
        wrong = [each for each in wrong if each not in named]
        lines.append(Line(kind="call", call=world.call(wrong), sure=True))
    return Conversation(opening=world.opening, tools=tuple(world.tools), lines=tuple(lines))
