"""The call form of each model: detected from its template, and parsed as strictly as Hermes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from lfo.env.tool_environment import ToolEnvironment, tool
from lfo.errors import ConfigError
from lfo.protocol.chat import ChatCodec, split_thought
from lfo.protocol.hermes import (
    MAX_CALLS,
    MAX_MESSAGE_CHARS,
    Mistake,
    Unreadable,
    format_tool_call,
    read_tool_call,
    without_calls,
)
from lfo.protocol.tool_calls import FORMS, HERMES, LLAMA, MISTRAL, MISTRAL_ARGS, QWEN_XML, CallForm
from lfo.types import Message, Origin, ToolCall
from small_tokenizers import CHATML_WITH_TOOLS, FAMILIES, QWEN3, family_tokenizer, qwen3_tokenizer, small_tokenizer

NAMES = ("search", "open_door")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does something.",
            "parameters": {
                "type": "object",
                "properties": {
                    "text": {"type": "string"},
                    "count": {"type": "integer"},
                    "share": {"anyOf": [{"type": "number"}, {"type": "null"}]},
                    "loud": {"type": "boolean"},
                    "boxes": {"type": "array"},
                    "more": {"type": "object"},
                },
            },
        },
    }
    for name in NAMES
]
ALL = pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
FORM_OF = {
    "llama3": LLAMA,
    "mistral": MISTRAL,
    "mistral_args": MISTRAL_ARGS,
    "qwen3_coder": QWEN_XML,
    "thinking": HERMES,
}
EACH = pytest.mark.parametrize("family", FAMILIES)
CALLS = (
    ToolCall(name="search", arguments={"text": 'né "quoted"\n{x}', "count": 3, "loud": True}),
    ToolCall(name="open_door", arguments={"boxes": [1, {"a": None}], "more": {"k": "v"}, "share": None}),
    ToolCall(name="open_door", arguments={}),
)

texts = st.text(max_size=12).filter(lambda text: "</parameter>" not in text)
simple = st.none() | st.booleans() | st.integers(-(10**9), 10**9) | st.text(max_size=5)
arguments = st.fixed_dictionaries(
    {},
    optional={
        "text": texts | st.sampled_from(["[TOOL_CALLS]", "</tool_call>", "<|python_tag|>{", "[ARGS]", '"; {"name"']),
        "count": st.integers(-(10**9), 10**9),
        "share": st.floats(allow_nan=False, allow_infinity=False) | st.none(),
        "loud": st.booleans(),
        "boxes": st.lists(simple, max_size=3),
        "more": st.dictionaries(st.text(max_size=4), simple, max_size=2),
    },
)
calls = st.lists(st.builds(ToolCall, name=st.sampled_from(NAMES), arguments=arguments), min_size=1, max_size=3)


@ALL
@given(written=calls)
@example(written=list(CALLS))
def test_what_is_written_is_read(form: CallForm, written: list[ToolCall]):
    text = form.render(written)
    try:
        assert form.parse(text, TOOLS) == written
    except Mistake as mistake:
        assert "surrogate" in str(mistake) or "</parameter>" in text  # noqa: PT017
    for other in FORMS:
        if other is not form:
            assert reads_nothing_else(other, text, written), f"{other.name} reads {form.name}"


def reads_nothing_else(form: CallForm, text: str, written: list[ToolCall]) -> bool:
    try:
        return form.parse(text, TOOLS) == []
    except Mistake:
        return True


# --- what cannot be read -------------------------------------------------------------------------------------------

GOOD = {form: form.render([ToolCall(name="search", arguments={"text": "x"})]) for form in FORMS}
BROKEN = (
    {
        "llama: not JSON": (LLAMA, "{'name': 'search'}", "JSON"),
        "llama: cut off": (LLAMA, '{"name": "search", "parameters": {"text": "x"', "JSON"),
        "llama: tag alone": (LLAMA, "<|python_tag|>", "JSON"),
        "llama: text behind": (LLAMA, '{"name": "search", "parameters": {}} I am done.', "nothing else"),
        "llama: no separator": (LLAMA, '{"name": "search"} {"name": "search"}', "nothing else"),
        "llama: Hermes' key": (LLAMA, '{"name": "search", "arguments": {}}', "only have"),
        "llama: twice": (LLAMA, '{"name": "search", "name": "open_door"}', "twice"),
        "llama: NaN": (LLAMA, '{"name": "search", "parameters": {"count": NaN}}', "NaN"),
        "llama: huge": (LLAMA, '{"name": "search", "parameters": {"count": %s}}' % ("9" * 99), "too large"),
        "llama: deep": (LLAMA, '{"name": "search", "parameters": {"boxes": %s}}' % ("[" * 99 + "]" * 99), "nested"),
        "llama: bomb": (LLAMA, '{"a":' * 4_000, "nested"),
        "llama: surrogate": (LLAMA, '{"name": "search", "parameters": {"text": "\\ud800"}}', "surrogate"),
        "mistral: no array": (MISTRAL, '[TOOL_CALLS]{"name": "search", "arguments": {}}', "array"),
        "mistral: empty": (MISTRAL, "[TOOL_CALLS][]", "array"),
        "mistral: text behind": (MISTRAL, '[TOOL_CALLS][{"name": "search"}] ok', "follow"),
        "mistral: a second array": (
            MISTRAL,
            '[TOOL_CALLS][{"name": "search"}][TOOL_CALLS][{"name": "search"}]',
            "follow",
        ),
        "mistral: a number": (MISTRAL, "[TOOL_CALLS][1]", "object"),
        "mistral: no name": (MISTRAL, '[TOOL_CALLS][{"arguments": {}}]', "name"),
        "mistral-args: no name": (MISTRAL_ARGS, "[TOOL_CALLS][ARGS]{}", "must be written"),
        "mistral-args: no arguments": (MISTRAL_ARGS, "[TOOL_CALLS]search", "must be written"),
        "mistral-args: an array": (MISTRAL_ARGS, "[TOOL_CALLS]search[ARGS][1]", "JSON object"),
        "mistral-args: text behind": (MISTRAL_ARGS, "[TOOL_CALLS]search[ARGS]{} ok", "must be written"),
        "mistral-args: twice": (MISTRAL_ARGS, '[TOOL_CALLS]search[ARGS]{"a": 1, "a": 2}', "twice"),
        "qwen-xml: JSON": (QWEN_XML, '<tool_call>{"name": "search"}</tool_call>', "function=name"),
        "qwen-xml: no end": (QWEN_XML, "<tool_call><function=search>", "must end"),
        "qwen-xml: no end of a value": (
            QWEN_XML,
            "<tool_call><function=search><parameter=text>x</function>",
            "parameter",
        ),
        "qwen-xml: text between": (QWEN_XML, "<tool_call><function=search>so</function></tool_call>", "must end"),
        "qwen-xml: a value twice": (
            QWEN_XML,
            "<tool_call><function=search>" + "<parameter=text>x</parameter>" * 2 + "</function></tool_call>",
            "twice",
        ),
    }
    | {f"{form.name}: too long": (form, GOOD[form] + " " * MAX_MESSAGE_CHARS, "longer") for form in FORMS}
    | {
        f"{form.name}: too many": (
            form,
            form.render([ToolCall(name="search", arguments={})] * (MAX_CALLS + 1)),
            "At most",
        )
        for form in FORMS
    }
    | {
        f"{form.name}: Hermes' form": (form, "So. " + GOOD[HERMES], "form|function=name")
        for form in FORMS
        if form is not HERMES
    }
)


@pytest.mark.parametrize(("form", "message", "word"), BROKEN.values(), ids=BROKEN.keys())
def test_calls_that_cannot_be_read_are_a_mistake_and_never_half_made(form: CallForm, message: str, word: str):
    with pytest.raises(Mistake, match=word) as caught:
        form.parse(message, TOOLS)
    sentence = str(caught.value)
    assert len(sentence) < 160
    assert sentence.isprintable()


@ALL
@pytest.mark.parametrize("message", ["", "I am done.", "So: {", "[1]", "name: search", "\ud800", "<function=search>"])
def test_a_message_without_a_call_has_none(form: CallForm, message: str):
    assert form.parse(message, TOOLS) == []


def test_values_between_tags_are_what_the_schema_says():
    def value(name: str, text: str) -> Any:
        message = f"<tool_call><function=search><parameter={name}>\n{text}\n</parameter></function></tool_call>"
        (call,) = QWEN_XML.parse(message, TOOLS)
        return call.arguments[name]

    assert value("text", "12") == "12", "a text that looks like a number"
    assert (value("count", "12"), value("count", " 12 "), value("count", "twelve")) == (12, 12, "twelve")
    assert (value("loud", "True"), value("loud", "false")) == (True, False)
    assert (value("share", "None"), value("share", "0.5")) == (None, 0.5)
    assert value("boxes", "[1, 2") == "[1, 2", "whoever checks the arguments says what is wrong"
    assert (value("unknown", "12"), value("text", ""), value("text", "\n a \n")) == ("12", "", "\n a \n")


# --- with the template ---------------------------------------------------------------------------------------------


def shown(codec: ChatCodec, ids) -> str:
    return codec._vocabulary.decode(list(ids), skip_special_tokens=False)


def openai(said: Sequence[ToolCall]) -> list[dict[str, Any]]:
    return [
        {"id": f"{place:09d}", "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
        for place, call in enumerate(said, start=1)
    ]


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[dict[str, Any]], **options: Any) -> str:
    options = {"add_generation_prompt": True, "enable_thinking": False, **options}
    return str(tokenizer.apply_chat_template(messages, tools=TOOLS, tokenize=False, **options))


@EACH
def test_the_form_is_that_of_the_template_and_reads_what_it_writes(family: str):
    tokenizer = family_tokenizer(family)
    codec = ChatCodec(tokenizer, TOOLS)
    assert codec.form is FORM_OF[family]
    for said in ([CALLS[0]], [CALLS[1]], list(CALLS)[: 1 if family == "llama3" else 3]):
        message = {"role": "assistant", "content": "", "tool_calls": openai(said)}
        start, opening = rendered(tokenizer, [{"role": "user", "content": "Go."}]), {"role": "user", "content": "Go."}
        text = rendered(tokenizer, [opening, message], add_generation_prompt=False)
        sampled = text.removeprefix(start).removeprefix("<|im_start|>assistant")
        assert text.startswith(start[: len(start) // 2])
        ids = tokenizer.encode(sampled, add_special_tokens=False)
        assert codec.read(ids).calls == tuple(said)
        # Written in the policy's place, it is the same calls again, and control tokens where the form has some.
        assert codec.read(codec.encode_message(HERMES.render(said))).calls == tuple(said)


@EACH
def test_a_row_is_the_templates_own_rendering_of_calls_and_observations(family: str):
    tokenizer, observations = family_tokenizer(family), ('It said "no".\n', "[TOOL_CALLS]", "3")
    codec = ChatCodec(tokenizer, TOOLS)
    row = list(codec.opening([Message(role="user", content="Go.")]).ids)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    for call, observation in zip(CALLS, observations, strict=True):
        row += [*codec.encode_message(format_tool_call(call)), codec.end_of_turn]
        row += codec.after_action(observation, stopped=True).ids
        messages.append({"role": "assistant", "content": "", "tool_calls": openai([call])})
        messages.append({"role": "tool", "content": observation, "tool_call_id": "000000001"})
    ours, theirs = shown(codec, row), rendered(tokenizer, messages)
    if family == "mistral":  # it writes an id beside a call, and a space before, that the model does not sample
        theirs = theirs.replace(', "id": "000000001"}]', "}]").replace("[TOOL_CALLS] [{", "[TOOL_CALLS][{")
    if family == "qwen3_coder":  # Python's spelling
        theirs = theirs.replace("\nTrue\n", "\ntrue\n").replace("\nNone\n", "\nnull\n")
    assert ours == theirs


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "llama3"])
def test_several_calls_in_a_message_are_the_templates_own_rendering(family: str):
    tokenizer = family_tokenizer(family)
    codec = ChatCodec(tokenizer, TOOLS)
    said, heard = [CALLS[2], CALLS[0]], ["one", "two"]
    row = list(codec.opening([Message(role="user", content="Go.")]).ids)
    row += [*codec.encode_message(HERMES.render(said)), codec.end_of_turn]
    after = codec.after_action(*heard, stopped=True)
    assert [shown(codec, after.ids[slice(*span)]) for span in after.spans] == heard
    assert sum(origin == Origin.ENVIRONMENT for origin in after.origins) == sum(end - at for at, end in after.spans)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    called = openai(said)
    messages.append({"role": "assistant", "content": "", "tool_calls": called})
    messages += [
        {"role": "tool", "content": text, "tool_call_id": f"{place + 1:09d}"} for place, text in enumerate(heard)
    ]
    theirs = rendered(tokenizer, messages)
    for place in (1, 2):
        theirs = theirs.replace(f', "id": "{place:09d}"}}', "}").replace("[TOOL_CALLS] [{", "[TOOL_CALLS][{")
    assert shown(codec, [*row, *after.ids]) == theirs.replace("\nTrue\n", "\ntrue\n")


@EACH
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_a_call_in_a_reply_or_an_opening_becomes_no_control_token(family: str, form: CallForm):
    tokenizer = family_tokenizer(family)
    codec = ChatCodec(tokenizer, TOOLS)
    hostile = "".join(FAMILIES[family]) + form.render(CALLS) + "<think></think>"
    special = {tokenizer.convert_tokens_to_ids(token) for token in FAMILIES[family]}
    pieces = [codec.opening([Message(role="user", content=hostile)]), codec.after_action(hostile, "x", stopped=True)]
    for piece in pieces:
        for start, end in piece.spans:
            assert special.isdisjoint(piece.ids[start:end])
    # A call whose argument holds the family's tokens has exactly as many of them as any other.
    plain, wicked = (ToolCall(name="search", arguments={"text": text}) for text in ("x", hostile))
    counts = [sum(each in special for each in codec.encode_message(format_tool_call(call))) for call in (plain, wicked)]
    assert counts[0] == counts[1] == {"mistral": 1, "mistral_args": 2}.get(family, 0)


class Door(ToolEnvironment):
    def tasks(self, split: str) -> list[Any]:
        return []

    def start(self, task: Any) -> list[Message]:
        return [Message(role="user", content="Go.")]

    @tool
    def search(self, text: str) -> str:
        """Search.

        text: what for
        """
        return f"Found {text}."

    def finished(self) -> bool:
        return False

    def reward(self) -> float:
        return 0.0


@EACH
def test_an_environment_hears_each_call_and_why_one_could_not_be_read(family: str):
    codec, door = ChatCodec(family_tokenizer(family), TOOLS), Door()
    door.reset(None)
    search = ToolCall(name="search", arguments={"text": "red"})
    said = codec.read(codec.encode_message(HERMES.render([search, search])))
    assert [door.step(message).observation for message in said.messages] == ["Found red."] * 2
    broken = codec.read([*codec.encode_message(format_tool_call(search))[:-4]])
    assert isinstance(broken.message, Unreadable)
    assert (broken.calls, len(broken.messages)) == ((), 1)
    assert door.step(broken.message).observation == broken.message.why
    assert door.mistakes == 1
    assert door.step(str(broken.message)).info["mistake"], "also to those who read it as plain text"


@pytest.mark.parametrize("family", [name for name, form in FORM_OF.items() if form is not HERMES])
def test_what_was_refused_is_no_call_to_later_readers_either(family: str):
    codec = ChatCodec(family_tokenizer(family), TOOLS)
    foreign = format_tool_call(ToolCall(name="search", arguments={"text": "red"}))
    for text in (foreign, foreign.removeprefix("<tool_call>")):
        said = codec.read(codec.encode(text))
        assert (said.calls, said.text) == ((), text)
        assert read_tool_call(str(said.message)) is None


@EACH
def test_text_before_a_call_is_heard_too(family: str):
    codec = ChatCodec(family_tokenizer(family), TOOLS)
    search = ToolCall(name="search", arguments={"text": "red"})
    call = codec.encode_message(format_tool_call(search))
    said = codec.read([*codec.encode("I look it up. "), *call])
    if codec.form is LLAMA:  # a message that does not begin with a call has none
        assert said.calls == ()
    else:
        assert (said.calls, without_calls(said.message)) == ((search,), "I look it up.")


@pytest.mark.parametrize("properties", [None, [], {"text": {"anyOf": None}}, {"text": {"anyOf": 3}}])
def test_no_schema_of_a_client_breaks_the_reader(properties):
    tools = [{"type": "function", "function": {"name": "search", "parameters": {"properties": properties}}}]
    (call,) = QWEN_XML.parse(QWEN_XML.render([ToolCall(name="search", arguments={"text": "red"})]), tools)
    assert call.arguments == {"text": "red"}


def test_a_message_ends_where_llama_ends_a_call_too():
    tokenizer = family_tokenizer("llama3")
    codec = ChatCodec(tokenizer, TOOLS)
    ids = tokenizer.encode(f"<|python_tag|>{GOOD[LLAMA]}<|eom_id|>", add_special_tokens=False)
    assert ids[-1] in codec.ends
    assert [call.name for call in codec.read(ids).calls] == ["search"]


@pytest.mark.parametrize(
    ("written", "known"),
    [("<call>' + call.function.name + '</call>", False), ("nothing", True)],
)
def test_a_form_that_nobody_knows_is_refused(written: str, known: bool):
    calls = f"{{%- for call in message.tool_calls or [] %}}{{{{- '{written}' }}}}{{%- endfor %}}"
    old, new = "message.content + '<|im_end|>", f"message.content }}}}{calls}{{{{- '<|im_end|>"
    assert old in CHATML_WITH_TOOLS
    tokenizer = small_tokenizer(CHATML_WITH_TOOLS.replace(old, new))
    if known:
        assert ChatCodec(tokenizer, TOOLS).form is HERMES, "a template that writes no calls"
        return
    with pytest.raises(ConfigError, match="unknown form; known forms are hermes, qwen-xml, llama"):
        ChatCodec(tokenizer, TOOLS)


# --- thoughts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "begun", "thought", "said"),
    [
        ("Red.", False, "", "Red."),
        ("<think>\nHm.\n</think>\n\nRed.", False, "Hm.", "Red."),
        ("Hm.\n</think>\n\nRed.", True, "Hm.", "Red."),
        ("Hm. <tool_call>", True, "Hm. <tool_call>", ""),
        ("<think>Hm. <tool_call>", False, "Hm. <tool_call>", ""),
        ("a</think>b</think>c", False, "a</think>b", "c"),
        ("<think>a</think>b<think>c", False, "a\nc", "b"),
        ("", True, "", ""),
    ],
)
def test_what_was_thought_was_not_said(text: str, begun: bool, thought: str, said: str):
    assert split_thought(text, begun=begun) == (thought, said)


@pytest.mark.parametrize("thinking", [False, True])
def test_a_call_in_a_thought_is_never_read(thinking: bool):
    tokenizer = family_tokenizer("thinking")
    codec = ChatCodec(tokenizer, TOOLS, thinking=thinking)
    call = format_tool_call(CALLS[0])
    for text, calls in ((f"{call}</think>{call}", 1), (f"<think>{call}", 0), (f"{call}</think>Done.", 0)):
        said = codec.read(tokenizer.encode(text, add_special_tokens=False))
        assert len(said.calls) == calls
        assert call in said.thought
    tags = {tokenizer.convert_tokens_to_ids(tag) for tag in ("<think>", "</think>")}
    assert tags.isdisjoint(codec.encode("<think></think>")), "nobody else can write one"


def test_thoughts_stay_in_the_row_as_the_template_keeps_them():
    tokenizer = family_tokenizer("thinking")
    codec = ChatCodec(tokenizer, TOOLS, thinking=True)
    row = list(codec.opening([Message(role="user", content="Go.")]).ids)
    messages = [{"role": "user", "content": "Go."}]
    for thought in ("Which one?", "That one."):
        row += tokenizer.encode(f"{thought}\n</think>\n\nLook.<|im_end|>", add_special_tokens=False)
        row += codec.after_action("A door.", stopped=True).ids
        messages.append({"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\nLook."})
        messages.append({"role": "tool", "content": "A door."})
    assert shown(codec, row) == rendered(tokenizer, messages, enable_thinking=True)
    # What is written in its place has no thought, and says so.
    assert shown(codec, codec.encode_message("Look.")) == "\n</think>\n\nLook."


@pytest.mark.parametrize(
    ("tokenizer", "thinking", "words"),
    [
        (lambda: small_tokenizer(CHATML_WITH_TOOLS), True, "does not support thoughts .*rollout.thinking=false"),
        (lambda: small_tokenizer(QWEN3), True, "drops thoughts between tool calls.*rollout.thinking=false"),
        (
            lambda: small_tokenizer(
                family_tokenizer("thinking").chat_template.replace("enable_thinking is false", "no")
            ),
            False,
            "always opens a thought: set rollout.thinking=true",
        ),
    ],
)
def test_thoughts_that_a_row_cannot_follow_are_refused(tokenizer, thinking: bool, words: str):
    with pytest.raises(ConfigError, match=words):
        ChatCodec(tokenizer(), TOOLS, thinking=thinking)


# --- a real tokenizer ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def qwen3() -> PreTrainedTokenizerBase:
    return qwen3_tokenizer()


@pytest.mark.parametrize("thinking", [False, True])
def test_qwen3_speaks_its_own_template(qwen3: PreTrainedTokenizerBase, thinking: bool):
    codec = ChatCodec(qwen3, TOOLS, thinking=thinking)
    assert codec.form is HERMES
    row = list(codec.opening([Message(role="user", content="Go.")]).ids)
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Go."}]
    thought = "<think>\nTwo at once.\n</think>\n\n" if thinking else ""
    for said in ([CALLS[0]], list(CALLS)):
        ids = qwen3.encode(f"{thought}{HERMES.render(said)}<|im_end|>")
        read = codec.read(ids)
        assert (read.calls, read.thought) == (tuple(said), "Two at once." if thinking else "")
        row += [*ids, *codec.after_action(*["<|im_end|> ok"] * len(said), stopped=True).ids]
        called = openai(said)
        messages.append({"role": "assistant", "content": thought, "tool_calls": called})
        messages += [{"role": "tool", "content": "<|im_end|> ok"}] * len(said)
    theirs = rendered(qwen3, messages, enable_thinking=thinking)
    if not thinking:  # the empty block of each prompt stays, as the policy saw it
        prompt = "<|im_start|>assistant\n"
        theirs = theirs.replace(prompt, f"{prompt}<think>\n\n</think>\n\n", 2)
    assert shown(codec, row) == theirs
    assert json.loads(codec.read(ids).messages[0].split("\n")[1])["name"] == "search"


# --- calls without tags ----------------------------------------------------------------------------------------------

UNTAGGED = '{"name": "search", "arguments": {"text": "a `b`"}}'


@pytest.mark.parametrize(
    "message",
    [
        UNTAGGED,
        f"\n {UNTAGGED}\n",
        f"```json\n{UNTAGGED}\n```",
        f"```\n{UNTAGGED}```",
        f"I search now.\n```json\n{UNTAGGED}\n```\nThat is all.",
    ],
)
def test_json_that_names_a_tool_is_a_call_without_tags(message: str):
    assert HERMES.parse(message, TOOLS) == [ToolCall(name="search", arguments={"text": "a `b`"})]


@pytest.mark.parametrize(
    "message",
    [
        UNTAGGED.replace("search", "delete"),  # not a tool
        UNTAGGED.replace("arguments", "parameters"),
        '{"name": "search"}',  # perhaps the record of a person
        f"The call would be {UNTAGGED}",
        f"{UNTAGGED} is how one calls it.",
        f"```json\n{UNTAGGED}\n",  # a block that never ends
        f"```json\n[{UNTAGGED}]\n```",
        f"```json\n{UNTAGGED}\n{UNTAGGED}\n```",
        f"```json\n{UNTAGGED}\n```\nor\n```json\n{UNTAGGED}\n```",
        f"```python\n{UNTAGGED}\n```",
        f"```json\n{UNTAGGED[:-1]}\n```",
        "```json\n" + UNTAGGED.replace("a `b`", "x" * MAX_MESSAGE_CHARS) + "\n```",
        "",
    ],
)
def test_other_json_is_text(message: str):
    assert HERMES.parse(message, TOOLS) == []


def test_a_call_with_tags_is_the_only_one_of_its_message():
    tagged = format_tool_call(ToolCall(name="open_door", arguments={}))
    assert [call.name for call in HERMES.parse(f"```json\n{UNTAGGED}\n```\n{tagged}", TOOLS)] == ["open_door"]


def test_environments_receive_a_call_without_tags_in_hermes_format():
    codec = ChatCodec(small_tokenizer(CHATML_WITH_TOOLS), TOOLS)
    read = codec.read([*codec.encode(f"I search now.\n```json\n{UNTAGGED}\n```"), codec.end_of_turn])
    call = ToolCall(name="search", arguments={"text": "a `b`"})
    assert read.calls == (call,)
    assert read.message == "I search now.\n" + format_tool_call(call)
    assert read.text.startswith("I search now.\n```json")
