"""`lfo report RUNS... -o report.html`: write run folders as one self-contained page.

The page is a template that contains its style, its script and the data of the runs. A few hundred lines of our own draw
the charts instead of a plotting library: its bundle has several megabytes, more than all runs together, and a page that
people keep with their results should be small and readable without tools.

Data of runs is not trusted. It is JSON without characters that HTML interprets (`text.as_script_json`), the script
inserts it as text nodes, and a content security policy allows only this style and script, by their hashes, and no
requests.
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
    """Return the page of a payload; a live page may request updates from its server."""
    parts = _parts(live)
    filling = {
        "policy": content_policy(live=live),
        "title": html.escape(str(payload["title"])),
        "style": parts["css"],
        "payload": as_script_json(payload),
        "script": parts["js"],
    }
    # In one pass, so that a placeholder in inserted text is not replaced.
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
