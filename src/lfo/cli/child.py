"""The entry point of child processes of `lfo demo` and `lfo ablate`: runs `lfo` while the parent lives."""

from __future__ import annotations

from lfo.cli import main
from lfo.cli.children import end_with_parent

if __name__ == "__main__":
    end_with_parent()
    main()
