"""World-model examples: a state, an action and the reply of the environment, as text and as token ids.

    <|state|>
    Task: Open the red safe.
    Step: 2
    Previous Actions:
    - read_label("red safe"): Maker: Acme. Two digits, one try.
    Collected Auth: {}
    <|/state|>

    <|action|>
    <|tool|>type_code<|args|>{"safe": "red", "code": ""}<|/tool|>
    <|/action|>

    <|predict_csr|>                                            weight 0 up to here
    <|csr|>It stays shut; it wanted ...<|/csr|>               weight 1, including the end of turn that follows

The tags are ordinary text, because the base is frozen. `Auth` and `csr` come from the phone-call world and stay because
the embedded base was pretrained with them; in any environment they mean the collected values and the reply. An example
contains only what the agent has seen; imagined exchanges are neither in a state nor a target.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from lfo.errors import ConfigError
from lfo.protocol.chat import ChatCodec
from lfo.protocol.fitting import largest_fit
from lfo.types import Message, ReplyFacts, Rollout, ToolCall, Turn

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

REPLY_OPEN, REPLY_CLOSE = "<|csr|>", "<|/csr|>"
TARGET_TOKENS = 512  # the longest part of a reply that is learned
CALL_TOKENS = 512  # about the longest call in a prompt; a longer one is cut
CUT_SHORT = " ... (cut short)"  # after a predicted reply that reached its token limit

# Longer texts are cut first, so that a megabyte costs no more than a page.
_MAX_CHARS = 8_000
_CHARS_A_TOKEN = 16  # an upper bound of the average
_CACHED = 1_024  # texts whose ids are cached
_MAX_COLLECTED = 100
_FEW_ACTIONS = 4  # are read first where many may not fit
_LEFT_OUT_TOKENS = 48  # more than the line about actions that were left out has, even with a token for each letter
_MAX_VALUE_CHARS = 200
_MIN_VALUE_CHARS = 3  # of a value that identifies something; shorter ones occur everywhere
_LINE_BREAK = "; "  # replaces line breaks of a text in a state
_CUT = "..."


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldModelState:
    """`WorldModelState(task="Unlock my card.", step=2, actions=(('search_company("A")', "A: ..."),), collected={})`"""

    task: str
    step: int  # the number of the next action, from 1
    actions: tuple[tuple[str, str], ...]  # (call, observation), the newest last
    collected: Mapping[str, str]  # values from the environment so far
    earlier: int = 0  # number of actions that were left out to save tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class ObservedCall:
    """A real call and its reply, before tokenisation."""

    state: WorldModelState
    call: ToolCall
    reply: str
    facts: ReplyFacts | None
    asked: bool = False  # look-ahead asks about this call in this state


@dataclass(frozen=True, kw_only=True, slots=True)
class WorldModelExample:
    """One sample of the world-model loss; samples with the same `key` are identical and may be merged.

    `WorldModelExample(tokens=(5, 6, 7), token_weights=(0.0, 1.0, 1.0), key="9f86...")`
    """

    tokens: tuple[int, ...]
    token_weights: tuple[float, ...]
    key: str
    asked: bool = False  # look-ahead asks about this call

    @property
    def reply_start(self) -> int:
        """The index of the first token of the reply."""
        return next((index for index, weight in enumerate(self.token_weights) if weight), len(self.token_weights))


def state_of(opening: Sequence[Message], turns: Sequence[Turn]) -> WorldModelState:
    """Return the state after these turns; imagined ones are ignored."""
    growing = _GrowingState(opening)
    for turn in turns:
        growing.add(turn)
    return growing.now()


def observed_calls(rollout: Rollout, *, predict: Collection[str] | None = None) -> Iterator[ObservedCall]:
    """Yield the real calls of a rollout that have a reply, of the tools in `predict` (None: all)."""
    growing = _GrowingState(rollout.opening)
    for turn in rollout.turns:
        if turn.call is not None and is_observed_call(turn, predict):
            state = growing.now()
            yield ObservedCall(state=state, call=turn.call, reply=turn.observation, facts=turn.facts, asked=turn.asked)
        growing.add(turn)


class _GrowingState:
    """The state of a rollout, turn by turn: each is read once."""

    def __init__(self, opening: Sequence[Message]) -> None:
        tasks = [message.content for message in opening if message.role == "user"]
        self._task = _one_line(tasks[-1]) if tasks else ""
        self._actions: list[tuple[str, str]] = []
        self._collected: dict[str, str] = {}

    def add(self, turn: Turn) -> None:
        if not turn.predicted:
            self._actions.append((_call_line(turn.call), _one_line(turn.observation)))
            self._collected.update(_strings_in(turn.observation))

    def now(self) -> WorldModelState:
        return WorldModelState(
            task=self._task,
            step=len(self._actions) + 1,
            actions=tuple(self._actions),
            collected=dict(islice(self._collected.items(), max(0, len(self._collected) - _MAX_COLLECTED), None)),
        )


def is_observed_call(turn: Turn, predict: Collection[str] | None) -> bool:
    """Whether a turn is a real call of one of these tools (None: all) that has a reply."""
    called = turn.call is not None and (predict is None or turn.call.name in predict)
    return called and not turn.predicted and bool(turn.observation)


def render_state(state: WorldModelState) -> str:
    lines = ["<|state|>", f"Task: {state.task}", f"Step: {state.step}", "Previous Actions:"]
    if state.earlier:
        lines.append(f"- ... {state.earlier} earlier actions")
    lines += [f"- {call}: {observation}" for call, observation in state.actions]
    lines += [f"Collected Auth: {_json(state.collected)}", "<|/state|>"]
    return "\n".join(lines)


def render_prompt(state: WorldModelState, call: ToolCall) -> str:
    return _prompt(state, _call_body(call))


def render_target(reply: str) -> str:
    return f"{REPLY_OPEN}{reply}{REPLY_CLOSE}"


def parse_prediction(text: str) -> str:
    """Return the reply in generated text, up to the first closing tag; both tags may be missing."""
    _, opened, reply = text.partition(REPLY_OPEN)
    return (reply if opened else text).partition(REPLY_CLOSE)[0]


class WorldModelCodec:
    """Encodes world-model examples. All text is tokenised as plain text; only the end of turn is a special token, so
    that generation stops by itself.

    A state has at most `state_tokens`, a call about `CALL_TOKENS`, a question at most `question_tokens`. The first
    `target_tokens` of a reply are the target; a reply that was cut has no end token, so that the world model does not
    learn to stop there.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        state_tokens: int = 512,
        target_tokens: int = TARGET_TOKENS,
        question_tokens: int | None = None,
    ) -> None:
        self._chat = ChatCodec(tokenizer)
        self._question_tokens = question_tokens
        # The rollouts of one task are similar: half of all texts were encoded just before.
        self._encode = lru_cache(maxsize=_CACHED)(self._chat.encode)
        self._prompts: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
        self._state_tokens = state_tokens
        self._target_tokens = target_tokens
        self._target_chars = max(_MAX_CHARS, _CHARS_A_TOKEN * target_tokens)
        first = tokenizer.encode("a")[0]  # a base whose tokenizer adds a first token has never seen a text without it
        self._start = [first] if first == tokenizer.bos_token_id else []
        smallest = WorldModelState(task=_CUT, step=0, actions=((_CUT, _CUT),), collected={}, earlier=1)
        # 12: the step and the count of earlier actions may need one token for each digit.
        needed = len(self._encode(render_state(smallest))) + 12
        if state_tokens < needed:
            raise ConfigError(f"world_model.state_tokens must be at least {needed} with this tokenizer")

    @property
    def end_of_turn(self) -> int:
        """The id of the end token of a target."""
        return self._chat.end_of_turn

    def compress(self, state: WorldModelState, call: ToolCall) -> WorldModelState:
        """Compress a state that is too large. First drop what does not concern the call. Then shrink one part after the
        other, as little as needed: older actions, the newest observation, the task, the newest call, and finally the
        collected values.
        """
        # Each action has at least one token, so more actions than this do not fit, whatever they are.
        state = _keep_newest_actions(state, self._state_tokens)
        if self._exceeds(state):
            state = concerning(state, call)
        if self._exceeds(state):
            state = self._with_newest_actions(state)
        for size, shrink in _SHRINKS:
            if self._size(state) <= self._state_tokens:
                break
            keep = partial(shrink, state)
            state = keep(largest_fit(size(state), lambda n, keep=keep: self._size(keep(n)), self._state_tokens))
        return state

    def _exceeds(self, state: WorldModelState) -> bool:
        """Whether a state is too large; a very long one is not read to its end."""
        newest = _FEW_ACTIONS
        while newest < len(state.actions):
            if self._size(_keep_newest_actions(state, newest)) > self._state_tokens + _LEFT_OUT_TOKENS:
                return True
            newest *= 2
        return self._size(state) > self._state_tokens

    def _with_newest_actions(self, state: WorldModelState) -> WorldModelState:
        """Return the state with as many actions as fit, at least the newest one."""
        newest, keep = _FEW_ACTIONS, partial(_keep_newest_actions, state)
        while newest < len(state.actions) and self._size(keep(newest)) <= self._state_tokens:
            newest *= 2
        return keep(largest_fit(min(newest, len(state.actions)), lambda n: self._size(keep(n)), self._state_tokens))

    def prompt_ids(self, state: WorldModelState, call: ToolCall) -> list[int]:
        """Return the ids of `render_prompt`, with a compressed state; a call that is too long is cut."""
        body = _call_body(call)[:_MAX_CHARS]
        state = _keep_newest_actions(state, self._state_tokens)  # no more can fit: see `compress`
        key = render_state(state), body, _identifying_values(call)  # everything that determines the prompt
        ids = self._prompts.get(key)
        if ids is None:
            if len(self._prompts) >= _CACHED:
                self._prompts.clear()
            ids = self._prompts[key] = self._prompt_ids(state, call, body)
        return list(ids)

    def question_ids(self, state: WorldModelState, call: ToolCall) -> list[int]:
        """Return the prompt to generate a reply; if it leaves no room for one, its beginning is cut."""
        ids = self.prompt_ids(state, call)
        return ids if self._question_tokens is None else ids[-self._question_tokens :]

    def _prompt_ids(self, state: WorldModelState, call: ToolCall, body: str) -> list[int]:
        if len(self._encode(body)) > CALL_TOKENS:
            body = _cut(body, largest_fit(len(body), lambda n: len(self._encode(body[:n])), CALL_TOKENS))
        return self._start + self._encode(_prompt(self.compress(state, call), body))

    def forget(self) -> None:
        """Clear the caches."""
        self._encode.cache_clear()
        self._prompts.clear()

    def target_ids(self, reply: str) -> list[int]:
        """Return the target ids with the end of turn; a long reply is cut and has none."""
        text = render_target(reply)
        ids = self._encode(text[: self._target_chars])
        whole = len(text) <= self._target_chars and len(ids) <= self._target_tokens
        return [*ids, self.end_of_turn] if whole else ids[: self._target_tokens]

    def length(self, reply: str) -> int:
        """Return the number of tokens of a reply; estimated from its beginning if it is very long."""
        text = render_target(reply)
        read = text[: self._target_chars]
        return len(self._encode(read)) * len(text) // len(read)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the reply in generated ids."""
        return parse_prediction(self._chat.decode(ids))

    def decode_for_policy(self, ids: Sequence[int]) -> str:
        """Like `decode`, with a mark if the reply is cut, so that the policy knows."""
        text = self._chat.decode(ids)
        ended = not set(self._chat.ends).isdisjoint(ids) or REPLY_CLOSE in text
        return parse_prediction(text) if ended else f"{parse_prediction(text)}{CUT_SHORT}"

    def example(self, state: WorldModelState, call: ToolCall, reply: str, *, asked: bool = False) -> WorldModelExample:
        prompt, target = self.prompt_ids(state, call), self.target_ids(reply)
        written = ",".join(map(str, [len(prompt), *prompt, *target]))
        return WorldModelExample(
            tokens=(*prompt, *target),
            token_weights=(0.0,) * len(prompt) + (1.0,) * len(target),
            key=hashlib.sha256(written.encode()).hexdigest(),
            asked=asked,
        )

    def prompt_text(self, example: WorldModelExample) -> str:
        """Return the text before the reply."""
        return self._chat.decode(example.tokens[len(self._start) : example.reply_start])

    def reply_text(self, example: WorldModelExample) -> str:
        return self.decode(example.tokens[example.reply_start :])

    def with_prompt(self, example: WorldModelExample, text: str) -> WorldModelExample:
        """Return the example with another prompt before the same reply."""
        prompt, start = (*self._start, *self._chat.encode(text)), example.reply_start
        token_weights = (0.0,) * len(prompt) + example.token_weights[start:]
        return replace(example, tokens=prompt + example.tokens[start:], token_weights=token_weights)

    def examples_of(self, rollout: Rollout, *, predict: Collection[str] | None) -> list[WorldModelExample]:
        """Return one example for each of `observed_calls`."""
        calls = observed_calls(rollout, predict=predict)
        return [self.example(each.state, each.call, each.reply, asked=each.asked) for each in calls]

    def _size(self, state: WorldModelState) -> int:
        return len(self._encode(render_state(state)))


