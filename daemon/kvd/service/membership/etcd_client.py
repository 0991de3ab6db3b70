"""Speaks to etcd 3.4 and later through its JSON gateway, the next server where one does not answer.

It needs aiohttp (`pip install kvctl[etcd]`) and is imported only where etcd is configured.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, AsyncIterator
from types import TracebackType
from typing import Self, TypeVar

import aiohttp
import msgspec
from aiohttp.abc import AbstractResolver, ResolveResult

from kvd.service.membership.etcd_messages import (
    Authenticated,
    Failure,
    Question,
    Streamed,
    WatchAnswer,
    WatchQuestion,
)
from kvd.service.membership.etcd_settings import EtcdAccess
from kvd.service.membership.told import shortly
from kvd.service.slices import paced
from kvd.service.sockets.resolver import Resolver

ASK_SECONDS = 2.0
"""How long one server may take for one answer."""
MOST_BYTES = 4 << 20
"""Of one answer. A page of hosts has some 100 KB, and few values may be large."""
MOST_CHANGE_BYTES = 1 << 20
"""Of one message of a watch, which is taken apart in one turn of the loop: 4,000 hosts that change at once."""
READ_BYTES = 64 << 10
LEASE_UNKNOWN = "requested lease not found"
COMPACTED = "has been compacted"
NO_TOKEN = ("invalid auth token", "user name is empty", "auth: revision in header is old")

Answer = TypeVar("Answer")


class EtcdAway(Exception):
    """No server gave an answer that can be used; the message says why the last one did not, and may be logged."""


class EtcdTooLarge(EtcdAway):
    """An answer has more bytes than are taken."""


class EtcdManyChanges(EtcdAway):
    """So much has changed at once that all is better read anew, page by page."""


class EtcdLeaseUnknown(EtcdAway):
    """etcd does not know our lease: it ran out, or etcd's data are others now."""


class EtcdCompacted(EtcdAway):
    """What was asked for is of a revision that etcd has forgotten."""


class _Names(AbstractResolver):
    """aiohttp's way to look names up, by kvd's own means: a DNS that hangs holds up nothing but this."""

    def __init__(self, resolver: Resolver) -> None:
        self._resolver = resolver

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """The addresses of a server."""
        return [
            ResolveResult(hostname=host, host=address, port=port, family=kind, proto=0, flags=0)
            for kind, address in await self._resolver.resolve(host, kept=True)
            if family in (socket.AF_UNSPEC, kind)
        ]

    async def close(self) -> None:
        """Nothing is held."""


