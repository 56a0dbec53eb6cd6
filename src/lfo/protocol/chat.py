"""The base model's own chat template, spoken in token ids.

The template is only ever rendered with placeholders in the place of contents. Between them stands its glue, which is
tokenised with special tokens; contents are tokenised apart, with special tokens disabled, so that no text of a model
or an environment can become a control token. What was sampled is never rendered or tokenised again: a row only grows.

    opening(messages)        glue system glue user glue+prompt
    <sampled ids>                                             action end-of-turn
    after_action(text)                                                           glue observation glue+prompt
    imagined(action, text)   action end-of-turn glue observation glue+prompt     (follows a prompt, like an action)

Not here: reading tool calls out of an action (the environment's edge) and sampling.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from lfo.errors import ConfigError
from lfo.types import Message, Origin

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

# For templates that have no words for tools of their own: those of Qwen's template, after Hermes.
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

MAX_FRAMES = 256  # sequences of roles whose glue is kept, where strangers choose them


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokens:
    """A piece of a row. `spans` are the half-open ranges of its contents in `ids`, template glue excluded, in order:
    one per message of an opening, the observation after an action, action and observation of an imagined exchange.

    >>> Tokens(ids=(1, 7, 8, 2), origins=(0, 2, 2, 0), spans=((1, 3),)).content_end
    3
    """

    ids: tuple[int, ...]
    origins: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]

    @property
    def content_start(self) -> int:
        """Of the last content: the observation, wherever there is one."""
        return self.spans[-1][0]

    @property
    def content_end(self) -> int:
        return self.spans[-1][1]


class ChatCodec:
    """Messages to ids and sampled ids to text, for one tokenizer and one set of tools.

    Raises `ConfigError` when the template cannot be spoken piece by piece: when it changes what was already said, or
    when its glue depends on the position in the conversation. A generation prompt that goes beyond what stands before
    a past message, such as the empty thinking block of Qwen3, is fine: it stays in the row, as the policy saw it.

    Added tokens that are not special, such as Qwen's `<tool_call>`, are ordinary vocabulary and may stand in contents,
    except those in the glue itself: a content can never close the bracket in which the template puts it.
    """

    end_of_turn: int  # the id that ends an assistant message

    def __init__(self, tokenizer: PreTrainedTokenizerBase, tools: Sequence[Mapping[str, Any]] = ()) -> None:
        self._tokenizer = tokenizer
        self._tools: list[Any] = [dict(tool) for tool in tools]
        self._frames: dict[tuple[str, ...], list[list[int]]] = {}
        self._template = _copy_of(tokenizer)
        added = self._template.get_added_tokens_decoder()
        specials = {number for number, token in added.items() if token.special}
        self._refuse_control_tokens([added[number].content for number in sorted(specials)])

        self._describes_tools = bool(tools) and self._pieces(("user",)) == self._pieces(("user",), tools=False)
        self._tool_speaks_as_user = False
        try:
            self._pieces(("user", "assistant", "tool"))
        except ConfigError:  # the template knows no tool messages
            self._tool_speaks_as_user = True

        prompt, to_observation, to_prompt = map(self._encode_glue, self._glue())
        if not to_observation or to_observation[0] not in added:
            raise ConfigError("the chat template puts no special token at the end of an assistant message")
        self.end_of_turn, *self._to_observation = to_observation
        self._to_prompt = to_prompt

        self._control = specials | (added.keys() & {*prompt, *to_observation, *to_prompt})
        self._content = _copy_of(tokenizer, control=self._control)
        self._check(added[number].content for number in sorted(self._control))

    def opening(self, messages: Sequence[Message]) -> Tokens:
        """The whole first prompt: tools, the given messages, and the prompt for the first action."""
        messages = self._with_tools_described(messages) if self._describes_tools else list(messages)
        roles = tuple(message.role for message in messages)
        if roles not in self._frames:
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            self._frames[roles] = [self._encode_glue(piece) for piece in self._pieces(roles)]
        return _weave(self._frames[roles], [self.encode(message.content) for message in messages], Origin.PROMPT)

    def after_action(self, observation: str, *, stopped: bool, origin: Origin = Origin.ENVIRONMENT) -> Tokens:
        """What follows a sampled message; `stopped`: its end-of-turn token was sampled too.

        A row that ends with this observation is cut at `content_end`.
        """
        before = self._to_observation if stopped else [self.end_of_turn, *self._to_observation]
        return _weave([before, self._to_prompt], [self.encode(observation)], origin)

    def after_action_by_user(self, words: str) -> Tokens:
        """What follows a sampled message, its end of turn included, when the user speaks next."""
        _, _, to_user, to_prompt = self._pieces(("user", "assistant", "user"))
        end, *before = self._encode_glue(to_user.lstrip())
        if end != self.end_of_turn:
            raise ConfigError("the chat template ends an assistant message differently before a user's")
        return _weave([before, self._encode_glue(to_prompt)], [self.encode(words)], Origin.PROMPT)

    def imagined(self, action: str, observation: str) -> Tokens:
        """A whole exchange that never happened, in the shape of a real one."""
        glue = [[], [self.end_of_turn, *self._to_observation], self._to_prompt]
        return _weave(glue, [self.encode(action), self.encode(observation)], Origin.PREDICTED)

    def encode(self, text: str) -> list[int]:
        """Untrusted text: never a control token, whatever it contains."""
        well_formed = text.encode("utf-8", errors="replace").decode("utf-8")  # lone surrogates
        (encoded,) = self._content.encode_batch_fast([well_formed], add_special_tokens=False)  # lets other threads run
        return encoded.ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of a sampled message, up to its end of turn; stray special tokens are shown as text."""
        ids = list(ids)
        end = ids.index(self.end_of_turn) if self.end_of_turn in ids else len(ids)
        return self._template.decode(ids[:end], skip_special_tokens=False)

    def _encode_glue(self, text: str) -> list[int]:
        return self._template.encode(text, add_special_tokens=False).ids

    def _pieces(self, roles: tuple[str, ...], *, tools: bool = True) -> list[str]:
        """The template's own text before, between and after messages of these roles, generation prompt included."""
        marks = [f"content{secrets.token_hex(16)}end" for _ in roles]
        try:
            text = self._tokenizer.apply_chat_template(
                [self._placeholder(role, mark) for role, mark in zip(roles, marks, strict=True)],
                tools=self._tools if self._tools and tools else None,
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=False,  # a variable of some templates; others ignore it
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise ConfigError(f"the chat template refuses the messages {', '.join(roles)}: {error}") from error
        pieces = []
        rest = str(text)
        for mark in marks:
            before, found, rest = rest.partition(mark)
            pieces.append(before)
            if not found or mark in rest:
                raise ConfigError(f"the chat template does not show each of {', '.join(roles)} once and in order")
        return [*pieces, rest]

    def _placeholder(self, role: str, mark: str) -> dict[str, str]:
        if role == "tool" and self._tool_speaks_as_user:
            return {"role": "user", "content": f"<tool_response>\n{mark}\n</tool_response>"}
        return {"role": role, "content": mark}

    def _glue(self) -> tuple[str, str, str]:
        """Between user and first action, between action and observation, between observation and next action."""
        before, prompt = self._pieces(("user",))
        # Pieces of n exchanges: before user, to action, (to observation, to action) * n, the last being a prompt.
        rows = [self._pieces(("user", *("assistant", "tool") * exchanges)) for exchanges in (1, 2, 3)]
        to_observation, to_prompt = rows[0][2], rows[0][-1]
        constant = all(
            pieces[0] == before
            and prompt.startswith(pieces[1])
            and all(glue == to_observation for glue in pieces[2::2])
            and all(to_prompt.startswith(glue) for glue in pieces[3:-1:2])
            and pieces[-1] == to_prompt
            for pieces in rows
        )
        if not constant:
            raise ConfigError(
                "the chat template writes a message differently at different places of a conversation, "
                "so a growing row of tokens cannot follow it; choose or write a template that does not"
            )
        # Whitespace before the end of turn belongs to the message, which the model has already finished.
        return prompt, to_observation.lstrip(), to_prompt

    def _check(self, control: Iterable[str]) -> None:
        for text in control:
            if not self._control.isdisjoint(self.encode(text)):
                raise ConfigError(f"the tokenizer cannot write {text!r} as plain text, so contents would not be safe")
        pieces = [[self.end_of_turn], self._to_observation, self._to_prompt]
        glue = [self._template.decode(piece, skip_special_tokens=False) for piece in pieces]
        row = self._template.decode(self.imagined("b", "c").ids, skip_special_tokens=False)
        if row != f"b{glue[0]}{glue[1]}c{glue[2]}":
            raise ConfigError("the tokenizer changes text at the seams of messages (it adds or strips spaces)")

    def _refuse_control_tokens(self, specials: Sequence[str]) -> None:
        schemas = json.dumps(self._tools, ensure_ascii=False)
        for token in specials:
            if token in schemas:
                raise ConfigError(f"a tool's schema contains {token!r}, a special token of the tokenizer")

    def _with_tools_described(self, messages: Sequence[Message]) -> list[Message]:
        schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in self._tools)
        prompt = TOOLS_PROMPT.format(schemas=schemas)
        if messages and messages[0].role == "system":
            return [Message(role="system", content=f"{messages[0].content}\n\n{prompt}"), *messages[1:]]
        return [Message(role="system", content=prompt), *messages]


def _weave(glue: Sequence[Sequence[int]], contents: Sequence[Sequence[int]], origin: Origin) -> Tokens:
    """glue content glue content ... glue."""
    ids = list(glue[0])
    origins = [int(Origin.PROMPT)] * len(ids)
    spans = []
    for content, after in zip(contents, glue[1:], strict=True):
        spans.append((len(ids), len(ids) + len(content)))
        ids += [*content, *after]
        origins += [int(origin)] * len(content) + [int(Origin.PROMPT)] * len(after)
    return Tokens(ids=tuple(ids), origins=tuple(origins), spans=tuple(spans))


def _copy_of(tokenizer: PreTrainedTokenizerBase, *, control: Iterable[int] | None = None) -> Tokenizer:
    """A private copy, since others switch the state of the shared one; given `control`, it never produces those ids."""
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
