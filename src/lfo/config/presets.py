"""Named sets of settings, what `preset=` stands for: a file of configs, by the dotted names of `knobs`."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from typing import Any

import yaml

FILE = files("lfo").joinpath("assets/presets.yaml")
PRESETS: Mapping[str, Mapping[str, Any]] = yaml.safe_load(FILE.read_text(encoding="utf-8"))
