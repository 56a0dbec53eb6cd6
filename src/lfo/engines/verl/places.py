"""Find out the node and the device of each rank before the rank itself has started.

verl asks the ranks, which import for many seconds before they answer, and the servers would wait for that. Here a task
that imports nothing runs in the slot of the placement group that the rank will get, and answers in its place.
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

A_LITTLE = 0.01  # the share of a device for which Ray already tells a task which device it is


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    node: str
    device: str
    address: str
    port: str  # a free port on the node


def places_of(pool: Any, device_name: str) -> list[Place]:
    """Return the place of each rank of verl's resource pool, in the order of the ranks."""
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
    """Return the function that the task runs.

    It is a local function because Ray sends the code of those. Ray would import a function of this module by name, and
    verl with it.
    """

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

    return here
