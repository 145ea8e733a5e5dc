"""What the streams of OpenAI's chats and completions have in common."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any
from uuid import uuid4

from nanovllm.server.answer import Event
from nanovllm.server.errors import ApiError, to_json
from nanovllm.server.generation import Job, Update, Usage, generate
from nanovllm.server.records import SamplingFields, StreamOptions
from nanovllm.server.service import Service


class OpenAIStream:
    """Chunks with an id, choices and, if asked for, usage; the last event is [DONE]."""

    end = b"data: [DONE]\n\n"

    def __init__(self, service: Service, job: Job, request: SamplingFields, prefix: str) -> None:
        self.service, self.job, self.request = service, job, request
        self.is_large = not job.is_streaming  # each event is a whole choice
        self.usage = Usage(job.num_prompt_tokens)
        self._options = request.stream_options or StreamOptions()
        self._head = {
            "id": f"{prefix}-{uuid4().hex}",
            "created": int(time.time()),
            "model": service.model_name,
        }

    def updates(self) -> AsyncGenerator[Update, None]:
        return generate(self.service, self.job)

    def chunk(self, kind: str, choices: list[dict[str, Any]]) -> Event:
        usage = self.usage.openai() if self._options.continuous_usage_stats else None
        return {"object": kind, **self._head, "choices": choices} | (
            {"usage": usage} if usage or self._options.include_usage else {}
        )

    def last_chunk(self, kind: str) -> list[Event]:
        """The usage of the whole answer, if it was asked for."""
        if not self._options.include_usage:
            return []
        return [self.chunk(kind, []) | {"usage": self.usage.openai()}]

    def body(self, kind: str, choices: list[dict[str, Any]]) -> Event:
        return {"object": kind, **self._head, "choices": choices, "usage": self.usage.openai()}

    def error(self, error: ApiError) -> list[Event]:
        return [error.openai()]

    def encode(self, event: Event) -> bytes:
        return b"data: " + to_json(event) + b"\n\n"
