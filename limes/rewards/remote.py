"""A grader behind HTTP.

It gets a POST with JSON `{"prompt": str or messages, "response": str, "label": ..., "metadata": {...}}` and answers
with a number, a dict of which `reward.key` (default `score`) is trained on, or null for unscored.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from limes.records import Reward, Sample
from limes.rewards.grade import EachSample, GraderError, TimedOut
from limes.rewards.per_loop import PerLoop

BUSY = frozenset({408, 425, 429})
SHOWN_CHARS = 200


class RemoteFault(GraderError):
    """The server cannot be reached or answers with an error."""


class _TryAgain(RemoteFault):
    """A fault that may pass."""


@dataclass(frozen=True, slots=True)
class _Connections:
    client: httpx.AsyncClient
    slots: asyncio.Semaphore


class RemoteGrader(EachSample):
    """Asks an HTTP server for each sample.

    Proxy settings of the environment are not used. A connection that fails, a late answer and the states 408, 425, 429
    and 5xx are tried again while time is left; any other state, or an answer that is no reward, is an error at once.

    Args:
        url: http or https; an IPv6 address stands in brackets.
        key: entry of dict rewards that must be there.
        timeout_s: one sample may take this long, with all tries and pauses.
        try_timeout_s: one try may take this long; None: all the time that is left.
        retries: further tries after the first.
        backoff_s: the pause before the first retry; it doubles with each.
        headers: sent along, such as Authorization.
        max_connections: samples asked for at a time; the others wait, outside the limit.

    Raises:
        ValueError: the URL is none.
    """

    def __init__(
        self,
        url: str,
        *,
        key: str | None = None,
        timeout_s: float = 10.0,
        try_timeout_s: float | None = None,
        retries: int = 3,
        backoff_s: float = 0.2,
        headers: Mapping[str, str] | None = None,
        max_connections: int = 64,
    ) -> None:
        self._url = checked_url(url)
        super().__init__(key)
        self._timeout_s, self._try_timeout_s = timeout_s, try_timeout_s
        self._retries, self._backoff_s, self._headers = retries, backoff_s, dict(headers or {})
        self._max_connections = max_connections
        self._connections: PerLoop[_Connections] = PerLoop(self._connect)

    async def close(self) -> None:
        """Close the connections of the running loop."""
        connections = self._connections.pop()
        if connections is not None:
            await connections.client.aclose()

    def _connect(self) -> _Connections:
        limits = httpx.Limits(max_connections=self._max_connections, max_keepalive_connections=self._max_connections)
        headers = {"Content-Type": "application/json", **self._headers}
        client = httpx.AsyncClient(limits=limits, trust_env=False, timeout=None, headers=headers)
        return _Connections(client, asyncio.Semaphore(self._max_connections))

    async def score(self, sample: Sample) -> Reward:
        """What the server answers."""
        body = {
            "prompt": sample.prompt,
            "response": sample.response,
            "label": sample.label,
            "metadata": sample.metadata,
        }
        content = json.dumps(body).encode()
        connections, last = self._connections.get(), "no answer"
        async with connections.slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    for num_try in range(self._retries + 1):
                        try:
                            return await self._try(connections.client, content)
                        except _TryAgain as fault:
                            last = str(fault)
                        if num_try < self._retries:
                            await asyncio.sleep(self._backoff_s * 2**num_try)
            except TimeoutError:
                raise TimedOut(
                    f"{self._url} gave no reward within {self._timeout_s:g} s (reward.timeout_s): {last}"
                ) from None
        raise RemoteFault(f"{self._url} gave no reward in {self._retries + 1} tries: {last}")

    async def _try(self, client: httpx.AsyncClient, content: bytes) -> Reward:
        try:
            async with asyncio.timeout(self._try_timeout_s):
                answer = await client.post(self._url, content=content)
        except TimeoutError:
            raise _TryAgain(f"no answer within {self._try_timeout_s:g} s") from None
        except httpx.TransportError as error:
            raise _TryAgain(f"{type(error).__name__} {error}".strip()) from error
        shown = f"status {answer.status_code} {answer.text[:SHOWN_CHARS]!r}"
        if answer.status_code in BUSY or answer.status_code >= 500:
            raise _TryAgain(shown)
        if not answer.is_success:
            raise RemoteFault(f"{self._url} answered with {shown}")
        try:
            reward: Any = json.loads(answer.content)
        except ValueError as error:
            raise RemoteFault(f"{self._url} answered with no JSON: {answer.text[:SHOWN_CHARS]!r}") from error
        return reward


def checked_url(url: str) -> str:
    """The URL as it is.

    Raises:
        ValueError: it is no http or https URL with a host.
    """
    try:
        parsed = httpx.URL(url)
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ValueError("it needs http:// or https:// and a host")
    except (httpx.InvalidURL, ValueError) as error:
        raise ValueError(
            f"url = {url!r} is no URL: {error}; write http://host:port/path, IPv6 as http://[::1]:8000/"
        ) from error
    return url
