"""A Ray cluster of several nodes on this machine, which only it can reach."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

HERE = Path(__file__).parent
# Of the loopback range, but not the first, for which Ray puts in the address of the machine.
NODE = {"node_ip_address": "127.0.0.2", "object_store_memory": 200 * 2**20}
HEAD = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
NUM_TRIES = 4


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
        # By default its workers make way for whatever else runs, here for other tests.
        "RAY_worker_niceness": "0",
    }
    with patch.dict(os.environ, settings):
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        cluster = Cluster()
        folders = []
        try:
            head = add_node(cluster, num_cpus=num_cpus, **HEAD)
            folders.append(head.get_session_dir_path())
            for _ in range(num_nodes - 1):
                add_node(cluster, num_cpus=num_cpus)
            os.environ["RAY_ADDRESS"] = cluster.address
            ray.init(address=cluster.address, log_to_driver=False, **init_options)
            yield cluster
        finally:
            ray.shutdown()
            cluster.shutdown()
            for folder in folders:  # of logs
                shutil.rmtree(folder, ignore_errors=True)


def add_node(cluster: Any, **options: Any) -> Any:
    """Add a node; returns what `cluster.remove_node` takes.

    Ray gives up on one that takes 15 s to start, as it may where all cores are busy.
    """
    for _ in range(NUM_TRIES - 1):
        with suppress(Exception):  # of no kind of its own
            return cluster.add_node(**NODE, **options)
    return cluster.add_node(**NODE, **options)
