"""Where the ranks of a group meet: a table on a port of this machine that the system picks."""

from __future__ import annotations

import socket
from datetime import timedelta

import torch.distributed as dist

HOST = "127.0.0.1"
TIMEOUT = timedelta(hours=1)  # for ranks that load slower than others: a dead one ends the wait


def host_store() -> dist.TCPStore:
    """Serve a table that only this machine can reach, for as long as the object lives."""
    listener = socket.create_server((HOST, 0))
    port = listener.getsockname()[1]
    return dist.TCPStore(
        HOST, port, None, True, TIMEOUT, wait_for_workers=False, master_listen_fd=listener.detach()
    )


def join_store(port: int) -> dist.TCPStore:
    return dist.TCPStore(HOST, port, None, False, TIMEOUT)
