"""Solutions of day 7.

PYTHONPATH=learn python learn/solutions/day7.py
"""

from __future__ import annotations

import os
import socket
import tempfile
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, multiprocessing

import day2_kv_cache as day2
from common import Model, load_from_command_line, show
from day1_forward import PROMPT, Attend, mlp, project_qkv, rms_norm
from day3_paged_cache import BlockManager, PagedCache
from day7_step_ahead import Device, Engine, Scheduler, Sequence


# Exercise 1: a rank is one of the processes that share the model. It holds some of the heads and
# some of the MLP's inner units. It keeps the rows of these heads and units in the matrices that
# compute them, and their columns in o_proj and down_proj, so it computes a part of each sum.
def shard_model(model: Model, rank: int, num_ranks: int) -> Model:
    """Return this rank's part of a model; embedding, norms and lm_head are on every rank."""
    num_kv_heads = model.config.num_kv_heads

    def rows(weight: Tensor, num_units: int) -> Tensor:
        units = weight.unflatten(0, (num_units, -1))  # a unit stays on one rank
        return units.tensor_split(num_ranks)[rank].flatten(0, 1)

    def columns(weight: Tensor, num_units: int) -> Tensor:
        return rows(weight.T, num_units).T

    layers = []
    for layer in model.layers:
        shard = {name: rows(layer[name], num_kv_heads) for name in ("q_proj", "k_proj", "v_proj")}
        shard["o_proj"] = columns(layer["o_proj"], num_kv_heads)
        num_inner = len(layer["gate_proj"])
        shard |= {name: rows(layer[name], num_inner) for name in ("gate_proj", "up_proj")}
        shard["down_proj"] = columns(layer["down_proj"], num_inner)
        layers.append({**layer, **shard})
    num_own = len(layers[0]["k_proj"]) // model.config.head_dim  # the cache is sharded, too
    return replace(model, config=replace(model.config, num_kv_heads=num_own), layers=layers)


def forward(model: Model, token_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
    """Day 1's `forward`, with a sum over all ranks after each of the two halves of a layer."""
    config = model.config
    hidden = model.embedding[token_ids]
    for index, layer in enumerate(model.layers):
        x = rms_norm(hidden, layer["input_layernorm"], config.norm_eps)
        q, k, v = project_qkv(config, layer, x, positions)
        hidden = hidden + summed(F.linear(attend(index, q, k, v).flatten(1), layer["o_proj"]))
        x = rms_norm(hidden, layer["post_attention_layernorm"], config.norm_eps)
        hidden = hidden + summed(mlp(layer, x))
    return rms_norm(hidden, model.norm, config.norm_eps)


def summed(part: Tensor) -> Tensor:
    dist.all_reduce(part)
    return part


def generate_on_ranks(
    model: Model, prompt_ids: list[int], max_tokens: int, num_ranks: int = 2
) -> list[int]:
    """Decode greedily with one process per rank."""
    shards = [shard_model(model, rank, num_ranks) for rank in range(num_ranks)]
    outputs = multiprocessing.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/ranks"  # where the ranks find each other
        args = (shards, address, prompt_ids, max_tokens, outputs)
        multiprocessing.spawn(run_rank, args, nprocs=num_ranks)
    return outputs.get()


def run_rank(
    rank: int,
    shards: list[Model],
    address: str,
    prompt_ids: list[int],
    max_tokens: int,
    outputs: Any,
) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = socket.if_nameindex()[0][1]  # loopback
    dist.init_process_group("gloo", address, rank=rank, world_size=len(shards))
    day2.forward = forward  # day 2's generate runs on every rank, and all choose the same tokens
    output_ids = day2.generate(shards[rank], prompt_ids, max_tokens)
    if rank == 0:
        outputs.put(output_ids)
    dist.destroy_process_group()


# Exercise 2: the device runs steps in order. A step in flight may still write to the blocks, but
# the next sequence that gets them writes and reads them in a later step.
def abort(engine: Engine, seq: Sequence) -> None:
    """End a sequence now; tokens that steps in flight choose for it are dropped at commit."""
    if seq in engine.scheduler.waiting:
        engine.scheduler.waiting.remove(seq)
    elif seq in engine.scheduler.running:
        engine.scheduler.running.remove(seq)
        engine.scheduler.blocks.release(seq)


def main(model: Model, tokenizer: Any) -> None:
    prompt_ids = tokenizer.encode(PROMPT)
    alone = day2.generate(model, prompt_ids, max_tokens=8)
    together = generate_on_ranks(model, prompt_ids, max_tokens=8)
    print(f"one process:   {show(tokenizer, alone)}\ntwo processes: {show(tokenizer, together)}")
    show_abort(model, tokenizer)


def show_abort(model: Model, tokenizer: Any) -> None:
    """Abort one of two sequences in the middle; the other is not affected."""
    scheduler = Scheduler(BlockManager(16, 16), model.config.eos_ids, 4, 64)
    engine = Engine(Device(model, PagedCache(model.config, 16, 16)), scheduler, depth=1)
    aborted, other = (Sequence(name, tokenizer.encode(PROMPT), 8) for name in "AB")
    scheduler.waiting.extend([aborted, other])
    for _ in range(4):
        engine.step()
    abort(engine, aborted)
    num_free, num_steps = len(scheduler.blocks.free_ids), len(engine.in_flight)
    print(f"A aborted: {num_free} blocks free, steps in flight: {num_steps}")
    engine.run([])
    for seq in (aborted, other):
        print(f"  {seq.name}: {show(tokenizer, seq.output_ids)}")
    print(f"late rows that were dropped: {scheduler.num_late}")


if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
