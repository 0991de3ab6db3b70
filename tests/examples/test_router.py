"""The example router over real HTTP, in front of servers that do what the test says."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from typing import Any

import pytest
from aiohttp import ClientConnectionError, ClientSession

from examples.router import read_options
from tests.support.daemons import ROOT
from tests.support.openai_servers import (
    HANDED_ON,
    Body,
    decodes,
    fails,
    fake,
    hangs,
    nobody,
    only_alone,
    prefills,
    routed,
    streams,
)
from tests.support.ports import free_port

COMPLETIONS = "/v1/completions"
ASKED: Body = {"model": "m", "prompt": "once upon a time", "max_tokens": 9, "temperature": 0, "seed": 3}
MODES = pytest.mark.parametrize("mode", ["pull", "push"])


async def json_of(client: ClientSession, url: str, body: Body = ASKED) -> tuple[int, Any]:
    """Status and body of an answer."""
    async with client.post(url + COMPLETIONS, json=body) as response:
        return response.status, await response.json()


# --- what goes where ---


@pytest.mark.parametrize("path", [COMPLETIONS, "/v1/chat/completions"])
async def test_pull_asks_the_prefiller_for_one_token_and_hands_its_params_on_unchanged(path: str) -> None:
    asked = ASKED | {"stream": True, "stream_options": {"include_usage": True}, "min_tokens": 4}
    asked |= {"max_completion_tokens": 9}
    async with (
        fake(prefills) as p,
        fake(decodes) as d,
        routed("pull", [p.url], [d.url]) as (client, url),
        client.post(url + path, json=asked) as response,
    ):
        assert (await response.json())["choices"][0]["text"] == "the answer"
        assert "X-Prefill-Failed" not in response.headers

    there = {"do_remote_decode": True, "do_remote_prefill": False}
    assert p.asked == [ASKED | {"max_tokens": 1, "stream": False, "kv_transfer_params": there}]
    assert d.asked == [asked | {"kv_transfer_params": HANDED_ON}]
    assert p.paths == d.paths == [path]


@MODES
async def test_both_servers_get_the_headers_of_the_clients_trace(mode: str) -> None:
    trace = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "tracestate": "a=b"}
    async with (
        fake(prefills) as p,
        fake(decodes) as d,
        routed(mode, [p.url], [d.url]) as (client, url),
        client.post(url + COMPLETIONS, json=ASKED, headers={**trace, "X-Own": "stays"}) as response,
    ):
        assert response.status == 200
    for server in (p, d):
        (headers,) = server.headers
        assert trace.items() <= headers.items()
        assert "X-Own" not in headers


async def test_push_asks_both_at_once_under_one_transfer_id() -> None:
    async def once_both_are_asked(*arguments: Any) -> Any:
        await asyncio.gather(p.arrived.wait(), d.arrived.wait())
        return await (prefills if arguments[0] is p else decodes)(*arguments)

    async with (
        fake(once_both_are_asked) as p,
        fake(once_both_are_asked) as d,
        routed("push", [p.url], [d.url]) as (client, url),
    ):
        assert (await json_of(client, url))[0] == 200
        assert (await json_of(client, url))[0] == 200

    ids = [params["kvd_transfer_id"] for params in p.params]
    assert len(set(ids)) == 2
    assert p.params[0] == {
        "do_remote_decode": True,
        "do_remote_prefill": False,
        "transfer_mode": "push",
        "kvd_transfer_id": ids[0],
    }
    assert d.params[0] == {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "transfer_mode": "push",
        "kvd_transfer_id": ids[0],
        "remote_engine_id": "engine-0",
        "remote_host": "10.0.0.0",
        "remote_port": 7766,
        "kvd_contract": 2,
    }
    assert p.asked[0]["max_tokens"] == 1
    assert d.asked[0]["max_tokens"] == 9


@MODES
async def test_a_stream_arrives_as_it_is_made(mode: str) -> None:
    async with (
        fake(prefills) as p,
        fake(streams) as d,
        routed(mode, [p.url], [d.url]) as (client, url),
        client.post(url + COMPLETIONS, json=ASKED | {"stream": True}) as response,
    ):
        assert response.content_type == "text/event-stream"
        assert await response.content.readany() == b"data: one\n\n"
        d.go_on.set()
        assert await response.content.read() == b"data: two\n\ndata: [DONE]\n\n"


@MODES
@pytest.mark.parametrize(
    "several", [{"n": 2}, {"prompt": ["a", "b"]}, {"prompt": [[1, 2], [3]]}, {"prompt_logprobs": 1}], ids=str
)
async def test_what_is_more_than_one_sequence_is_left_to_the_decoder(mode: str, several: Body) -> None:
    async with fake(prefills) as p, fake(decodes) as d, routed(mode, [p.url], [d.url]) as (client, url):
        assert (await json_of(client, url, ASKED | several))[0] == 200
    assert p.asked == []
    assert d.params == [None]


async def test_one_prompt_of_token_ids_is_one_sequence() -> None:
    async with fake(prefills) as p, fake(decodes) as d, routed("pull", [p.url], [d.url]) as (client, url):
        assert (await json_of(client, url, ASKED | {"prompt": [5, 6, 7]}))[0] == 200
    assert d.params == [HANDED_ON]


@MODES
async def test_a_clients_own_params_go_nowhere(mode: str) -> None:
    evil = {"kv_transfer_params": {"remote_engine_id": "someone else's"}}
    async with fake(prefills) as p, fake(decodes) as d, routed(mode, [p.url], [d.url]) as (client, url):
        await json_of(client, url, ASKED | evil)
        await json_of(client, url, ASKED | evil | {"n": 2})
    assert "someone else's" not in str(p.asked + d.asked)


async def test_requests_go_where_the_fewest_are() -> None:
    async with (
        fake(hangs) as busy,
        fake(prefills) as free,
        fake(decodes) as d,
        routed("pull", [busy.url, free.url], [d.url]) as (client, url),
    ):
        stuck = asyncio.create_task(json_of(client, url))
        await busy.arrived.wait()
        assert [(await json_of(client, url))[0] for _ in range(3)] == [200] * 3
        stuck.cancel()
    assert len(free.asked) == 3


async def test_a_body_that_is_no_object_is_refused() -> None:
    async with fake(prefills) as p, fake(decodes) as d, routed("pull", [p.url], [d.url]) as (client, url):
        for data in (b"{", b"[1]"):
            async with client.post(url + COMPLETIONS, data=data) as response:
                assert response.status == 400
                assert "no JSON object" in (await response.json())["error"]["message"]
    assert p.asked == d.asked == []


# --- failures ---


@MODES
@pytest.mark.parametrize("status", [500, 503, 429, None])
async def test_the_decoder_computes_what_no_prefiller_does(mode: str, status: int | None) -> None:
    async with fake(fails(status or 500)) as p, fake(only_alone(decodes)) as d:
        there = p.url if status else nobody()
        async with (
            routed(mode, [there], [d.url]) as (client, url),
            client.post(url + COMPLETIONS, json=ASKED) as response,
        ):
            assert (response.status, (await response.json())["choices"][0]["text"]) == (200, "the answer")
            cause = response.headers["X-Prefill-Failed"]
    assert cause.startswith(f"{there}: ")
    assert f"no: {status}" in cause or not status
    assert d.asked[-1] == ASKED
    if len(d.asked) > 1:  # in push, unless the prefiller was faster
        assert mode == "push"
        await d.aborted.wait()


@MODES
async def test_a_prefiller_that_takes_too_long_has_failed(mode: str) -> None:
    async with (
        fake(hangs) as p,
        fake(only_alone(decodes)) as d,
        routed(mode, [p.url], [d.url], "--prefill-timeout", "0.2") as (client, url),
    ):
        assert (await json_of(client, url))[0] == 200
        await p.aborted.wait()


@MODES
async def test_a_request_that_is_wrong_in_itself_is_refused_in_the_servers_words(mode: str) -> None:
    async with (
        fake(fails(400)) as p,
        fake(hangs) as d,
        routed(mode, [p.url], [d.url]) as (client, url),
    ):
        assert await json_of(client, url) == (400, {"error": {"message": "no: 400"}})
        assert len(d.asked) <= (1 if mode == "push" else 0)
        if d.asked:
            await d.aborted.wait()


@MODES
async def test_a_decoders_error_is_passed_on(mode: str) -> None:
    async with fake(prefills) as p, fake(fails(500)) as d, routed(mode, [p.url], [d.url]) as (client, url):
        assert await json_of(client, url) == (500, {"error": {"message": "no: 500"}})


@MODES
async def test_a_decoder_that_is_not_there_is_named(mode: str) -> None:
    async with fake(prefills) as p, routed(mode, [p.url], [nowhere := nobody()]) as (client, url):
        status, body = await json_of(client, url)
    assert status == 502
    assert body["error"]["message"].startswith(f"{nowhere}: ")


async def test_when_both_fail_both_causes_are_named() -> None:
    prefill, decode = nobody(), nobody()
    async with routed("pull", [prefill], [decode]) as (client, url):
        status, body = await json_of(client, url)
    assert status == 502
    assert decode in body["error"]["message"]
    assert f"before that: {prefill}: " in body["error"]["message"]


async def test_a_prefill_is_given_up_when_its_decode_failed() -> None:
    async with fake(hangs) as p, routed("push", [p.url], [nobody()]) as (client, url):
        assert (await json_of(client, url))[0] == 502
        if p.asked:
            await p.aborted.wait()


async def test_a_stream_that_breaks_off_says_why() -> None:
    async def breaks_off(server: Any, request: Any, body: Body) -> Any:
        response = asyncio.create_task(streams(server, request, body))
        await server.go_on.wait()
        response.cancel()
        request.transport.abort()
        await asyncio.Event().wait()

    async with (
        fake(prefills) as p,
        fake(breaks_off) as d,
        routed("pull", [p.url], [d.url]) as (client, url),
        client.post(url + COMPLETIONS, json=ASKED | {"stream": True}) as response,
    ):
        assert await response.content.readany() == b"data: one\n\n"
        d.go_on.set()
        rest = (await response.content.read()).decode()
    assert '"error"' in rest
    assert d.url in rest
    assert "[DONE]" not in rest


# --- aborts ---


async def test_a_client_that_goes_away_ends_both_sides_of_a_push() -> None:
    async with fake(hangs) as p, fake(hangs) as d, routed("push", [p.url], [d.url]) as (client, url):
        asking = asyncio.create_task(json_of(client, url))
        await asyncio.gather(p.arrived.wait(), d.arrived.wait())
        asking.cancel()
        await asyncio.gather(p.aborted.wait(), d.aborted.wait())


async def test_a_client_that_goes_away_during_the_prefill_of_a_pull_ends_it() -> None:
    async with fake(hangs) as p, fake(decodes) as d, routed("pull", [p.url], [d.url]) as (client, url):
        asking = asyncio.create_task(json_of(client, url))
        await p.arrived.wait()
        asking.cancel()
        await p.aborted.wait()
    assert d.asked == []


@MODES
async def test_a_client_that_goes_away_in_the_middle_of_a_stream_ends_the_decode(mode: str) -> None:
    async with (
        fake(prefills) as p,
        fake(streams) as d,
        routed(mode, [p.url], [d.url]) as (client, url),
    ):
        async with client.post(url + COMPLETIONS, json=ASKED | {"stream": True}) as response:
            await response.content.readany()
            response.close()
        await d.aborted.wait()


# --- the program ---


async def test_told_to_stop_it_finishes_what_is_under_way() -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with fake(prefills) as p, fake(streams) as d, ClientSession() as client:
        words = [
            str(ROOT / "examples" / "router.py"),
            "--prefill",
            p.url,
            "--decode",
            d.url,
            "--port",
            str(port),
        ]
        router = await asyncio.create_subprocess_exec(
            sys.executable, *words, stdout=asyncio.subprocess.DEVNULL
        )
        try:
            while True:
                try:
                    response = await client.post(url + COMPLETIONS, json=ASKED)
                    break
                except ClientConnectionError:
                    assert router.returncode is None
                    await asyncio.sleep(0.02)  # its socket appears when it appears; nothing announces it
            assert await response.content.readany() == b"data: one\n\n"
            os.kill(router.pid, signal.SIGTERM)
            while True:
                try:
                    socket.create_connection(("127.0.0.1", port)).close()
                    await asyncio.sleep(0.02)
                except ConnectionRefusedError:
                    break
            d.go_on.set()
            assert (await response.content.read()).endswith(b"[DONE]\n\n")
            response.close()
            assert await router.wait() == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                router.kill()
            await router.wait()


def test_push_needs_to_know_the_prefillers_engine(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(["--mode", "push", "--prefill", "http://p", "--decode", "http://d"])
    assert ended.value.code == 2
    assert "--prefill URL,ENGINE,HOST:PORT" in capsys.readouterr().err
