"""Where the ranks of a group meet: a table on a port that the system picks."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

HOST = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(minutes=1)
TIMEOUT = timedelta(hours=1)  # for ranks that load slower than others: a dead one ends the wait


def host_store(host: str = HOST) -> dist.TCPStore:
    """Serve a table for as long as the object lives; by default only this machine can reach it."""
    listener = socket.create_server((host, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()
    return _patient(
        dist.TCPStore(
            host, port, None, True, CONNECT_TIMEOUT, wait_for_workers=False, master_listen_fd=fd
        )
    )


def join_store(host: str, port: int) -> dist.TCPStore:
    return _patient(dist.TCPStore(host, port, None, False, CONNECT_TIMEOUT))


def own_address(host: str, port: int) -> str:
    """Return the address that this machine has in the network of a host."""
    with socket.create_connection((host, port), CONNECT_TIMEOUT.total_seconds()) as connection:
        return str(connection.getsockname()[0])


def _patient(store: dist.TCPStore) -> dist.TCPStore:
    store.set_timeout(TIMEOUT)
    return store
