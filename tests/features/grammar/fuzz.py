"""Compile random grammars that are deep, wide or cyclic, and match text with the accepted ones.

Run as `python -m tests.features.grammar.fuzz FIRST COUNT`; prints how many were accepted, and how
long other Python threads had to wait.
"""

from __future__ import annotations

import json
import random
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from nanovllm.engine.input_processor import Vocabulary
from nanovllm.errors import RequestError
from nanovllm.features.grammar import limits
from nanovllm.features.grammar.guidance import GuidanceEngine, GuidanceGrammar

VOCAB_SIZE, EOS = 288, 256
ATOMS = ["a", "[a-z]", ".", "\\d", "(a|b)", "[^x]", "é", "\\w+", "(?s:.)", "[", "(", "\\", "x{3}"]
REPEATS = ["", "*", "+", "?", "{2,5}", "{0,1000}", "{1000}", "{3,}"]
PATTERNS = ["^(a+)+$", "(a|b)*a(a|b){20}", "(.*a){30}.*b", "^[a-z]{1,300}$", "x", "[[[", "a{1000}"]
LARK = ['"a"', "/b*/", "start", "r1", "T", "(", ")", "|", "*", "?", ":", "\n", "~", "&", "%json {}"]
LARK += ["\nr1:", "\nT:", "{2,900}", "[lazy]", "<[5]>", "%ignore", "%import common.INT", "//"]


def size(rng: random.Random, most: int = 4000) -> int:
    return int(most ** rng.random())


def nested(rng: random.Random) -> dict[str, Any]:
    part: Any = {"const": 1}
    kinds = rng.sample(["items", "not", "anyOf", "allOf", "oneOf", "properties", "if", "const"], 2)
    for _ in range(size(rng, 400)):
        kind = rng.choice(kinds)
        if kind == "properties":
            part = {"type": "object", "properties": {"a": part, "b": part}, "required": ["a"]}
        elif kind == "const":
            part = {"const": [part]}
        else:
            part = {kind: [part, {"type": "null"}] if kind.endswith("Of") else part}
            if len(json.dumps(part)) > 200_000:
                break
    return {"json": part}


def wide(rng: random.Random) -> dict[str, Any]:
    number = size(rng)
    texts, pattern = [f"v{i}" for i in range(number)], rng.choice(PATTERNS)
    rule = " | ".join(f'"{text}"' for text in texts)
    return rng.choice([
        {"choice": texts},
        {"regex": "|".join(f"{text}.*" for text in texts)},
        {"grammar": f"start: {rule}"},
        {"grammar": f"start: ({rule})*"},
        {"grammar": "start: " + " ".join(f"{text}?" for text in texts) + f"\n{texts[0]}: /a*/"},
        {"json": {"enum": texts}},
        {"json": {"properties": each_of(texts, {"type": "integer"})}},
        {"json": {"properties": each_of(texts, {"pattern": pattern})}},
        {"json": {"properties": each_of(texts, {}), "required": texts}},
        {"json": {"patternProperties": {f"^{text}": {} for text in texts}}},
        {"json": {"anyOf": [{"properties": {text: {}}} for text in texts]}},
        {"json": {"oneOf": [{"required": [text]} for text in texts]}},
        {"json": {"allOf": [{"pattern": pattern + "." * i} for i in range(number % 40)]}},
        {"json": {"type": "integer", "multipleOf": number * rng.choice([1, 97])}},
        {"json": {"properties": each_of(texts, {}),
                  "patternProperties": {pattern: {}}}},
    ])  # fmt: skip


def each_of(names: list[str], schema: Any) -> dict[str, Any]:
    return dict.fromkeys(names, schema)


def referring(rng: random.Random) -> dict[str, Any]:
    """Return a schema with chains, cycles or graphs of references."""
    number = size(rng)
    is_chain = rng.random() < 0.4

    def to(i: int) -> dict[str, str]:
        return {"$ref": f"#/$defs/{i + 1 if is_chain else rng.randrange(number + 1)}"}

    forms: list[Callable[[int], Any]] = [
        to,
        lambda i: {"items": to(i), "minItems": rng.randrange(2)},
        lambda i: {"allOf": [to(i), to(i)]},
        lambda i: {"anyOf": [{"type": "null"}, to(i), to(i)]},
        lambda i: {"oneOf": [{"type": "null"}, to(i), to(i)]},
        lambda i: {"type": "object", "properties": {"a": to(i), "b": to(i)}, "required": ["a"]},
        lambda i: {"not": to(i)},
        lambda i: {"pattern": rng.choice(PATTERNS), **to(i)},
    ]
    chosen = rng.sample(forms, rng.choice([1, 1, 3]))
    parts = {str(i): rng.choice(chosen)(i) for i in range(number)}
    return {"json": {"$ref": "#/$defs/0", "$defs": {**parts, str(number): {"const": 1}}}}


