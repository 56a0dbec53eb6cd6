"""The chat template of the base model, in token ids.

The template is always rendered with placeholders instead of contents. The text between them, the glue, is tokenised
with special tokens. Contents are tokenised separately, with special tokens disabled, so that no text of a model or an
environment can become a control token. Sampled tokens are never rendered or tokenised again: a rollout only grows.

    opening(messages)        glue system glue user glue+prompt
    <sampled ids>                                             action end-of-turn
    after_action(text)                                                           glue observation glue+prompt
    shown(text, form)                                                       glue text glue+prompt     (after a draft)
    imagined(action, text, form)   action end-of-turn glue text glue+prompt      (follows a prompt, like an action)

A model writes tool calls in the form of its own template (`tool_calls`); the rest of the system, including
environments, uses the Hermes format. Only this module translates: `read` for sampled messages, `encode_message` for
messages that are written for the policy. Sampling is elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lfo.errors import ConfigError
from lfo.protocol.hermes import UNREADABLE, Mistake, Unreadable, one_by_one, parse_tool_calls
from lfo.protocol.shown import MARK, ShownForm
from lfo.protocol.template import THOUGHT, THOUGHT_END, ChatTemplate
from lfo.protocol.tool_calls import FORMS, HERMES, CallForm, Control
from lfo.types import Message, Origin, ToolCall

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# For templates without tools: the text of Qwen's template, after Hermes.
TOOLS_PROMPT = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{schemas}
</tools>

For each function call, return a json object with function name and arguments within <tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

MAX_FRAMES = 256  # cached sequences of roles; clients of `lfo serve` choose them


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """A piece of a rollout. `spans`: half-open ranges of its contents in `ids`, without the glue of the template, in
    order: each message of an opening, the observation after an action, action and observation of an imagined exchange.

    >>> Tokens(ids=(1, 7, 8, 2), origins=(0, 2, 2, 0), spans=((1, 3),)).content_end
    3
    """

    ids: tuple[int, ...]
    origins: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def content_start(self) -> int:
        """The start of the last content: the observation, if there is one."""
        return self.spans[-1][0]

    @property
    def content_end(self) -> int:
        return self.spans[-1][1]


@dataclass(frozen=True, kw_only=True, slots=True)
class ParsedMessage:
    """A parsed message of a policy: `ParsedMessage(message='<tool_call>...</tool_call>', calls=(...,), thought="Hm.")`.

    `message` is what the environment receives: without the thought, with calls in Hermes format; `Unreadable` if a call
    cannot be parsed.
    """

    message: str
    calls: tuple[ToolCall, ...] = ()
    thought: str = ""
    text: str = ""  # the original text, without the thought

    @property
    def messages(self) -> tuple[str, ...]:
        """The messages for an environment, one for each call."""
        return tuple(one_by_one(self.message))


def split_thought(text: str, *, begun: bool) -> tuple[str, str]:
    """Split text into (thought, message); everything up to the last end tag, and an unclosed thought, is thought.

    >>> split_thought("<think>Red? <tool_call>no</think>Red.", begun=False)
    ('Red? <tool_call>no', 'Red.')
    """
    thought, ended, message = text.rpartition(THOUGHT_END)
    if begun and not ended:
        thought, message = text, ""
    message, begins_again, unfinished = message.partition(THOUGHT)
    thought = thought.strip().removeprefix(THOUGHT) + (f"\n{unfinished}" if begins_again else "")
    return thought.strip(), message.lstrip("\n")


class ChatCodec:
    """Encodes messages and decodes sampled ids, for one tokenizer and one set of tools.

    Raises a `ConfigError` if the template cannot be written piece by piece: if it changes earlier messages, or if its
    glue depends on the position in the conversation. A generation prompt that is longer than the text before a past
    message, such as the empty thinking block of Qwen3, is allowed: it stays in the rollout, as the policy saw it. With
    `thinking`, thoughts stay too, and a template that drops them between calls is rejected.

    Added tokens that are not special, such as Qwen's `<tool_call>`, are ordinary vocabulary and may be in contents,
    except those in the glue: a content can never close a tag of the template around it.
    """

    end_of_turn: int  # the id that ends an assistant message
    ends: tuple[int, ...]  # all ids at which sampling stops
    form: CallForm  # how the model writes calls

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = (), *, thinking: bool = False
    ) -> None:
        self.tools = [_with_parameters(tool) for tool in tools]
        self._frames: dict[tuple[str, ...], list[list[int]]] = {}
        self._vocabulary = _copy_of(tokenizer)
        added = self._vocabulary.get_added_tokens_decoder()
        specials = {number for number, token in added.items() if token.special}
        self._refuse_control_tokens([added[number].content for number in sorted(specials)])
        known = {token.content: number for number, token in added.items()}

        self._template = ChatTemplate(tokenizer, self.tools, thinking=thinking, added=known)
        self.form = self._template.form
        self.end_of_turn = known[self._template.end]
        self.ends = (self.end_of_turn, *(known[end] for form in FORMS for end in form.ends if end in known))
        self._after: dict[int, list[list[int]]] = {}  # glue, by the number of observations after one action
        self._to_user: list[list[int]] | None = None  # glue around a user message after an action
        self._no_thought = self._encode_glue(self._template.no_thought)

        glue = {token for piece in (self._encode_glue(self._template.prompt), *self._after_glue(1)) for token in piece}
        tags = {known[tag] for tag in (THOUGHT, THOUGHT_END) if self._template.knows_thoughts and tag in known}
        self._control = specials | tags | (added.keys() & glue)
        self._content = _copy_of(tokenizer, control=self._control)
        self._check(added[number].content for number in sorted(self._control))

    def opening(self, messages: Sequence[Message]) -> Tokens:
        """Return the first prompt: tools, the given messages, and the prompt for the first action."""
        messages = self._with_tools_described(messages) if self._template.ignores_tools else list(messages)
        roles = tuple(message.role for message in messages)
        if roles not in self._frames:
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            self._frames[roles] = [self._encode_glue(piece) for piece in self._template.pieces(roles)]
        write = {"assistant": self._encode_calls, "tool": self._encode_observation}
        contents = [write.get(message.role, self.encode)(message.content) for message in messages]
        return _weave(self._frames[roles], contents, Origin.PROMPT)

    def after_action(self, *observations: str, stopped: bool, origin: Origin = Origin.ENVIRONMENT) -> Tokens:
        """Return what follows a sampled message: one observation for each of its calls, and the next prompt.

        `stopped`: the end-of-turn token was sampled too. Cut a rollout that ends with this reply at `content_end`.
        """
        to_observation, *others = self._after_glue(len(observations))
        before = to_observation if stopped else [self.end_of_turn, *to_observation]
        return _weave([before, *others], list(map(self._encode_observation, observations)), origin)

    def after_action_by_user(self, text: str, *, origin: Origin = Origin.PROMPT) -> Tokens:
        """Return what follows a sampled message, after its end of turn, if the user speaks next."""
        return _weave(self._user_glue(), [self.encode(text)], origin)

    def shown(self, text: str, form: ShownForm) -> Tokens:
        """Return what follows a sampled draft, after its end of turn, if it is told a reply in this form."""
        if form.by_user:
            return self.after_action_by_user(text, origin=Origin.PREDICTED)
        return self.after_action(text, stopped=True, origin=Origin.PREDICTED)

    def imagined(self, action: str, text: str, form: ShownForm) -> Tokens:
        """Return an action that was not sampled, and what tells the reply to it in this form."""
        to_text, to_prompt = self._user_glue() if form.by_user else self._after_glue(1)
        glue = [self._no_thought, [self.end_of_turn, *to_text], to_prompt]
        content = self.encode(text) if form.by_user else self._encode_observation(text)
        return _weave(glue, [self._encode_calls(action), content], Origin.PREDICTED)

    @property
    def lets_user_follow_draft(self) -> bool:
        """Whether the template allows a user message after a call that has no reply."""
        return self._template.lets_user_follow_call()

    def encode_message(self, message: str) -> list[int]:
        """Encode a message written for the policy, after a prompt: no thought, calls in the form of the model."""
        return [*self._no_thought, *self._encode_calls(message)]

    def encode(self, text: str) -> list[int]:
        """Encode untrusted text; the result never contains a control token."""
        well_formed = text.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates
        # The batch method releases the interpreter lock.
        (encoded,) = self._content.encode_batch_fast([well_formed], add_special_tokens=False)
        return encoded.ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode sampled ids up to the end of turn; other special tokens become text."""
        ids = list(ids)
        end = next((index for index, each in enumerate(ids) if each in self.ends), len(ids))
        return self._vocabulary.decode(ids[:end], skip_special_tokens=False)

    def read(self, ids: Sequence[int]) -> ParsedMessage:
        """Parse a sampled message into thought, message and calls."""
        text, thought = self.decode(ids), ""
        if self._template.knows_thoughts:
            thought, text = split_thought(text, begun=self._template.begins_thought)
        try:
            calls = self.form.parse(text, self.tools)
        except Mistake as mistake:
            # A parser of the plain text must not find a call in it either.
            marked = text if self.form is HERMES else UNREADABLE + text
            return ParsedMessage(message=Unreadable(marked, str(mistake)), thought=thought, text=text)
        message = text
        if calls and (self.form is not HERMES or "<tool_call>" not in text):
            before = self.form.before(text)
            message = f"{before}\n{HERMES.render(calls)}" if before else HERMES.render(calls)
        return ParsedMessage(message=message, calls=tuple(calls), thought=thought, text=text)

    def _encode_calls(self, message: str) -> list[int]:
        """Rewrite the calls of a Hermes message in the form of the model."""
        if self.form is HERMES:
            return self.encode(message)
        try:
            calls = parse_tool_calls(message)
        except Mistake:
            calls = []
        ids: list[int] = []
        for piece in self.form.pieces(calls) if calls else (message,):
            token = self._vocabulary.token_to_id(piece) if isinstance(piece, Control) else None
            ids += self.encode(piece) if token is None else [token]
        return ids

    def _encode_observation(self, text: str) -> list[int]:
        return self.encode(json.dumps(text, ensure_ascii=False)[1:-1] if self._template.escapes_observations else text)

    def _encode_glue(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, add_special_tokens=False).ids

    def _after_glue(self, observations: int) -> list[list[int]]:
        """Return the glue between the end of turn of an action and the next prompt, for a number of observations."""
        if observations not in self._after:
            first, *others = map(self._encode_glue, self._template.after_action(observations))
            self._after[observations] = [first[1:], *others]
        return self._after[observations]

    def _user_glue(self) -> list[list[int]]:
        """Return the glue from the end of turn of an action to a user message, and from there to the next prompt."""
        if self._to_user is None:
            _, _, to_user, to_prompt = self._template.pieces(("user", "assistant", "user"))
            end, *before = self._encode_glue(to_user.lstrip())
            if end != self.end_of_turn:
                raise ConfigError("the chat template ends an assistant message differently before a user message")
            self._to_user = [before, self._encode_glue(to_prompt)]
        return self._to_user

    def _check(self, control: Iterable[str]) -> None:
        for text in control:
            if not self._control.isdisjoint(self.encode(text)):
                raise ConfigError(f"the tokenizer cannot write {text!r} as plain text, so contents would not be safe")
        to_observation, to_prompt = self._after_glue(1)
        pieces = [self._no_thought, [self.end_of_turn], to_observation, to_prompt]
        glue = [self._vocabulary.decode(piece, skip_special_tokens=False) for piece in pieces]
        shown = self._vocabulary.decode(self.imagined("b", "c", MARK).ids, skip_special_tokens=False)
        if shown != f"{glue[0]}b{glue[1]}{glue[2]}c{glue[3]}":
            raise ConfigError("the tokenizer adds or strips spaces between messages, which is not supported")

    def _refuse_control_tokens(self, specials: Sequence[str]) -> None:
        schemas = json.dumps(self.tools, ensure_ascii=False)
        for token in specials:
            if token in schemas:
                raise ConfigError(f"a tool's schema contains {token!r}, a special token of the tokenizer")

    def _with_tools_described(self, messages: Sequence[Message]) -> list[Message]:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self.tools)
        prompt = TOOLS_PROMPT.format(schemas=schemas)
        if messages and messages[0].role == "system":
            return [Message(role="system", content=f"{messages[0].content}\n\n{prompt}"), *messages[1:]]
        return [Message(role="system", content=prompt), *messages]


