"""Where each rank of a run lies: its node and its device, known before the rank itself has started.

verl asks the ranks, which import for many seconds before they answer; whatever starts beside them would wait. Here a
task that imports nothing asks in their place, in the slot of the placement group that the rank will have.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from verl.single_controller.ray.base import sort_placement_group_by_node_ip
from verl.utils.device import get_resource_name

A_LITTLE = 0.01  # of a device: enough to be told which one it is


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    node: str
    device: str
    address: str
    port: str  # a free one


def places_of(pool: Any, device_name: str) -> list[Place]:
    """One for each rank of verl's resource pool, in their order."""
    groups = sort_placement_group_by_node_ip(pool.get_placement_groups(device_name=device_name))
    ask: Any = ray.remote(num_cpus=0, num_gpus=A_LITTLE)(_question())
    asked = [
        ask.options(
            scheduling_strategy=PlacementGroupSchedulingStrategy(
                placement_group=group, placement_group_bundle_index=slot
            )
        ).remote(get_resource_name())
        for group in groups
        for slot in range(pool.store[0])
    ]
    return [Place(**answer) for answer in ray.get(asked)]


def _question() -> Callable[[str], dict[str, str]]:
    def here(resource: str) -> dict[str, str]:
        import socket

        import ray

        context = ray.get_runtime_context()
        with socket.socket() as free:
            free.bind(("", 0))
            port = str(free.getsockname()[1])
        return {
            "node": context.get_node_id(),
            "device": context.get_accelerator_ids()[resource][0],
            "address": ray.util.get_node_ip_address().strip("[]"),
            "port": port,
        }

    return here  # made here, so that Ray sends its code: by its name it would import this module, and verl with it
