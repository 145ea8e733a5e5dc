"""benchmarks/engine/steps.py on a CPU, with a tiny model."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import steps

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 2048,
    "dtype": "float32",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


@pytest.fixture
def measure(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run the script in this process; return the records it wrote."""

    def run(arguments: str) -> list[dict[str, Any]]:
        path = folder / "results.jsonl"
        common = f"--model {folder} --device cpu --max-model-len 2048 --repeats 2 --json {path}"
        monkeypatch.setattr(sys, "argv", ["steps.py", *arguments.split(), *common.split()])
        assert steps.main() == 0
        return [json.loads(line) for line in path.read_text().splitlines()]

    return run


def test_latency_beside_its_floor(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--prompt-len 16 --new-tokens 5"
    records = measure(f"latency --batch 1 3 {sizes} --bandwidth 1 --tflops 1")
    assert [record["case"] for record in records] == ["bs1-16-5", "bs3-16-5"]
    for record in records:
        assert (record["unit"], len(record["runs"])) == ("ms/step", 2)
        assert (record["device"], record["dtype"]) == ("cpu", "float32")
        assert 0 < record["floor"] < record["value"]
        assert record["rates"] == {"bytes_per_second": 1e12, "flops_per_second": 1e12}
        assert "torch" in record["versions"]
    output = capsys.readouterr().out
    assert "floor at 1 TB/s, 1 TFLOP/s" in output
    assert output.count("of the floor's speed") == 2


def test_prefix(measure: Any) -> None:
    records = measure("prefix --prefix-len 256 --bandwidth 1 --tflops 1")
    assert [record["case"] for record in records] == ["cold-256", "cached-256"]
    assert records[1]["floor"] < records[0]["floor"]


def test_samples_without_a_floor(measure: Any, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = measure("samples --num-seqs 6 --prompt-len 20 --new-tokens 4")
    assert (record["case"], record["unit"]) == ("samples-6-20-4", "tok/s")
    assert record["floor"] is None
    output = capsys.readouterr().out
    assert "floor unknown" in output
    assert "of the floor's speed" not in output


@pytest.mark.parametrize("arguments", ["latency --new-tokens 1", "prefix --repeats 0", "sleep"])
def test_wrong_usage(arguments: str, measure: Any) -> None:
    with pytest.raises(SystemExit):
        measure(arguments)
