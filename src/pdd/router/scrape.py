"""Reads from an engine's own metrics what the router cannot count itself: how full its KV cache is.

Other requests may run there than ours, and a request's KV says more than its number.

Source:
    vllm/v1/metrics/loggers.py@0.32.0 (``vllm:kv_cache_usage_perc``, a ratio in spite of its name).
"""

import asyncio

import aiohttp

_USAGE = b"vllm:kv_cache_usage_perc"
_MAX_PAGE_BYTES = 4 * 2**20
TIMEOUT_S = 3.0


class MetricsPage:
    """One engine's ``/metrics``.

    Args:
        url: Base URL of the engine.
        api_key: Sent as bearer token if the engines want one.
    """

    def __init__(self, *, url: str, api_key: str | None = None) -> None:
        self._url = f"{url.rstrip('/')}/metrics"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        # A connection per look: engines close idle ones after 5 s, and nobody waits for this.
        connector = aiohttp.TCPConnector(force_close=True)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers)

    async def close(self) -> None:
        """Close the connection."""
        await self._session.close()

    async def kv_usage_ratio(self) -> float | None:
        """How much of the KV cache running requests hold, or None if the engine does not say."""
        try:
            async with asyncio.timeout(TIMEOUT_S), self._session.get(self._url) as answer:
                if answer.status != 200:
                    return None
                return read_usage(await answer.content.read(_MAX_PAGE_BYTES))
        except (aiohttp.ClientError, TimeoutError, OSError):
            return None


def read_usage(page: bytes) -> float | None:
    """The fullest cache on a metrics page; an engine with several ranks has one sample for each."""
    ratios: list[float] = []
    for line in page.splitlines():
        if line.startswith(_USAGE) and line[len(_USAGE) : len(_USAGE) + 1] in (b"{", b" "):
            try:
                ratios.append(float(line.rpartition(b" ")[2]))
            except ValueError:
                continue
    return max(ratios, default=None)