def concerning(state: WorldModelState, call: ToolCall) -> WorldModelState:
    """Return the state with only what concerns the call.

    Of an observation with several lines (separated by `; ` in a state), keep the first line, which names its subject,
    and the lines with a value of the call; keep all lines if there are none."""
    values = _identifying_values(call)

    def shortened(observation: str) -> str:
        first, *others = observation.split(_LINE_BREAK)
        kept = [line for line in others if any(value in line for value in values)]
        return _LINE_BREAK.join([first, *kept]) if kept else observation

    return replace(state, actions=tuple((call, shortened(observation)) for call, observation in state.actions))


def _identifying_values(call: ToolCall) -> tuple[str, ...]:
    """Return the arguments of a call that are long enough to identify something."""
    values = (value for value in _values_in(call.arguments) if len(value) >= _MIN_VALUE_CHARS)
    # One character more than a line may have: a longer value then matches no line.
    return tuple(value[: _MAX_CHARS + 1] for value in islice(values, _MAX_COLLECTED))


def _values_in(value: Any, depth: int = 4) -> Iterator[str]:
    """Yield the texts and numbers in the arguments of a call, also nested ones up to a depth."""
    if isinstance(value, str | int | float):
        yield str(value)
    elif depth and isinstance(value, Mapping | list):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _values_in(inner, depth - 1)


