"""Named random streams: the same names give the same stream on every machine.

No clock, no `hash()`, no global state. `stream(7, "company", 3)` is independent of every other stream.
"""

from __future__ import annotations

import hashlib
import random


def stream(*parts: int | str) -> random.Random:
    """Return the random stream of these names."""
    name = "\x1f".join(map(str, parts)).encode()
    return random.Random(int.from_bytes(hashlib.sha256(name).digest()[:16], "big"))
