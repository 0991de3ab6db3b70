"""A minimal router in front of prefilling and decoding vLLM servers with KvdConnector, to read and to start from.

    python examples/router.py --prefill http://10.0.0.7:8100 --decode http://10.0.0.8:8200
    python examples/router.py --mode push --prefill http://10.0.0.7:8100,prefill-0,10.0.0.7:7766 --decode ...

Clients speak to it as to one OpenAI server. In mode pull it asks a prefiller first and then a decoder, which reads the
KV; in mode push it asks both at once. docs/routers.md says what the entries mean and what happens when a side fails.
"""
# ruff: noqa: INP001 - a script to read, in no package

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from aiohttp import ClientError, ClientResponse, ClientSession, ClientTimeout, TCPConnector, web

log = logging.getLogger("router")

Body = dict[str, Any]

HANDED_ON = ("Authorization", "X-Request-Id", "traceparent", "tracestate")
"""Headers of the client's that both servers get; by the last two their spans are of the client's trace."""


@dataclass(frozen=True, slots=True)
class Prefiller:
    """A prefilling server. For pushes also its vLLM engine id, and where its kvd listens for other kvds."""

    url: str
    engine_id: str = ""
    kvd_host: str = ""
    kvd_port: int = 0


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoding server."""

    url: str


Server = TypeVar("Server", Prefiller, Decoder)


@dataclass(slots=True)
class Router:
    """What the command line says, the connections, and how many requests each server has now."""

    options: argparse.Namespace
    session: ClientSession
    busy: Counter[Prefiller | Decoder] = field(default_factory=Counter)


ROUTER = web.AppKey("router", Router)


class Failed(Exception):
    """A server did not do what it was asked. ``answer`` is the response, if it gave one, and its body."""

    def __init__(self, who: str, cause: str, answer: tuple[int, str] | None = None) -> None:
        """``who`` is a URL."""
        super().__init__(f"{who}: {cause}")
        self.answer = answer

    @property
    def by_client(self) -> bool:
        """Whether the request itself is wrong: another server would say the same."""
        return self.answer is not None and self.answer[0] // 100 == 4 and self.answer[0] not in (408, 429)


@dataclass(slots=True)
class Begun:
    """An answer whose first bytes are here; until then nothing was promised to the client."""

    response: ClientResponse
    first: bytes


# --- what is sent ---


def prefill_request(body: Body, params: Body) -> Body:
    """The client's request as the prefiller gets it: one token, in one piece. The answer's token is thrown away."""
    dropped = ("stream_options", "min_tokens", "max_completion_tokens")
    kept = {name: value for name, value in body.items() if name not in dropped}
    return kept | {"max_tokens": 1, "stream": False, "kv_transfer_params": params}


def decode_request(body: Body, params: Body | None) -> Body:
    """The client's request as the decoder gets it; without params it computes the prompt by itself."""
    kept = {name: value for name, value in body.items() if name != "kv_transfer_params"}
    return kept | ({} if params is None else {"kv_transfer_params": params})


def pull_params() -> Body:
    """To the prefiller. What its answer carries goes to the decoder unchanged."""
    return {"do_remote_decode": True, "do_remote_prefill": False}


def push_params(transfer_id: str, prefiller: Prefiller) -> tuple[Body, Body]:
    """To the prefiller and to the decoder, at the same time."""
    both = {"transfer_mode": "push", "kvd_transfer_id": transfer_id}
    source = {"remote_engine_id": prefiller.engine_id, "kvd_contract": 2}
    source |= {"remote_host": prefiller.kvd_host, "remote_port": prefiller.kvd_port}
    return (
        {"do_remote_decode": True, "do_remote_prefill": False} | both,
        {"do_remote_decode": False, "do_remote_prefill": True} | both | source,
    )


def one_sequence(body: Body) -> bool:
    """Whether one prompt has one answer; of anything else vLLM makes several requests, and one hand-over serves one."""
    prompt = body.get("prompt")
    several = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    unusual = ("use_beam_search", "prompt_logprobs", "echo")
    return not several and body.get("n") in (None, 1) and not any(body.get(name) for name in unusual)


# --- the two ways ---


async def pulled(
    request: web.Request, body: Body, prefiller: Prefiller, decoder: Decoder
) -> web.StreamResponse:
    """First the prefiller, then the decoder with what the prefiller's answer carries."""
    try:
        answer = await prefilled(request, prefiller, prefill_request(body, pull_params()))
    except Failed as error:
        return await decoded_alone(request, body, decoder, error)
    return await decoded(request, decoder, decode_request(body, answer.get("kv_transfer_params")))


