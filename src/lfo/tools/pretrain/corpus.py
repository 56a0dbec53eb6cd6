"""Practice conversations, which teach the language of the domain, the tool syntax, and the use of what was read.

The requirements of departments are drawn again for every task, so the corpus cannot teach them. No conversation
contains look-ahead. Two behaviours are shown:

    read    call without details, read what is missing, ask the user for it, call again
    guess   ask the user for some fields, call with the values

If one failed check is final, the second call of the reader fails: reading is too late there, and the base cannot know
what to ask for first.
"""

from __future__ import annotations

import dataclasses
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lfo.env.seeds import stream
from lfo.env.worlds.oracle import WORDS, OracleCodes
from lfo.env.worlds.phone.environment import PhoneCalls
from lfo.env.worlds.phone.fields import ALTERNATIVE, FIELDS, REFERENCE
from lfo.env.worlds.phone.players import PlayerView
from lfo.env.worlds.phone.reps import describe
from lfo.env.worlds.phone.tasks import LEVEL, Errand, Level, Task, draw_task
from lfo.env.worlds.phone.world import company
from lfo.protocol.chat import ChatCodec
from lfo.protocol.hermes import read_tool_call
from lfo.protocol.world_model import WorldModelCodec, render_prompt, render_target, state_of
from lfo.types import Message, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PRACTICE_WORLD = 77_000  # the seed of the practice companies; no dataset uses it
PRACTICE_COMPANIES = 4000
PRACTICE_SHARE = 0.5  # of the tasks that are a `PracticeTask`
# Irrelevant words, so that the base learns to ignore unknown words.
_SMALL_TALK = ("Thank you.", "It is urgent.", "An answer is expected soon.", "Take your time.", "I am at work now.")
_REMARKS = ("(recorded) ", "(by phone) ", "(line 2) ", "(note) ", "Rep: ", "They said: ", "Heard: ", "Answer: ")
_GIVING_UP = ("I could not get it done.", "Sorry, this did not work.", "It was not possible today.")


