"""OpenAI's embeddings API: /v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncGenerator, Sequence
from functools import partial
from typing import Literal

import numpy as np

from nanovllm.engine.step import Pooling
from nanovllm.errors import RequestError, at_index
from nanovllm.outputs import EmbeddingOutput
from nanovllm.serve.fields import COMMON
from nanovllm.serve.http_responses import Event, EventStream
from nanovllm.serve.protocol import ApiModel, Texts
from nanovllm.serve.service import Service


class EmbeddingRequest(ApiModel):
    policy = COMMON
    input: Texts
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    normalize: bool | None = None


async def create_embedding(service: Service, request: EmbeddingRequest) -> EmbeddingResponse:
    service.check_model(request.model)
    prompts = await tokenize_prompts(service, request.input, "input")
    return EmbeddingResponse(service, request, prompts)


async def tokenize_prompts(service: Service, prompts: object, param: str) -> Sequence[list[int]]:
    """Tokenize the inputs of an embedding or rerank request; raise if too many or too long."""
    token_ids = await service.all_token_ids(prompts, param)
    service.check_num_sequences(len(token_ids))
    for index, each in enumerate(token_ids):
        try:
            service.check_length(len(each), 0, param)
        except RequestError as error:
            raise at_index(error, param, index, len(token_ids)) from error
    return token_ids


class PooledResponse(EventStream):
    """A response computed from one pooled vector per prompt."""

    normalize = True
    pooling: Pooling | None = None  # None: the model's default

    def __init__(self, service: Service, prompts: Sequence[list[int]]) -> None:
        self.service, self._prompts = service, prompts

    async def events(self) -> AsyncGenerator[Event, None]:
        """Yield the response body as a single event."""
        embed = partial(self.service.llm.embed, pooling=self.pooling, normalize=self.normalize)
        metrics = self.service.metrics
        tasks = [asyncio.create_task(embed(prompt)) for prompt in self._prompts]
        try:
            with self.service.counted(len(tasks)), metrics.failures(len(tasks)):
                outputs = await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
        num_tokens = sum(map(len, self._prompts))
        metrics.embedded(num_tokens, len(outputs))
        usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        yield {**self.body(outputs), "model": self.service.model_name, "usage": usage}

    def body(self, outputs: Sequence[EmbeddingOutput]) -> Event:
        """Return the fields of the body besides `model` and `usage`."""
        raise NotImplementedError


class EmbeddingResponse(PooledResponse):
    def __init__(
        self, service: Service, request: EmbeddingRequest, prompts: Sequence[list[int]]
    ) -> None:
        super().__init__(service, prompts)
        self.normalize = request.normalize is not False
        self._is_base64 = request.encoding_format == "base64"

    def body(self, outputs: Sequence[EmbeddingOutput]) -> Event:
        encode = partial(_encoded, is_base64=self._is_base64)
        data = [
            {"object": "embedding", "index": index, "embedding": partial(encode, output)}
            for index, output in enumerate(outputs)
        ]
        return {"object": "list", "data": data}


def _encoded(output: EmbeddingOutput, is_base64: bool) -> list[float] | str:
    if not is_base64:
        return output.embedding
    return base64.b64encode(np.array(output.embedding, "<f4").tobytes()).decode()
