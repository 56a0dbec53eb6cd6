"""Make text of models, environments and file names safe to show.

The page contains it as JSON without characters that HTML interprets (`as_script_json`) and shows it only as text nodes.
`shown` replaces invisible characters and those that change how others are displayed.
"""

from __future__ import annotations

import json
import re
from typing import Any

TEXT_LIMIT = 4000  # characters of one message; the rest is cut, with a note

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f\x80-\x9f"  # control characters except tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that reorder text
    "\ud800-\udfff]"  # halves of surrogate pairs, which cannot be encoded
)


def shown(text: Any, limit: int = TEXT_LIMIT) -> str:
    """Return any value as safe text.

    >>> shown("a\\x00b\\u202e"), shown({"a": 1}), shown("abcdef", limit=4)
    ('a␀b[U+202E]', '{"a": 1}', 'abcd … (2 more characters)')
    """
    words = text if isinstance(text, str) else json.dumps(text)
    rest = len(words) - limit
    words = _HIDDEN.sub(_face, words[:limit])
    return f"{words} … ({rest:,} more characters)" if rest > 0 else words


def as_script_json(value: Any) -> str:
    """Return JSON for a `<script>` element, without characters that HTML interprets.

    >>> as_script_json("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII only, so without line separators
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _face(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the symbol of a control character
    return f"[U+{code:04X}]"
