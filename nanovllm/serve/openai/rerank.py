"""The rerank API of vLLM, Jina and Cohere: /v1/rerank, /v2/rerank and /rerank."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any
from uuid import uuid4

from pydantic import Field

from nanovllm.engine.reranking import label_ids, ranked, rerank_prompts
from nanovllm.outputs import EmbeddingOutput
from nanovllm.serve.fields import COMMON
from nanovllm.serve.http_responses import Event
from nanovllm.serve.openai.embeddings import PooledResponse, tokenize_prompts
from nanovllm.serve.protocol import ApiModel, Listed
from nanovllm.serve.service import Service


class RerankDocument(ApiModel):
    text: str


class RerankRequest(ApiModel):
    policy = COMMON
    query: str
    documents: Listed[str | RerankDocument]
    model: str | None = None
    top_n: int | None = Field(None, ge=0)  # 0: all documents, as in vLLM
    return_documents: bool | None = None
    instruction: str | None = None


async def create_rerank(service: Service, request: RerankRequest) -> RerankResponse:
    service.check_model(request.model)
    documents = [each if isinstance(each, str) else each.text for each in request.documents]
    texts = rerank_prompts(request.query, documents, request.instruction)
    prompts = await tokenize_prompts(service, texts, "documents")
    labels = await asyncio.to_thread(label_ids, service.llm.input_processor)
    return RerankResponse(service, request, documents, prompts, labels)


class RerankResponse(PooledResponse):
    normalize = False

    def __init__(
        self,
        service: Service,
        request: RerankRequest,
        documents: list[str],
        prompts: Sequence[list[int]],
        labels: tuple[int, int],
    ) -> None:
        super().__init__(service, prompts)
        self.pooling = labels
        self._request, self._documents = request, documents

    def body(self, outputs: Sequence[EmbeddingOutput]) -> Event:
        results: list[dict[str, Any]] = []
        for each in ranked(self._documents, outputs, self._request.top_n or None):
            result = {**asdict(each), "document": {"text": each.document}}
            if self._request.return_documents is False:
                del result["document"]
            results.append(result)
        return {"id": f"rerank-{uuid4().hex}", "results": results}
