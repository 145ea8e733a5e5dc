"""Day 6: sampling, streaming and stop strings.

So far the engine takes the best token and returns token ids. Today it draws tokens at random, but
in such a way that a request with a seed always gets the same text. And it turns tokens into text as
they arrive, which is harder than it looks: a token can be a part of a character, and a stop string
can begin in one token and end in another.

From day 5: the scheduler with preemption, unchanged. From day 4: the loop, with sampling.

    python learn/day6_sampling.py
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import day4_continuous_batching as day4
from common import Model, Table, load_from_command_line, print_table, show
from day1_forward import next_token_logits
from day3_paged_cache import PagedCache, Sequence
from day4_continuous_batching import Row, run_rows
from day5_prefix_cache import BlockManager, Scheduler

BLOCK_SIZE = 4
MAX_NUM_SEQS = 3
MAX_NUM_BATCHED_TOKENS = 32
PROMPTS = ["She opened the door and saw a", "The best thing about cats is", "For dinner, we had"]
MAX_TOKENS = 12
TEXT = "Grüße aus 東京 🎉!"
LIST_PROMPT = "List of planets: Mercury, Venus,"
STOP = ("Mars, Saturn", "Uranus, N")


@dataclass(frozen=True)
class SamplingParams:
    """How a request chooses its tokens, and where its text ends."""

    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # draw from the k best tokens; 0: from all
    top_p: float = 1.0  # draw from the fewest best tokens that together have this probability
    seed: int = 0
    stop: tuple[str, ...] = ()  # the text ends before any of these


@dataclass(eq=False)
class Request(Sequence):
    """A sequence with its own sampling parameters."""

    params: SamplingParams = SamplingParams()


# 1. Sampling


def sampling_probs(logits: Tensor, params: SamplingParams) -> Tensor:
    """Return the probabilities to draw from; logits and result are [vocab_size]."""
    probs = (logits / params.temperature).softmax(dim=-1)
    best, token_ids = probs.sort(descending=True)
    if params.top_k:
        best[params.top_k :] = 0.0
    if params.top_p < 1.0:
        mass_before = best.cumsum(0) - best  # the probability of all better tokens
        best[mass_before >= params.top_p * best.sum()] = 0.0
    return torch.zeros_like(probs).scatter(0, token_ids, best / best.sum())


def uniform(seed: int, position: int) -> float:
    """Return a random number in [0, 1) that depends on its arguments alone (splitmix64).

    A generator has a state, which each draw changes for all later draws. This function has none, so
    it does not matter which other requests run, or whether one is preempted.
    """
    bits = (seed + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB % 2**64
    return ((bits ^ bits >> 31) >> 11) / 2**53


def sample(logits: Tensor, params: SamplingParams, position: int) -> int:
    """Choose the token at `position`, given its scores [vocab_size]."""
    if params.temperature == 0:
        return int(logits.argmax())
    # Lay the probabilities side by side on a line, and see on which token the number falls.
    cumulative = sampling_probs(logits, params).double().cumsum(0)
    target = uniform(params.seed, position) * cumulative[-1]
    return int(torch.searchsorted(cumulative, target, right=True))


class Engine(day4.Engine):
    """Day 4's loop, but each request samples with its own parameters."""

    def step(self) -> list[Row]:
        rows = self.scheduler.schedule()
        assert rows, "a sequence needs more blocks than the pool has"
        logits = run_rows(self.model, self.cache, rows)  # one row per sampled sequence
        sampled = [row for row in rows if row.is_sampled]
        pairs = zip(logits, sampled, strict=True)
        next_ids = [sample(scores, row.seq.params, row.end) for scores, row in pairs]
        self.scheduler.commit(rows, next_ids)
        return rows


# 2. Streaming


class Detokenizer:
    """Turns tokens into text as they arrive."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.shown_ids: list[int] = []  # the last tokens already shown: context for the next ones
        self.new_ids: list[int] = []  # tokens that are not shown yet

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is now certain."""
        self.new_ids.append(token_id)
        text = self._decode(self.shown_ids + self.new_ids)
        if text.endswith("\ufffd"):  # replaces bytes that are not (yet) a character
            return ""
        piece = text[len(self._decode(self.shown_ids)) :]
        self.shown_ids, self.new_ids = self.new_ids, []
        return piece

    def finish(self) -> str:
        """Return the rest of the text: no more tokens follow."""
        text = self._decode(self.shown_ids + self.new_ids)
        return text[len(self._decode(self.shown_ids)) :]

    def _decode(self, token_ids: list[int]) -> str:
        return self.tokenizer.decode(token_ids, skip_special_tokens=True)


# 3. Stop strings


class StopStrings:
    """Passes text on, but holds back an end that may be the beginning of a stop string."""

    def __init__(self, stop: tuple[str, ...]) -> None:
        self.stop = stop
        self.held = ""
        self.is_found = False

    def push(self, piece: str) -> str:
        """Add text; return the text that may be shown."""
        text = self.held + piece
        starts = [text.find(stop) for stop in self.stop if stop in text]
        if starts:
            self.held, self.is_found = "", True
            return text[: min(starts)]
        num_held = max((self._num_common(text, stop) for stop in self.stop), default=0)
        end = len(text) - num_held
        self.held = text[end:]
        return text[:end]

    def _num_common(self, text: str, stop: str) -> int:
        """Return the length of the longest suffix of `text` that is a prefix of `stop`."""
        lengths = range(min(len(text), len(stop)), 0, -1)
        return next((count for count in lengths if text.endswith(stop[:count])), 0)


