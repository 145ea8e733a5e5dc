"""The HTTP application: the routes and their handlers."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from datetime import datetime, timezone
from typing import Any

from fastapi import FastAPI
from fastapi.responses import Response
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from nanovllm import __version__
from nanovllm.sampling_params import SamplingParams
from nanovllm.serve.anthropic import messages
from nanovllm.serve.http_errors import add_error_handlers, json_response, message_of
from nanovllm.serve.http_responses import EventStream, StreamResponse, WholeResponse, whole_body
from nanovllm.serve.metrics import CONTENT_TYPE
from nanovllm.serve.middleware import Middleware
from nanovllm.serve.openai import chat_completions, completions, embeddings, rerank, responses
from nanovllm.serve.prepare_chat import detokenize, tokenize
from nanovllm.serve.protocol import ApiModel, ChatRequest, DetokenizeRequest, TokenizeRequest
from nanovllm.serve.server_options import SAMPLING_NAMES
from nanovllm.serve.service import Service
from nanovllm.validation import has_folder

CreateResponse = Callable[[Service, Any], Awaitable[EventStream]]
RERANK = rerank.RerankRequest, rerank.create_rerank
ROUTES: dict[str, tuple[type[ApiModel], CreateResponse]] = {
    "/v1/chat/completions": (ChatRequest, chat_completions.create_chat_completion),
    "/v1/completions": (completions.CompletionRequest, completions.create_completion),
    "/v1/embeddings": (embeddings.EmbeddingRequest, embeddings.create_embedding),
    "/rerank": RERANK,
    "/v1/rerank": RERANK,
    "/v2/rerank": RERANK,
    "/v1/responses": (responses.ResponsesRequest, responses.create_response),
    "/v1/messages": (messages.MessagesRequest, messages.create_message),
}


def make_app(service: Service) -> ASGIApp:
    """Create the application; the middleware covers every route, including the OpenAPI schema."""
    app = FastAPI(title="nanovllm", version=__version__, docs_url=None, redoc_url=None)
    add_error_handlers(app)
    for path, (kind, create) in ROUTES.items():
        app.post(path)(_endpoint(service, kind, create))
    _text_routes(app, service)
    _model_routes(app, service)
    _operating_routes(app, service)
    if has_folder("nanovllm.serve.live"):  # the server also runs without this folder
        from nanovllm.serve.live.routes import add_routes

        add_routes(app, service)
    middleware, origins = Middleware(app, service.options), service.options.allowed_origins
    if not origins:
        return middleware
    return CORSMiddleware(middleware, origins, allow_methods=["*"], allow_headers=["*"])


def _endpoint(service: Service, kind: type[ApiModel], create: CreateResponse) -> Any:
    async def respond(request: Any) -> Response:
        service.check_queue()
        stream = await create(service, request)
        service.check_queue()  # other requests may have been queued during the await
        timeout = service.options.request_timeout
        if getattr(request, "stream", None):
            return StreamResponse(stream, timeout)
        return WholeResponse(whole_body(stream), timeout)

    respond.__annotations__["request"] = kind  # FastAPI parses the body as this type
    return respond


def _text_routes(app: FastAPI, service: Service) -> None:
    @app.post("/v1/messages/count_tokens")
    async def count_message_tokens(request: messages.CountRequest) -> Response:
        return json_response(await messages.count_tokens(service, request))

    @app.post("/tokenize")
    async def tokenize_text(request: TokenizeRequest) -> Response:
        return json_response(await tokenize(service, request))

    @app.post("/detokenize")
    async def detokenize_ids(request: DetokenizeRequest) -> Response:
        return json_response(await detokenize(service, request))


def _model_routes(app: FastAPI, service: Service) -> None:
    sampling = SamplingParams(**service.options.sampling_defaults)

    def describe(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            # Anthropic's client reads the next three fields.
            "type": "model",
            "display_name": name,
            "created_at": datetime.fromtimestamp(service.created, timezone.utc).isoformat(),
            "owned_by": "nanovllm",
            "root": service.llm.config.model,
            "max_model_len": service.llm.max_len,
            "default_sampling_params": {each: getattr(sampling, each) for each in SAMPLING_NAMES},
        }

    @app.get("/v1/models")
    async def models() -> Response:
        names = service.options.served_model_name
        data = [describe(name) for name in names]
        ends = {"first_id": names[0], "last_id": names[-1]}
        return json_response({"object": "list", "data": data, "has_more": False, **ends})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        service.check_model(name)
        return json_response(describe(name))


def _operating_routes(app: FastAPI, service: Service) -> None:
    @app.get("/health")
    @app.get("/ping")
    @app.post("/ping")
    async def health() -> Response:
        """Succeed while at least one engine is healthy; the body lists the failed ones."""
        error = service.llm.error
        if error is not None:
            raise error
        errors = {replica.number: replica.error for replica in service.llm.replicas}
        lost = {number: message_of(each) for number, each in errors.items() if each is not None}
        return json_response({"lost_engines": lost}) if lost else Response()

    @app.get("/load")
    async def load() -> Response:
        return json_response({"server_load": service.llm.num_requests})

    @app.get("/version")
    async def version() -> Response:
        return json_response({"version": __version__})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type=CONTENT_TYPE)
