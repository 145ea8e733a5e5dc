"""/v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from functools import partial

import numpy as np

from nanovllm.outputs import EmbeddingOutput
from nanovllm.server.answer import Event
from nanovllm.server.records import EmbeddingRequest
from nanovllm.server.service import Service


async def embed(service: Service, request: EmbeddingRequest) -> Event:
    service.check_model(request.model)
    prompts = await service.all_token_ids(request.input, "input")
    service.check_num_sequences(len(prompts))
    for prompt in prompts:
        service.check_length(len(prompt), 0, "input")
    normalize = request.normalize is not False
    tasks = [
        asyncio.create_task(service.llm.embed(prompt, normalize=normalize)) for prompt in prompts
    ]
    try:
        with service.counted(len(tasks)), service.metrics.failures(len(tasks)):
            outputs = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    num_tokens = sum(map(len, prompts))
    service.metrics.embedded(num_tokens, len(outputs))
    encode = partial(_encoded, is_base64=request.encoding_format == "base64")
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": partial(encode, output)}
            for index, output in enumerate(outputs)
        ],
        "model": service.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _encoded(output: EmbeddingOutput, is_base64: bool) -> list[float] | str:
    if not is_base64:
        return output.embedding
    return base64.b64encode(np.array(output.embedding, "<f4").tobytes()).decode()
