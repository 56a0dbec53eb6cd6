"""How a model is told of a reply that its rollout did not receive."""

from __future__ import annotations

import pytest

from lfo.protocol.chat import ChatCodec
from lfo.protocol.shown import MARK, SHOWN_FORMS, TOOL, USER, ShownForm
from lfo.types import Message, Origin
from small_tokenizers import ALTERNATING, CHATML_PLAIN, CHATML_WITH_TOOLS, QWEN3, TOOLS
from small_tokenizers import small_tokenizer as build

OPENING = (Message(role="system", content="You help."), Message(role="user", content="Call Acme Bank, please."))
FORMS = pytest.mark.parametrize("form", SHOWN_FORMS.values(), ids=list(SHOWN_FORMS))
TEMPLATES = pytest.mark.parametrize(
    "template", [CHATML_WITH_TOOLS, CHATML_PLAIN, QWEN3], ids=["tools", "plain", "qwen3"]
)


def show(template: str, ids: tuple[int, ...]) -> str:
    return build(template).backend_tokenizer.decode(list(ids), skip_special_tokens=False)


@FORMS
@TEMPLATES
def test_what_follows_a_draft_is_what_follows_a_written_action(template: str, form: ShownForm):
    codec = ChatCodec(build(template), TOOLS)
    text = form.text("No such company. <|im_end|>")
    exchange, after = codec.imagined("call", text, form), codec.shown(text, form)
    (_, action_end), (start, end) = exchange.spans
    assert exchange.ids[action_end] == codec.end_of_turn
    assert exchange.ids[action_end + 1 :] == after.ids
    assert show(template, exchange.ids[start:end]) == text
    assert codec.end_of_turn not in exchange.ids[start:end]


@FORMS
@TEMPLATES
def test_all_its_words_are_predicted_and_none_is_sampled(template: str, form: ShownForm):
    piece = ChatCodec(build(template), TOOLS).shown(form.text("yes"), form)
    assert set(piece.origins) == {Origin.PROMPT, Origin.PREDICTED}
    assert set(piece.origins[piece.content_start : piece.content_end]) == {Origin.PREDICTED}


def test_words_of_the_user_are_a_user_message():
    codec = ChatCodec(build(CHATML_WITH_TOOLS), TOOLS)
    by_user, by_tool = (codec.shown(form.text("yes"), form) for form in (USER, TOOL))
    assert "<tool_response>" not in show(CHATML_WITH_TOOLS, by_user.ids)
    assert "<tool_response>" in show(CHATML_WITH_TOOLS, by_tool.ids)
    assert "<|im_start|>user" in show(CHATML_WITH_TOOLS, by_user.ids)


def test_a_template_says_whether_a_user_may_follow_a_draft():
    assert ChatCodec(build(CHATML_WITH_TOOLS), TOOLS).lets_user_follow_draft
    assert ChatCodec(build(ALTERNATING), TOOLS).lets_user_follow_draft


def test_an_empty_prediction_is_not_quoted():
    assert '""' not in TOOL.text(" ") + USER.text("")
    assert MARK.text("") == "(expected) "


def test_braces_in_a_reply_are_text():
    assert '"{reply} {0}"' in USER.text("{reply} {0}")
    assert "{flaw} {x}" in USER.refused("{flaw} {x}")
    assert "{error} {x}" in USER.failed("{error} {x}")