async def pushed(
    request: web.Request, body: Body, prefiller: Prefiller, decoder: Decoder
) -> web.StreamResponse:
    """Both at once. The end of the answer, good or bad, ends what the other side still does for it."""
    there, here = push_params(uuid.uuid4().hex, prefiller)
    prefill = asyncio.create_task(prefilled(request, prefiller, prefill_request(body, there)))
    decode = asyncio.create_task(begun(request, decoder, decode_request(body, here)))
    try:
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        if not decode.done() and isinstance(failed := prefill.exception(), Failed):
            # The decoder waits for KV that nobody will send. It has said nothing yet, so it can be asked anew.
            await given_up(decode)
            return await decoded_alone(request, body, decoder, failed)
        return await handed_on(request, await decode)
    except Failed as error:
        return refusal(error)
    finally:
        await given_up(prefill)
        await given_up(decode)


async def prefilled(request: web.Request, prefiller: Prefiller, body: Body) -> Body:
    """The prefiller's answer. Raises `Failed`."""
    seconds = request.app[ROUTER].options.prefill_timeout
    try:
        with contextlib.closing(await posted(request, prefiller, body, seconds)) as response:
            text = await response.text()
            if response.status != 200:
                raise Failed(prefiller.url, f"status {response.status}: {text}", (response.status, text))
            answer: Body = json.loads(text)
            return answer
    except (ClientError, OSError, ValueError) as error:
        raise Failed(prefiller.url, str(error) or type(error).__name__) from error


async def decoded(
    request: web.Request, decoder: Decoder, body: Body, failed: Failed | None = None
) -> web.StreamResponse:
    """The decoder's answer, handed on. ``failed`` is why no KV waits for it."""
    try:
        answer = await begun(request, decoder, body)
    except Failed as error:
        return refusal(error, failed)
    return await handed_on(request, answer, failed)


async def decoded_alone(
    request: web.Request, body: Body, decoder: Decoder, failed: Failed
) -> web.StreamResponse:
    """What becomes of a request whose prefill failed: the decoder computes it, unless it is wrong in itself."""
    if failed.by_client:
        return refusal(failed)
    log.warning("the decoder computes the prompt: %s", failed)
    return await decoded(request, decoder, decode_request(body, None), failed)


# --- HTTP ---


async def posted(
    request: web.Request, server: Prefiller | Decoder, body: Body, seconds: float | None = None
) -> ClientResponse:
    """A server's response, at the path that the client asked for. Closed before its end, it is aborted there."""
    headers = {name: request.headers[name] for name in HANDED_ON if name in request.headers}
    # A server may take as long as it likes to answer, but not to be reached.
    timeout = ClientTimeout(total=seconds, sock_connect=5.0)
    session = request.app[ROUTER].session
    return await session.post(server.url + request.path, json=body, headers=headers, timeout=timeout)


async def begun(request: web.Request, decoder: Decoder, body: Body) -> Begun:
    """An answer once it has begun, whatever its status; the caller closes it. Raises `Failed`."""
    try:
        response = await posted(request, decoder, body)
        try:
            return Begun(response, await response.content.readany())
        except BaseException:
            response.close()
            raise
    except (ClientError, OSError) as error:
        raise Failed(decoder.url, str(error) or type(error).__name__) from error


async def handed_on(request: web.Request, answer: Begun, failed: Failed | None = None) -> web.StreamResponse:
    """Pass an answer on as it comes. Where the client goes away, the server sees its connection closed."""
    with contextlib.closing(answer.response) as response:
        made = web.StreamResponse(status=response.status)
        made.content_type = response.content_type
        if failed is not None:
            made.headers["X-Prefill-Failed"] = " ".join(str(failed).split())[:500]
        await made.prepare(request)
        async for chunk in chunks(answer):
            await made.write(chunk)
        await made.write_eof()
        return made


async def chunks(answer: Begun) -> AsyncIterator[bytes]:
    """The bytes of an answer. One that breaks off ends with the cause, where a client of a stream looks for it."""
    yield answer.first
    try:
        while chunk := await answer.response.content.readany():
            yield chunk
    except ClientError as error:
        yield b"\n\ndata: " + message(str(answer.response.url), str(error)) + b"\n\n"


async def given_up(task: asyncio.Task[Any]) -> None:
    """End a task, and close the answer that nobody took."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled() and task.exception() is None and isinstance(task.result(), Begun):
        task.result().response.close()


def refusal(error: Failed, before: Failed | None = None) -> web.Response:
    """An error for the client: a server's own words where it answered, else 502 with the causes."""
    if error.answer is not None:
        status, text = error.answer
        return web.Response(status=status, text=text, content_type="application/json")
    causes = (str(error), *(() if before is None else ("before that", str(before))))
    return web.Response(status=502, body=message(*causes), content_type="application/json")


