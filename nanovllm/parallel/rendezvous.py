"""Where the ranks of a group meet, a table on a port that the system picks, and how they do."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nanovllm.ops.tp_group import TPGroup

HOST = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(minutes=1)
TIMEOUT = timedelta(hours=1)  # for ranks that load slower than others: a dead one ends the wait


def host_store(host: str = HOST) -> dist.TCPStore:
    """Serve a table for as long as the object lives; by default only this machine can reach it."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()
    store = dist.TCPStore(
        host, port, None, True, CONNECT_TIMEOUT, wait_for_workers=False, master_listen_fd=fd
    )
    store.set_timeout(TIMEOUT)
    return store


def join_store(host: str, port: int) -> dist.TCPStore:
    store = dist.TCPStore(host, port, None, False, CONNECT_TIMEOUT)
    store.set_timeout(TIMEOUT)
    return store


def connect(
    rank: int,
    size: int,
    store: dist.Store,
    backend: str,
    timeout: timedelta,
    address: str = HOST,  # of this machine, where other ranks reach it
) -> TPGroup:
    """Join the group that meets at a store; nothing of it is global to the process."""
    kinds: Any = dist  # torch's stubs know only some of what follows
    if backend == "nccl":
        kind, options = kinds.ProcessGroupNCCL, kinds.ProcessGroupNCCL.Options()
    else:
        kind, options = kinds.ProcessGroupGloo, kinds.ProcessGroupGloo._Options()
        # By itself it might choose another network.
        options._devices = [kind.create_device(hostname=address)]
    options._timeout = timeout
    return TPGroup(rank, size, kind(store, rank, size, options))


def own_address(host: str, port: int) -> str:
    """Return the address that this machine has in the network of a host."""
    with socket.create_connection((host, port), CONNECT_TIMEOUT.total_seconds()) as connection:
        return str(connection.getsockname()[0])
