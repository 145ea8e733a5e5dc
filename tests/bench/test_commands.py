"""The benchmarks end to end, on a CPU and a model of a few thousand weights."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from nanovllm.bench.runner import Passes, run_once
from nanovllm.bench.workloads import uniform
from nanovllm.cli import build_parser
from nanovllm.cli.bench import _set_defaults
from nanovllm.cli.options import model_of
from nanovllm.errors import ConfigError
from nanovllm.llm import LLM
from nanovllm.outputs import StepOutput

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


def bench(folder: Path, arguments: str) -> list[dict[str, Any]]:
    """Run `nanovllm bench` in this process; return what it appended to the results."""
    common = f"--model {folder} --device cpu --max-model-len 2048 --json {folder}/results.jsonl"
    args = build_parser().parse_args(["bench", *arguments.split(), *common.split()])
    assert args.run(args) == 0
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_throughput(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (record,) = bench(folder, "throughput --num-seqs 6 --max-len 40 --repeats 2")
    assert (record["case"], record["unit"], len(record["runs"])) == ("nano-6-40", "tok/s", 2)
    assert (record["device"], record["dtype"], record["floor"]) == ("cpu", "float32", None)
    assert "torch" in record["versions"]
    output = capsys.readouterr().out
    assert "tok, Time: " in output
    assert "floor         not known" in output
    assert "of what is possible" not in output


def test_latency_beside_its_floor(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = "--prompt-len 16 --new-tokens 5 --repeats 1 --bandwidth 1 --tflops 1"
    records = bench(folder, f"latency --batch 1 3 {options}")
    assert [record["case"] for record in records] == ["bs1-16-5", "bs3-16-5"]
    for record in records:
        assert record["unit"] == "ms/step"
        assert 0 < record["floor"] < record["value"]
        assert record["rates"] == {"bytes_per_second": 1e12, "flops_per_second": 1e12}
    output = capsys.readouterr().out
    assert "at 1 TB/s, 1 TFLOP/s" in output
    assert output.count("of what is possible") == 2


def test_prefill_and_prefix(folder: Path) -> None:
    (record,) = bench(folder, "prefill --num-seqs 2 --prompt-len 64 --repeats 1")
    assert (record["case"], record["unit"]) == ("prefill-2-64", "tok/s")
    _, *records = bench(folder, "prefix --prefix-len 256 --repeats 1 --bandwidth 1 --tflops 1")
    assert [record["case"] for record in records] == ["cold-256", "cached-256"]
    assert records[1]["floor"] < records[0]["floor"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("latency --batch 1 4 --max-num-seqs 2", "--max-num-seqs 2 is too few for --batch 4"),
        ("prefix --prefix-len 64 --no-prefix-caching", "--no-prefix-caching leaves nothing"),
    ],
)
def test_options_that_contradict_the_measurement(
    folder: Path, arguments: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        bench(folder, arguments)


def test_arrivals(folder: Path) -> None:
    lengths = "--num-seqs 30 --prompt-len 16 --new-tokens 4"
    records = bench(folder, f"arrivals --rate 50 {lengths} --repeats 1 --target-inter-token-ms 40")
    cases = ["ttft-p50@50", "ttft-p99@50", "itl-p50@50", "itl-p99@50"]
    assert [record["case"] for record in records] == cases
    first, late_first, following, late_following = (record["value"] for record in records)
    assert 0 < first <= late_first
    assert 0 < following <= late_following


@pytest.mark.parametrize("depth", [0, 1])
def test_decode_steps_are_counted_after_the_last_first_token(folder: Path, depth: int) -> None:
    """Prompts that enter over several steps: only steps in which all of them decode count."""
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True, "depth": depth}
    with LLM(folder, max_num_batched_tokens=32, max_model_len=256, **options) as llm:
        workload = uniform(512, num_prompts=3, prompt_len=30, max_tokens=9)
        timing = run_once(llm, workload, "a")
        assert timing.num_decode_steps == 8
        assert 0 < timing.decode_seconds < timing.seconds
        assert timing.num_cached_tokens == 0
        assert run_once(llm, workload, "b").num_cached_tokens == 0
        with pytest.raises(ConfigError, match="257 tokens, but the engine ends them at 256"):
            run_once(llm, uniform(512, 1, 256, 1), "c")


class Interrupted:
    """An engine that is interrupted in one of its steps."""

    def __init__(self, llm: LLM, num_steps: int) -> None:
        self._engine, self._num_left = llm.engine, num_steps

    def step(self) -> StepOutput:
        self._num_left -= 1
        if self._num_left < 0:
            raise KeyboardInterrupt
        return self._engine.step()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)


def test_an_interrupt_leaves_the_passes_that_are_done(folder: Path) -> None:
    options: dict[str, Any] = {"load_format": "dummy", "skip_tokenizer_init": True}
    with LLM(folder, max_model_len=256, depth=0, **options) as llm:
        workload = uniform(512, num_prompts=1, prompt_len=8, max_tokens=4)

        def run(repeats: int, num_steps: int) -> Passes:
            fake: Any = SimpleNamespace(engine=Interrupted(llm, num_steps))
            passes = Passes(repeats)
            done = passes.run([workload], lambda salt, count: run_once(fake, workload, salt, count))
            assert len(done) == min(repeats, num_steps // 4 - 1)
            llm.abort_all()
            return passes

        assert not run(repeats=2, num_steps=12).is_interrupted
        late = Passes(repeats=3, deadline=0.0)
        assert len(late.run([workload], lambda salt, count: run_once(llm, workload, salt))) == 1
        passes = run(repeats=3, num_steps=11)
        assert passes.is_interrupted
        with pytest.raises(KeyboardInterrupt):
            passes.run([workload], lambda salt, count: None)
        with pytest.raises(KeyboardInterrupt):
            run(repeats=3, num_steps=6)  # of the second, which is the first that counts


def test_defaults_for_a_cpu() -> None:
    """Less than a minute on two cores, as the sizes tell: time would depend on the machine."""
    for name in ("throughput", "latency", "prefill", "prefix", "arrivals"):
        args = build_parser().parse_args(["bench", name, "--device", "cpu"])
        _set_defaults(args)
        assert model_of(args) == "smollm2"
        largest = max(args.batch) if name == "latency" else getattr(args, "num_seqs", 2)
        lengths = [getattr(args, each, 0) for each in ("prompt_len", "new_tokens", "max_len")]
        lengths += getattr(args, "prefix_len", [])
        assert largest * sum(lengths) <= 2048, name
    args = build_parser().parse_args(["bench", "latency", "--device", "cpu", "--batch", "64"])
    _set_defaults(args)
    assert (args.batch, args.prompt_len) == ([64], 64)


def test_results_that_cannot_be_written_stop_the_run_before_it_starts(folder: Path) -> None:
    (folder / "results.jsonl").mkdir()
    with pytest.raises(ConfigError, match=r"cannot write results to .*: Is a directory"):
        bench(folder, "prefill")


@pytest.mark.parametrize("arguments", ["latency --new-tokens 1", "prefill --repeats 0", "sleep"])
def test_wrong_usage(arguments: str) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args(["bench", *arguments.split()])
