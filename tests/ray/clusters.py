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
# A loopback address other than 127.0.0.1, which Ray replaces by the address of the machine.
NODE = {"node_ip_address": "127.0.0.2", "object_store_memory": 200 * 2**20}
HEAD = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}
NUM_TRIES = 4


@contextmanager
def ray_cluster(num_nodes: int = 3, num_cpus: int = 1, **init_options: Any) -> Iterator[Any]:
    """Start nodes and connect to them; yield Ray's `Cluster`.

    Child processes find the cluster and the package through environment variables.
    """
    import ray
    from ray.cluster_utils import Cluster

    paths = [HERE / "hidden", HERE.parents[1], *filter(None, [os.environ.get("PYTHONPATH")])]
    settings = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "RAY_USAGE_STATS_ENABLED": "0",
        # By default its workers have a lower priority than other processes, here other tests.
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
            for folder in folders:  # log folders
                shutil.rmtree(folder, ignore_errors=True)


def add_node(cluster: Any, **options: Any) -> Any:
    """Add a node; return the handle that `cluster.remove_node` takes.

    Retry, as Ray gives up on a node that takes 15 s to start, which happens if all cores are busy.
    """
    for _ in range(NUM_TRIES - 1):
        with suppress(Exception):  # Ray raises no specific type
            return cluster.add_node(**NODE, **options)
    return cluster.add_node(**NODE, **options)
