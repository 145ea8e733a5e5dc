"""Rendezvous of the ranks of a process group through a TCPStore on a free port."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from nanovllm.ops.tp_group import TPGroup

HOST = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(minutes=1)
TIMEOUT = timedelta(hours=1)  # long enough for slow loading; the supervisor detects dead ranks


def host_store(host: str = HOST) -> dist.TCPStore:
    """Start a TCPStore server on a free port; by default only this machine can reach it.

    The server runs until the returned object is freed.
    """
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
    address: str = HOST,  # address of this machine that other ranks can reach
) -> TPGroup:
    """Create the process group of all ranks that use `store`, without torch's default group."""
    kinds: Any = dist  # torch's stubs lack some of the following names
    if backend == "nccl":
        kind, options = kinds.ProcessGroupNCCL, kinds.ProcessGroupNCCL.Options()
    else:
        kind, options = kinds.ProcessGroupGloo, kinds.ProcessGroupGloo._Options()
        # Gloo might choose another network interface by default.
        options._devices = [kind.create_device(hostname=address)]
    options._timeout = timeout
    return TPGroup(rank, size, kind(store, rank, size, options))


def own_address(host: str, port: int) -> str:
    """Return this machine's address on the network that connects it to a host."""
    with socket.create_connection((host, port), CONNECT_TIMEOUT.total_seconds()) as connection:
        return str(connection.getsockname()[0])
