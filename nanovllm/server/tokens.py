"""/tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from typing import Any

from nanovllm.engine.front import check_text
from nanovllm.server.chat_prompt import render_chat
from nanovllm.server.openai_records import DetokenizeRequest, TokenizeRequest
from nanovllm.server.service import Service


async def tokenize(service: Service, request: TokenizeRequest) -> dict[str, Any]:
    service.check_model(request.model)
    special = request.add_special_tokens
    if request.prompt is not None:
        text, special = request.prompt, True if special is None else special
        param = "prompt"
    else:
        text = await asyncio.to_thread(render_chat, service, request, request.tools)
        check_text("a message", text)
        param = "messages"
    ids = await service.token_ids(text, param, add_special_tokens=bool(special)) if text else []
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.llm.max_len,
        "tokens": ids,
    }
    if request.return_token_strs:
        answer["token_strs"] = service.tokenizer.convert_ids_to_tokens(ids)
    return answer


async def detokenize(service: Service, request: DetokenizeRequest) -> dict[str, Any]:
    service.check_model(request.model)
    ids = await service.token_ids(request.tokens) if request.tokens else []
    return {"prompt": await asyncio.to_thread(service.tokenizer.decode, ids)}
