"""A second, small environment: doors that open to two code words, which the oracle names only after a failed try.

It has no phone and no form, so it tests that the rest of the system is general. It is difficult in the same way as the
phone-call world:

    user        Open the red door in the temple of Vashti.
    assistant   ask_oracle(oracle="Vashti")
    tool        I am Vashti of the owl order.                       <- the law depends on this
    assistant   open_door(words=["moss", "iron"])                   <- the only try in this task
    tool        This door wanted ember and salt. It stays shut.     <- too late for this task, useful for others

A law, drawn once per seed and valid in every task, gives the two words from the oracle's order and the door's colour.
The law is never shown; only a wrong try reveals the right words. So a player without knowledge from other tasks cannot
win, and a player that knows the law always wins, also with unseen oracles.

Splits: `train`; `val` (the same oracles before other doors); `test_unseen_oracles`. 5 orders x 6 colours = 30 laws
over 66 pairs of words, no pair used twice: guessing wins 1 task in 66, the best constant answer 1 in 30.
Everything is a pure function of the seed. Reward: 1 when the door is open at the end, else 0.
"""

from __future__ import annotations

import difflib
import functools
import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lfo.env.seeds import stream
from lfo.env.tool_environment import Mistake, ToolEnvironment, quote, tool
from lfo.errors import UsageError
from lfo.types import Message, ReplyFacts, ToolCall

ORDERS = ("owl", "serpent", "lantern", "river", "mirror")
COLOURS = ("red", "blue", "green", "white", "black", "golden")
WORDS = ("ash", "dusk", "ember", "flint", "frost", "honey", "iron", "moss", "pearl", "reed", "salt", "thorn")

_NAMES = tuple(
    start + end
    for start in ("Va", "Or", "Mi", "Te", "Su", "Ka", "Ne", "Di", "La", "Zo")
    for end in ("shti", "ren", "dra", "lune", "mor", "phis")
)
_SEEN_ORACLES = 40  # of 60; the others are met only in the test split
_VAL_ORACLES = 2  # per order and colour, of the 8 seen ones

_SYSTEM = "You open temple doors. A door takes two code words, and one try only. Make one tool call per message."
_GOALS = (
    "Open the {colour} door in the temple of {oracle}.",
    "Please get me through the {colour} door at {oracle}'s temple.",
    "I must pass the {colour} door of the oracle {oracle}.",
)
_INTRODUCTIONS = (
    "I am {oracle} of the {order} order.",
    "You stand before {oracle}, voice of the {order} order.",
    "The {order} order made me, {oracle}, keeper of this door.",
)
_REFUSALS = (
    "This door wanted {first} and {second}. It stays shut.",
    "No. I waited for {first} and {second}. The door remains shut.",
    "The door is shut for good: {first} and {second} were its words.",
    "{oracle} sighs: {first} and {second}, nothing else. Shut it stays.",
)
_OPENINGS = ("The door swings open.", "Well spoken, says {oracle}. The door is open.", "Slowly the door comes open.")


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleTask:
    """`OracleTask(id="Vashti-red", oracle="Vashti", order="owl", colour="red", code=("ember", "salt"))`"""

    id: str
    oracle: str
    order: str  # hidden until the oracle is asked
    colour: str
    code: tuple[str, str]  # hidden until it is too late


@functools.cache
def _splits(seed: int) -> Mapping[str, tuple[OracleTask, ...]]:
    random = stream(seed, "oracle")
    cells = list(itertools.product(ORDERS, COLOURS))
    law = dict(zip(cells, random.sample(list(itertools.combinations(WORDS, 2)), len(cells)), strict=True))
    names = random.sample(_NAMES, len(_NAMES))
    splits: dict[str, list[OracleTask]] = {"train": [], "val": [], "test_unseen_oracles": []}
    for index, order in enumerate(ORDERS):
        seen, unseen = names[:_SEEN_ORACLES][index :: len(ORDERS)], names[_SEEN_ORACLES:][index :: len(ORDERS)]
        for colour in COLOURS:
            val = set(random.sample(seen, _VAL_ORACLES))
            for name in seen + unseen:
                split = "test_unseen_oracles" if name in unseen else "val" if name in val else "train"
                splits[split].append(
                    OracleTask(id=f"{name}-{colour}", oracle=name, order=order, colour=colour, code=law[order, colour])
                )
    return {split: tuple(random.sample(tasks, len(tasks))) for split, tasks in splits.items()}


