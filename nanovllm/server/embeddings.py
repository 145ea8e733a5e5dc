"""/v1/embeddings."""

from __future__ import annotations

import asyncio
import base64
from typing import Any

import numpy as np

from nanovllm.outputs import EmbeddingOutput
from nanovllm.server.errors import TooLong
from nanovllm.server.openai_records import EmbeddingRequest
from nanovllm.server.service import Service


async def answer_embeddings(service: Service, request: EmbeddingRequest) -> dict[str, Any]:
    service.check_model(request.model)
    service.check_queue()
    prompts = await service.all_token_ids(request.input, "input")
    for prompt in prompts:
        if len(prompt) > service.llm.max_len:
            raise TooLong(len(prompt), 0, service.llm.max_len, "input")
    normalize = request.normalize is not False
    tasks = [
        asyncio.create_task(service.llm.embed(prompt, normalize=normalize)) for prompt in prompts
    ]
    try:
        outputs = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
    num_tokens = sum(map(len, prompts))
    return {
        "object": "list",
        "data": [
            {"object": "embedding", "index": index, "embedding": _encoded(output, request)}
            for index, output in enumerate(outputs)
        ],
        "model": service.model_name,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }


def _encoded(output: EmbeddingOutput, request: EmbeddingRequest) -> list[float] | str:
    if request.encoding_format != "base64":
        return output.embedding
    return base64.b64encode(np.array(output.embedding, "<f4").tobytes()).decode()
