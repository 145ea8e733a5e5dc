"""A Ray cluster of several nodes on this machine, which only it can reach."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
# Of the loopback range, but not the first, for which Ray puts in the address of the machine.
NODE = {"node_ip_address": "127.0.0.2", "object_store_memory": 200 * 2**20}


@contextmanager
def ray_cluster(num_nodes: int = 3, num_cpus: int = 1, **init_options: Any) -> Iterator[Any]:
    """Start nodes and connect to them; yields Ray's `Cluster`.

    Children of this process find the cluster too, and the package: both are in the environment.
    """
    import ray
    from ray.cluster_utils import Cluster

    paths = [HERE / "hidden", HERE.parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_raylet_start_wait_time_s": "120",  # machines that run tests are busy
    }
    with patch.dict(os.environ, settings):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        cluster = Cluster()
        try:
            cluster.add_node(num_cpus=num_cpus, include_dashboard=False, **NODE)
            for _ in range(num_nodes - 1):
                add_node(cluster, num_cpus=num_cpus)
            os.environ["RAY_ADDRESS"] = cluster.address
            ray.init(address=cluster.address, log_to_driver=False, **init_options)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()


def add_node(cluster: Any, **options: Any) -> Any:
    """Add a node; returns what `cluster.remove_node` takes."""
    return cluster.add_node(**NODE, **options)
