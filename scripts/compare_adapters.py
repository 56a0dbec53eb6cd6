#!/usr/bin/env python3
"""Compare the adapters of two runs: scripts/compare_adapters.py RUN RUN

Exit with 1 if they differ by more than rounding.
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors.torch import load_file

CLOSE = 1e-4


def main() -> int:
    one, other = (Path(each) / "adapters" for each in sys.argv[1:3])
    worst = 0.0
    files = sorted(one.glob("*/adapter_model.safetensors"))
    if not files:
        sys.exit(f"{one} holds no adapters")
    for file in files:
        mine, theirs = load_file(file), load_file(other / file.relative_to(one))
        gap = max(float((mine[name] - theirs[name]).abs().max()) for name in mine)
        moved = max(float(tensor.abs().max()) for name, tensor in mine.items() if "lora_B" in name)  # B starts at 0
        print(f"{file.parent.name}: largest difference {gap:.2g}, largest weight of B {moved:.2g}")
        worst = max(worst, gap)
    return int(worst > CLOSE)


if __name__ == "__main__":
    sys.exit(main())