@dataclass(frozen=True, kw_only=True, slots=True)
class PracticeTask(Task):
    """A task that allows one more failed check and more calls, so that reading succeeds."""

    @property
    def limits(self) -> Level:
        level = LEVEL[self.level]
        return dataclasses.replace(level, failures_to_lock=2, calls=level.calls + level.departments[1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversation:
    """A finished practice rollout as text; `turns` have no token spans."""

    opening: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...]
    turns: tuple[Turn, ...]  # the last one may be a final answer without an observation


def _lawless(rng: random.Random, task: Task) -> Task:
    """Return the same errands with random requirements, and a user who can meet them."""
    names = list(FIELDS)
    while True:
        errands = []
        for errand in task.errands:
            size = len([name for name in errand.requires if name != REFERENCE])
            chained = (REFERENCE,) if REFERENCE in errand.requires else ()
            errands.append(
                Errand(kind=errand.kind, service=errand.service, requires=(*rng.sample(names, size), *chained))
            )
        needed = {name for errand in errands for name in errand.requires} - {REFERENCE}
        replaceable = sorted(name for name in needed if name in ALTERNATIVE and ALTERNATIVE[name] not in needed)
        form = len(needed) + (len(replaceable) if task.limits.alternatives else 0)
        if form <= task.limits.max_fields and (replaceable or not task.limits.alternatives):
            break
    missing = {rng.choice(replaceable)} if task.limits.alternatives else set()
    kept = needed | {ALTERNATIVE[name] for name in missing}
    missing |= set(rng.sample([name for name in names if name not in kept], 5))
    profile = {name: field.value(rng) for name, field in FIELDS.items() if name not in missing}
    return dataclasses.replace(task, errands=tuple(errands), profile=profile)


def practice_task(number: int) -> Task:
    """Return the practice task of that number: any level, any practice company, random rules."""
    rng = stream(PRACTICE_WORLD, "practice", number)
    task = None
    while task is None:
        level = rng.choice((1, 2, 2, 2, 3, 4, 5))
        where = company(PRACTICE_WORLD, rng.randrange(PRACTICE_COMPANIES))
        split = rng.choice(("train", "test_unseen_rules"))  # all kinds of departments occur
        task = draw_task(world=PRACTICE_WORLD, where=where, level=level, split=split, number=number, stream_seed=0)
    if rng.random() < PRACTICE_SHARE:
        task = PracticeTask(**{field.name: getattr(task, field.name) for field in dataclasses.fields(task)})
        limits = task.limits
        words = f"Limits: {limits.max_fields} details, {limits.calls} calls, {limits.failures_to_lock} failed checks."
        task = dataclasses.replace(task, goal=re.sub(r"Limits: .*", words, task.goal))
    if rng.random() < 0.2:
        task = dataclasses.replace(task, goal=task.goal.replace("Limits:", f"{rng.choice(_SMALL_TALK)} Limits:"))
    return _lawless(rng, task)


class _PracticeOracle(OracleCodes):
    """An oracle that allows one try without words."""

    def finished(self) -> bool:
        return bool(self.spoken)


@dataclass
class _Talk(PlayerView):
    """A player's view with a record of its messages."""

    turns: list[Turn] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.opening = tuple(self.environment.reset(self.task))

    def say(self, text: str) -> str:
        reply = super().say(text)
        span = dict.fromkeys(("action_start", "action_end", "observation_start", "observation_end"), 0)
        self.turns.append(Turn(action=text, observation=reply, call=read_tool_call(text), **span))
        return reply

    def finish(self, rng: random.Random) -> Conversation:
        if not self.done:
            self.say(rng.choice(_GIVING_UP))
        tools = tuple(self.environment.tools())
        return Conversation(opening=self.opening, tools=tools, turns=tuple(self.turns))


def _requested(reply: str, *, alternatives: bool) -> list[str]:
    facts = describe(reply)
    names = [name for name in (facts.facts if facts else ()) if name in FIELDS]
    return names + [ALTERNATIVE[name] for name in names if alternatives and name in ALTERNATIVE]


def phone_conversation(number: int) -> Conversation:
    task = practice_task(number)
    limits = task.limits
    rng = stream(PRACTICE_WORLD, "habit", number)
    environment = PhoneCalls(seed=PRACTICE_WORLD, companies=PRACTICE_COMPANIES, unseen_companies=0)
    talk = _Talk(environment, task)
    numbers = talk.numbers()
    order = [errand.service for errand in task.errands]
    wanted: list[str] = []
    if limits.failures_to_lock > 1 or rng.random() < 0.5:
        for service in order:
            numbers[service], reply = talk.call(numbers[service], {})
            wanted += _requested(reply, alternatives=limits.alternatives)
    wanted = list(dict.fromkeys(wanted))[: limits.max_fields]
    if not wanted:
        wanted = rng.sample(sorted(FIELDS), rng.randint(2, limits.max_fields))
    talk.tool("auth_info_form", fields=wanted)
    for service in order:
        numbers[service], reply = talk.call(numbers[service], dict(environment.values))
        facts = describe(reply)
        if not facts or facts.category != "success":
            break
    return talk.finish(rng)


def oracle_conversation(number: int) -> Conversation:
    rng = stream(PRACTICE_WORLD, "oracle", number)
    environment = _PracticeOracle(seed=PRACTICE_WORLD + rng.randrange(500))
    task = rng.choice(environment.tasks("train"))
    # Another code in every conversation, so that the law of the seed is not learned.
    talk = _Talk(environment, dataclasses.replace(task, code=tuple(rng.sample(WORDS, 2))))
    talk.tool("ask_oracle", oracle=task.oracle)
    words: tuple[str, ...] = tuple(rng.sample(WORDS, 2))
    if rng.random() < 0.5:
        facts = environment.describe_reply(talk.tool("open_door", words=[]))
        words = facts.facts if facts else words
    talk.tool("open_door", words=list(words))
    return talk.finish(rng)


def converse(number: int) -> Conversation:
    """Return the practice conversation of that number; one in twelve is about doors."""
    return oracle_conversation(number) if number % 12 == 0 else phone_conversation(number)


def texts(conversation: Conversation) -> Iterator[str]:
    """Yield all texts of a conversation and of its world-model examples, for the tokenizer."""
    yield "\n".join(message.content for message in conversation.opening)
    for index, turn in enumerate(conversation.turns):
        yield f"{turn.action}\n{turn.observation}"
        if turn.call:
            yield render_prompt(state_of(conversation.opening, conversation.turns[:index]), turn.call)
            yield render_target(turn.observation)


class CorpusRows:
    """Encodes conversations and world-model examples with the codecs of rollouts."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._world_model = WorldModelCodec(tokenizer)
        self._chats: dict[str, ChatCodec] = {}

    def _chat(self, conversation: Conversation) -> ChatCodec:
        name = conversation.tools[0]["function"]["name"]
        if name not in self._chats:
            self._chats[name] = ChatCodec(self._tokenizer, conversation.tools)
        return self._chats[name]

    def chat(self, conversation: Conversation, rng: random.Random) -> list[int]:
        codec = self._chat(conversation)
        remark = rng.choice(_REMARKS) if rng.random() < 0.2 else ""
        ids = list(codec.opening(conversation.opening).ids)
        end = len(ids)
        for turn in conversation.turns:
            ids += codec.encode(turn.action)
            if not turn.observation:
                return [*ids, codec.end_of_turn]
            spoken = turn.call is not None and turn.call.name in ("make_phone_call", "open_door")
            after = codec.after_action(remark * spoken + turn.observation, stopped=False)
            end = len(ids) + after.content_end
            ids += after.ids
        return ids[:end]

    def example(self, conversation: Conversation, rng: random.Random) -> list[int]:
        """Return one world-model example of a conversation, mostly of a call to a rep."""
        calls = [index for index, turn in enumerate(conversation.turns) if turn.call]
        index = rng.choice(calls if rng.random() < 0.3 else calls[1:] or calls)
        turn = conversation.turns[index]
        assert turn.call is not None
        state = state_of(conversation.opening, conversation.turns[:index])
        return list(self._world_model.example(state, turn.call, turn.observation).tokens)

    def write(self, numbers: Iterable[int], *, example_share: float = 0.5) -> Iterator[list[int]]:
        """Yield the rows of these conversations, some followed by a world-model example."""
        for number in numbers:
            conversation = converse(number)
            rng = stream(PRACTICE_WORLD, "row", number)
            yield self.chat(conversation, rng)
            if rng.random() < example_share:
                yield self.example(conversation, rng)
