"""The state of a training that may be stopped at any time: model, optimizer, losses and step, in one file."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from lfo.atomic import temporary_path

SNAPSHOT_STEPS = 50


@dataclass(frozen=True, slots=True)
class Snapshots:
    """Writes and reads the file."""

    path: Path

    def save(self, step: int, model: Any, optimizer: Any, losses: list[Tensor]) -> None:
        state = {"step": torch.tensor(step), "losses": torch.stack(losses)}
        state |= {f"model.{name}": value for name, value in _parameters(model).items()}
        for index, moments in optimizer.state_dict()["state"].items():
            state |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
        temporary = temporary_path(self.path)
        save_file({name: value.detach().cpu().contiguous() for name, value in state.items()}, temporary)
        os.replace(temporary, self.path)

    def load(self, model: Any, optimizer: Any) -> tuple[int, list[Tensor]]:
        """Restore the last snapshot; return its step and losses, or 0 and none."""
        state: dict[str, Tensor] = {}
        with suppress(OSError, SafetensorError):
            state = load_file(self.path)
        if not state:
            return 0, []
        with torch.no_grad():
            for name, parameter in _parameters(model).items():
                parameter.copy_(state[f"model.{name}"])
        moments: dict[int, dict[str, Tensor]] = {}
        for name, value in state.items():
            if name.startswith("optimizer."):
                _, index, moment = name.split(".")
                moments.setdefault(int(index), {})[moment] = value
        optimizer.load_state_dict({**optimizer.state_dict(), "state": moments})
        return int(state["step"]), list(state["losses"].unbind())


def _parameters(model: Any) -> dict[str, Any]:
    return dict(model.named_parameters())
