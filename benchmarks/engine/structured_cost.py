"""Measure the cost of a JSON schema on every row of a decode step.

    python -m benchmarks.engine.structured_cost --rows 64 [--model CONFIG_OR_CHECKPOINT]

Weights are random; the target is at most 15% at 64 rows of Qwen3-0.6B on an H200. The vocabulary is
synthetic and as large as the model's, since a config has none; `--tokenizer tokenizer.json` uses a
real one. `--max-length N` bounds the strings of the schema, which makes some bitmasks a hundred
times slower: near the bound, every token of the vocabulary is tried. `--mask-us N` replaces
llguidance, if it is not installed, with a pause of N microseconds per row.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models

from benchmarks.models import model_path
from nanovllm import LLM, SamplingParams
from nanovllm.engine.input_processor import Vocabulary
from nanovllm.features.grammar.guidance import GuidanceEngine, GuidanceGrammar

SCHEMA: dict[str, Any] = {
    "type": "array",
    "minItems": 100,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "kind": {"enum": ["first", "second", "third"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": False,
    },
}


def main() -> None:
    args = parse_args()
    if args.max_length is not None:
        SCHEMA["items"]["properties"]["name"]["maxLength"] = args.max_length
    llm = LLM(
        model_path(args.model),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_num_seqs=args.rows,
        max_model_len=1024,
    )
    engine, vocab_size = llm.engine, llm.engine.model_config.vocab_size
    if args.mask_us is None:
        backend = (
            Tokenizer.from_file(args.tokenizer)
            if args.tokenizer
            else synthetic_tokenizer(vocab_size)
        )
        tokenizer = SimpleNamespace(backend_tokenizer=backend)
        end = min(vocab_size, backend.get_vocab_size()) - 1  # EOS, which no output reaches
        vocabulary = Vocabulary(tokenizer, frozenset({end}))
        grammars = GuidanceEngine(lambda: vocabulary, vocab_size)
    else:
        grammars = PausedGrammars(vocab_size, args.mask_us * 1e-6)
    engine.input_processor.grammars = grammars
    plain, masked = [], []
    for _ in range(4):  # in turns; the first round is a warm-up
        plain.append(milliseconds_per_step(llm, args.rows, args.steps, None))
        masked.append(milliseconds_per_step(llm, args.rows, args.steps, {"json": SCHEMA}))
    before, after = statistics.median(plain[1:]), statistics.median(masked[1:])
    print(f"{args.rows} rows: {before:.3f} ms plain, {after:.3f} ms with a schema on each", end="")
    print(f" ({after / before - 1:+.1%}; {engine.info.device_name})")
    llm.close()


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--max-length", type=int)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--tokenizer", help="a tokenizer.json to use instead of the synthetic one")
    source.add_argument("--mask-us", type=float)
    return parser.parse_args()


class PausedGrammars:
    """Fake grammars that allow every token; each bitmask takes a fixed time."""

    def __init__(self, vocab_size: int, seconds: float) -> None:
        self.num_words, self.seconds = -(-vocab_size // 32), seconds
        self.memory = np.zeros((0, self.num_words), np.int32)

    def compile(self, asked: Any) -> GuidanceGrammar:
        return GuidanceGrammar("")

    def matcher(self, grammar: GuidanceGrammar, stop_token_ids: frozenset[int]) -> Any:
        return SimpleNamespace(finishes=lambda token_id: False, is_ready=True)

    def masks(self, matchers: list[Any], allocate: Any) -> tuple[np.ndarray, list[int]]:
        if len(self.memory) < len(matchers):  # persistent, like the buffer of real bitmasks
            self.memory = allocate(len(matchers), self.num_words)
            self.memory.fill(-1)
        time.sleep(len(matchers) * self.seconds)
        return self.memory[: len(matchers)], []

    def close(self) -> None:
        pass


def milliseconds_per_step(llm: LLM, num_rows: int, num_steps: int, asked: Any) -> float:
    engine, added = llm.engine, llm.added
    for row in range(num_rows):
        params = SamplingParams(
            temperature=0.6, seed=row, max_tokens=num_steps + 20, ignore_eos=True,
            structured_outputs=asked,
        )  # fmt: skip
        added.submit(engine.prepare([5 + row] * 128, params))
    for _ in range(4):
        added.step()
    start = time.perf_counter()
    for _ in range(num_steps):
        added.step()
    seconds = time.perf_counter() - start
    assert len(added.abort_all()) == num_rows, "a sequence ended early"
    return seconds * 1000 / num_steps


def synthetic_tokenizer(vocab_size: int) -> Tokenizer:
    """Return a synthetic vocabulary: all bytes, and words of random letters."""
    rng, letters = random.Random(0), "etaoinshrdlucmfwygpbvkxqjz"
    # Byte-level vocabularies map unprintable bytes to higher code points.
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    texts = dict.fromkeys(map(chr, [*printable, *range(256, 256 + len(others))]))
    while len(texts) < vocab_size - 1:
        word = "".join(rng.choices(letters, k=rng.randint(2, 9)))
        texts[rng.choice(["", "\u0120"]) + rng.choice([word, word.capitalize()])] = None
    tokenizer = Tokenizer(models.BPE({text: i for i, text in enumerate(texts)}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


if __name__ == "__main__":
    main()