class OracleCodes(ToolEnvironment):
    """The world of this module, as an `Environment`: one object plays one task."""

    predicted_tools = ("open_door",)  # its replies reveal the law; an oracle's order is not secret

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.spoken: frozenset[str] | None = None  # the words of the try

    def tasks(self, split: str) -> Sequence[OracleTask]:
        splits = _splits(self.seed)
        if split not in splits:
            raise UsageError(f"OracleCodes has no split {split!r}; it has {', '.join(splits)}.")
        return splits[split]

    def start(self, task: OracleTask) -> Sequence[Message]:
        self.task = task
        self.phrasing = stream(task.id, "phrasing")  # only by visible names: the wording must not reveal the code
        return (
            Message(role="system", content=_SYSTEM),
            Message(role="user", content=self._say(_GOALS, colour=task.colour)),
        )

    @property
    def opened(self) -> bool:
        return self.spoken == frozenset(self.task.code)

    def reward(self) -> float:
        return float(self.opened)

    def finished(self) -> bool:
        return self.spoken is not None

    def info(self) -> dict[str, Any]:
        return {"tried": self.spoken is not None, "opened": self.opened}

    @tool
    def ask_oracle(self, oracle: str) -> str:
        """Ask the oracle of the temple who they are.

        oracle: the oracle's name
        """
        if oracle.strip().casefold() != self.task.oracle.casefold():
            raise Mistake(f"No oracle here is called {quote(oracle)}; this is the temple of {self.task.oracle}.")
        return self._say(_INTRODUCTIONS, order=self.task.order)

    @tool
    def open_door(self, words: list[str]) -> str:
        """Try to open the door with two code words. There is one try only.

        words: the two words, out of: {words}
        """
        for word in words:
            if word not in WORDS:
                nearest = difflib.get_close_matches(word[:80], WORDS, n=1, cutoff=0.0)[0]
                raise Mistake(f"{quote(word)} is no code word; did you mean {nearest}?")
        self.spoken = frozenset(words)
        if self.opened:
            return self._say(_OPENINGS)
        first, second = self.task.code
        return self._say(_REFUSALS, first=first, second=second)

    def tool_text(self) -> Mapping[str, str]:
        return {"words": ", ".join(WORDS)}

    @staticmethod
    def describe_reply(observation: str) -> ReplyFacts | None:
        """Return the meaning of a reply from its text only, so that it also works for predicted replies."""
        if '"' in observation:  # only mistakes contain quotes, and these quote the policy
            return None
        text = observation.lower()
        if order := _ORDER_IN_TEXT.search(text):
            return ReplyFacts(category="introduction", facts=(order[1],))
        if re.search(r"\bshut\b", text):
            return ReplyFacts(category="refusal", facts=tuple(sorted(set(_WORD_IN_TEXT.findall(text)))))
        if re.search(r"\bopen\b", text):
            return ReplyFacts(category="opening")
        return None

    def lookahead_query(self, transcript: Sequence[Message]) -> ToolCall | None:
        """Return a try without words as soon as the oracle is known; its predicted reply names the right words."""
        if any(message.predicted for message in transcript):
            return None
        replies = [message for message in transcript if message.role == "tool" and message.name == "ask_oracle"]
        facts = [self.describe_reply(reply.content) for reply in replies]
        if not any(fact is not None and fact.category == "introduction" for fact in facts):
            return None
        return ToolCall(name="open_door", arguments={"words": []})

    def _say(self, phrasings: Sequence[str], **values: str) -> str:
        return self.phrasing.choice(phrasings).format(oracle=self.task.oracle, **values)


_ORDER_IN_TEXT = re.compile(rf"\b({'|'.join(ORDERS)}) order\b")
_WORD_IN_TEXT = re.compile(rf"\b({'|'.join(WORDS)})\b")
