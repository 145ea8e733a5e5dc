"""/v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from functools import partial

import numpy as np

from nanovllm.outputs import EmbeddingOutput
from nanovllm.server.answer import Event
from nanovllm.server.errors import TooLong
from nanovllm.server.openai_records import EmbeddingRequest
from nanovllm.server.service import Service


async def answer_embeddings(service: Service, request: EmbeddingRequest) -> EmbeddingAnswer:
    """Check everything that can be checked before the answer begins."""
    service.check_model(request.model)
    prompts = await service.all_token_ids(request.input, "input")
    service.check_num_sequences(len(prompts))
    for prompt in prompts:
        if len(prompt) > service.llm.max_len:
            raise TooLong(len(prompt), 0, service.llm.max_len, "input")
    return EmbeddingAnswer(service, prompts, request)


class EmbeddingAnswer:
    """Its one event is the whole of it."""

    def __init__(
        self, service: Service, prompts: Sequence[list[int]], request: EmbeddingRequest
    ) -> None:
        self._service, self._prompts, self._request = service, prompts, request

    async def events(self) -> AsyncGenerator[Event, None]:
        normalize = self._request.normalize is not False
        embed, metrics = self._service.llm.embed, self._service.metrics
        tasks = [
            asyncio.create_task(embed(prompt, normalize=normalize)) for prompt in self._prompts
        ]
        try:
            with self._service.counted(len(tasks)), metrics.failures(len(tasks)):
                outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        num_tokens = sum(map(len, self._prompts))
        metrics.embedded(num_tokens, len(outputs))
        yield {
            "object": "list",
            "data": [
                {"object": "embedding", "index": index, "embedding": partial(self._encoded, output)}
                for index, output in enumerate(outputs)
            ],
            "model": self._service.model_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
        }

    def whole(self, events: list[Event]) -> Event:
        return events[0]

    def _encoded(self, output: EmbeddingOutput) -> list[float] | str:
        if self._request.encoding_format != "base64":
            return output.embedding
        return base64.b64encode(np.array(output.embedding, "<f4").tobytes()).decode()
