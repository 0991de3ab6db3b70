"""Small OpenAI servers that do what a test says, and the router of examples/ in front of them; one event loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import ClientSession, web

from examples.router import application, read_options
from tests.support.ports import free_port

Body = dict[str, Any]
Deed = Callable[["Fake", web.Request, Body], Awaitable[web.StreamResponse]]


@dataclass(eq=False)
class Fake:
    """A server. ``asked`` are the bodies it got, ``headers`` what came with them; events tell of the newest request."""

    deed: Deed
    url: str = ""
    asked: list[Body] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def params(self) -> list[Any]:
        """The kv_transfer_params of each request, None where it had none."""
        return [body.get("kv_transfer_params") for body in self.asked]

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """One request."""
        body = await request.json()
        self.asked.append(body)
        self.paths.append(request.path)
        self.headers.append(dict(request.headers))
        self.arrived.set()
        try:
            return await self.deed(self, request, body)
        except asyncio.CancelledError:
            self.aborted.set()
            raise


async def prefills(fake: Fake, request: web.Request, body: Body) -> web.StreamResponse:  # noqa: ARG001
    """Answers as a prefiller does: one token, and what the decoder needs."""
    pulled = body["kv_transfer_params"].get("transfer_mode") != "push"
    return web.json_response(
        {"choices": [{"text": "x"}], "kv_transfer_params": HANDED_ON if pulled else None}
    )


HANDED_ON = {"do_remote_prefill": True, "remote_engine_id": "p", "remote_block_ids": [[3, 1], []], "odd": 1.5}


async def decodes(fake: Fake, request: web.Request, body: Body) -> web.StreamResponse:  # noqa: ARG001
    """Answers as a decoder does, in one piece."""
    return web.json_response({"choices": [{"text": "the answer"}]})


async def streams(fake: Fake, request: web.Request, body: Body) -> web.StreamResponse:  # noqa: ARG001
    """Answers with one event, and with two more once it may go on."""
    response = web.StreamResponse()
    response.content_type = "text/event-stream"
    await response.prepare(request)
    await response.write(b"data: one\n\n")
    await fake.go_on.wait()
    await response.write(b"data: two\n\ndata: [DONE]\n\n")
    await response.write_eof()
    return response


async def hangs(fake: Fake, request: web.Request, body: Body) -> web.StreamResponse:  # noqa: ARG001
    """Never answers."""
    await asyncio.Event().wait()
    raise AssertionError


def fails(status: int) -> Deed:
    """Answers with an error."""

    async def deed(fake: Fake, request: web.Request, body: Body) -> web.StreamResponse:  # noqa: ARG001
        return web.json_response({"error": {"message": f"no: {status}"}}, status=status)

    return deed


def only_alone(deed: Deed) -> Deed:
    """Hangs while it is to wait for another's KV, as a decoder does whose prefiller failed; else does ``deed``."""

    async def made(fake: Fake, request: web.Request, body: Body) -> web.StreamResponse:
        return await (hangs if "kv_transfer_params" in body else deed)(fake, request, body)

    return made


@asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[str]:
    """A URL at which an application is served, connections' ends noticed as vLLM notices them."""
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        host, port = runner.addresses[0][:2]
        yield f"http://{host}:{port}"
    finally:
        await runner.cleanup()


@asynccontextmanager
async def fake(deed: Deed) -> AsyncIterator[Fake]:
    """A server that does ``deed`` for each request."""
    made = Fake(deed)
    app = web.Application()
    app.router.add_post("/{path:.*}", made.handle)
    async with serving(app) as made.url:
        yield made


@asynccontextmanager
async def routed(
    mode: str, prefills: list[str], decodes: list[str], *options: str
) -> AsyncIterator[tuple[ClientSession, str]]:
    """A client, and a router's URL."""
    words = ["--mode", mode, *options]
    for number, url in enumerate(prefills):
        words += ["--prefill", f"{url},engine-{number},10.0.0.{number}:7766" if mode == "push" else url]
    for url in decodes:
        words += ["--decode", url]
    app = await application(read_options(words))
    async with serving(app) as url, ClientSession() as client:
        yield client, url


def nobody() -> str:
    """A URL at which nothing is served."""
    return f"http://127.0.0.1:{free_port()}"
