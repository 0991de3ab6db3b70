"""What may come instead of etcd's answers: too much, too slowly, of something else, or from somewhere else."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import Awaitable, Callable

import pytest

from kvd.service.membership import etcd_client
from kvd.service.membership.etcd_client import (
    MOST_BYTES,
    MOST_CHANGE_BYTES,
    EtcdAway,
    EtcdClient,
    EtcdCompacted,
    EtcdLeaseUnknown,
    EtcdManyChanges,
    EtcdTooLarge,
)
from kvd.service.membership.etcd_messages import (
    Range,
    RangeAnswer,
    WatchAnswer,
    WatchCreate,
    WatchQuestion,
)
from kvd.service.membership.etcd_settings import EtcdAccess
from kvd.service.sockets.resolver import Resolver

QUESTION = Range(key=b"a", range_end=b"b", limit=1)
WATCH = WatchQuestion(create_request=WatchCreate(key=b"a", range_end=b"b", start_revision=1))
OK = b"HTTP/1.1 200 OK\r\nConnection: close\r\n"
Serve = Callable[[asyncio.StreamWriter], Awaitable[None]]


def says(answer: bytes) -> Serve:
    async def serve(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()

    return serve


def error(status: str, body: str) -> Serve:
    return says(f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode())


async def endless(writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"\r\n")
    while True:
        writer.write(b"[" * 65536)
        await writer.drain()


async def silent(_writer: asyncio.StreamWriter) -> None:
    await asyncio.sleep(60)


def asked(*servers: Serve, watch: bool = False) -> tuple[RangeAnswer | list[WatchAnswer], int]:
    """The answer of the first of these servers that gives one, and how many requests they had."""
    requests = 0

    async def run() -> RangeAnswer | list[WatchAnswer]:
        listening, urls = [], []
        tasks: set[asyncio.Task[None] | None] = set()
        for serve in servers:

            async def connected(
                reader: asyncio.StreamReader, writer: asyncio.StreamWriter, serve: Serve = serve
            ) -> None:
                nonlocal requests
                tasks.add(asyncio.current_task())
                try:
                    await reader.readuntil(b"\r\n\r\n")
                    requests += 1
                    await serve(writer)
                    writer.close()
                except (OSError, asyncio.CancelledError, asyncio.IncompleteReadError):
                    writer.transport.abort()

            server = await asyncio.start_server(connected, "127.0.0.1", 0)
            listening.append(server)
            urls.append(f"http://localhost:{server.sockets[0].getsockname()[1]}")
        try:
            async with EtcdClient(EtcdAccess(tuple(urls)), Resolver()) as client:
                if watch:
                    return [answer async for answer in client.watch(WATCH)]
                return await client.ask(QUESTION, RangeAnswer)
        finally:
            for server in listening:
                server.close()
            for task in tasks:
                if task is not None:
                    task.cancel()
            await asyncio.gather(*(task for task in tasks if task is not None), return_exceptions=True)

    return asyncio.run(run()), requests


def answer(body: bytes) -> Serve:
    return says(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)


GOOD = answer(b'{"header": {"revision": "7"}, "kvs": [{"key": "YQ==", "value": "YmI="}], "unknown": 1}')


def test_an_answer_with_numbers_as_strings_and_fields_of_later_versions_is_read() -> None:
    found, _ = asked(GOOD)
    assert isinstance(found, RangeAnswer)
    assert (found.header.revision, found.kvs[0].key, found.kvs[0].value) == (7, b"a", b"bb")


@pytest.mark.parametrize(
    ("serve", "kind", "wanted"),
    [
        (endless, EtcdTooLarge, f"more than {MOST_BYTES:,} bytes"),
        (silent, EtcdAway, "no answer within 0.3 s"),
        (answer(b"<html>"), EtcdAway, "not etcd's"),
        (says(OK + b"Content-Encoding: gzip\r\n\r\n" + gzip.compress(b"[" * (64 << 20))), EtcdAway, "not etcd's"),
        (answer(b"[1]"), EtcdAway, "not etcd's"),
        (answer(b'{"kvs": [{"key": "no base64 \x1b"}]}'), EtcdAway, "not etcd's"),
        (says(b"\x00\x01\x02\x1b[2J\r\n\r\n"), EtcdAway, "localhost"),
        (error("500 Oh", "\x1b[2J" * 100), EtcdAway, "HTTP 500"),
        (error("500 Oh", '{"error": "no space\\u001b[2J"}'), EtcdAway, "no space"),
        (error("404 No", '{"error": "etcdserver: requested lease not found"}'), EtcdLeaseUnknown, "lease"),
        (error("400 No", '{"error": "mvcc: required revision has been compacted"}'), EtcdCompacted, "compacted"),
        (says(b"HTTP/1.1 302 Go\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"), EtcdAway, "HTTP 302"),
    ],
)  # fmt: skip
def test_what_is_no_answer_is_named_in_a_short_line(
    monkeypatch: pytest.MonkeyPatch, serve: Serve, kind: type[EtcdAway], wanted: str
) -> None:
    monkeypatch.setattr(etcd_client, "ASK_SECONDS", 0.3 if serve is silent else 10.0)
    with pytest.raises(EtcdAway) as away:
        asked(serve)
    assert type(away.value) is kind
    assert wanted in str(away.value)
    assert "\x1b" not in str(away.value)
    assert len(str(away.value)) < 300


def test_the_next_server_is_asked_after_one_that_is_silent_or_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(etcd_client, "ASK_SECONDS", 0.5)
    found, requests = asked(silent, answer(b"junk"), GOOD)
    assert isinstance(found, RangeAnswer)
    assert found.header.revision == 7
    assert requests == 3


def test_a_watch_is_told_change_by_change_and_a_compacted_one_is_that() -> None:
    events = b'[{"kv":{"key":"YQ=="}},{"type":"DELETE","kv":{"key":"YQ=="}}]'
    lines = b'{"result":{"created":true}}\n\n{"result":{"events":' + events + b"}}\n"
    found, _ = asked(answer(lines), watch=True)
    assert isinstance(found, list)
    assert [[event.type for event in told.events] for told in found] == [[], ["PUT", "DELETE"]]
    with pytest.raises(EtcdCompacted):
        asked(answer(b'{"result":{"canceled":true,"compact_revision":"9"}}\n'), watch=True)
    for wrong in (
        b'{"error":{"code":14}}\n',
        b'{"result":{"canceled":true,"cancel_reason":"\\u001b"}}\n',
        b"junk\n",
    ):
        with pytest.raises(EtcdAway) as away:
            asked(answer(wrong), watch=True)
        assert "\x1b" not in str(away.value)


def test_a_change_without_an_end_or_a_very_large_one_is_given_up_and_all_is_to_be_read_anew() -> None:
    events = b'{"kv":{"key":"YQ=="}},' * (MOST_CHANGE_BYTES // 20) + b'{"kv":{"key":"YQ=="}}'
    for serve in (endless, answer(b'{"result":{"events":[' + events + b"]}}\n")):
        with pytest.raises(EtcdManyChanges):
            asked(serve, watch=True)