def _keep_newest_actions(state: WorldModelState, count: int) -> WorldModelState:
    left_out = max(len(state.actions) - max(count, 1), 0)
    return replace(state, actions=state.actions[left_out:], earlier=state.earlier + left_out)


def _cut_newest_observation(state: WorldModelState, length: int) -> WorldModelState:
    newest = tuple((call, _cut(observation, length)) for call, observation in state.actions[-1:])
    return replace(state, actions=state.actions[:-1] + newest)


def _cut_newest_call(state: WorldModelState, length: int) -> WorldModelState:
    newest = tuple((_cut(call, length), observation) for call, observation in state.actions[-1:])
    return replace(state, actions=state.actions[:-1] + newest)


def _cut_task(state: WorldModelState, length: int) -> WorldModelState:
    return replace(state, task=_cut(state.task, length))


def _keep_newest_collected(state: WorldModelState, count: int) -> WorldModelState:
    items = list(state.collected.items())
    return replace(state, collected=dict(items[len(items) - count :]))


# The parts that may shrink after the actions, in this order: (size of the part, state with a part of that size).
_SHRINKS: tuple[tuple[Callable[[WorldModelState], int], Callable[[WorldModelState, int], WorldModelState]], ...] = (
    (lambda state: len(state.actions[-1][1]) if state.actions else 0, _cut_newest_observation),
    (lambda state: len(state.task), _cut_task),
    (lambda state: len(state.actions[-1][0]) if state.actions else 0, _cut_newest_call),
    (lambda state: len(state.collected), _keep_newest_collected),
)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else text[:length] + _CUT


