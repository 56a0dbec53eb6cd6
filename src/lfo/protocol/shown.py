"""How a model is told of a reply that this rollout did not receive: a prediction, or the reply to another rollout.

mark    `(expected) REPLY` as a tool reply: for a base that was pretrained or warmed up on dialogues with such remarks
tool    words as a tool reply: the call was not made, this is its expected reply, make the right call now
user    the same words as a user message

An instruct model that was never taught the mark copies the marked reply, or repeats its call; words tell it what to do.
Which form a base acts on belongs to the base (`lfo.base_form`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

FormName = Literal["mark", "tool", "user"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownForm:
    """
    >>> SHOWN_FORMS["mark"].text("No such company.")
    '(expected) No such company.'
    >>> SHOWN_FORMS["user"].text("No such company.")
    'That call has not been made. Its expected reply is: "No such company." Make the right call now.'
    """

    name: FormName
    words: str  # with {reply}
    unknown: str  # for an empty reply: nobody can predict yet
    refusal: str  # with {flaw}: what does not fit the schema of the tool
    failure: str = ""  # with {error}: for a message that only repeats the error of the last call; "": nothing is said
    by_user: bool = False

    def text(self, reply: str) -> str:
        return self.words.replace("{reply}", reply) if reply.strip() else self.unknown

    def failed(self, error: str) -> str:
        return self.failure.replace("{error}", error)

    def refused(self, flaw: str) -> str:
        return self.refusal.replace("{flaw}", flaw)


_MARK = "(expected) "
_WORDS = 'That call has not been made. Its expected reply is: "{reply}" Make the right call now.'
_UNKNOWN = "That call has not been made, and nobody knows its reply yet. Make the call that you think is right now."
_REFUSAL = "That call has not been made, because it does not fit its tool: {flaw} Make the right call now."
_FAILURE = "The last call failed: {error} Make the right call now."
MARK = ShownForm(name="mark", words=_MARK + "{reply}", unknown=_MARK, refusal=_MARK + "{flaw}")
TOOL = ShownForm(name="tool", words=_WORDS, unknown=_UNKNOWN, refusal=_REFUSAL, failure=_FAILURE)
USER = replace(TOOL, name="user", by_user=True)
SHOWN_FORMS: Mapping[str, ShownForm] = {form.name: form for form in (MARK, TOOL, USER)}
