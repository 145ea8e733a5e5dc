"""Workloads have the same tokens on every run and machine."""

from __future__ import annotations

import random

from benchmarks.workloads import mixed, shared_prefix, uniform


def test_the_usual_workload_is_nano_vllms() -> None:
    workload = mixed(151936)
    assert len(workload.prompts) == len(workload.max_tokens) == 256
    assert (workload.num_prompt_tokens, workload.num_new_tokens) == (142_827, 133_966)
    assert max(workload.total_lens) == 2011


def test_it_is_drawn_in_nano_vllms_order() -> None:
    rng = random.Random(0)
    first = [rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))]
    second = [rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))]
    assert mixed(128256).prompts[:2] == [first, second]


def test_a_smaller_one_fits_a_small_vocabulary() -> None:
    workload = mixed(50, 20, 64, 64)
    lengths = [*workload.prompt_lens, *workload.max_tokens]
    assert len(workload.prompts) == 20
    assert 1 <= min(lengths) < max(lengths) <= 64
    assert max(map(max, workload.prompts)) == 49
    assert mixed(50, 1, 1, 1).total_lens == [2]


def test_uniform() -> None:
    workload = uniform(151936, num_prompts=64, prompt_len=2048, max_tokens=1)
    assert workload.prompt_lens == [2048] * 64
    assert (workload.num_prompt_tokens, workload.num_new_tokens) == (131_072, 64)
    assert len(set(map(tuple, workload.prompts))) == 64


def test_shared_prefix() -> None:
    first, second = (workload.prompts[0] for workload in shared_prefix(151936, 1000))
    assert first[:1000] == second[:1000]
    assert len(first) == len(second) == 1020
    assert first[1000] != second[1000]
