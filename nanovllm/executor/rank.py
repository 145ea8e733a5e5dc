"""The worker of one rank: its device, its group, its part of the model."""

from __future__ import annotations

import torch

from nanovllm.devices.choose import claim_device, create_device
from nanovllm.distributed.group import TPGroup, connect
from nanovllm.distributed.store import TIMEOUT, join_store, own_address
from nanovllm.executor.worker_main import RankWorker, WorkerTask
from nanovllm.worker.worker import Worker


def build_worker(task: WorkerTask, rank: int) -> RankWorker:
    group = join_group(task, rank)
    device = create_device(task.config, group)
    return Worker(task.config, task.model_config, task.checkpoint, device)


def join_group(task: WorkerTask, rank: int) -> TPGroup:
    """Take the rank's share of the machine and meet the other ranks, who leave if it is dropped."""
    site, size = task.site, task.config.tensor_parallel_size
    torch.set_num_threads(site.num_threads)
    backend = claim_device(task.config.device, 0 if site.has_one_device else rank)
    store = join_store(site.host, site.port)
    address = own_address(site.host, site.port)
    return connect(rank, size, store, backend, TIMEOUT, address)
