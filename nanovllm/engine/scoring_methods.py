"""The methods of `LLM` that return embeddings and scores instead of text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from nanovllm.engine.prompts import Prompts, as_prompt
from nanovllm.engine.reranking import check_documents, label_ids, ranked, rerank_prompts
from nanovllm.engine.scoring import SCORED, continue_prompt, embedding_of, score_of
from nanovllm.engine.step import Pooling
from nanovllm.outputs import EmbeddingOutput, RequestOutput, RerankOutput, Score
from nanovllm.sampling_params import SamplingParams
from nanovllm.validation import require

if TYPE_CHECKING:
    from nanovllm.engine.engine_thread import EngineThread


class ScoringMethods:
    """Embeddings, reranking and the logprobs of continuations, for `LLM`."""

    engine: EngineThread
    _complete: Callable[..., list[RequestOutput]]  # `LLM._complete`

    def embed(
        self,
        prompts: Prompts,
        pooling: Literal["last", "mean"] | None = None,
        normalize: bool = True,
        use_tqdm: bool = True,
        *,
        cache_salt: str | None = None,
    ) -> list[EmbeddingOutput]:
        """Return an embedding for each prompt, computed in float32 from the model's hidden states.

        After the final norm, `pooling` takes the hidden state of the last token ("last") or the
        mean over all tokens ("mean"). The default is the checkpoint's own pooling. If it has none,
        the default is "mean" for bidirectional models and "last" for others. `normalize` scales
        the embedding to length one.
        """
        is_valid = pooling in (None, "last", "mean")
        require(is_valid, "pooling", '"last" or "mean"', pooling)
        chosen: Pooling = pooling or self.engine.input_processor.default_pooling or "last"
        params = SamplingParams(max_tokens=1)
        outputs = self._complete(prompts, params, cache_salt, use_tqdm, pooling=chosen)
        return [embedding_of(output, normalize) for output in outputs]

    def rerank(
        self,
        query: str,
        documents: Iterable[str],
        *,
        instruction: str | None = None,
        top_n: int | None = None,
    ) -> list[RerankOutput]:
        """Return the documents (at most `top_n`), the most relevant to the query first.

        With Qwen3-Reranker's prompt, the model judges whether a document meets the query and the
        `instruction`. The document's relevance is the probability of "yes" in a softmax over the
        logits of "yes" and "no".
        """
        documents = check_documents(documents, top_n)
        labels = label_ids(self.engine.input_processor)
        prompts, params = (
            rerank_prompts(query, documents, instruction),
            SamplingParams(max_tokens=1),
        )
        outputs = self._complete(prompts, params, name="documents", pooling=labels)
        return ranked(documents, [embedding_of(output, False) for output in outputs], top_n)

    def score(
        self,
        prompt: Prompts,
        continuations: Sequence[Any],
        *,
        cache_salt: str | None = None,
    ) -> list[Score]:
        """Return the logprobs of each continuation (text or token ids) of a prompt.

        Text is tokenized together with the prompt, since a token may span the boundary.
        """
        first, encode = as_prompt(prompt, cache_salt), self.engine.input_processor.token_ids_of
        continued = continue_prompt(first.content, continuations, encode)
        wholes = [each.token_ids for each in continued]
        outputs = self._complete(wholes, SCORED, first.cache_salt)
        return [score_of(output, one.start) for output, one in zip(outputs, continued, strict=True)]
