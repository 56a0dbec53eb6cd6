"""Text of models, environments and file names, made fit to be shown: nothing hides, reorders or becomes markup.

It is carried as JSON without a character that HTML reads (`as_script_json`) and reaches the page through text nodes
alone. Characters that a reader could not see, or that change how others are seen, are given a face (`shown`).
"""

from __future__ import annotations

import json
import re
from typing import Any

TEXT_LIMIT = 4000  # characters of one message; more is cut, in words

_HIDDEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f\x80-\x9f"  # control characters but tab and newline
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # marks that reorder what is around them
    "\ud800-\udfff]"  # halves of a surrogate pair, which no encoding can write
)


def shown(text: Any, limit: int = TEXT_LIMIT) -> str:
    """Any value as text for a reader.

    >>> shown("a\\x00b\\u202e"), shown({"a": 1}), shown("abcdef", limit=4)
    ('a␀b[U+202E]', '{"a": 1}', 'abcd … (2 more characters)')
    """
    words = text if isinstance(text, str) else json.dumps(text)
    rest = len(words) - limit
    words = _HIDDEN.sub(_face, words[:limit])
    return f"{words} … ({rest:,} more characters)" if rest > 0 else words


def as_script_json(value: Any) -> str:
    """JSON that can stand inside a `<script>` element: it contains no character that HTML gives a meaning.

    >>> as_script_json("</script>")
    '"\\\\u003c/script\\\\u003e"'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII only, so no line separators either
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _face(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)  # the picture of a control character
    return f"[U+{code:04X}]"