def stream(engine: Engine, requests: list[Request], tokenizer: Any) -> Iterator[tuple[Row, str]]:
    """Run requests; yield each row that samples a token, with the text that is now certain."""
    detokenizers = {seq.name: Detokenizer(tokenizer) for seq in requests}
    stops = {seq.name: StopStrings(seq.params.stop) for seq in requests}
    scheduler = engine.scheduler
    scheduler.waiting.extend(requests)
    while scheduler.waiting or scheduler.running:
        for row in engine.step():
            if not row.is_sampled:
                continue
            seq, detokenizer, stop = row.seq, detokenizers[row.seq.name], stops[row.seq.name]
            piece = stop.push(detokenizer.push(seq.token_ids[-1]))
            is_running = seq in scheduler.running
            if is_running and stop.is_found:  # the scheduler does not know the text
                scheduler.running.remove(seq)
                scheduler.blocks.release(seq)
            if not is_running and not stop.is_found:  # no more tokens follow
                piece += stop.push(detokenizer.finish()) + stop.held
            yield row, piece


def main(model: Model, tokenizer: Any) -> None:
    print(f"1. The token after {PROMPTS[0]!r}, with the probability to draw it:")
    print_distributions(model, tokenizer)

    print("\n2. The same seed gives the same text, whatever else happens:")
    table = Table(["seed", "how it ran", "preempted", "text"], [0, 15, 0, 0])
    table.add(*run_with_seed(model, tokenizer, 1, "alone", num_requests=1, num_blocks=64))
    table.add(*run_with_seed(model, tokenizer, 1, "with two others", num_requests=3, num_blocks=64))
    table.add(*run_with_seed(model, tokenizer, 1, "in a small pool", num_requests=3, num_blocks=8))
    table.add(*run_with_seed(model, tokenizer, 2, "alone", num_requests=1, num_blocks=64))
    texts = [row[-1] for row in table.rows]
    assert texts[0] == texts[1] == texts[2], "the text depends on other requests"

    print(f"\n3. The tokens of {TEXT!r}, decoded one by one and as a stream:")
    detokenizer = Detokenizer(tokenizer)
    print_table(
        ["token id", "by itself", "stream"],
        [(i, show(tokenizer, [i]), repr(detokenizer.push(i))) for i in tokenizer.encode(TEXT)],
    )

    print(f"\n4. {LIST_PROMPT!r}, which stops before {' or '.join(map(repr, STOP))}:")
    params = SamplingParams(temperature=0, stop=STOP)
    request = Request("list", tokenizer.encode(LIST_PROMPT), 2 * MAX_TOKENS, params=params)
    table, text = Table(["new token", "stream"], [10, 0]), ""
    for row, piece in stream(new_engine(model, num_blocks=64), [request], tokenizer):
        table.add(show(tokenizer, row.seq.token_ids[-1:]), repr(piece))
        text += piece
    num_new = len(table.rows)
    print(f"The text: {text!r}. The request ended after {num_new} of {2 * MAX_TOKENS} tokens.")


def print_distributions(model: Model, tokenizer: Any) -> None:
    logits = next_token_logits(model, tokenizer.encode(PROMPTS[0]))
    columns = {
        "temperature 1": SamplingParams(),
        "0.5": SamplingParams(temperature=0.5),
        "2": SamplingParams(temperature=2.0),
        "top_k 3": SamplingParams(top_k=3),
        "top_p 0.4": SamplingParams(top_p=0.4),
    }
    probs = torch.stack([sampling_probs(logits, params) for params in columns.values()])
    best = logits.topk(6).indices
    rows = [
        (show(tokenizer, [token_id]), *(f"{prob:.1%}" for prob in probs[:, token_id].tolist()))
        for token_id in best.tolist()
    ]
    rest = 1 - probs[:, best].sum(dim=1)
    rows.append(("all others", *(f"{abs(prob):.1%}" for prob in rest.tolist())))
    print_table(["token", *columns], rows)


def run_with_seed(
    model: Model, tokenizer: Any, seed: int, how: str, num_requests: int, num_blocks: int
) -> tuple[int, str, int, str]:
    """Run some requests with a seed; return a row of the table about the last one."""
    requests = [
        Request(prompt, tokenizer.encode(prompt), MAX_TOKENS, params=SamplingParams(0.8, seed=seed))
        for prompt in reversed(PROMPTS[:num_requests])
    ]
    engine = new_engine(model, num_blocks)
    engine.run(requests)
    num_preempted = engine.scheduler.events.count(f"{PROMPTS[0]} is preempted")
    return seed, how, num_preempted, show(tokenizer, requests[-1].output_ids)


def new_engine(model: Model, num_blocks: int) -> Engine:
    blocks = BlockManager(num_blocks, BLOCK_SIZE)
    scheduler = Scheduler(blocks, model.config.eos_ids, MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS)
    return Engine(model, PagedCache(model.config, num_blocks, BLOCK_SIZE), scheduler)


# Exercises (solutions: learn/solutions/day6.py)
#
# 1. Draw without sorting and summing. Add -log(-log(u)) to each logit / temperature, where u is a
#    random number per token, and take the largest sum: `sample_gumbel(logits, params, position)`
#    draws from the same probabilities. Compute u for all tokens at once, from nothing but seed,
#    position and token id: `uniform_per_token(seed, position, token_ids)`. Why does this
#    suit a GPU better?
# 2. Structured output in its simplest form. Write `choose(model, tokenizer, prompt, choices,
#    params)`, which generates one of several texts, such as " positive" or " negative": before a
#    token is sampled, the logits of all tokens that lead to no choice become -inf. How would you
#    avoid looking at every token of the vocabulary for every new token?

if __name__ == "__main__":
    main(*load_from_command_line(__doc__))
