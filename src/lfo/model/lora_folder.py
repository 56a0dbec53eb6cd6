"""Read any LoRA of PEFT, such as one from supervised fine-tuning, validate it and fit it to a larger rank.

    lora = read_lora("sft")                       # adapter_config.json and adapter_model.safetensors
    a, b = fitted(lora, layer, a, b, scale=2.0)   # a new adapter with the same function

A LoRA adds `scale * b @ a` to a layer. In an adapter of larger rank, the additional rows of `a` keep their values and
the additional columns of `b` are 0, so they add nothing at first and can be trained.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lfo.errors import DataError

WEIGHTS_FILE = "adapter_model.safetensors"
CONFIG_FILE = "adapter_config.json"
# Options of PEFT that change `scale * b @ a`, with the values that do not.
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "use_dora": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": ({}, None),
    "alpha_pattern": ({}, None),
    "lora_bias": (False, None),
    "fan_in_fan_out": (False, None),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Lora:
    folder: Path
    rank: int
    scale: float
    layers: Mapping[str, tuple[Tensor, Tensor]]  # name in PEFT -> a, b


def read_lora(folder: Path | str) -> Lora:
    folder = Path(folder)
    config = _config(folder)
    for name, values in _PLAIN.items():
        if name in config and config[name] not in values:
            raise DataError(
                f"{folder} cannot be loaded by init_from, which reads plain LoRA only: its {name} is {config[name]}"
            )
    try:
        tensors = load_file(folder / WEIGHTS_FILE)
    except FileNotFoundError as error:
        raise DataError(f"{folder} has no {WEIGHTS_FILE}") from error
    except (OSError, SafetensorError) as error:
        raise DataError(f"the adapter file {folder / WEIGHTS_FILE} is damaged: {error}") from error
    names = {key.removesuffix(".weight").removesuffix(".lora_A").removesuffix(".lora_B") for key in tensors}
    try:
        layers = {name: (tensors[f"{name}.lora_A.weight"], tensors[f"{name}.lora_B.weight"]) for name in sorted(names)}
    except KeyError as error:
        raise DataError(f"{folder} contains other tensors than those of a LoRA: {error}") from error
    refuse_values_not_finite(tensors, folder / WEIGHTS_FILE)
    rank, scale = _rank_and_scale(folder, config)
    return Lora(folder=folder, rank=rank, scale=scale, layers=layers)


def read_scale(folder: Path | str) -> float:
    """Return the factor of `b @ a` in a folder of PEFT."""
    return _rank_and_scale(Path(folder), _config(Path(folder)))[1]


def _rank_and_scale(folder: Path, config: Mapping[str, Any]) -> tuple[int, float]:
    try:
        rank, alpha = int(config["r"]), float(config["lora_alpha"])
        if rank < 1 or not math.isfinite(alpha):
            raise ValueError(f"r is {rank} and lora_alpha is {alpha}")
        return rank, alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise DataError(f"{folder / CONFIG_FILE} has no valid r and lora_alpha: {error}") from error


def refuse_values_not_finite(tensors: Mapping[str, Tensor], file: Path) -> None:
    """Raise a `DataError` that names the first tensor with a value that is infinite or not a number."""
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise DataError(f"the adapter file {file} has values that are not finite numbers, in {name}")


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{folder} is not an adapter: it has no {CONFIG_FILE}") from error
    except ValueError as error:
        raise DataError(f"{folder / CONFIG_FILE} is not valid JSON") from error
    if not isinstance(config, dict):
        raise DataError(f"{folder / CONFIG_FILE} must be a mapping")
    return config


def refuse_misfit(lora: Lora, shapes: Mapping[str, tuple[Tensor, Tensor]]) -> None:
    """Raise a `DataError` that names the option to change, unless every layer of the LoRA fits."""
    for name, (a, b) in lora.layers.items():
        if name not in shapes:
            raise DataError(
                f"{lora.folder} adapts the layer {name}, which this run's adapters do not have: "
                "name its modules in lora.targets, or use the base that it was trained on"
            )
        ours_a, ours_b = shapes[name]
        if lora.rank > ours_a.shape[0]:
            raise DataError(f"{lora.folder} has rank {lora.rank}: set lora.rank={lora.rank} or more")
        if a.shape != (lora.rank, ours_a.shape[1]) or b.shape != (ours_b.shape[0], lora.rank):
            raise DataError(f"{lora.folder} was made for another base: the layer {name} has another size")


def fitted(lora: Lora, layer: str, a: Tensor, b: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
    """Return new values of `a` and `b` of a new adapter with this `scale`."""
    theirs_a, theirs_b = lora.layers[layer]
    new_a, new_b = a.clone(), torch.zeros_like(b)
    new_a[: lora.rank] = theirs_a.to(a)
    new_b[:, : lora.rank] = (theirs_b.to(torch.float32) * (lora.scale / scale)).to(b)
    return new_a, new_b
