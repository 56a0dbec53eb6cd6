#!/usr/bin/env python3
"""Compare the adapters of two runs: scripts/compare_adapters.py RUN RUN

Exit with 1 if they differ at all.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file


def main() -> int:
    one, other = (Path(each) / "adapters" for each in sys.argv[1:3])
    same = True
    files = sorted(one.glob("*/adapter_model.safetensors"))
    if not files:
        sys.exit(f"{one} holds no adapters")
    for file in files:
        mine, theirs = load_file(file), load_file(other / file.relative_to(one))
        gap = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
        moved = max(float(tensor.abs().max()) for name, tensor in mine.items() if "lora_B" in name)  # B starts at 0
        print(f"{file.parent.name}: largest difference {gap:.2g}, largest weight of B {moved:.2g}")
        same = same and gap == 0
    return int(not same)


if __name__ == "__main__":
    sys.exit(main())
