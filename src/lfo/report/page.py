"""`lfo report RUNS... -o report.html`: run folders -> one page that opens from disk and loads nothing.

The page is a template with its style, its script and the data of the runs inside. The charts are drawn by a few hundred
lines of our own rather than by a plotting library: a bundle of one weighs several megabytes, more than all runs
together, and a page that people keep beside their results should be small, readable without tools, and ours to label.

What runs wrote is never trusted. It is JSON without a character that HTML reads (`text.as_script_json`), the script
puts it on the page as text nodes, and a content security policy allows this very style and script by their hashes and
nothing else: no request, no other script, not even by mistake.
"""

from __future__ import annotations

import base64
import hashlib
import html
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from lfo.report.text import as_script_json

_OWN_SERVER = "connect-src 'self'; "


def render(payload: Mapping[str, Any], *, live: bool = False) -> str:
    """The page of a payload, pure ASCII but for the template's own words; a live one may ask its server for news."""
    parts = _parts(live)
    filling = {
        "policy": content_policy(live=live),
        "title": html.escape(str(payload["title"])),
        "style": parts["css"],
        "payload": as_script_json(payload),
        "script": parts["js"],
    }
    # In one pass, so that a place named in what is filled in stays what it is.
    return re.sub(r"\{\{(\w+)\}\}", lambda match: filling[match[1]], parts["html"])


def content_policy(*, live: bool = False) -> str:
    parts = _parts(live)
    return (
        f"default-src 'none'; script-src {_hash(parts['js'])}; style-src {_hash(parts['css'])}; "
        f"{_OWN_SERVER if live else ''}base-uri 'none'; form-action 'none'"
    )


@cache
def _parts(live: bool) -> dict[str, str]:
    folder = files("lfo.report")
    parts = {name: (folder / f"page.{name}").read_text(encoding="utf-8") for name in ("html", "css", "js", "live.js")}
    return {**parts, "js": f"{parts['js']}\n{parts['live.js']}" if live else parts["js"]}


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
