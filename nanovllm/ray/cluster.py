"""How many engines a Ray cluster has room for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray

from nanovllm.config import EngineConfig
from nanovllm.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Room:
    """Where engines go on a cluster."""

    num_engines: int
    each: dict[str, float]  # what Ray sets aside for one, in its own words


def find_room(config: EngineConfig, num_engines: int | None = None) -> Room:
    """Plan as many engines as fit, or as many as are asked for.

    An engine takes a GPU for every rank. Without GPUs it takes the CPUs of the smallest machine, or
    fewer if that many engines are asked for.
    """
    resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    num_ranks = config.tensor_parallel_size * config.data_parallel_size
    gpus = [int(each.get("GPU", 0)) for each in resources]
    if config.device != "cpu" and any(gpus):
        fitting = sum(count // num_ranks for count in gpus)
        return _checked(Room(num_engines or max(fitting, 1), {"num_gpus": num_ranks}), fitting)
    cpus = [int(each["CPU"]) for each in resources if each.get("CPU", 0) >= 1]
    least = min(cpus, default=1)
    wanted = num_engines or len(cpus)
    each = max(min(least, sum(cpus) // max(wanted, 1)), 1)
    fitting = sum(count // each for count in cpus)
    return _checked(Room(wanted, {"num_cpus": each}), fitting)


def _checked(room: Room, fitting: int) -> Room:
    if not 1 <= room.num_engines <= fitting:
        needs = ", ".join(f"{name}={count:g}" for name, count in room.each.items())
        raise ConfigError(
            f"the Ray cluster has room for {fitting} engines with {needs} each, "
            f"not for {room.num_engines}"
        )
    return room


def remote(kind: type, **options: Any) -> Any:
    """Make a class one of actors, of which Ray starts each in a process of its own."""
    return ray.remote(**options)(kind)