def ruled(rng: random.Random) -> dict[str, Any]:
    """Return a grammar with chains, cycles or graphs of rules or terminals."""
    number, name = size(rng), rng.choice("rT")
    is_chain = rng.random() < 0.5
    form = rng.choice(["{}", '"x" {}', '{} "y"', "{0} {1}", '"x" | {}', '({}? "a")*', "{}{{2,9}}"])
    lines = [f"start: {name}0"]
    for i in range(number):
        ends = [i + 1 if is_chain else rng.randrange(number + 1) for _ in range(2)]
        lines.append(f"{name}{i}: " + form.format(*(f"{name}{end}" for end in ends)))
    return {"grammar": "\n".join([*lines, f'{name}{number}: "z"'])}


def expression(rng: random.Random) -> dict[str, Any]:
    text = rng.choice(ATOMS)
    for _ in range(size(rng, 300)):
        other = rng.choice(ATOMS) + rng.choice(REPEATS)
        forms = [f"({text})", text + other, f"{text}|{other}", f"({text}{other})"]
        text = rng.choice(forms) + rng.choice(REPEATS)
    return rng.choice(
        [{"regex": text}, {"json": {"pattern": text}}, {"grammar": f"start: /{text}/"}]
    )


def litter(rng: random.Random) -> dict[str, Any]:
    text = " ".join(rng.choice(LARK) for _ in range(size(rng)))
    return {"grammar": f"start: {text}"}


def random_grammar(seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    make = rng.choice([nested, wide, referring, ruled, expression, litter])
    return make(rng)


def new_grammars() -> GuidanceEngine:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(BPE({letter: i for i, letter in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    tokenizer: Any = SimpleNamespace(backend_tokenizer=backend)
    return GuidanceEngine(lambda: Vocabulary(tokenizer, frozenset({EOS})), VOCAB_SIZE)


def follow(grammars: GuidanceEngine, grammar: GuidanceGrammar, rng: random.Random) -> None:
    """Match a random text of a few tokens, as the engine does."""
    matcher = grammars.matcher(grammar, frozenset({EOS}))
    for _ in range(12):
        if matcher.job is not None:
            matcher.job.result()
        masks, late = grammars.masks([(matcher, [])], new_masks)
        while late:
            matcher.job.result()
            masks, late = grammars.masks([(matcher, [])], new_masks)
        bits = np.unpackbits(masks[0].view(np.uint8), bitorder="little")
        allowed = [i for i in np.flatnonzero(bits) if i != EOS]
        if not allowed or matcher.finishes(int(rng.choice(allowed))):
            return


def new_masks(num_rows: int, num_words: int) -> np.ndarray:
    return np.empty((num_rows, num_words), np.int32)


class Waits:
    """Measures how long other threads wait for the GIL.

    Time in which the machine runs other processes does not count.
    """

    def __init__(self) -> None:
        self.longest = 0.0
        threading.Thread(target=self._beat, daemon=True).start()

    def _beat(self) -> None:
        while True:
            start, start_of_process = time.perf_counter(), time.process_time()
            time.sleep(0.01)
            waited = time.perf_counter() - start, time.process_time() - start_of_process
            self.longest = max(self.longest, min(waited))


def main(first: int, count: int) -> None:
    limits.MAX_SECONDS = 2.0
    limits.START_SECONDS = 2.0
    waits, grammars = Waits(), new_grammars()
    num_taken = 0
    for seed in range(first, first + count):
        before, start = waits.longest, time.process_time()
        try:
            grammar = grammars.compile(random_grammar(seed))
            num_taken += 1
            follow(grammars, grammar, random.Random(seed))
            if seed % 8 == 0:  # compile again, as a core in another process does
                follow(new_grammars(), GuidanceGrammar(grammar.text), random.Random(seed))
        except RequestError:
            pass
        if waits.longest > max(before, 0.3) or time.process_time() - start > 3:
            print(f"seed {seed}: waited {waits.longest:.2f} s", file=sys.stderr)
    print(json.dumps({"taken": num_taken, "longest_wait": waits.longest}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
