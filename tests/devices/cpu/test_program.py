"""Kernels run on torch's threads, immediately or as a captured program, with equal results."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("numba")

from nanovllm.devices.cpu import program as program_module
from nanovllm.devices.cpu.features import find_cpu_features
from nanovllm.devices.cpu.ops import NumbaOps
from nanovllm.devices.cpu.program import Launcher, NotCapturableError, find_openmp, float_bits
from nanovllm.ops.interface import NormWeights, PackedLinear, ResidualStream
from nanovllm.ops.torch_ops import TorchOps
from tests.devices import cpu_device

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
DIM, SIZE, VOCAB_SIZE = 40, 56, 30


class Block:
    """A small stack of operations with static weights, like a model."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.launcher = Launcher(dtype)
        self.ops = NumbaOps(self.launcher, find_cpu_features())
        generator = torch.Generator().manual_seed(0)

        def make(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        self.table = make(VOCAB_SIZE, DIM)
        self.norm = NormWeights(make(DIM).float(), 1e-6)
        self.up: PackedLinear = self.ops.pack_linear(
            make(2 * SIZE, DIM), make(2 * SIZE), "silu", True
        )
        self.down: PackedLinear = self.ops.pack_linear(make(DIM, SIZE), None, None, True)

    def __call__(self, token_ids: Tensor) -> Tensor:
        x = self.ops.embed(token_ids, self.table, 1.0)
        x, residual = self.ops.norm(ResidualStream(x), self.norm)
        for _ in range(3):
            x, residual = self.ops.norm(self.down.add_to(residual, self.up(x)), self.norm)
        return x


@pytest.fixture(params=[torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def block(request: pytest.FixtureRequest) -> Block:
    return Block(request.param)


def tokens(*token_ids: int) -> Tensor:
    return torch.tensor(token_ids, dtype=torch.int32)


@pytest.fixture(autouse=True)
def threads() -> Iterator[None]:
    """Set torch to two threads, and restore the number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("num_rows", [0, 1, 4, 7])
def test_a_replay_sees_what_its_inputs_hold_now(block: Block, num_rows: int) -> None:
    inputs = tokens(*[0] * num_rows)
    program, output = block.launcher.capture(lambda: block(inputs))
    for first in (0, 3, 17, 3):
        wanted_ids = (torch.arange(num_rows) * 5 + first) % VOCAB_SIZE
        inputs.copy_(wanted_ids)
        program.run()
        assert torch.equal(output, block(wanted_ids.to(torch.int32)))


def test_recording_runs_nothing(block: Block, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, shapes = tokens(1, 2), []

    def note(*shape: int, dtype: torch.dtype | None = None) -> Tensor:
        shapes.append(shape)
        return block.launcher.empty(*shape, dtype=dtype)

    monkeypatch.setattr(block.ops, "_empty", note)
    block(inputs)
    filled = iter([torch.full(shape, 7.0, dtype=block.launcher.dtype) for shape in shapes])
    monkeypatch.setattr(block.ops, "_empty", lambda *shape, dtype=None: next(filled))
    _, output = block.launcher.capture(lambda: block(inputs))
    assert bool((output == 7.0).all())


@pytest.mark.parametrize(
    "compute", [lambda x: x + 1, lambda x: x.add_(1), torch.zeros_like, lambda x: x[x > 0]]
)
def test_what_a_replay_would_leave_out_is_refused(
    block: Block, compute: Callable[[Tensor], Tensor]
) -> None:
    inputs = tokens(4, 8)
    with pytest.raises(NotCapturableError, match="aten"):
        block.launcher.capture(lambda: compute(block(inputs)))
    program, output = block.launcher.capture(lambda: block(inputs).view(-1, 2).t()[:3])
    program.run()
    assert torch.equal(output, block(inputs).view(-1, 2).t()[:3])


def test_a_program_holds_on_to_its_buffers(block: Block) -> None:
    """Buffers of a program stay valid, whatever is freed, allocated or run in between."""
    inputs = tokens(4, 8, 15)
    want = block(inputs)
    program, output = block.launcher.capture(lambda: block(inputs))
    scratch_size = len(block.launcher.scratch(0))
    block.launcher.scratch(scratch_size + 1).fill_(math.nan)  # replaces the program's scratch
    gc.collect()
    sizes = [scratch_size, output.numel(), 3 * SIZE, 3 * DIM, 6 * SIZE]
    junk = [torch.full((size,), math.nan) for size in sizes * 20]  # takes memory that was freed
    program.run()
    assert torch.equal(output, want)
    assert all(tensor.isnan().all() for tensor in junk)


def test_programs_do_not_disturb_each_other(block: Block) -> None:
    inputs = [tokens(*range(count)) for count in (1, 2, 5)]
    want = [block(ids) for ids in inputs]
    captured = [block.launcher.capture(lambda ids=ids: block(ids)) for ids in inputs]
    for order in ([0, 1, 2], [2, 0, 1, 0]):
        for _, output in captured:
            output.fill_(math.nan)
        for i in order:
            captured[i][0].run()
        assert all(torch.equal(captured[i][1], want[i]) for i in range(3))


def test_an_error_while_recording_leaves_the_launcher_usable(block: Block) -> None:
    inputs = tokens(4, 8, 15)
    want = block(inputs)

    def fail() -> Tensor:
        block(inputs)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block.launcher.capture(fail)
    assert torch.equal(block(inputs), want)  # runs immediately again
    program, output = block.launcher.capture(lambda: block(inputs))
    program.run()
    assert torch.equal(output, want)


def test_scratch_is_float32_whatever_the_default_is() -> None:
    """A script may have set a default dtype of half the size."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        scratch = Launcher(torch.float32).scratch(10)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scratch.dtype == torch.float32
    assert len(scratch) >= 10


def test_openmp_is_found_where_torch_has_it() -> None:
    if "USE_OPENMP=ON" not in torch.__config__.show():
        pytest.skip("this torch runs on other threads")
    assert find_openmp() is not None
    assert Launcher(torch.float32).num_threads == torch.get_num_threads()


@DTYPES
def test_without_openmp_one_thread_does_it_all(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    inputs = tokens(4, 8, 15, 16, 23)
    want = Block(dtype)(inputs)
    monkeypatch.setattr(program_module, "find_openmp", lambda: None)
    block = Block(dtype)
    assert block.launcher.num_threads == 1
    program, output = block.launcher.capture(lambda: block(inputs))
    program.run()
    assert torch.equal(output, block(inputs))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    torch.testing.assert_close(output, want, rtol=tolerance, atol=tolerance)


@DTYPES
def test_any_number_of_threads_gives_the_same(dtype: torch.dtype) -> None:
    outputs = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        block = Block(dtype)
        assert block.launcher.num_threads == num_threads
        outputs.append(block(tokens(4, 8, 15, 16, 23)))
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dim", [8, 13, 40])
def test_a_program_gives_the_same_bits_on_any_number_of_threads(dim: int) -> None:
    """A program may run on one thread for a while, which must not change the order of sums."""
    launcher = Launcher(torch.float32)
    launcher.num_threads = launcher._pool.num_threads = 3
    ops = NumbaOps(launcher, find_cpu_features())
    x, weight = torch.randn(5, dim), torch.randn(3 * dim + 1, dim)
    linear = ops.pack_linear(weight, None, None, False)
    program, output = launcher.capture(lambda: linear(x))
    outputs = []
    for launcher.chooser.num_threads in (1, 2, 3):
        output.fill_(math.nan)
        program.run()
        outputs.append(output.clone())
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[0], outputs[2])
    torch.testing.assert_close(outputs[0], x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_launcher_outlives_a_change_of_threads(block: Block) -> None:
    inputs = tokens(4, 8, 15)
    want = block(inputs)
    for num_threads in (1, 3):
        torch.set_num_threads(num_threads)
        assert torch.equal(block(inputs), want)


def test_two_launchers_run_at_the_same_time() -> None:
    """Each Python thread has its own OpenMP team; two engines share nothing."""
    blocks = [Block(torch.float32) for _ in range(2)]
    inputs = [tokens(1, 2, 3), tokens(4, 5)]
    want = [block(ids) for block, ids in zip(blocks, inputs, strict=True)]
    is_equal: list[bool] = []

    def work(i: int) -> None:
        for _ in range(100):
            is_equal.append(torch.equal(blocks[i](inputs[i]), want[i]))

    workers = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert is_equal == [True] * 200


@pytest.mark.parametrize("value", [0.0, 1.0, -2.5, 1e-6, 1e-5, 0.125, 3e38])
def test_fractions_travel_as_bits(value: float) -> None:
    bits = torch.tensor(float_bits(value), dtype=torch.int64).to(torch.uint32)
    assert bits.view(torch.float32).item() == torch.tensor(value).item()


def test_kernels_are_chosen_by_dtype() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        assert isinstance(cpu_device().ops(dtype), NumbaOps)
    assert isinstance(cpu_device().ops(torch.float16), TorchOps)