class EtcdClient:
    """Asks the servers in turn, beginning with the one that answered last. ``async with`` opens and closes it.

    ``moved`` counts how often another server had to be taken.
    """

    def __init__(self, access: EtcdAccess, resolver: Resolver) -> None:
        self.moved = 0
        self._access = access
        self._resolver = resolver
        self._at = 0
        self._token = ""
        self._session: aiohttp.ClientSession

    async def __aenter__(self) -> Self:
        """Open it; nothing is asked yet."""
        tls = self._access.tls if self._access.tls is not None else True
        connector = aiohttp.TCPConnector(
            resolver=_Names(self._resolver), ssl=tls, use_dns_cache=False, limit=8
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=None),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a few bytes could become many at once
            headers={"Accept-Encoding": "identity"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close all connections."""
        await self._session.close()

    async def ask(self, question: Question, answer: type[Answer]) -> Answer:
        """The answer of the first server that gives one. Raises `EtcdAway`."""
        trouble = EtcdAway("no server is named")
        for _ in self._access.urls:
            try:
                async with asyncio.timeout(ASK_SECONDS):
                    return msgspec.json.decode(await self._posted(question), type=answer, strict=False)
            except (EtcdLeaseUnknown, EtcdCompacted, EtcdTooLarge):
                raise
            except EtcdAway as away:
                trouble = away
            except msgspec.MsgspecError as error:
                trouble = EtcdAway(f"{self._url} answered what is not etcd's: {shortly(str(error))}")
            except (TimeoutError, OSError, aiohttp.ClientError, ValueError) as error:
                trouble = EtcdAway(f"{self._url}: {_said(error)}")
            self._next_server()
        raise trouble

    async def watch(self, question: WatchQuestion) -> AsyncGenerator[WatchAnswer, None]:
        """What changes from now on, until the server ends it. Raises `EtcdAway`."""
        at, rest = self._url, bytearray()
        try:
            async with self._posting(question) as response:
                async for chunk in response.content.iter_chunked(READ_BYTES):
                    *lines, last = chunk.split(b"\n")
                    async for line in paced(lines):
                        rest += line
                        _refuse_large(rest, at)
                        if rest.strip():
                            yield _streamed(bytes(rest))
                        rest.clear()
                    rest += last
                    _refuse_large(rest, at)
                    await asyncio.sleep(0)  # else what is here already is taken in one turn
        except msgspec.MsgspecError as error:
            raise EtcdAway(f"{at} told of a change what is not etcd's: {shortly(str(error))}") from None
        except (TimeoutError, OSError, aiohttp.ClientError, ValueError) as error:
            raise EtcdAway(f"{at}: {_said(error)}") from None

    @property
    def _url(self) -> str:
        return self._access.urls[self._at % len(self._access.urls)]

    def _next_server(self) -> None:
        self._at = (self._at + 1) % len(self._access.urls)
        self._token = ""
        self.moved += len(self._access.urls) > 1

    async def _posted(self, question: Question) -> bytes:
        """The bytes of an answer; who we are is proved anew where the server has forgotten."""
        for attempt in (1, 2):
            try:
                if self._access.user and not self._token:
                    await self._authenticate()
                async with self._posting(question) as response:
                    return await _body(response)
            except EtcdAway as away:
                if attempt == 2 or not (self._access.user and any(word in str(away) for word in NO_TOKEN)):
                    raise
                self._token = ""
        raise AssertionError("unreachable")

    async def _authenticate(self) -> None:
        question = {"name": self._access.user, "password": self._access.password}
        url = f"{self._url}/v3/auth/authenticate"
        async with self._session.post(
            url, data=msgspec.json.encode(question), allow_redirects=False
        ) as response:
            await _refuse(response)
            self._token = msgspec.json.decode(await _body(response), type=Authenticated).token

    @contextlib.asynccontextmanager
    async def _posting(self, question: Question) -> AsyncIterator[aiohttp.ClientResponse]:
        headers = {"Authorization": self._token} if self._token else {}
        async with self._session.post(
            f"{self._url}{question.path}",
            data=msgspec.json.encode(question),
            headers=headers,
            allow_redirects=False,
        ) as response:
            await _refuse(response)
            yield response


async def _refuse(response: aiohttp.ClientResponse) -> None:
    """Raise `EtcdAway`, or what it is in particular, for an answer that says that something is wrong."""
    if response.status == 200:
        return
    body = await _body(response)
    try:
        said = msgspec.json.decode(body, type=Failure).error
    except msgspec.MsgspecError:
        said = f"HTTP {response.status}"
    text = f"{response.url.origin()} refuses: {shortly(said)}"
    if LEASE_UNKNOWN in said:
        raise EtcdLeaseUnknown(text)
    if COMPACTED in said:
        raise EtcdCompacted(text)
    raise EtcdAway(text)


async def _body(response: aiohttp.ClientResponse) -> bytes:
    found = bytearray()
    async for chunk in response.content.iter_chunked(READ_BYTES):
        found += chunk
        if len(found) > MOST_BYTES:
            raise EtcdTooLarge(f"{response.url.origin()} answered more than {MOST_BYTES:,} bytes")
    return bytes(found)


def _refuse_large(told: bytearray, at: str) -> None:
    if len(told) > MOST_CHANGE_BYTES:
        raise EtcdManyChanges(f"{at} told of a change of more than {MOST_CHANGE_BYTES:,} bytes")


def _streamed(line: bytes) -> WatchAnswer:
    told = msgspec.json.decode(line, type=Streamed[WatchAnswer], strict=False)
    if told.result is None:
        raise EtcdAway("it ended the watch with an error")
    if told.result.compact_revision:
        raise EtcdCompacted("it has forgotten the revision from which it was to be watched")
    if told.result.canceled:
        raise EtcdAway(f"it ended the watch: {shortly(told.result.cancel_reason)}")
    return told.result


def _said(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return f"no answer within {ASK_SECONDS:g} s"
    if isinstance(error, OSError) and error.strerror:
        return shortly(error.strerror)
    return shortly(str(error) or type(error).__name__)
