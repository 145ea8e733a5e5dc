"""Products of the persistent step with weights that stay codes, on numpy."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from nanovllm.kernels.stored_weights import (
    Fp8Weight,
    Int4Weight,
    order_codes,
    pack_words,
    quantise_blocks,
    quantise_int4,
)
from tests.kernels.cuda.gluon_on_numpy import Shared, array, load_modules

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")
from nanovllm.kernels.cuda.persistent_pack import factors_of
from nanovllm.kernels.cuda.persistent_step import by_tile

NAMES = ("persistent_sizes", "persistent_codes", "persistent_exchange", "persistent_stream")


@pytest.fixture(scope="module")
def modules() -> list[Any]:
    return load_modules(*NAMES)


def make_weight(bits: int, num_out: int, num_in: int, has_zeros: bool) -> Fp8Weight | Int4Weight:
    values = torch.randn(num_out, num_in, generator=torch.Generator().manual_seed(bits))
    if bits == 8:
        rounded = quantise_blocks(values)
        scales = rounded.scales * (1 + torch.rand(rounded.scales.shape))  # of each line its own
        return Fp8Weight(order_codes(rounded.codes), scales, num_in)
    codes, scales = quantise_int4(values, 128)
    zeros = torch.randint(0, 16, scales.shape, dtype=torch.uint8) if has_zeros else None
    return Int4Weight(pack_words(codes), scales.bfloat16(), zeros, num_in)


@pytest.mark.parametrize(
    ("bits", "num_in", "has_zeros"),
    [(8, 4096, False), (8, 3072, False), (8, 12288, False), (4, 4096, False), (4, 2560, True),
     (4, 12288, True)],
)  # fmt: skip
def test_products_with_codes(modules: list[Any], bits: int, num_in: int, has_zeros: bool) -> None:
    sizes, codes_module, _, stream_module = modules
    tiles, num_blocks = sizes.num_tiles(num_in, bits), 2
    weight = make_weight(bits, 8 * num_blocks, num_in, has_zeros)
    x = torch.randn(num_in, generator=torch.Generator().manual_seed(0)).bfloat16()
    padded = torch.nn.functional.pad(x.float(), (0, sizes.num_chunks(num_in, bits) * 1024 - num_in))
    staged: Any = ()
    for k, chunk in enumerate(padded.view(-1, 8, 128)):
        staged = codes_module.stage(staged, k, array(chunk.numpy()), bits)
    stream = make_stream(stream_module, weight, bits, tiles)
    held_x = stream.hold_x(staged, tiles)
    sums = stream.products(0, 0, (), staged, held_x, num_blocks, tiles, 3, bits)
    lines = np.stack([np.stack(sums[2 * r : 2 * r + 2], -1).sum(0) for r in range(num_blocks)])
    found = lines.reshape(num_blocks, 8, 8)
    assert np.allclose(found, found[:, :1], rtol=1e-5, atol=1e-4), "lines of A differ"
    wanted = weight.widen(torch.float32) @ x.float()
    assert np.allclose(found[:, 0].flatten(), wanted.numpy(), rtol=1e-4, atol=1e-3)


def make_stream(module: Any, weight: Fp8Weight | Int4Weight, bits: int, tiles: int) -> Any:
    """With all tiles of the weight in the ring, in the order of their use."""
    words = weight.words.view(-1, 8, weight.words.shape[1])
    words = torch.nn.functional.pad(words, (0, tiles * 512 - words.shape[2]))
    by_place = words.view(-1, 8, tiles, 16, 32).permute(0, 2, 3, 1, 4).reshape(-1, 16, 8, 32)
    factors = by_tile(factors_of(weight).unsqueeze(0), bits).view(len(by_place), -1)
    memory = Shared(by_place.contiguous().numpy()), Shared(factors.numpy())
    barriers = SimpleNamespace(index=lambda i: None)
    return module.Stream(None, *memory, barriers, barriers, None, None, 0, len(by_place), 3, bits)
