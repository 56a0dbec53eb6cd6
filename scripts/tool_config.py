#!/usr/bin/env python3
"""Print the tools of the phone-call world in verl's format.

scripts/tool_config.py > configs/tool_config.yaml
"""

from __future__ import annotations

import yaml

from lfo.env.worlds.phone.environment import PhoneCalls

HEADER = """\
# The tools of the phone-call world, written from its typed methods; to write it again:
#   scripts/tool_config.py > configs/tool_config.yaml
# The class is the environment that carries the calls out: one object plays one rollout.
"""


def tool_config() -> str:
    place = f"{PhoneCalls.__module__}.{PhoneCalls.__name__}"
    tools = [
        {"class_name": place, "config": {"type": "native"}, "tool_schema": schema} for schema in PhoneCalls().tools()
    ]
    return HEADER + yaml.safe_dump({"tools": tools}, sort_keys=False, width=1_000)


if __name__ == "__main__":
    print(tool_config(), end="")
