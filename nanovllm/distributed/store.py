"""Where the ranks of a group meet: a table on a port of this machine that the system picks."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

HOST = "127.0.0.1"
CONNECT_TIMEOUT = timedelta(minutes=1)
TIMEOUT = timedelta(hours=1)  # for ranks that load slower than others: a dead one ends the wait


def host_store() -> dist.TCPStore:
    """Serve a table that only this machine can reach, for as long as the object lives."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    fd = listener.detach()
    return _patient(
        dist.TCPStore(
            HOST, port, None, True, CONNECT_TIMEOUT, wait_for_workers=False, master_listen_fd=fd
        )
    )


def join_store(port: int) -> dist.TCPStore:
    return _patient(dist.TCPStore(HOST, port, None, False, CONNECT_TIMEOUT))


def _patient(store: dist.TCPStore) -> dist.TCPStore:
    store.set_timeout(TIMEOUT)
    return store
