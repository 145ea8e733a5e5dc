"""The front: text on one side, token ids on the other.

It prepares requests for the core, and turns what the core reports into answers. Nothing here
imports torch, so it can run in another process than the model.
"""

from __future__ import annotations

import itertools
import threading
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from nanovllm.engine.detokenizer import Detokenizer, decode_whole
from nanovllm.engine.grammar import GrammarEngine
from nanovllm.engine.request import CoreStep, Ending, FinishReason, Request, TokenLogprobs
from nanovllm.engine.step import Pooling
from nanovllm.errors import RequestError
from nanovllm.outputs import CompletionOutput, Logprob, RequestOutput, StepOutput, StreamPiece
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import require, require_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from nanovllm.engine.logprobs import AnswerLogprobs, TokenTexts

NOTHING_ALLOWED = (
    "no token may be sampled: allowed_token_ids, bad_words, logit_bias, min_tokens and "
    "logits_processors together leave none, or make logits that are not numbers, or "
)
NOTHING_FITS = (
    "no token fits structured_outputs any more: the grammar took too much work to follow, or "
)
BROKEN = (
    "the model's {} are not numbers (NaN or infinity); the weights may be damaged, or too large "
    "for the dtype: try dtype='float32'"
)


@dataclass(frozen=True, slots=True)
class Vocabulary:
    tokenizer: PreTrainedTokenizerBase | None
    eos_token_ids: frozenset[int]


@dataclass(slots=True, eq=False)
class Sample:
    """One of the answers to a prompt, on its way."""

    index: int
    request: Request
    detokenizer: Detokenizer | None
    new_token_ids: list[int] = field(default_factory=list)  # not streamed yet
    logprobs: list[TokenLogprobs] = field(default_factory=list)  # of all tokens that came
    num_wanted: int | None = None  # tokens, once a stop string was found
    ending: Ending | None = None


@dataclass(slots=True, eq=False)
class Live:
    """What the front keeps of a prompt until all its samples are there."""

    prompt: str | None
    is_streaming: bool
    samples: list[Sample]
    num_unfinished: int
    request_id: str

    @property
    def seq_id(self) -> int:
        """Of its first sample, which stands for all of them."""
        return self.samples[0].request.seq_id


