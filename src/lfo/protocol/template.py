"""Analyse a chat template: render it with placeholders to find the text that it puts between messages.

It also detects how the model writes tool calls, whether it thinks, and how past exchanges must be passed to it. It
handles text only; `chat` makes token ids of it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from lfo.errors import ConfigError
from lfo.protocol.tool_calls import FORMS, HERMES, CallForm, form_of
from lfo.types import ToolCall

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

THOUGHT, THOUGHT_END = "<think>", "</think>"
# How past exchanges are passed to a template: as text; with separate calls, which some require before an observation;
# or with observations as user messages, if it has no tool role.
History = Literal["text", "calls", "user"]


class ChatTemplate:
    """The template of a tokenizer with these tools; `added` are the added tokens that its text may contain.

    Raises a `ConfigError` if tokens that only grow cannot follow the template.
    """

    ignores_tools: bool  # then the system message must describe them
    end: str  # the token that ends an assistant message
    prompt: str  # between the user message and the first action
    form: CallForm  # how it writes calls
    knows_thoughts: bool
    begins_thought: bool  # its prompt opens a thought
    no_thought: str  # the text after a prompt that skips the thought
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
        self._check_positions()
        self.escapes_observations = self._escapes()
        self.form = self._find_form()

    def pieces(self, roles: tuple[str, ...], *, tools: bool = True, past: bool = False) -> list[str]:
        """Return the glue before, between and after messages of these roles, with the generation prompt.

        `past`: assistant messages are rendered as they were sampled, with a thought if the model thinks, or with a call
        if the template requires one.
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
        """Return the glue from the end of turn of an action to the next prompt, for a number of observations.

        Text before the end of turn belongs to the message, which the model has already finished.
        """
        _, _, to_observation, *others = self.pieces(("user", "assistant", *("tool",) * observations), past=True)
        return [to_observation[to_observation.index(self.end) :], *others]

    def lets_user_follow_call(self) -> bool:
        """Whether a user message may follow a call that has no reply, and leaves that message as it was sampled."""
        roles = ("user", "assistant", "user")
        try:
            as_text, as_sampled = self.pieces(roles), self.pieces(roles, past=True)
        except ConfigError:
            return False
        keeps_thought = not self._thinking or self._thought in as_sampled[1]
        to_user, to_prompt = as_sampled[2:]
        ends_alike = [as_text[2].lstrip(), as_text[3]] == [to_user[to_user.find(self.end) :], to_prompt]
        return keeps_thought and ends_alike

    def _render(self, messages: Sequence[Mapping[str, Any]], *, tools: bool = True) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                [dict(message) for message in messages],
                tools=self._tools if self._tools and tools else None,
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=self._thinking,  # used by some templates, ignored by others
            )
        except Exception as error:  # a template is a program of others, and clients of `lfo serve` choose its tools
            roles = ", ".join(message["role"] for message in messages)
            raise ConfigError(f"the chat template rejects messages of the roles {roles}: {error}") from error
        return str(text)

    def _placeholders(self, roles: Sequence[str], marks: Sequence[str], *, past: bool) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        index = 0  # of the observation after one action
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

    def _check_positions(self) -> None:
        """Raise a `ConfigError` unless the glue is the same at every position of a conversation."""
        before, self.prompt = self.pieces(("user",))
        # Pieces of n exchanges: before user, to action, (to observation, to action) * n, the last being a prompt.
        chats = [self.pieces(("user", *("assistant", "tool") * exchanges), past=True) for exchanges in (1, 2, 3)]
        to_observation, to_prompt = chats[0][2], chats[0][-1]
        self._check_thoughts(to_prompt, chats[1][3])
        constant = all(
            pieces[0] == before
            and self._leads_to(self.prompt, pieces[1])
            and all(glue == to_observation for glue in pieces[2::2])
            and all(self._leads_to(to_prompt, glue) for glue in pieces[3:-1:2])
            and pieces[-1] == to_prompt
            for pieces in chats
        )
        if not constant:
            raise ConfigError(
                "the chat template renders a message differently at different positions of a conversation, "
                "so a growing row of tokens cannot follow it; choose or write another template"
            )

    def _leads_to(self, prompt: str, glue: str) -> bool:
        """Whether a past message is rendered as it was sampled after its prompt.

        Spaces are ignored, because some templates add one when another message follows.
        """
        prompt, glue = "".join(prompt.split()), "".join(glue.split())
        return prompt.startswith(glue) or ((self._thinking or self._history == "calls") and glue.startswith(prompt))

    def _check_thoughts(self, prompt: str, past: str) -> None:
        """Raise a `ConfigError` for thoughts that growing tokens cannot follow; `past`: text before a past action."""
        self.knows_thoughts = THOUGHT_END in str(self._tokenizer.get_chat_template(tools=self._tools or None))
        self.begins_thought = prompt.rstrip().endswith(THOUGHT)
        self.no_thought = f"\n{THOUGHT_END}\n\n" if self.begins_thought else ""
        if self.begins_thought and self._tools and not self._thinking:
            raise ConfigError("the chat template always opens a thought: set rollout.thinking=true")
        if self._thinking and not self.knows_thoughts:
            raise ConfigError(
                f"the chat template does not support thoughts ({THOUGHT_END}): set rollout.thinking=false"
            )
        if self._thinking and self._thought not in past:
            raise ConfigError(
                "the chat template drops thoughts between tool calls, so a growing row of tokens cannot follow it: "
                "set rollout.thinking=false"
            )

    def _escapes(self) -> bool:
        mark = _mark()
        messages = self._placeholders(("user", "assistant", "tool"), ("content", "content", f'{mark}"'), past=True)
        return f'{mark}\\"' in self._render(messages)

    def _find_form(self) -> CallForm:
        """Return the form in which the template writes calls; Hermes if it writes none or ignores tools."""
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
        # Between two ends of turn, the message is the text after the glue.
        _, glue, _ = self.pieces(("user", "assistant"))
        message = before.rpartition(self.end)[2] + name + after.partition(self.end)[0]
        form = form_of(message.strip().removeprefix(glue.rpartition(self.end)[2].strip()).strip(), call)
        if form is None:
            forms = ", ".join(known.name for known in FORMS)
            raise ConfigError(f"the chat template writes tool calls in an unknown form; known forms are {forms}")
        return form


def _mark() -> str:
    """Return a unique placeholder."""
    return f"content{secrets.token_hex(16)}end"


def _calling(call: ToolCall) -> dict[str, Any]:
    function = {"name": call.name, "arguments": dict(call.arguments)}
    called = [{"id": _call_id(1), "type": "function", "function": function}]
    return {"role": "assistant", "content": "", "tool_calls": called}


def _call_id(number: int) -> str:
    """Return an id of nine characters, which some templates require with each observation; sampled calls have none."""
    return f"{number:09d}"
