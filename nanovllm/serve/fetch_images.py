"""Fetch the images that requests name by address, from hosts that the server's options allow."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import httpx

from nanovllm.errors import RequestError
from nanovllm.validation import require

SECONDS = 5.0  # for one image
MAX_BYTES = 20 << 20
SCHEMES = ("http", "https")


async def with_fetched(sources: Sequence[Any], domains: Sequence[str]) -> list[Any]:
    """Return the images of a prompt; those with addresses are fetched, and become data URLs."""
    return [await fetch(each, domains) if _is_address(each) else each for each in sources]


def _is_address(source: Any) -> bool:
    return isinstance(source, str) and source.lower().startswith(("http:", "https:"))


async def fetch(address: str, domains: Sequence[str]) -> str:
    """Fetch an image, without following redirects; raise RequestError if that is not allowed."""
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise RequestError(f"the address of an image is invalid: {error}") from error
    expected = "a host of --allowed-media-domains, or send a data URL"
    is_allowed = url.scheme in SCHEMES and url.host in domains and not url.userinfo
    require(is_allowed, "image", expected, address)
    try:
        return await asyncio.wait_for(_fetch(url), SECONDS)
    except (asyncio.TimeoutError, OSError, httpx.HTTPError) as error:
        raise RequestError(f"cannot fetch the image {address:.80}: {error!r:.200}") from error


async def _fetch(url: httpx.URL) -> str:
    # Connect to the address that was checked: a second lookup could return another one.
    checked = url.copy_with(host=await _public_address(url))
    extensions = {"sni_hostname": url.host}
    headers = {"Host": url.netloc.decode(), "Accept-Encoding": "identity"}
    async with (
        httpx.AsyncClient(trust_env=False, timeout=SECONDS) as client,
        client.stream("GET", checked, headers=headers, extensions=extensions) as response,
    ):
        require(response.status_code == 200, "image", "an address of a file", response.status_code)
        data = bytearray()
        async for piece in response.aiter_raw():
            data += piece
            require(len(data) <= MAX_BYTES, "image", f"at most {MAX_BYTES >> 20} MiB", len(data))
        kind = response.headers.get("Content-Type", "").partition(";")[0]
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


async def _public_address(url: httpx.URL) -> str:
    """Return an address of the host; raise RequestError unless all of them are public."""
    addresses = await addresses_of(url)
    is_public = all(ipaddress.ip_address(each).is_global for each in addresses)
    require(is_public, "image", "on a host with public addresses only", url.host)
    return addresses[0]


async def addresses_of(url: httpx.URL) -> list[str]:
    port = url.port or (443 if url.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]
