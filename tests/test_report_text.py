"""Text of models and environments in the page: it always stays text."""

import html
import json
import re
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lfo.report.page import render
from lfo.report.text import as_script_json, shown

HOSTILE = (
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(1)>",
    "<!-- <script>",
    "--> ]]> </SCRIPT >",
    "{{script}} {{payload}}",
    "\\u003c/script\\u003e &lt; &amp;",
    "a\x00b\u2028c\u2029d",
    "\ud800 \udfff \u202egnp.exe",
)
anything = st.text(st.characters(codec=None), max_size=40) | st.sampled_from(HOSTILE)
values = st.recursive(
    anything | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(anything, inner, max_size=3),
    max_leaves=6,
)


class Scripts(HTMLParser):
    """Every element of a page, and what stands inside its scripts, as a browser's parser sees them."""

    def __init__(self) -> None:
        super().__init__()
        self.elements: list[str] = []
        self.contents: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.elements.append(tag)
        if tag == "script":
            self.contents.append("")

    def handle_data(self, data):
        if self.elements and self.elements[-1] == "script":
            self.contents[-1] += data


def payload(content) -> dict:
    return {"title": "lfo report", "anything": content}


@given(values)
def test_json_in_a_script_holds_no_markup_and_reads_back_as_it_was(value):
    written = as_script_json(value)
    assert written.isascii()
    assert not re.search(r"[<>&\x00-\x1f\x7f]", written)
    assert json.loads(written) == value


@given(anything)
def test_no_text_changes_the_elements_of_the_page(content):
    empty, full = Scripts(), Scripts()
    empty.feed(render(payload("")))
    full.feed(render(payload(content)))
    assert full.elements == empty.elements
    assert full.contents[1:] == empty.contents[1:], "the script itself stays what it is"
    assert json.loads(full.contents[0])["anything"] == content


@given(anything)
def test_a_title_is_text_and_no_more(content):
    plain, titled = Scripts(), Scripts()
    plain.feed(render({"title": ""}))
    page = render({"title": content})
    titled.feed(page)
    assert titled.elements == plain.elements
    written = re.search("<title>(.*?)</title>", page, re.DOTALL)
    assert written
    assert html.unescape(written[1]) == content


@given(anything, st.integers(1, 50))
def test_shown_text_can_be_written_seen_and_read(content, limit):
    result = shown(content, limit)
    result.encode("utf-8")
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]", result)
    if len(content) <= limit and content.isascii() and content.isprintable():
        assert result == content


def test_hidden_characters_get_a_face():
    assert shown("a\x00b\tc\nd\r\x7f\u202ee\ud800") == "a␀b\tc\nd␍[U+007F][U+202E]e[U+D800]"
    assert shown("naïve 漢字 🙂") == "naïve 漢字 🙂"


def test_the_policy_names_the_hashes_of_the_style_and_the_script_and_allows_nothing_else():
    page = render(payload(""))
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy[1]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", page), "no address but the name of SVG"


@pytest.mark.parametrize(
    "script", ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "fetch("]
)
def test_the_script_has_no_way_to_make_markup_of_text(script):
    assert script not in render(payload(""))
