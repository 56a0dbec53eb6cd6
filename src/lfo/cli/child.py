"""What a child of `lfo demo` and `lfo ablate` runs: `lfo`, for as long as the parent lives. Nobody imports this."""

from __future__ import annotations

from lfo.cli import main
from lfo.cli.children import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    main()