class Front:
    """Any thread may `prepare` requests and `encode`; everything else is for one at a time."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        vocab_size: int,
        seed: int,
        has_workers: bool = False,
        create_grammars: Callable[[Vocabulary], GrammarEngine] | None = None,
    ) -> None:
        self.tokenizer = vocabulary.tokenizer
        self._vocabulary, self._create_grammars = vocabulary, create_grammars
        self._texts: TokenTexts | None = None  # until a request asks for logprobs
        self._has_workers = has_workers  # in processes of their own, which take no functions
        self.live: dict[int, Live] = {}  # by seq_id
        self._samples: dict[int, tuple[Live, Sample]] = {}  # by seq_id of the sample
        self._vocab_size = vocab_size
        self._eos_token_ids = vocabulary.eos_token_ids
        self.grammars: GrammarEngine | None = None  # until a request has one: see `get_grammars`
        self._seed_of_all = seed
        self._seq_ids = itertools.count()
        self._lock = threading.Lock()
        self._tokenizing = threading.Lock()  # to encode may change a tokenizer's settings

    def get_grammars(self) -> GrammarEngine:
        """Create the grammars for the first request that has one. Safe in any thread."""
        with self._lock:
            if self.grammars is None:
                self.grammars = GrammarEngine(lambda: self._vocabulary, self._vocab_size)
            return self.grammars

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()

    def prepare(
        self,
        prompt: str | list[int],
        params: SamplingParams,
        cache_salt: str | None = None,
        is_streaming: bool = False,
        pooling: Pooling | None = None,
        request_id: str | None = None,
    ) -> Live:
        """Check and tokenise a prompt."""
        self._check_params(params)
        for name, text in (("cache_salt", cache_salt), ("request_id", request_id)):
            if text is not None:
                require_text(name, text)
        token_ids = self.token_ids_of(prompt)
        if params.truncate_prompt_tokens is not None:
            token_ids = token_ids[-params.truncate_prompt_tokens :]
        tokenizer = self.tokenizer if is_streaming or params.stop else None
        seq_id = next(self._seq_ids)
        grammar, asked = None, params.structured_outputs
        if asked is not None:
            grammar = self.get_grammars().compile(asked)
            params = replace(params, structured_outputs=None)
        first = Request(
            seq_id,
            token_ids,
            params,
            self._seed(params, seq_id, 0),
            stop_token_ids=self._stop_token_ids(params),
            grammar=grammar,
            bad_words=self._bad_words(params),
            cache_salt=cache_salt or None,  # an empty one is none
            is_streaming=is_streaming or tokenizer is not None or params.logprobs is not None,
            pooling=pooling,
        )
        requests = [first]
        if params.n > 1:  # the first sample has the prompt's own log-probabilities
            other = replace(first, params=replace(params, prompt_logprobs=None), leader_id=seq_id)
            for index, seq_id in zip(range(1, params.n), self._seq_ids, strict=False):
                seed = self._seed(params, seq_id, index)
                requests.append(replace(other, seq_id=seq_id, seed=seed))
        samples = []
        for index, request in enumerate(requests):
            detokenizer = None if tokenizer is None else Detokenizer(tokenizer, params)
            samples.append(Sample(index, request, detokenizer))
        text = prompt if isinstance(prompt, str) else None
        request_id = str(first.seq_id) if request_id is None else request_id
        return Live(text, is_streaming, samples, len(samples), request_id)

    def submit(self, live: Live) -> None:
        """Expect news of a prompt's samples."""
        self.live[live.seq_id] = live
        for sample in live.samples:
            self._samples[sample.request.seq_id] = live, sample

    def forget(self, seq_id: int) -> None:
        """Expect no more of a prompt."""
        live = self.live.pop(seq_id, None)
        for sample in () if live is None else live.samples:
            self._samples.pop(sample.request.seq_id, None)

    def seq_ids_of(self, request_id: int | str) -> list[int]:
        """The requests under way with this seq_id, or with this request_id of their callers."""
        if not isinstance(request_id, str):
            return [request_id]
        return [i for i, live in self.live.items() if live.request_id == request_id]

    def unfinished(self, seq_id: int) -> list[int]:
        """The samples of a prompt that are still on their way."""
        samples = self.live[seq_id].samples if seq_id in self.live else []
        return [sample.request.seq_id for sample in samples if sample.ending is None]

    def collect(
        self, step: CoreStep, finish: Callable[[int, FinishReason], Ending | None]
    ) -> StepOutput:
        """Turn what a step of the core brought into text; `finish` ends what a stop string ends.

        If it returns no ending, that is among those of a later step. Until the core hears of
        it, more may come for what was stopped or dropped here.
        """
        known = self._samples
        endings = {ending.seq_id: ending for ending in step.endings if ending.seq_id in known}
        columns = step.seq_ids, step.token_ids, step.logprobs
        for seq_id, token_id, logprobs in zip(*columns, strict=True):
            if seq_id not in known or known[seq_id][1].num_wanted is not None:
                continue
            _, sample = known[seq_id]
            if logprobs is not None:
                sample.logprobs.append(logprobs)
            sample.new_token_ids.append(token_id)
            detokenizer = sample.detokenizer
            if detokenizer is not None and detokenizer.push(token_id):
                sample.num_wanted = detokenizer.num_tokens
                ending = endings.get(seq_id) or finish(seq_id, "stop")
                if ending is not None:
                    endings[seq_id] = ending
        seq_ids = dict.fromkeys((*step.seq_ids, *endings))
        changed = [known[seq_id] for seq_id in seq_ids if seq_id in known]
        outputs: dict[int, RequestOutput] = {}
        for ending in endings.values():
            output = self.end(ending)
            if output is not None:
                outputs[output.seq_id] = output
        last = {live.seq_id: sample.index for live, sample in changed}  # has the output with it
        pieces = [
            self._piece(live, sample, outputs if last[live.seq_id] == sample.index else {})
            for live, sample in changed
            if live.is_streaming
        ]
        return StepOutput(
            list(outputs.values()), pieces, step.num_prefill_tokens, step.num_decode_tokens
        )

    def end(self, ending: Ending) -> RequestOutput | None:
        """Note the end of a sample; return the answers when it was the last one of its prompt."""
        live, sample = self._samples.pop(ending.seq_id)
        if sample.num_wanted is not None:
            ending = ending.stopped_at(sample.num_wanted)
        sample.ending = ending
        if sample.detokenizer is not None:
            sample.detokenizer.finish()
        live.num_unfinished -= 1
        if live.num_unfinished > 0:
            return None
        del self.live[live.seq_id]
        outputs = [self._completion(each) for each in live.samples]
        request, best = live.samples[0].request, outputs[0]
        endings = [each.ending for each in live.samples if each.ending is not None]  # all, by now
        own, broken = endings[0], [each for each in endings if each.finish_reason == "error"]
        prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        num_best = request.params.prompt_logprobs
        if num_best is not None:
            prompt_logprobs = [None, *self._logprobs(own.prompt_logprobs, num_best)]
        return RequestOutput(
            seq_id=live.seq_id,
            prompt=live.prompt,
            prompt_token_ids=request.token_ids.tolist(),
            text=best.text,
            token_ids=best.token_ids,
            finish_reason=best.finish_reason,
            num_cached_tokens=own.num_cached_tokens,
            queue_time=max(own.start_time - request.arrival_time, 0.0),
            time_to_first_token=max(own.first_token_time - request.arrival_time, 0.0),
            duration=ending.end_time - request.arrival_time,
            error=(broken[0].error or why_broken(request)) if broken else None,
            logprobs=best.logprobs,
            cumulative_logprob=best.cumulative_logprob,
            prompt_logprobs=prompt_logprobs,
            outputs=outputs,
            pooled=None if own.pooled is None else own.pooled.tolist(),
            request_id=live.request_id,
        )

    def _completion(self, sample: Sample) -> CompletionOutput:
        ending, params, tokenizer = sample.ending, sample.request.params, self.tokenizer
        assert ending is not None
        if sample.detokenizer is not None:
            text = sample.detokenizer.text
        else:
            text = "" if tokenizer is None else decode_whole(tokenizer, ending.token_ids, params)
        logprobs = cumulative = None
        if params.logprobs is not None:
            logprobs = self._logprobs(sample.logprobs[: len(ending.token_ids)], params.logprobs)
            cumulative = logprobs.cumulative
        return CompletionOutput(
            index=sample.index,
            text=text,
            token_ids=ending.token_ids,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
            finish_reason=ending.finish_reason,
            stop_reason=_stop_reason(sample, ending),
        )

    def _piece(self, live: Live, sample: Sample, outputs: dict[int, RequestOutput]) -> StreamPiece:
        """Take what is new in a streamed sample."""
        token_ids, sample.new_token_ids = sample.new_token_ids, []
        text = sample.detokenizer.take() if sample.detokenizer is not None else ""
        output, num_best, logprobs = outputs.get(live.seq_id), sample.request.params.logprobs, None
        if token_ids and num_best is not None:
            logprobs = self._logprobs(sample.logprobs[-len(token_ids) :], num_best)
        return StreamPiece(
            live.seq_id,
            text,
            token_ids,
            output,
            logprobs,
            sample.index,
            request_id=live.request_id,
        )

    def _logprobs(self, entries: list[TokenLogprobs], num_best: int) -> AnswerLogprobs:
        from nanovllm.engine.logprobs import AnswerLogprobs, TokenTexts

        if self._texts is None:
            self._texts = TokenTexts(self.tokenizer)
        return AnswerLogprobs(entries, num_best, self._texts)

    def get_tokenizer(self) -> PreTrainedTokenizerBase:
        if self.tokenizer is None:
            raise RequestError("there is no tokenizer with skip_tokenizer_init=True")
        return self.tokenizer

    def encode(self, text: str, **options: Any) -> list[int]:
        """Tokenise text. Safe in any thread."""
        assert self.tokenizer is not None
        with self._tokenizing:
            ids: list[int] = self.tokenizer.encode(text, **options)
        return ids

    def token_ids_of(self, prompt: str | list[int], **options: Any) -> array[int]:
        """Check a prompt and tokenise it, if it is a text. Safe in any thread."""
        require(isinstance(prompt, (str, list)), "prompt", "a string or token ids", prompt)
        if not isinstance(prompt, str):
            ids = prompt
        else:
            has_tokenizer = self.tokenizer is not None
            require(has_tokenizer, "prompt", "token ids with skip_tokenizer_init=True", prompt)
            require_text("prompt", prompt)
            ids = self.encode(prompt, **options)
        require(ids, "prompt", "at least one token", prompt)
        return to_token_ids(ids, self._vocab_size)

    def _check_params(self, params: SamplingParams) -> None:
        is_params = isinstance(params, SamplingParams)
        require(is_params, "sampling_params", "SamplingParams", params)
        for name in ("stop", "bad_words"):
            words = getattr(params, name)
            can_tokenize = self.tokenizer is not None or not words
            expected = "empty without a tokenizer; stop_token_ids and logit_bias need none"
            require(can_tokenize, name, expected, words)
            for word in words:
                require_text(name, word)
        has_functions = any(map(callable, params.logits_processors))
        require(
            not (self._has_workers and has_functions),
            "logits_processors",
            "names, 'module:function', where workers run in other processes",
            params.logits_processors,
        )
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            high = max(getattr(params, name) or (), default=0)
            expected = f"ids inside the vocabulary of {self._vocab_size}"
            require(high < self._vocab_size, name, expected, high)

    def _stop_token_ids(self, params: SamplingParams) -> frozenset[int]:
        if params.max_tokens == 0:  # nothing that is sampled counts
            return frozenset()
        eos = frozenset() if params.ignore_eos else self._eos_token_ids
        return eos.union(params.stop_token_ids)

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        """The tokens of each word, as it begins a text and as it follows other words.

        Words with tokens that the model does not have are never said.
        """
        texts = [text for word in params.bad_words for text in (word, " " + word.lstrip())]
        found = [tuple(self.encode(text, add_special_tokens=False)) for text in texts]
        return tuple(dict.fromkeys(word for word in found if word and max(word) < self._vocab_size))

    def _seed(self, params: SamplingParams, seq_id: int, index: int) -> int:
        """A 64-bit seed: by the request's own, or one derived from the engine's for this sample."""
        if params.seed is None:
            seed = xxhash.xxh3_64_intdigest(f"{self._seed_of_all}/{seq_id}".encode())
        else:
            seed = (params.seed + index) % 2**64
        return seed - 2**64 if seed >= 2**63 else seed


