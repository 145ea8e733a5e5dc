"""The routes of the page: its files, the engine's events, step mode and traces."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from fastapi import FastAPI
from fastapi.responses import FileResponse, Response

from nanovllm.errors import RequestError
from nanovllm.serve.core_messages import ControlAction
from nanovllm.serve.http_errors import json_response
from nanovllm.serve.http_responses import StreamResponse, WholeResponse
from nanovllm.serve.live.engine_events import EngineEvents, choose_engine, record_trace
from nanovllm.serve.middleware import PAGE_PREFIX
from nanovllm.serve.model_interface import OwnedModel
from nanovllm.serve.service import Service

PAGE_FOLDER = Path(__file__).parent / "page"
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def add_routes(app: FastAPI, service: Service) -> None:
    _watching_routes(app, service)
    _page_routes(app)


def _watching_routes(app: FastAPI, service: Service) -> None:
    @app.get("/engine/events")
    async def engine_events(engine: int | None = None) -> Response:
        """Stream snapshots of an engine's state as server-sent events."""
        events = EngineEvents(service.llm, engine, service.options.allow_pause)
        return StreamResponse(events, timeout=None)

    @app.post("/engine/{action}")
    async def control_engine(action: ControlAction, engine: int | None = None) -> Response:
        """Pause an engine between two steps, let it run one step, or resume it."""
        if not service.options.allow_pause:
            message = "the engine cannot be paused: start the server with --allow-pause"
            raise RequestError(message, status=403)
        number = choose_engine(service.llm, engine)
        replica = cast(OwnedModel, service.llm).replicas[number]
        if replica.error is not None:
            raise replica.error
        replica.control(action)
        return json_response({"engine": number, "is_paused": action != "resume"})

    @app.get("/trace")
    async def trace(seconds: float = 3.0) -> Response:
        """Record a trace for the given number of seconds; ui.perfetto.dev can open it."""
        return WholeResponse(record_trace(service.llm, seconds), timeout=None)


def _page_routes(app: FastAPI) -> None:
    """Serve the page at `/`: static files that may not load anything from other origins."""
    files = {path.name: path for path in PAGE_FOLDER.iterdir()}

    @app.get("/", include_in_schema=False)
    @app.get(PAGE_PREFIX + "{name}", include_in_schema=False)
    async def file(name: str = "index.html") -> Response:
        if name not in files:
            raise RequestError(f"the page has no file {name!r}", status=404)
        return FileResponse(files[name], headers=PAGE_HEADERS)
