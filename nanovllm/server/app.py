"""The HTTP application: which path is answered by whom."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from nanovllm import __version__
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.answer import StreamedAnswer, StreamResponse, WholeResponse
from nanovllm.server.chat_completions import answer_chat
from nanovllm.server.completions import answer_completion
from nanovllm.server.embeddings import answer_embeddings
from nanovllm.server.engine_events import EngineEvents, TraceAnswer
from nanovllm.server.errors import ApiError, add_error_handlers, first_line, json_response
from nanovllm.server.guard import Guard
from nanovllm.server.messages import answer_message, count_tokens
from nanovllm.server.messages_records import CountRequest, MessagesRequest
from nanovllm.server.metrics import CONTENT_TYPE
from nanovllm.server.openai_records import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    TokenizeRequest,
)
from nanovllm.server.options import SAMPLING_NAMES
from nanovllm.server.page_files import page_routes
from nanovllm.server.responses import answer_response
from nanovllm.server.responses_records import ResponsesRequest
from nanovllm.server.service import Service
from nanovllm.server.tokens import detokenize, tokenize

Q = TypeVar("Q")
A = TypeVar("A")
R = TypeVar("R", ChatRequest, CompletionRequest, MessagesRequest, ResponsesRequest)


def make_app(service: Service) -> ASGIApp:
    """Everything behind one guard, the schema too; pages that show it load scripts from a CDN."""
    app = FastAPI(title="nanovllm", version=__version__, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    app.include_router(_generating_routes(service))
    app.include_router(_text_routes(service))
    app.include_router(_model_routes(service))
    app.include_router(_operating_routes(service))
    app.include_router(_watching_routes(service))
    app.include_router(page_routes())
    guard, origins = Guard(app, service.options), service.options.allowed_origins
    if not origins:
        return guard
    return CORSMiddleware(guard, origins, allow_methods=["*"], allow_headers=["*"])


def _generating_routes(service: Service) -> APIRouter:
    router = APIRouter()

    timeout = service.options.request_timeout

    async def prepare(answer: Callable[[Service, Q], Awaitable[A]], request: Q) -> A:
        service.check_queue()
        made = await answer(service, request)
        service.check_queue()  # of those that came together, too many may have passed
        return made

    async def respond(
        answer: Callable[[Service, R], Awaitable[StreamedAnswer]], request: R
    ) -> Response:
        made = await prepare(answer, request)
        return StreamResponse(made, timeout) if request.stream else WholeResponse(made, timeout)

    @router.post("/v1/chat/completions")
    async def chat_completions(request: ChatRequest) -> Response:
        return await respond(answer_chat, request)

    @router.post("/v1/completions")
    async def completions(request: CompletionRequest) -> Response:
        return await respond(answer_completion, request)

    @router.post("/v1/embeddings")
    async def embeddings(request: EmbeddingRequest) -> Response:
        return WholeResponse(await prepare(answer_embeddings, request), timeout)

    @router.post("/v1/responses")
    async def responses(request: ResponsesRequest) -> Response:
        return await respond(answer_response, request)

    @router.post("/v1/messages")
    async def messages(request: MessagesRequest) -> Response:
        return await respond(answer_message, request)

    return router


def _text_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/v1/messages/count_tokens")
    async def count_message_tokens(request: CountRequest) -> Response:
        return json_response(await count_tokens(service, request))

    @router.post("/tokenize")
    async def tokenize_text(request: TokenizeRequest) -> Response:
        return json_response(await tokenize(service, request))

    @router.post("/detokenize")
    async def detokenize_ids(request: DetokenizeRequest) -> Response:
        return json_response(await detokenize(service, request))

    return router


def _model_routes(service: Service) -> APIRouter:
    router = APIRouter()

    sampling = SamplingParams(**service.options.sampling_defaults)

    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            # Under these names Anthropic's client looks for it.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(service.created, timezone.utc).isoformat(),
            "owned_by": "nanovllm",
            "root": service.llm.config.model,
            "max_model_len": service.llm.max_len,
            "default_sampling_params": {each: getattr(sampling, each) for each in SAMPLING_NAMES},
        }

    @router.get("/v1/models")
    async def models() -> Response:
        names = service.options.served_model_name
        data = [describe(name) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": data, "has_more": False, **ends})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(describe(name))

    return router


def _operating_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    @router.get("/ping")
    @router.post("/ping")
    async def health() -> Response:
        """Healthy as long as one engine answers; the body then says which ones do not."""
        error = service.llm.error
        if error is not None:
            raise ApiError(first_line(error), 503)
        errors = {replica.number: replica.error for replica in service.llm.replicas}
        lost = {number: first_line(each) for number, each in errors.items() if each is not None}
        return json_response({"lost_engines": lost}) if lost else Response()

    @router.get("/load")
    async def load() -> Response:
        return json_response({"server_load": service.llm.num_requests})

    @router.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)

    return router


def _watching_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/engine/events")
    async def engine_events(engine: int | None = None) -> Response:
        """The state of an engine, then what changes in it, as server-sent events."""
        return StreamResponse(EngineEvents(service.llm, engine), timeout=None)

    @router.get("/trace")
    async def trace(seconds: float = 3.0) -> Response:
        """The steps of some seconds, for ui.perfetto.dev."""
        return WholeResponse(TraceAnswer(service.llm, seconds), timeout=None)

    return router
