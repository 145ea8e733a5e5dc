"""The llama.cpp side of gguf_peers.py, run by an interpreter that can import llama_cpp.

    PYTHON llama_side.py FILE              # serves loads; threads: OMP_NUM_THREADS
    PYTHON llama_side.py FILE Q4_0_FILE    # writes FILE's weights as Q4_0

Calls the library's C functions, as its own server does, so that Python only selects the most likely
token.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
from typing import Any

import llama_cpp
import numpy as np

MAX_TOKENS = 512  # per batch
MAX_SEQS, MAX_LEN = 16, 1024


class Model:
    def __init__(self, path: str, num_threads: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            path.encode(), llama_cpp.llama_model_default_params()
        )
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max = MAX_SEQS * MAX_LEN, MAX_SEQS
        params.n_batch = params.n_ubatch = MAX_TOKENS
        params.n_threads = params.n_threads_batch = num_threads
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        vocabulary = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocabulary)
        self._batch = llama_cpp.llama_batch_init(MAX_TOKENS, 0, 1)

    def generate(self, prompts: list[list[int]], num_new: int) -> list[list[int]]:
        """Decode all prompts greedily as one batch."""
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self._context), True)
        newest, lengths = prompts, [0] * len(prompts)
        outputs: list[list[int]] = [[] for _ in prompts]
        for _ in range(num_new):
            tokens = self._step(newest, lengths)
            lengths = [length + len(ids) for length, ids in zip(lengths, newest, strict=True)]
            newest = [[token] for token in tokens]
            for output, token in zip(outputs, tokens, strict=True):
                output.append(token)
        return outputs

    def _step(self, newest: list[list[int]], lengths: list[int]) -> list[int]:
        batch, count, last = self._batch, 0, []
        for seq, (ids, length) in enumerate(zip(newest, lengths, strict=True)):
            for i, token in enumerate(ids):
                batch.token[count], batch.pos[count] = token, length + i
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, seq
                batch.logits[count] = i == len(ids) - 1
                count += 1
            last.append(count - 1)
        batch.n_tokens = count
        if llama_cpp.llama_decode(self._context, batch) != 0:
            raise RuntimeError("llama_decode failed")
        return [int(self._logits(index).argmax()) for index in last]

    def _logits(self, index: int) -> Any:
        pointer = llama_cpp.llama_get_logits_ith(self._context, index)
        return np.ctypeslib.as_array(pointer, shape=(self._vocab_size,))


def requantize(path: str, target: str) -> None:
    """Write a model as Q4_0 with llama.cpp's quantizer, which may read quantized weights."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0, True
    if llama_cpp.llama_model_quantize(path.encode(), target.encode(), ctypes.byref(params)) != 0:
        raise RuntimeError(f"llama.cpp could not quantize {path}")


def main() -> None:
    if len(sys.argv) > 2:
        requantize(*sys.argv[1:3])
        return
    model = Model(sys.argv[1], int(os.environ["OMP_NUM_THREADS"]))
    for line in sys.stdin:
        load = json.loads(line)
        clock, cores = time.perf_counter(), time.process_time()
        model.generate(load["prompts"], load["num_new"])
        taken = {"clock": time.perf_counter() - clock, "cores": time.process_time() - cores}
        print(json.dumps(taken), flush=True)


if __name__ == "__main__":
    main()
