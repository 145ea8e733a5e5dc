"""A cluster for all tests of this folder, which must leave it unchanged, and a model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.ray.clusters import ray_cluster
from tests.serve.byte_model import make_byte_file


@pytest.fixture(scope="package")
def cluster() -> Iterator[Any]:
    """Start three nodes with one CPU each."""
    pytest.importorskip("ray")
    with ray_cluster() as cluster:
        yield cluster


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_byte_file(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def engine_options() -> dict[str, Any]:
    """Return the options of a small engine on a CPU."""
    return {
        "device": "cpu",
        "dtype": "float32",
        "max_model_len": 256,
        "kvcache_block_size": 16,
        "num_kvcache_blocks": 256,
        "max_num_seqs": 16,
    }
