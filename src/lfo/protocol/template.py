"""A chat template, asked with placeholders in the place of contents: which text of its own it puts between messages.

It also tells by asking how the model writes tool calls, whether it thinks, and how past exchanges have to be given to
it. Text only: `chat` makes token ids of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from lfo.errors import ConfigError
from lfo.protocol.tool_calls import FORMS, HERMES, CallForm, form_of
from lfo.types import ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHT, THOUGHT_END = "<think>", "</think>"
# How past exchanges are given to a template: as text; with their calls apart, which some demand before an observation;
# or, where it knows no observations, with the user speaking them.
History = Literal["text", "calls", "user"]


class ChatTemplate:
    """The template of a tokenizer with these tools; `added` are the tokens that its text may hold.

    Raises `ConfigError` when a growing row of tokens cannot follow it.
    """

    ignores_tools: bool  # so that they have to be described
    end: str  # the token that ends an assistant message
    prompt: str  # between the user's words and the first action
    form: CallForm  # in which it writes calls
    knows_thoughts: bool
    begins_thought: bool  # in its prompt
    no_thought: str  # what skips the thought, behind a prompt
    escapes_observations: bool  # writes them as JSON strings, as Llama's does

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]],
        *,
        thinking: bool,
        added: Collection[str],
    ) -> None:
        self._tokenizer, self._thinking = tokenizer, thinking
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self._history: History = "text"
        self._thought = _mark()
        self.ignores_tools = bool(tools) and self.pieces(("user",)) == self.pieces(("user",), tools=False)
        self._history = self._find_history()
        _, _, after = self.pieces(("user", "assistant"))
        ends = [token for token in added if after.lstrip().startswith(token)]
        if not ends:
            raise ConfigError("the chat template puts no special token at the end of an assistant message")
        self.end = max(ends, key=len)
        self._check_places()
        self.escapes_observations = self._escapes()
        self.form = self._find_form()

    def pieces(self, roles: tuple[str, ...], *, tools: bool = True, past: bool = False) -> list[str]:
        """The template's own text before, between and after messages of these roles, generation prompt included.

        `past`: messages of the assistant stand as they were said, with a thought where it thinks, or with a call where
        the template demands one.
        """
        marks = [_mark() for _ in roles]
        rest = self._render(self._placeholders(roles, marks, past=past), tools=tools)
        pieces = []
        for mark in marks:
            before, found, rest = rest.partition(mark)
            pieces.append(before)
            if not found or mark in rest:
                raise ConfigError(f"the chat template does not show each of {', '.join(roles)} once and in order")
        return [*pieces, rest]

    def after_action(self, observations: int) -> list[str]:
        """What follows an action, around so many observations: from its end of turn to the next prompt.

        Whatever stands before the end of turn belongs to the message, which the model has already finished.
        """
        _, _, to_observation, *others = self.pieces(("user", "assistant", *("tool",) * observations), past=True)
        return [to_observation[to_observation.index(self.end) :], *others]

    def _render(self, messages: Sequence[Mapping[str, Any]], *, tools: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools if self._tools and tools else None,
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=self._thinking,  # a variable of some templates; others ignore it
            )
        except (TemplateError, TypeError, ValueError) as error:
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template refuses the messages {roles}: {error}") from error
        return str(text)

    def _placeholders(self, roles: Sequence[str], marks: Sequence[str], *, past: bool) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        index = 0  # among the observations after one action
        for role, mark in zip(roles, marks, strict=True):
            index = index + 1 if role == "tool" else 0
            if role == "assistant" and past and self._history == "calls":
                messages.append(_calling(ToolCall(name=mark, arguments={})))
            elif role == "assistant" and past and self._thinking:
                messages.append({"role": role, "content": f"{THOUGHT}\n{self._thought}\n{THOUGHT_END}\n\n{mark}"})
            elif role == "tool" and self._history == "user":
                text = f"<tool_response>\n{mark}\n</tool_response>"
                if index > 1:
                    messages[-1]["content"] += f"\n{text}"
                else:
                    messages.append({"role": "user", "content": text})
            elif role == "tool":
                messages.append({"role": role, "content": mark, "tool_call_id": _call_id(index)})
            else:
                messages.append({"role": role, "content": mark})
        return messages

    def _find_history(self) -> History:
        histories: tuple[History, ...] = ("text", "calls")
        for history in histories:
            self._history = history
            try:
                self.pieces(("user", *("assistant", "tool") * 2), past=True)
            except ConfigError:
                continue
            return history
        return "user"

    def _check_places(self) -> None:
        """What stands between messages must be the same everywhere in a conversation."""
        before, self.prompt = self.pieces(("user",))
        # Pieces of n exchanges: before user, to action, (to observation, to action) * n, the last being a prompt.
        rows = [self.pieces(("user", *("assistant", "tool") * exchanges), past=True) for exchanges in (1, 2, 3)]
        to_observation, to_prompt = rows[0][2], rows[0][-1]
        self._check_thoughts(to_prompt, rows[1][3])
        constant = all(
            pieces[0] == before
            and self._leads_to(self.prompt, pieces[1])
            and all(glue == to_observation for glue in pieces[2::2])
            and all(self._leads_to(to_prompt, glue) for glue in pieces[3:-1:2])
            and pieces[-1] == to_prompt
            for pieces in rows
        )
        if not constant:
            raise ConfigError(
                "the chat template writes a message differently at different places of a conversation, "
                "so a growing row of tokens cannot follow it; choose or write a template that does not"
            )

    def _leads_to(self, prompt: str, glue: str) -> bool:
        """Whether a past message, with this before it, stands where it was said behind this prompt; spaces apart, of
        which some templates write one more once others follow."""
        prompt, glue = "".join(prompt.split()), "".join(glue.split())
        return prompt.startswith(glue) or ((self._thinking or self._history == "calls") and glue.startswith(prompt))

    def _check_thoughts(self, prompt: str, past: str) -> None:
        """Refuse thoughts that a growing row cannot follow; `past` is what stands before a past action."""
        self.knows_thoughts = THOUGHT_END in str(self._tokenizer.get_chat_template(tools=self._tools or None))
        self.begins_thought = prompt.rstrip().endswith(THOUGHT)
        self.no_thought = f"\n{THOUGHT_END}\n\n" if self.begins_thought else ""
        if self.begins_thought and self._tools and not self._thinking:
            raise ConfigError("the chat template always begins a thought: set rollout.thinking=true")
        if self._thinking and not self.knows_thoughts:
            raise ConfigError(f"the chat template knows no thoughts ({THOUGHT_END}): leave rollout.thinking=false")
        if self._thinking and self._thought not in past:
            raise ConfigError(
                "the chat template drops thoughts between tool calls, so a growing row of tokens cannot follow it: "
                "leave rollout.thinking=false"
            )

    def _escapes(self) -> bool:
        mark = _mark()
        messages = self._placeholders(("user", "assistant", "tool"), ("content", "content", f'{mark}"'), past=True)
        return f'{mark}\\"' in self._render(messages)

    def _find_form(self) -> CallForm:
        """The form in which the template writes a call; Hermes' where it writes none, or says nothing about tools."""
        if not self._tools or self.ignores_tools:
            return HERMES
        user, call = _mark(), ToolCall(name="look_at", arguments={"thing": "door"})
        try:
            _, _, written = self._render([{"role": "user", "content": user}, _calling(call)]).partition(user)
        except ConfigError:
            return HERMES
        before, name, after = written.partition(call.name)
        if not name:
            return HERMES
        # Of what stands between two ends of turns, the message is what follows the glue before any message.
        _, glue, _ = self.pieces(("user", "assistant"))
        message = before.rpartition(self.end)[2] + name + after.partition(self.end)[0]
        form = form_of(message.strip().removeprefix(glue.rpartition(self.end)[2].strip()).strip(), call)
        if form is None:
            forms = ", ".join(known.name for known in FORMS)
            raise ConfigError(f"the chat template writes tool calls in a form that is not known; known are {forms}")
        return form


def _mark() -> str:
    """A content that stands nowhere else."""
    return f"content{secrets.token_hex(16)}end"


def _calling(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    called = [{"id": _call_id(1), "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": called}


def _call_id(place: int) -> str:
    """Some templates write an id beside each observation, of nine characters; what was sampled has none."""
    return f"{place:09d}"