def why_broken(request: Request) -> str:
    if request.pooling is not None:
        return BROKEN.format("hidden states")
    why = BROKEN.format("logits")
    if request.grammar is not None:
        return NOTHING_FITS + NOTHING_ALLOWED + why
    return NOTHING_ALLOWED + why if request.params.can_exclude_tokens else why


def _stop_reason(sample: Sample, ending: Ending) -> str | int | None:
    """The stop string or stop token that ended a sample; None for the model's own end."""
    if ending.finish_reason != "stop":
        return ending.stop_reason
    if sample.detokenizer is not None and sample.detokenizer.found_stop is not None:
        return sample.detokenizer.found_stop
    last = ending.token_ids[-1]
    return last if last in tuple(sample.request.params.stop_token_ids) else None


def to_token_ids(ids: list[int], vocab_size: int) -> array[int]:
    """Check ids without a loop over what may be many thousands, and lay them out side by side."""
    try:
        values = np.array(array("L", ids))  # several times as fast as a conversion with a sign
        has_bool = any(isinstance(ids[i], bool) for i in np.flatnonzero(values <= 1))
        if not has_bool and values.max() < vocab_size:
            return array("i", values.astype(np.int32).tobytes())
    except (TypeError, OverflowError):
        pass  # what is wrong is said below
    is_integer = all(isinstance(i, (int, np.integer)) and not isinstance(i, bool) for i in ids)
    require(is_integer, "prompt", "a text or integers, the ids of tokens", ids)
    wrong = min(ids) if min(ids) < 0 else max(ids)
    raise RequestError(
        f"token id {wrong} is outside the model's vocabulary of {vocab_size}", param="prompt"
    )
