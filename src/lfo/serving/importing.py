"""Import conversations from a file in OpenAI's chat format, one JSON object in each line.

    {"messages": [{"role": "user", "content": "..."}, ...], "tools": [...], "reward": 1.0}

as for fine-tuning; `tools`, `reward` and `id` may be left out, and a line may be the list of messages alone.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from lfo.errors import DataError
from lfo.serving.book import OpenConversation
from lfo.serving.recording import Recorder


def import_chats(path: Path, recorder: Recorder) -> None:
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    recorder.write(_conversation(line, f"{path}, line {number}"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error


def _conversation(line: bytes, where: str) -> OpenConversation:
    try:
        given: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise DataError(f"{where}: not valid JSON") from None
    given = {"messages": given} if isinstance(given, list) else given
    messages = given.get("messages") if isinstance(given, dict) else None
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise DataError(f"{where}: needs messages, a list of objects with a role")
    tools, reward = given.get("tools"), given.get("reward")
    if not isinstance(reward, int | float) or isinstance(reward, bool) or not math.isfinite(reward):
        reward = None
    return OpenConversation(
        messages=messages,
        tools=tools if isinstance(tools, list) else None,
        model=str(given.get("model", "")),
        name=str(given.get("id", "")),
        outcome=None if reward is None else float(reward),
    )
