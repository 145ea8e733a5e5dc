"""OpenAI's embeddings API: /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import numpy as np

from nanovllm.outputs import EmbeddingOutput
from nanovllm.serve.http_responses import Event, EventStream
from nanovllm.serve.protocol import EmbeddingRequest
from nanovllm.serve.service import Service


async def create_embedding(service: Service, request: EmbeddingRequest) -> EmbeddingResponse:
    service.check_model(request.model)
    prompts = await service.all_token_ids(request.input, "input")
    service.check_num_sequences(len(prompts))
    for prompt in prompts:
        service.check_length(len(prompt), 0, "input")
    return EmbeddingResponse(service, request, prompts)


class EmbeddingResponse(EventStream):
    def __init__(
        self, service: Service, request: EmbeddingRequest, prompts: Sequence[list[int]]
    ) -> None:
        self._service, self._request, self._prompts = service, request, prompts

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the response body as a single event."""
        llm, metrics = self._service.llm, self._service.metrics
        normalize = self._request.normalize is not False
        tasks = [
            asyncio.create_task(llm.embed(prompt, normalize=normalize)) for prompt in self._prompts
        ]
        try:
            with self._service.counted(len(tasks)), metrics.failures(len(tasks)):
                outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        num_tokens = sum(map(len, self._prompts))
        metrics.embedded(num_tokens, len(outputs))
        encode = partial(_encoded, is_base64=self._request.encoding_format == "base64")
        yield {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": partial(encode, output)}
                for index, output in enumerate(outputs)
            ],
            "model": self._service.model_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }


def _encoded(output: EmbeddingOutput, is_base64: bool) -> list[float] | str:
    if not is_base64:
        return output.embedding
    return base64.b64encode(np.array(output.embedding, "<f4").tobytes()).decode()
