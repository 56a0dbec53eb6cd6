"""A CPU as a platform of verl, for machines without a GPU.

A platform gives verl its device, its memory calls and its communication backend. A CPU has no device memory to manage,
so those calls do nothing. Ranks communicate by gloo, and Ray's GPUs are only counted slots
(`ray.init(num_gpus=ranks)`).
"""

# pyright: reportMissingImports=false, reportIncompatibleMethodOverride=false

from __future__ import annotations

import types
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry

_CPU = torch.device("cpu")
_GIB = 1 << 30


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _zero(*_: Any, **__: Any) -> int:
    return 0


class _CpuModule(types.ModuleType):
    """`torch.cpu` with the memory calls of `torch.cuda` that verl uses."""

    max_memory_allocated = max_memory_reserved = memory_allocated = memory_reserved = staticmethod(_zero)
    empty_cache = ipc_collect = reset_peak_memory_stats = set_device = synchronize = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)
    mem_get_info = staticmethod(lambda *_: (8 * _GIB, 16 * _GIB))
    get_rng_state = staticmethod(lambda *_: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *_: torch.set_rng_state(state))
    is_available = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 1)
    current_device = staticmethod(lambda: _CPU)
    get_device_name = staticmethod(lambda *_: "cpu")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = "cpu"  # pyright: ignore[reportAssignmentType]
    vendor_name = "cpu"  # pyright: ignore[reportAssignmentType]
    device_module = _CpuModule("lfo_cpu")  # pyright: ignore[reportAssignmentType]
    set_device = synchronize = set_allocator_settings = empty_cache = staticmethod(_nothing)
    profiler_start = profiler_stop = cudart = staticmethod(_nothing)
    manual_seed = manual_seed_all = staticmethod(torch.manual_seed)  # pyright: ignore[reportAssignmentType]

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        return _CPU

    def device_count(self) -> int:
        return 1

    def get_device_capability(self, device_index: int = 0) -> tuple[int | None, int | None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return []

    def is_ipc_supported(self) -> bool:
        return False
