"""Reranking: the relevance of documents to a query, from a reranker's next-token probabilities.

Prompt and score follow Qwen3-Reranker's transformers example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from nanovllm.engine.input_processor import InputProcessor
from nanovllm.engine.scoring import embedding_of
from nanovllm.errors import RequestError
from nanovllm.outputs import EmbeddingOutput, RequestOutput, RerankOutput
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import require, require_text

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
PREFIX = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
SUFFIX = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def rerank(
    complete: Callable[..., list[RequestOutput]],
    input_processor: InputProcessor,
    query: str,
    documents: Iterable[str],
    instruction: str | None,
    top_n: int | None,
) -> list[RerankOutput]:
    """Implement `LLM.rerank`; `complete` runs prompts."""
    documents = check_documents(documents, top_n)
    labels = label_ids(input_processor)
    prompts = rerank_prompts(query, documents, instruction)
    outputs = complete(prompts, SamplingParams(max_tokens=1), name="documents", pooling=labels)
    return ranked(documents, [embedding_of(output, False) for output in outputs], top_n)


def check_documents(documents: Iterable[str], top_n: int | None) -> list[str]:
    is_valid = top_n is None or (type(top_n) is int and top_n >= 1)
    require(is_valid, "top_n", "an integer of at least 1", top_n)
    is_list = isinstance(documents, Iterable) and not isinstance(documents, str)
    require(is_list, "documents", "a list of texts", documents)
    return list(documents)


def rerank_prompts(query: str, documents: Sequence[str], instruction: str | None) -> list[str]:
    """Return a prompt per document. Documents come last, so the prompts share a prefix."""
    instruction = INSTRUCTION if instruction is None else instruction
    for name, text in (("instruction", instruction), ("query", query)):
        require_text(name, text)
    for document in documents:
        require_text("documents", document)
    head = f"{PREFIX}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: "
    return [head + document + SUFFIX for document in documents]


def label_ids(input_processor: InputProcessor) -> tuple[int, int]:
    """Return the token ids of "yes" and "no"."""
    input_processor.get_tokenizer()  # raises if there is none
    yes, no = (input_processor.encode(text, add_special_tokens=False) for text in ("yes", "no"))
    if len(yes) != 1 or len(no) != 1:
        raise RequestError('this model cannot rerank: its tokenizer has no tokens "yes" and "no"')
    return yes[0], no[0]


def relevance_of(output: EmbeddingOutput) -> float:
    """Return the probability of "yes", given that the next token is "yes" or "no"."""
    yes, no = output.embedding
    return 1 / (1 + math.exp(min(no - yes, 700.0)))  # exp of more would overflow


def ranked(
    documents: Sequence[str], outputs: Sequence[EmbeddingOutput], top_n: int | None
) -> list[RerankOutput]:
    """Return the `top_n` most relevant documents, best first; ties keep their order."""
    pairs = enumerate(zip(documents, outputs, strict=True))
    results = [
        RerankOutput(index, relevance_of(output), document) for index, (document, output) in pairs
    ]
    return sorted(results, key=lambda result: -result.relevance_score)[:top_n]