def _with_parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool whose function has parameters. OpenAI's format allows none at all; many templates read them."""
    function = tool.get("function")
    if not isinstance(function, Mapping) or function.get("parameters") is not None:
        return dict(tool)
    return {**tool, "function": {**function, "parameters": {"type": "object", "properties": {}}}}


def _weave(glue: Sequence[Sequence[int]], contents: Sequence[Sequence[int]], origin: Origin) -> Tokens:
    """Interleave glue and contents, with glue at both ends; contents get this origin."""
    ids = list(glue[0])
    origins = [int(Origin.PROMPT)] * len(ids)
    spans = []
    for content, after in zip(contents, glue[1:], strict=True):
        spans.append((len(ids), len(ids) + len(content)))
        ids += [*content, *after]
        origins += [int(origin)] * len(content) + [int(Origin.PROMPT)] * len(after)
    return Tokens(ids=tuple(ids), origins=tuple(origins), spans=tuple(spans))


def _copy_of(tokenizer: PreTrainedTokenizerBase, *, control: Iterable[int] | None = None) -> Tokenizer:
    """Return a private copy of the tokenizer, because others change the shared one; it never produces `control` ids."""
    from tokenizers import Tokenizer

    backend = getattr(tokenizer, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise ConfigError("only fast tokenizers can keep special tokens out of text; this one has no tokenizer.json")
    settings = json.loads(backend.to_str())
    settings.update(truncation=None, padding=None)
    if control is not None:
        control = set(control)
        for token in settings["added_tokens"]:
            token["special"] = token["id"] in control
    copy = Tokenizer.from_str(json.dumps(settings))
    copy.encode_special_tokens = control is not None
    return copy