def message(*causes: str) -> bytes:
    """An error as OpenAI servers put it."""
    return json.dumps({"error": {"message": ": ".join(causes), "type": "router_error"}}).encode()


# --- the server ---


async def complete(request: web.Request) -> web.StreamResponse:
    """One completion or chat completion."""
    router = request.app[ROUTER]
    try:
        body = await request.json()
    except ValueError:
        body = None
    if not isinstance(body, dict):
        return web.Response(
            status=400, body=message("the body is no JSON object"), content_type="application/json"
        )
    with least_busy(router, router.options.decode) as decoder:
        if not one_sequence(body):
            return await decoded(request, decoder, decode_request(body, None))
        with least_busy(router, router.options.prefill) as prefiller:
            way = pushed if router.options.mode == "push" else pulled
            return await way(request, body, prefiller, decoder)


async def passed(request: web.Request) -> web.StreamResponse:
    """A question that any decoder answers."""
    router = request.app[ROUTER]
    with least_busy(router, router.options.decode) as decoder:
        try:
            response = await router.session.get(decoder.url + request.path)
        except (ClientError, OSError) as error:
            return refusal(Failed(decoder.url, str(error) or type(error).__name__))
        return await handed_on(request, Begun(response, b""))


@contextlib.contextmanager
def least_busy(router: Router, servers: Sequence[Server]) -> Iterator[Server]:
    """The server with the fewest requests of ours; it has one more meanwhile."""
    server = min(servers, key=lambda one: router.busy[one])
    router.busy[server] += 1
    try:
        yield server
    finally:
        router.busy[server] -= 1


async def application(options: argparse.Namespace) -> web.Application:
    """The router as an aiohttp application; run it with ``handler_cancellation``, or nothing is ever aborted."""
    app = web.Application(client_max_size=1 << 28)

    async def connected(app: web.Application) -> AsyncIterator[None]:
        async with ClientSession(connector=TCPConnector(limit=0)) as session:
            app[ROUTER] = Router(options, session)
            yield

    app.cleanup_ctx.append(connected)
    app.router.add_post("/v1/completions", complete)
    app.router.add_post("/v1/chat/completions", complete)
    app.router.add_get("/v1/models", passed)
    app.router.add_get("/health", passed)
    return app


def read_prefiller(text: str) -> Prefiller:
    """``URL`` or ``URL,ENGINE,HOST:PORT``. Raises `ValueError`."""
    url, *more = text.split(",")
    if not more:
        return Prefiller(url.rstrip("/"))
    engine_id, kvd = more
    host, _, port = kvd.rpartition(":")
    return Prefiller(url.rstrip("/"), engine_id, host, int(port))


def read_options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line. Ends the program with status 2 where it is wrong."""
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="router.py", description=__doc__, formatter_class=raw)
    add = parser.add_argument
    add("--mode", choices=("pull", "push"), default="pull", help="as the engines' setting `mode`")
    add("--prefill", action="append", required=True, type=read_prefiller, metavar="URL[,ENGINE,HOST:PORT]",
        help="a prefiller; for push also its engine id, and where its kvd listens for other kvds")  # fmt: skip
    add("--decode", action="append", required=True, type=lambda url: Decoder(url.rstrip("/")), metavar="URL",
        help="a decoder; both options may be given several times")  # fmt: skip
    add("--host", default="127.0.0.1", help="where to listen (%(default)s)")
    add("--port", type=int, default=8000, help="where to listen (%(default)s)")
    add("--prefill-timeout", type=float, default=600.0, metavar="SECONDS",
        help="then the decoder computes the prompt (%(default)g)")  # fmt: skip
    add("--grace", type=float, default=30.0, metavar="SECONDS",
        help="for what is under way when it is told to stop (%(default)g)")  # fmt: skip
    options = parser.parse_args(arguments)
    if options.mode == "push" and (bad := [one.url for one in options.prefill if not one.engine_id]):
        parser.error(f"--mode push needs more of {bad[0]}: --prefill URL,ENGINE,HOST:PORT")
    return options


def main() -> None:
    """Serve until SIGINT or SIGTERM; then take nothing new and let what is under way end."""
    logging.basicConfig(level=logging.INFO, format="router: %(message)s")
    options = read_options()
    web.run_app(
        application(options),
        host=options.host,
        port=options.port,
        shutdown_timeout=options.grace,
        handler_cancellation=True,
        access_log=None,
    )


if __name__ == "__main__":
    main()