def _prompt(state: WorldModelState, call_body: str) -> str:
    action = f"<|action|>\n<|tool|>{call_body}<|/tool|>\n<|/action|>"
    return f"{render_state(state)}\n\n{action}\n\n<|predict_csr|>\n"


def _call_body(call: ToolCall) -> str:
    return f"{_one_line(call.name)}<|args|>{_json(call.arguments)}"


def _call_line(call: ToolCall | None) -> str:
    """Return a call as text: `search_company("Acme Bank")`."""
    if call is None:
        return "no readable call"
    return f"{_one_line(call.name)}({', '.join(map(_json, call.arguments.values()))})"[:_MAX_CHARS]


def _strings_in(text: str) -> dict[str, str]:
    """Return the string values of all JSON objects in an observation."""
    text = text[:_MAX_CHARS]
    found: dict[str, str] = {}
    position = text.find("{")
    while position >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, position)
            strings = {key: entry for key, entry in value.items() if isinstance(entry, str)}
            found.update({key: entry for key, entry in strings.items() if len(entry) <= _MAX_VALUE_CHARS})
        except (ValueError, RecursionError):
            end = position + 1
        position = text.find("{", end)
    return found


def _one_line(text: str) -> str:
    """Replace line breaks, so that a text cannot forge lines of a state."""
    lines = (" ".join(line.split()) for line in text[:_MAX_CHARS].splitlines())
    return _LINE_BREAK.join(line for line in lines if line)


def _json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, default=str)
    except RecursionError:  # a model may nest its arguments very deeply
        return json.dumps(_CUT)
