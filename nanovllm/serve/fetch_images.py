"""Fetch the images that requests name by address, from hosts that the server's options allow."""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import socket
from collections.abc import Sequence
from typing import Any

import httpx

from nanovllm.engine.images import MAX_BYTES
from nanovllm.errors import RequestError
from nanovllm.validation import require

SECONDS = 5.0
SCHEMES = ("http", "https")
UNICAST = ipaddress.IPv6Network("2000::/3")


async def with_fetched(sources: Sequence[Any], domains: Sequence[str]) -> list[Any]:
    """Return the images of a request; those with addresses become data URLs, or errors.

    They are fetched at the same time, so that `SECONDS` is the limit for all of them.
    """
    return await asyncio.gather(*(_with_fetched(each, domains) for each in sources))


async def _with_fetched(source: Any, domains: Sequence[str]) -> Any:
    if not isinstance(source, str) or not source[:6].lower().startswith(("http:", "https:")):
        return source
    try:
        return await fetch(source, domains)
    except RequestError as error:
        return error


async def fetch(address: str, domains: Sequence[str]) -> str:
    """Fetch an image, without following redirects; raise RequestError if that is not allowed."""
    try:
        url = httpx.URL(address)
    except httpx.InvalidURL as error:
        raise RequestError(f"the address of an image is invalid: {error}") from error
    expected = "a host of --allowed-media-domains, or send a data URL"
    is_allowed = url.scheme in SCHEMES and url.host in domains and not url.userinfo
    require(is_allowed, "image", expected, address[:80])
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
    is_public = all(map(_is_public, map(ipaddress.ip_address, addresses)))
    require(is_public, "image", "on a host with public addresses only", url.host)
    return addresses[0]


def _is_public(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    if isinstance(address, ipaddress.IPv6Address) and (
        address not in UNICAST or address.sixtofour is not None
    ):
        return False  # it may stand for an IPv4 address, which may be private
    return address.is_global and not address.is_multicast


async def addresses_of(url: httpx.URL) -> list[str]:
    port = url.port or (443 if url.scheme == "https" else 80)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(url.host, port, type=socket.SOCK_STREAM)
    return [str(each[4][0]) for each in found]
