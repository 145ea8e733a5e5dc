"""The page at `/`: plain files, sent as they are, that may load nothing from elsewhere."""

from __future__ import annotations

from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response

from nanovllm.server.errors import ApiError

FOLDER = Path(__file__).parent / "page"
PREFIX = "/page/"
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def is_page(path: str) -> bool:
    """Whether a path is the page's, which asks for the key itself."""
    return path == "/" or path.startswith(PREFIX)


def page_routes() -> APIRouter:
    router = APIRouter(include_in_schema=False)
    files = {path.name: path for path in FOLDER.iterdir() if path.suffix in TYPES}

    @router.get("/")
    async def index() -> Response:
        return _send(files["index.html"])

    @router.get(PREFIX + "{name}")
    async def file(name: str) -> Response:
        if name not in files:
            raise ApiError(f"the page has no file {name!r}", 404)
        return _send(files[name])

    return router


def _send(path: Path) -> Response:
    return FileResponse(path, headers=HEADERS, media_type=TYPES[path.suffix])
