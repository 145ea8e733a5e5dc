#!/usr/bin/env bash
# Measure the GPU tables of benchmarks/RESULTS.md, the most important first, and rewrite them.
#
#     benchmarks/report.sh [PATTERN]       e.g. '*-8b'; PYTHON names the interpreter (default: python)
#
# Results are appended to benchmarks/results.jsonl. A part that fails or takes longer than LIMIT
# seconds (default: 200) is reported at the end; the other parts still run.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
pattern=${1:-*} python=${PYTHON:-python} num_run=0 failed=()

part() { # NAME ARGUMENTS...
    # shellcheck disable=SC2053  # $pattern is a glob
    [[ $1 == $pattern ]] || return 0
    num_run=$((num_run + 1))
    echo "[$1] ${*:2}"
    timeout --signal=KILL "${LIMIT:-200}" "$python" "${@:2}" --json benchmarks/results.jsonl || failed+=("$1")
}

part compare-0.6b bench.py --load-format dummy --model qwen3-0.6b --case mixed bs1 bs8 bs64 bs256 prefill
part steps-0.6b -m benchmarks.engine.steps latency --model qwen3-0.6b
part prefix-0.6b -m benchmarks.engine.steps prefix --model qwen3-0.6b --prefix-len 492 1000 4000 16000 --max-model-len 16384
part samples-0.6b -m benchmarks.engine.steps samples --model qwen3-0.6b --num-seqs 1024 --max-num-seqs 1024 \
    --prompt-len 1000 --new-tokens 256
part features-0.6b -m benchmarks.engine.request_features --model qwen3-0.6b --batch 256
part trace-0.6b -m benchmarks.engine.trace --model qwen3-0.6b --batch 1 64 256
part compare-8b bench.py --load-format dummy --model qwen3-8b --case mixed bs1 bs64 bs256 prefill
part steps-8b -m benchmarks.engine.steps latency --model qwen3-8b --batch 1 64
part weights-8b -m benchmarks.engine.quantized_weights --weights fp8 fp8-block int4 --case bs1 bs8 bs64 prefill
part steps-30b -m benchmarks.engine.steps latency --model qwen3-30b-a3b --batch 1 64
part arrivals-0.6b -m benchmarks.engine.arrivals --model qwen3-0.6b --rate 200
part arrivals-8b -m benchmarks.engine.arrivals --model qwen3-8b --rate 40
part startup-0.6b -m benchmarks.engine.startup --model qwen3-0.6b
part transformers-0.6b bench.py --load-format dummy --model qwen3-0.6b --engine nanovllm transformers \
    --num-seqs 64 --max-input-len 512 --max-output-len 512

[[ $num_run != 0 ]] || { echo "no part matches $pattern"; exit 2; }
"$python" -m benchmarks.report.tables
[[ ${#failed[@]} == 0 ]] || { echo "FAILED, whole or in part: ${failed[*]}"; exit 1; }
